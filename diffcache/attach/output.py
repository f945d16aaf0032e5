"""The site MODEL: the denoiser's output is kept, and replaced at skipped steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffcache.attach.advice import can_set
from diffcache.attach.span import OWN, Held, estimates, hold
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError
from diffcache.step import Site

if TYPE_CHECKING:
    from diffcache.attach.frame import Frame

OUTPUT = ("output", 0)  # where the feature is held


def keep_output(frame: Frame, out: Any) -> Any:
    """Show the output to the observer and keep it; return what replaces it, None if it stays."""
    engine, replaced = frame.engine, None
    observer = engine.handle.observer
    if observer is not None and isinstance(frame.sample, Tensor):
        first, *others = leaves(out)
        seen = observer.output(frame.step, frame.sample, first)
        if seen is not None:
            out = replaced = Template(out).build([seen, *others])
    if engine.site is not Site.MODEL:
        return replaced
    own = [leaf.detach().clone() for leaf in leaves(out)]
    if engine.parts.feature == "change":
        own[0].sub_(fitted(frame, own[0]))
    hold(frame, OUTPUT, own, [OWN] * len(own), Template(out))
    return replaced


def stand_in(frame: Frame) -> Any:
    """Return what stands for the output of a skipped step."""
    held: Held = frame.branch.features[OUTPUT]
    guesses = estimates(frame, held)
    if frame.engine.parts.feature == "change":
        value = guesses[0] + fitted(frame, guesses[0])
        guesses[0] = frame.instead.correct(held.states[0], frame.step, value)
    return held.template.build(guesses)


def fitted(frame: Frame, like: Tensor) -> Tensor:
    """Return the sample in the shape of the output: more channels or tokens are left out.

    Zeros are added where the output has more, as with a learned variance.

    Raises:
        AttachError: If the sample has another number of axes.
    """
    sample = frame.sample
    if not isinstance(sample, Tensor) or sample.dim() != like.dim():
        settable = can_set(frame.engine.method, "feature")
        way_out = "feature='output'" if settable else "another method"
        raise AttachError(
            f"{frame.engine.anatomy.model}: its output of shape {list(like.shape)} cannot be taken "
            f"against its sample; use {way_out}"
        )
    if sample.shape == like.shape:
        return sample
    shared = tuple(slice(min(a, b)) for a, b in zip(sample.shape, like.shape, strict=True))
    out = like.new_zeros(like.shape)
    out[shared] = sample[shared].to(like.dtype)
    return out
