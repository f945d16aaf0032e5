"""Learning a model's wiring from one real forward: which output becomes which argument."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from diffcache.attach.flop_counter import counted
from diffcache.attach.tap import ServedTap
from diffcache.attach.tree import hollow, outputs_of
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site

Key = int | str  # where a block takes an argument: a place or a name


@dataclass(eq=False)
class BlockCall:
    """One call of a block in the traced forward; tensors are dropped once they are not needed.

    `hollow` is what the block returned, as zeros that take no memory.
    """

    list_key: str
    index: int
    position: int
    shapes_in: dict[Key, Any]
    arguments: dict[Key, Tensor]
    outputs: tuple[Any, ...]
    container: type
    shapes_out: tuple[Any, ...]
    hollow: Any
    flops: float | None = None


@dataclass(frozen=True)
class Wiring:
    """Chain of the blocks of one list."""

    carry: dict[int, Key]  # index of an output -> where the next block takes it
    # `identity` if the very tensors were seen to travel, `shape` if the loop transforms them in between and the first
    # argument of equal shape was taken
    source: str


# List -> the arguments of its first block that change with the sample; for a list of the text
# alone there are none.
Reach = dict[str, list[Key]]


class Trace:
    """Watches one forward and answers with the wiring of every list that was called.

    Attributes:
        reach: List -> arguments of its first block that change with the sample; None if unknown.

    Args:
        keep_all: Whether the inputs and outputs of every block are kept to the end (BLOCK, RUN).
        lead: Calls at the start of each list whose inputs and outputs are kept.
    """

    def __init__(self, keep_all: bool, lead: int) -> None:
        self.keep_all = keep_all
        self.lead = lead
        self.calls: list[BlockCall] = []
        self.reach: Reach | None = None
        self._last: dict[str, BlockCall] = {}
        self._links: dict[str, list[dict[int, Key]]] = {}
        self._given: dict[str, dict[Key, Tensor]] = {}
        self._moving: dict[str, set[Key]] = {}

    def items(self, key: str, blocks: list[nn.Module], opened: tuple[str, ...]) -> list[Any]:
        """Return a recording stand-in for every block but those that are opened."""
        return [
            block if f"{key}.{index}" in opened else ServedTap(block, partial(self.call, key, index))
            for index, block in enumerate(blocks)
        ]

    def call(self, key: str, index: int, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a block and record its call."""
        given: dict[Key, Any] = dict(enumerate(args))
        given.update(kwargs)
        arguments = {name: v for name, v in given.items() if isinstance(v, Tensor)}
        if any(value.is_nested for value in arguments.values()):
            raise AttachError(
                f"{key}.{index} is given nested tensors, which cannot be kept as features; "
                "make the nn.TransformerEncoder with enable_nested_tensor=False"
            )
        before = self._last.get(key)
        if before is not None:
            self._link(before, arguments)
            last = self._given[key]
            moved = {k for k, v in arguments.items() if k in last and not _same(last[k], v)}
            self._moving[key] = self._moving.get(key, set()) | moved
        self._given[key] = arguments
        out, flops = counted(module, args, kwargs)
        outputs = outputs_of(out)
        position = sum(1 for call in self.calls if call.list_key == key)
        call = BlockCall(
            list_key=key,
            index=index,
            position=position,
            shapes_in={name: value.shape for name, value in arguments.items()},
            arguments=arguments if self.keep_all or position <= self.lead else {},
            outputs=outputs,
            container=type(out) if isinstance(out, (tuple, list)) else Tensor,
            shapes_out=tuple(getattr(value, "shape", None) for value in outputs),
            hollow=hollow(out),
            flops=flops,
        )
        self.calls.append(call)
        self._last[key] = call
        return out

    def _link(self, before: BlockCall, arguments: dict[Key, Tensor]) -> None:
        """Note which outputs of the block before arrived unchanged."""
        link: dict[int, Key] = {}
        for number, output in enumerate(before.outputs):
            if not isinstance(output, Tensor):
                continue
            for key, value in arguments.items():
                if key not in link.values() and _same(output, value):
                    link[number] = key
                    break
        self._links.setdefault(before.list_key, []).append(link)
        if not self.keep_all and before.position >= self.lead:  # what travels on need not be kept
            before.outputs = tuple(None if n in link else o for n, o in enumerate(before.outputs))

    def unlinked(self) -> list[str]:
        """Return the lists of which no output was seen to arrive at the next block."""
        return [key for key, links in self._links.items() if not any(links)]

    def members(self, parts: Combine) -> list[BlockCall]:
        """Return the calls that a method works on.

        A list of the text alone always runs, as in the official codes of the methods: it is small
        beside the image's blocks, and a gate before it would decide by what never changes. So do
        the refiners of Lumina2 and its kin, before text and image become one sequence: a gate
        looks at the joint one. Where blocks are named, and where the whole model is skipped, they
        count as any other.
        """
        if parts.site not in (Site.STACK, Site.BLOCK) and not parts.when.waits:
            return self.calls
        main = [call for call in self.calls if not call.list_key.endswith("_refiner")]
        if self.reach is None:
            return main or self.calls
        return [call for call in main or self.calls if self.reach.get(call.list_key)]

    def streams(self, first: BlockCall) -> list[Key]:
        """Return where the first block of a list may take the stream of the sample."""
        known = None if self.reach is None else self.reach.get(first.list_key)
        return sorted(known or first.shapes_in or [0], key=lambda key: key != "hidden_states")

    def wirings(self) -> dict[str, Wiring]:
        """Return the wiring of every list that was called."""
        return {key: self._wiring(key) for key in dict.fromkeys(c.list_key for c in self.calls)}

    def _wiring(self, key: str) -> Wiring:
        calls = [call for call in self.calls if call.list_key == key]
        links = self._links.get(key, [])
        seen = {number: name for link in reversed(links) for number, name in link.items()}
        if any(seen[number] != name for link in links for number, name in link.items()):
            seen = {}
        # The loop transforms streams between the blocks, or there is one block: the first
        # arguments of the outputs' shapes are the streams; beside streams that were seen to
        # travel, those that change from block to block.
        first = calls[0]
        moving = self._moving.get(key, set())
        carry = dict(seen)
        for number, shape in enumerate(first.shapes_out):
            for name, given in first.shapes_in.items():
                if number in carry or (seen and name not in moving):
                    continue
                if shape is not None and given == shape and name not in carry.values():
                    carry[number] = name
                    break
        carry = dict(sorted(carry.items()))
        is_whole = bool(seen) and all(link == carry for link in links)
        return Wiring(carry, "identity" if is_whole else "shape")


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory seen the same way."""
    return one is other or (
        one.shape == other.shape
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
