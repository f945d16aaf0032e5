"""The site MODEL: the denoiser's output is kept, and replaced at skipped steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.setup import can_set
from diffcache.attach.reuse.span import OWN, BlockFeatures, estimates, store_features
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError
from diffcache.step import Site

OUTPUT = ("output", 0)  # where the feature is held


def keep_output(frame: Frame, out: Any) -> Any:
    """Show the output to the observer and keep it; return what replaces it, None if it stays."""
    setup, replaced = frame.setup, None
    observer, sample = setup.observer, frame.call.sample
    if observer is not None and isinstance(sample, Tensor):
        first, *others = leaves(out)
        seen = observer.output(frame.step, sample, first)
        if seen is not None:
            out = replaced = Template(out).build([seen, *others])
    if setup.site is not Site.MODEL:
        return replaced
    own = [leaf.detach().clone() for leaf in leaves(out)]
    if setup.parts.feature == "change":
        own[0].sub_(fitted(frame, own[0]))
    store_features(frame, OUTPUT, own, [OWN] * len(own), Template(out))
    return replaced


def stand_in(frame: Frame) -> Any:
    """Return what stands for the output of a skipped step."""
    held: BlockFeatures = frame.features[OUTPUT]
    guesses = estimates(frame, held)
    if frame.setup.parts.feature == "change":
        value = guesses[0] + fitted(frame, guesses[0])
        guesses[0] = frame.instead.correct(held.states[0], frame.step, value)
    return held.template.build(guesses)


def fitted(frame: Frame, like: Tensor) -> Tensor:
    """Return the sample in the shape of the output: more channels or tokens are left out.

    Zeros are added where the output has more, as with a learned variance.

    Raises:
        AttachError: If the sample has another number of axes.
    """
    sample = frame.call.sample
    if not isinstance(sample, Tensor) or sample.dim() != like.dim():
        settable = can_set(frame.setup.method, "feature")
        way_out = "feature='output'" if settable else "another method"
        raise AttachError(
            f"{frame.setup.anatomy.model}: its output of shape {list(like.shape)} cannot be taken "
            f"against its sample; use {way_out}"
        )
    if sample.shape == like.shape:
        return sample
    shared = tuple(slice(min(a, b)) for a, b in zip(sample.shape, like.shape, strict=True))
    out = like.new_zeros(like.shape)
    out[shared] = sample[shared].to(like.dtype)
    return out
