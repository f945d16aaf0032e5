"""Place of a call in a sampling run (`Step`) and of a feature in a model (`Site`)."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Scene:
    """The noise level of a step and the grid of its tokens.

    Attributes:
        signal: Weight of the clean sample in the noisy one, 0 to 1.
        noise: Weight of the noise in it.
        grids: Token grids that the call speaks of, slowest axis first: `(H, W)` or `(F, H, W)`.
        sizes: Sizes of the sample's own axes after its channels, empty where it is packed.
    """

    signal: float
    noise: float
    grids: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One denoiser call of a sampling run.

    Attributes:
        index: Position in the sampling loop of this denoiser, from 0.
        timestep: Timestep that the model is given, in model units; None where reading it would
            make an accelerator wait.
        total: Number of steps of the run, None when nobody said it.
        branch: Guidance branch, from 0 in the order of the first calls.
        chunk: Part of a stream, such as a chunk of a video, from 0.
        ranks: Process group that shares the sample, None where one process has all of it.
        scene: Noise level and token grid, for methods that ask for it; else None.
        is_left_out: Whether another ability of the method planned not to compute this step.
        before: Number of steps of the run that another denoiser took before the first of this one.
    """

    index: int
    timestep: float | None = None
    total: int | None = None
    branch: int = 0
    chunk: int = 0
    ranks: Any = None
    scene: Scene | None = None
    is_left_out: bool = False
    before: int = 0

    @property
    def is_last(self) -> bool:
        """Return whether this is known to be the last step of the run."""
        return self.total is not None and self.index >= self.total - 1


# The wrapped denoiser call that this thread is in (`diffcache.attach.call.Call`), None outside.
CURRENT: ContextVar[Any] = ContextVar("diffcache_call", default=None)


def current_step() -> Step | None:
    """Return the step of the denoiser call that this thread is in, None outside of one."""
    call = CURRENT.get()
    return None if call is None else call.step


def writes_to_stream() -> bool:
    """Return whether this thread is in a denoiser call that writes to a stream."""
    call = CURRENT.get()
    return call is not None and bool(call.writes)


class Site(str, Enum):
    """Place in a model where a feature is taken.

    `MODEL` is the denoiser's output, `STACK` the residual over each list of blocks, `RUN` the residual over runs of
    named blocks, `BLOCK` the residual of every block. `DEEP` is what enters the last layer of a UNet (a resnet with
    its attention), and `STACK` elsewhere. `ATTENTION` and `FEED_FORWARD` are the outputs of those modules inside the
    blocks, before their gates; `MODULE` is both, with a fused single-stream block taken as one (the layout of the
    TaylorSeer paper).
    """

    MODEL = "model"
    STACK = "stack"
    DEEP = "deep"
    RUN = "run"
    BLOCK = "block"
    MODULE = "module"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"

    def __repr__(self) -> str:
        """Return the name as Python text, so that a method's `repr` can be evaluated."""
        return repr(self.value)

    @property
    def is_module(self) -> bool:
        """Return whether the site is a module inside the blocks."""
        return self in (Site.MODULE, Site.ATTENTION, Site.FEED_FORWARD)

    @classmethod
    def of(cls, value: str | Site) -> Site:
        """Return the site named `value`; raise ValueError if no site has that name."""
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(repr(site.value) for site in cls)
            raise ValueError(f"site={value!r}: must be one of {allowed}") from None
