"""Holding features in less memory: bfloat16, int8 with a scale a token, or on the host."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from diffcache.features.base import Ability, Instead, Method
from diffcache.features.combine import Combine, reuse_of
from diffcache.features.parts.instead import Summed
from diffcache.kernels.rows import pack_rows, unpack_rows, weighted_sum_int8
from diffcache.ranges import Settings
from diffcache.step import Step

Form = Literal["bf16", "int8", "host"]
FORMS = get_args(Form)
_THREAD = threading.local()  # streams of copies


@dataclass
class Packed:
    """One tensor as it is held."""

    values: Tensor  # bfloat16, int8, or as it was but on the host
    scale: Tensor | None  # bfloat16, one a token, of int8 values; else None
    dtype: torch.dtype  # dtype of the tensor
    device: torch.device  # device of the tensor
    ready: tuple[Tensor, Any] | None = None  # a copy on the device that is on its way, with the event that ends it

    def tensors(self) -> list[Tensor]:
        """Return the tensors that take memory."""
        return [self.values] if self.scale is None else [self.values, self.scale]

    def prefetch(self) -> None:
        """Start to copy host values to their accelerator, on a stream of their own."""
        if self.device.type != "cuda" or self.values.is_cuda or self.ready is not None:
            return
        stream = _copies(self.device)
        with torch.cuda.stream(stream):
            copy = self.values.to(self.device, non_blocking=True)
            self.ready = copy, stream.record_event()

    def unpack(self) -> Tensor:
        """Return the tensor, as exactly as it is held."""
        if self.scale is not None:
            return unpack_rows(self.values, self.scale, self.dtype)
        if self.ready is not None:
            (copy, event), self.ready = self.ready, None
            torch.cuda.current_stream(self.device).wait_event(event)
            copy.record_stream(torch.cuda.current_stream(self.device))
            return copy
        return self.values.to(self.device, self.dtype)


def _copies(device: torch.device) -> Any:
    """Return this thread's stream of copies to a device."""
    streams = _THREAD.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def pack(tensor: Tensor, form: Form) -> Packed:
    """Return a tensor in the form in which it is held.

    Args:
        tensor: Float, `[..., D]` with D channels a token; with four or five axes `[B, C, ...]`,
            as in UNets and whole latents, with C channels a token.
        form: `bf16`; `int8`: symmetric, a token's largest number is 127; `host`: unchanged, in
            pinned memory where there is an accelerator.
    """
    if not tensor.is_floating_point():
        return Packed(tensor, None, tensor.dtype, tensor.device)
    if form == "bf16":
        return Packed(tensor.to(torch.bfloat16), None, tensor.dtype, tensor.device)
    if form == "host":
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        values.copy_(tensor, non_blocking=False)
        return Packed(values, None, tensor.dtype, tensor.device)
    values, scale = pack_rows(tensor, axis=1 if tensor.dim() >= 4 else -1)
    return Packed(values, scale, tensor.dtype, tensor.device)


@dataclass(eq=False)
class Box:
    """A state of the method with its tensors packed, and the state that is asked for after it."""

    state: Any
    following: weakref.ref[Box] | None = field(default=None)


@dataclass(frozen=True)
class Hold(Instead):
    """Stand in as `inner` does, with all that it keeps packed.

    Args:
        inner: Stand-in that keeps features and estimates those of skipped steps.
        form: Form of the held tensors: `bf16`, `int8` or `host`.
    """

    inner: Instead
    form: Form

    def init(self) -> Box:
        """Return an empty state."""
        return Box(self.inner.init())

    def init_at(self, site: str, index: int) -> Box:
        """Return an empty state of one feature."""
        return Box(self.inner.init_at(site, index))

    def adopt(self, state: Any) -> Box:
        """Return a state of `inner` as one of this."""
        return Box(self._packed(state))

    def link(self, states: Sequence[Box]) -> None:
        """Let the estimate of each state start to fetch the next one."""
        for box, following in pairwise(states):
            box.following = weakref.ref(following)

    def record(self, state: Box, step: Step, feature: Tensor) -> None:
        """Let `inner` record, and pack the tensors that it keeps."""
        inner = mapped(state.state, Packed, Packed.unpack)
        self.inner.record(inner, step, feature)
        state.state = self._packed(inner)

    def _packed(self, state: Any) -> Any:
        return mapped(state, Tensor, lambda tensor: pack(tensor, self.form))

    def estimate(self, state: Box, step: Step) -> Tensor:
        """Return the estimate of `inner` from the unpacked state."""
        packed_sum = self._packed_sum(state, step, None)
        if packed_sum is not None:
            return packed_sum
        guess = self.inner.estimate(mapped(state.state, Packed, Packed.unpack), step)
        following = state.following() if state.following is not None else None
        if self.form == "host" and following is not None:
            for packed in _within(following.state):
                packed.prefetch()
        return guess

    def estimate_all(self, states: Sequence[Box], step: Step, bases: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return every state's estimate; a sum of codes takes its base in the same pass."""
        if bases is None:
            return super().estimate_all(states, step)
        totals = []
        for state, base in zip(states, bases, strict=True):
            packed_sum = self._packed_sum(state, step, base)
            totals.append(base + self.estimate(state, step) if packed_sum is None else packed_sum)
        return totals

    def _packed_sum(self, state: Box, step: Step, base: Tensor | None) -> Tensor | None:
        """Return the estimate of a weighted sum of int8 factors; None of any other state."""
        if self.form != "int8" or not isinstance(self.inner, Summed):
            return None
        factors: list[Packed] = state.state.factors
        scales = [packed.scale for packed in factors if packed.scale is not None]
        if len(scales) < len(factors):  # whole numbers are not packed
            return None
        codes, weights = ([packed.values for packed in factors], self.inner.weights(state.state, step))
        return weighted_sum_int8(codes, scales, weights, base, factors[0].dtype)

    def correct(self, state: Box, step: Step, value: Tensor) -> Tensor:
        """Return the stand-in as `inner` corrects it."""
        return self.inner.correct(mapped(state.state, Packed, Packed.unpack), step, value)

    def held(self, state: Box) -> list[Tensor]:
        """Return the packed tensors."""
        return [tensor for packed in _within(state.state) for tensor in packed.tensors()]

    def is_held(self, state: Box) -> bool:
        """Return whether an estimate is a held tensor, which unpacking may leave it."""
        return any(packed.scale is None for packed in _within(state.state))


@dataclass(frozen=True)
class Held(Settings, Method):
    """Run a method with all its features held in another form.

    Args:
        method: Any method.
        hold: `bf16`; `int8`, with a scale a token, in about half the memory of bf16; `host`, in
            the host's memory, fetched back ahead of use.

    Raises:
        ValueError: If the method is held already, or holds nothing.
    """

    name: ClassVar[str] = "held"

    method: Method
    hold: Form

    def check(self) -> None:
        """Raise ValueError unless there are features to hold."""
        if isinstance(self.method, Held):
            raise ValueError(f"method={self.method!r}: must be a method, and not held already")
        if reuse_of(self.method) is None:
            raise ValueError(f"hold={self.hold!r}: {self.method!r} holds no features")
        object.__setattr__(self, "bibtex", self.method.bibtex)

    @property
    def total(self) -> int | None:
        """The method's."""
        return self.method.total

    def abilities(self) -> tuple[Ability, ...]:
        """Return the method's, with its features packed."""
        return tuple(
            replace(ability, instead=Hold(ability.instead, self.hold)) if isinstance(ability, Combine) else ability
            for ability in self.method.abilities()
        )

    def for_denoiser(self, denoiser: str) -> Method:
        """Return the method of one denoiser, with its features held in the same form."""
        own = self.method.for_denoiser(denoiser)
        return self if own is self.method else Held(own, self.hold)

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise unless the method fits the model."""
        self.method.check_model(facts)


def mapped(state: Any, cls: type, change: Callable[[Any], Any]) -> Any:
    """Return a state with `change` of every `cls` in it; lists and dataclasses are copied."""
    if isinstance(state, cls):
        return change(state)
    if isinstance(state, (list, tuple)):
        return type(state)([mapped(item, cls, change) for item in state])
    if dataclasses.is_dataclass(state) and not isinstance(state, (type, Packed)):
        values = {f.name: mapped(getattr(state, f.name), cls, change) for f in dataclasses.fields(state)}
        return dataclasses.replace(state, **values)
    return state


def _within(state: Any) -> list[Packed]:
    """Return the packed tensors of a state."""
    found: list[Packed] = []
    mapped(state, Packed, found.append)
    return found
