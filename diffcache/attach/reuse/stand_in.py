"""Items that hold the places of blocks in a model's lists: stand-ins of a span, and gates."""

from __future__ import annotations

from operator import add
from typing import Any

from torch import Tensor, nn

from diffcache.attach.call import Call
from diffcache.attach.flop_counter import counted
from diffcache.attach.reuse.frame import FRAME, Frame, current_frame, lost
from diffcache.attach.reuse.layout import Layout
from diffcache.attach.reuse.modulated_probe import plain
from diffcache.attach.reuse.span import BlockFeatures, TapSpec, by_place, copied, estimate, foresee, picker, record
from diffcache.attach.tap import Tap
from diffcache.attach.tree import Template, leaves, outputs_of
from diffcache.features.base import Probe
from diffcache.step import CURRENT


class SpecTap(Tap):
    """A block with a task for the cache.

    Args:
        module: The block.
        spec: Its task.
        container: Type of what it returns, `Tensor` for a lone one.
    """

    __slots__ = ("container", "input_of", "spec")

    def __init__(self, module: nn.Module, spec: TapSpec, container: type = Tensor) -> None:
        super().__init__(module)
        self.spec, self.container = spec, container
        streams = list(spec.carry.values())
        self.input_of: Any = picker(streams, tuple) if streams else None  # its streams, as a tuple


class ComputeTap(SpecTap):
    """A block that runs, and whose input or output the cache needs."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        if self.spec.opens:
            given = kwargs if not args else by_place(args, kwargs)
            frame.bases[self.spec.span] = self.input_of(given)
        out = self.module(*args, **kwargs)
        if self.spec.records:
            record(frame, self.spec, out)
        return out


class LiveTap(SpecTap):
    """A block that runs in a span whose features leave out the loop's additions between blocks.

    The span's base follows those additions: the difference between what a block is given and what
    the block before returned is added to it.
    """

    __slots__ = ("copies",)

    def __init__(self, module: nn.Module, spec: TapSpec) -> None:
        super().__init__(module, spec)
        self.copies = False  # whether the loop writes to its streams in place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        spec = self.spec
        given = self.input_of(kwargs if not args else by_place(args, kwargs))
        if spec.opens:
            base = tuple([tensor.clone() for tensor in given]) if self.copies else given
        else:
            streams = zip(frame.bases[spec.span], given, frame.lasts[spec.span], strict=True)
            base = tuple([b if now is last else b + (now - last) for b, now, last in streams])
        frame.bases[spec.span] = base
        out = self.module(*args, **kwargs)
        if spec.records:
            record(frame, spec, out)
        returned = [outputs_of(out)[number] for number in spec.carry]
        if self.copies:
            returned = [None if tensor is None else tensor.clone() for tensor in returned]
        frame.lasts[spec.span] = returned
        return out


class PassTap(SpecTap):
    """A block that is skipped and passes its streams through."""

    __slots__ = ("streams_of",)

    def __init__(self, module: nn.Module, spec: TapSpec, container: type) -> None:
        super().__init__(module, spec, container)
        self.streams_of = picker([spec.carry[n] for n in sorted(spec.carry)], container)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        return self.streams_of(kwargs if not args else by_place(args, kwargs))


class CloseTap(SpecTap):
    """The last skipped block of a span: the span's base plus the estimates of all it adds.

    In a live span the base is what arrives here, with all that the loop added on the way.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        call: Call | None = CURRENT.get()
        if call is None:
            raise lost()
        frame: Frame = call.storage[FRAME]  # written out: the shortest way through a span
        frame.closed += 1
        spec, input_of = self.spec, self.input_of
        held: BlockFeatures = frame.features[spec.key]
        base = input_of(kwargs if not args else by_place(args, kwargs)) if spec.live else frame.bases[spec.span]
        found = frame.instead.estimate_all(held.states, frame.step, base)
        return found[0] if self.container is Tensor else self.container(found)


class OpenTap(PassTap):
    """The first skipped block of a span: it notes the base and passes its streams through."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        call: Call | None = CURRENT.get()
        if call is None:
            raise lost()
        frame: Frame = call.storage[FRAME]  # written out: the shortest way through a span
        given = kwargs if not args else by_place(args, kwargs)
        frame.bases[self.spec.span] = self.input_of(given)
        return self.streams_of(given)


class EstimateTap(SpecTap):
    """A skipped block whose outputs are estimates: the last of a span, or one with side outputs."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        spec = self.spec
        given: tuple[Any, ...] = ()
        if self.input_of is not None:
            given = self.input_of(kwargs if not args else by_place(args, kwargs))
        if spec.opens and not spec.live:
            frame.bases[spec.span] = given
        return estimate(frame, spec, given)


class AddTap(SpecTap):
    """A skipped block of its own span: its streams plus estimates of its residuals."""

    __slots__ = ("number",)

    def __init__(self, module: nn.Module, spec: TapSpec, container: type) -> None:
        super().__init__(module, spec, container)
        self.number = -1  # place among the blocks that are foreseen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        guesses = (frame.foreseen or foresee(frame))[self.number]
        streams = self.input_of(kwargs if not args else by_place(args, kwargs))
        if frame.adds_at_once:
            sums = frame.instead.estimate_all(guesses, frame.step, streams)
            return sums[0] if self.container is Tensor else self.container(sums)
        if self.container is Tensor:
            return streams[0] + guesses[0]
        return self.container(map(add, streams, guesses))


class HollowTap(SpecTap):
    """A skipped block whose outputs nobody reads: zeros of their shapes, which take no memory.

    Where the model's loop writes to them in place they have to be `real`.
    """

    __slots__ = ("real",)

    def __init__(self, module: nn.Module, spec: TapSpec) -> None:
        super().__init__(module, spec)
        self.real = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        out = frame.features[self.spec.key].hollow
        return Template(out).build([zeros.clone() for zeros in leaves(out)]) if self.real else out


def protect(tap: Any) -> None:
    """Let a tap hold and hand out copies: the model's loop writes to its streams in place."""
    if isinstance(tap, (ComputeTap, OpenTap)) and tap.spec.opens:
        tap.input_of = copied(tap.input_of)
    elif isinstance(tap, PassTap) and tap.spec.live and tap.spec.opens:
        tap.streams_of = copied(tap.streams_of)
    elif isinstance(tap, LiveTap):
        tap.copies = True
    elif isinstance(tap, HollowTap):
        tap.real = True


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
