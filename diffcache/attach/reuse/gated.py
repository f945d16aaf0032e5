"""Gates: blocks that run until the decision falls, and the stand-ins after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffcache.attach.call import Call
from diffcache.attach.flop_counter import counted
from diffcache.attach.reuse.frame import FRAME, Frame, current_frame, lost
from diffcache.attach.reuse.layout import Layout
from diffcache.attach.reuse.modulated_probe import plain
from diffcache.attach.reuse.stand_in import ComputeTap, LiveTap
from diffcache.attach.tap import Tap
from diffcache.features.base import Probe
from diffcache.step import CURRENT


class LeadTap(Tap):
    """A lead block: it always runs; after the last one the decision falls."""

    __slots__ = ("argument", "first", "item", "last", "number")

    def __init__(self, item: Any, place: tuple[Any, int], first: bool, last: bool) -> None:
        super().__init__(item.module if isinstance(item, (ComputeTap, LiveTap)) else item)
        self.item = item  # what runs: the block, or a tap that keeps features of it
        self.argument, self.number = place
        self.first, self.last = first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        if self.first:
            key = self.argument
            frame.probe_input = kwargs[key] if isinstance(key, str) else args[key]
        out = self.item(*args, **kwargs)
        if self.last and frame.probe_input is not None:
            after = out[self.number] if isinstance(out, (tuple, list)) else out
            frame.decide(frame.probe_of(frame.probe_input, after))
            frame.probe_input = None
        return out


class LateTap(Tap):
    """A block after the lead: its stand-in is known only when it is called."""

    __slots__ = ("index", "key")

    def __init__(self, module: nn.Module, key: str, index: int) -> None:
        super().__init__(module)
        self.key, self.index = key, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        call: Call | None = CURRENT.get()
        if call is None:
            raise lost()
        frame: Frame = call.storage[FRAME]  # written out: every skipped block comes here
        layout = frame.layout
        assert layout is not None
        items = layout.compute if frame.computes else layout.skip
        return items[self.key][self.index](*args, **kwargs)


class InputTap(LateTap):
    """A block that decides by its own input whether it runs."""

    __slots__ = ("argument",)

    def __init__(self, module: nn.Module, place: tuple[str, int], argument: Any) -> None:
        super().__init__(module, *place)
        self.argument = argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        layout, key = frame.layout, self.argument
        assert layout is not None
        if frame.decision.index != frame.step.index:
            frame.decide(None)
        value = kwargs[key] if isinstance(key, str) else args[key]
        skips = frame.asks_block(f"{self.key}.{self.index}", value)
        if skips:
            frame.left_out.add((self.key, self.index))
        items = layout.skip if skips else layout.compute
        return items[self.key][self.index](*args, **kwargs)


class PeekTap(Tap):
    """A block of a model where something is looked at before any block runs."""

    __slots__ = ("late",)

    def __init__(self, module: nn.Module, key: str, index: int) -> None:
        super().__init__(module)
        self.late = LateTap(module, key, index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block; the first one decides for the step."""
        frame = current_frame()
        if frame.decision.index != frame.step.index:
            frame.looked = True
            frame.decide(self._look(frame, args, kwargs))
        return self.late(*args, **kwargs)

    def _look(self, frame: Frame, args: Any, kwargs: Any) -> Tensor:
        """Return the probe; the first time, count the operations that it takes."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            peek = frame.setup.peek
            assert peek is not None
            return peek.look(plain(self.module), args, kwargs)

        layout = frame.layout
        assert layout is not None
        if layout.whole.flops is None or layout.look is not None:
            return call(*args, **kwargs)
        probe, layout.look = counted(self.module, args, kwargs, call)
        return probe  # type: ignore[no-any-return]


def gated_items(layout: Layout, blocks: dict[str, list[nn.Module]], probe: Probe | None) -> dict[str, list[Any]]:
    """Return the items of the block lists while the decision waits for the probe."""
    if layout.gated is not None:
        return layout.gated
    items: dict[str, list[Any]] = {}
    if probe == "input":
        for key in layout.streams:
            argument = main_stream(layout, key)[0]
            items[key] = [
                InputTap(blocks[key][index], (key, index), argument) if isinstance(item, Tap) else item
                for index, item in enumerate(layout.skip[key])
            ]
        layout.gated = items
        return items
    peeks = probe not in ("residual", "output")
    late = PeekTap if peeks else LateTap
    for key, group in blocks.items():
        if key in layout.streams:
            items[key] = [late(module, key, index) for index, module in enumerate(group)]
    layout.gated = items
    if peeks:
        return items
    lead = layout.lead_calls
    for key, index in lead:
        place = main_stream(layout, key)
        items[key][index] = LeadTap(
            layout.compute[key][index], place, (key, index) == lead[0], (key, index) == lead[-1]
        )
    return items


def main_stream(layout: Layout, list_key: str) -> tuple[Any, int]:
    """Return where a lead block takes the stream of the sample, and which output it becomes.

    It is a stream that changes with the sample, one called `hidden_states` before others.
    """
    carry, streams = layout.wirings[list_key].carry, layout.streams[list_key]
    for stream in streams:
        for number, key in carry.items():
            if key == stream:
                return key, number
    number = next(iter(carry), 0)
    return carry.get(number, streams[0]), number
