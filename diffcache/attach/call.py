"""One call of a wrapped denoiser, as extensions see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from diffcache.attach.record import CallRecord
from diffcache.attach.run import Branch, Run, Timeline
from diffcache.step import CURRENT, Step


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a denoiser.

    Attributes:
        owner: The `Denoiser` that opened it; only its taps answer.
        step: Step of the run, as methods see it, with noise level, token grid and ranks.
        branch: Guidance branch, with storage that lasts as long as the run.
        timeline: Place of the denoiser in its run, with storage that lasts as long as the run.
        signature: Look of the arguments, without their values.
        args: Positional arguments.
        kwargs: Keyword arguments.
        sample: The sample that is denoised, None where the call has none.
        writes: Whether the call writes to a stream, so that nothing of it may be left out.
        record: Entry of the call in the record of its run; `computed` is None until it is decided.
        learns: Whether an extension learns from this call how the denoiser works.
        repeats: Whether the denoiser runs once more on this call, to learn how it works.
        storage: Storage of extensions that lasts as long as the call, by extension or name.
    """

    owner: object
    step: Step
    branch: Branch
    timeline: Timeline
    signature: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sample: Any
    writes: bool
    record: CallRecord
    learns: bool = False
    repeats: bool = False
    storage: dict[Any, Any] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The run that the call belongs to."""
        return self.timeline.run


@contextmanager
def in_call(call: Call | None) -> Iterator[None]:
    """Let the code inside belong to a call, or to none."""
    token = CURRENT.set(call)
    try:
        yield
    finally:
        CURRENT.reset(token)
