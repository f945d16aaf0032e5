"""What stands for the blocks of a span, on a computed and on a skipped step."""

from __future__ import annotations

from operator import add, itemgetter
from typing import Any

from torch import Tensor, nn

from diffcache.attach.reuse.frame import current_frame
from diffcache.attach.reuse.span import Duty, Held, copied, estimate, foresee, picker, record
from diffcache.attach.tap import Tap
from diffcache.attach.tree import Template, leaves, outputs_of


class ComputeTap(Tap):
    """A block that runs, and whose input or output the cache needs."""

    __slots__ = ("base_of", "duty")

    def __init__(self, module: nn.Module, duty: Duty) -> None:
        super().__init__(module)
        self.duty = duty
        self.base_of = picker(list(duty.carry.values()), tuple) if duty.opens else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        if self.base_of is not None:
            frame.bases[self.duty.span] = self.base_of(args, kwargs)
        out = self.module(*args, **kwargs)
        if self.duty.records:
            record(frame, self.duty, out)
        return out


class LiveTap(Tap):
    """A block that runs in a span whose features leave out what the loop adds between blocks.

    The span's base follows those additions: the difference between what a block is given and what
    the block before returned is added to it.
    """

    __slots__ = ("copies", "duty", "input_of")

    def __init__(self, module: nn.Module, duty: Duty) -> None:
        super().__init__(module)
        self.duty = duty
        self.copies = False  # whether the loop writes to its streams in place
        self.input_of = picker(list(duty.carry.values()), tuple)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        duty, given = self.duty, self.input_of(args, kwargs)
        if duty.opens:
            base = tuple([tensor.clone() for tensor in given]) if self.copies else given
        else:
            streams = zip(frame.bases[duty.span], given, frame.lasts[duty.span], strict=True)
            base = tuple([b if now is last else b + (now - last) for b, now, last in streams])
        frame.bases[duty.span] = base
        out = self.module(*args, **kwargs)
        if duty.records:
            record(frame, duty, out)
        returned = [outputs_of(out)[number] for number in duty.carry]
        if self.copies:
            returned = [None if tensor is None else tensor.clone() for tensor in returned]
        frame.lasts[duty.span] = returned
        return out


class PassTap(Tap):
    """A block that is skipped and passes its streams through."""

    __slots__ = ("duty", "streams_of")

    def __init__(self, module: nn.Module, duty: Duty, container: type) -> None:
        super().__init__(module)
        self.duty = duty
        self.streams_of = picker([duty.carry[n] for n in sorted(duty.carry)], container)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        return self.streams_of(args, kwargs)


class CloseTap(Tap):
    """The last skipped block of a span: the span's base plus the estimates of all it adds.

    In a live span the base is what arrives here, with all that the loop added on the way.
    """

    __slots__ = ("container", "duty", "input_of")

    def __init__(self, module: nn.Module, duty: Duty, container: type) -> None:
        super().__init__(module)
        self.duty, self.container = duty, container
        self.input_of = picker(list(duty.carry.values()), tuple) if duty.live else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        frame.closed += 1
        held: Held = frame.features[self.duty.key]
        guesses = frame.instead.estimate_all(held.states, frame.step)
        live = self.input_of
        base = frame.bases[self.duty.span] if live is None else live(args, kwargs)
        if self.container is Tensor:
            return base[0] + guesses[0]
        return self.container(map(add, base, guesses))


class NamedPassTap(Tap):
    """A `PassTap` whose streams are passed by name in a tuple or alone: the fastest way through."""

    __slots__ = ("take",)

    def __init__(self, module: nn.Module, duty: Duty) -> None:
        super().__init__(module)
        self.take = itemgetter(*[duty.carry[number] for number in sorted(duty.carry)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        return self.take(kwargs)


class OpenTap(PassTap):
    """The first skipped block of a span: it notes the base and passes its streams through."""

    __slots__ = ("base_of",)

    def __init__(self, module: nn.Module, duty: Duty, container: type) -> None:
        super().__init__(module, duty, container)
        self.base_of = picker(list(duty.carry.values()), tuple)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        frame.bases[self.duty.span] = self.base_of(args, kwargs)
        return self.streams_of(args, kwargs)


class EstimateTap(Tap):
    """A skipped block whose outputs are estimates: the last of a span, or one with side outputs."""

    __slots__ = ("duty", "input_of")

    def __init__(self, module: nn.Module, duty: Duty) -> None:
        super().__init__(module)
        self.duty = duty
        self.input_of = picker(list(duty.carry.values()), tuple) if duty.carry else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        duty = self.duty
        given = self.input_of(args, kwargs) if self.input_of is not None else ()
        if duty.opens and not duty.live:
            frame.bases[duty.span] = given
        return estimate(frame, duty, given)


class AddTap(Tap):
    """A skipped block of its own span: its streams plus the estimates of what it adds to them."""

    __slots__ = ("container", "duty", "input_of", "number")

    def __init__(self, module: nn.Module, duty: Duty, container: type) -> None:
        super().__init__(module)
        self.duty = duty
        self.number = -1  # place among the blocks that are foreseen
        self.container = container
        self.input_of = picker(list(duty.carry.values()), tuple)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        guesses = (frame.foreseen or foresee(frame))[self.number]
        if self.container is Tensor:
            return self.input_of(args, kwargs)[0] + guesses[0]
        return self.container(map(add, self.input_of(args, kwargs), guesses))


class HollowTap(Tap):
    """A skipped block whose outputs nobody reads: zeros of their shapes, which take no memory.

    Where the model's loop writes to them in place they have to be `real`.
    """

    __slots__ = ("duty", "real")

    def __init__(self, module: nn.Module, duty: Duty) -> None:
        super().__init__(module)
        self.duty = duty
        self.real = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame = current_frame()
        out = frame.features[self.duty.key].hollow
        return Template(out).build([zeros.clone() for zeros in leaves(out)]) if self.real else out


def protect(tap: Any) -> None:
    """Let a tap hold and hand out copies: the model's loop writes to its streams in place."""
    if isinstance(tap, (ComputeTap, OpenTap)) and tap.base_of is not None:
        tap.base_of = copied(tap.base_of)
    elif isinstance(tap, PassTap) and tap.duty.live and tap.duty.opens:
        tap.streams_of = copied(tap.streams_of)
    elif isinstance(tap, LiveTap):
        tap.copies = True
    elif isinstance(tap, HollowTap):
        tap.real = True
