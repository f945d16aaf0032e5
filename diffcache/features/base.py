"""Parts of feature reuse: a schedule of computed steps, and a stand-in for the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import add
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.method import Ability as Ability
from diffcache.method import Method as Method
from diffcache.method import check_int as check_int
from diffcache.method import is_number as is_number
from diffcache.ranges import Range, Settings
from diffcache.step import Step

Order = Annotated[int, Range(0, 4), " (0 is reuse)"]  # of a forecast
Spacing = Annotated[int, Range(1), " (1 turns the cache off)"]
Warmup = Annotated[int, Range(1), " (the first step has nothing to stand in for it)"]
Change = Annotated[float, Range(0, endless=True), " (0 turns the cache off)"]  # that is taken as none
Probe = Literal["residual", "output", "modulated", "time", "time-projection", "sample", "input"]


def tensors_in(state: object) -> list[Tensor]:
    """Return the tensors that are fields of a state, alone or in lists."""
    fields = getattr(state, "__dict__", {}).values()
    parts = (each if isinstance(each, list) else [each] for each in fields)
    return [part for each in parts for part in each if isinstance(part, Tensor)]


def length_of(step: Step, needs: str) -> int:
    """Return the length of a step's run in steps; raise AttachError with what `needs` it if nobody said it."""
    if step.total is None:
        raise AttachError(f"{needs}; wrap the pipeline, or say it: diffcache.run(model, steps=...)")
    return step.total


class When(Settings, ABC):
    """Decides which steps are computed. Immutable; the run's state is made by `init`.

    The decision is taken once a step, by the first guidance branch, and shared by the others,
    unless `by_branch` says that every branch takes its own.

    Attributes:
        total: Length in steps of the runs it is made for, None for any; other runs are refused.
        by_branch: Whether every guidance branch decides for itself, with a state of its own.
        reads_output: Whether `returned` is to be called.
        verifies: Whether `verified` is to be called.
        by_kind: Whether modules decide apart by their kind (`self`, `temporal` or `cross`
            attention), which `computes_at` is then given for their names.
        state: Class of the state of a run, None's where the step alone decides.
        needs: Abilities that it asks for beside feature reuse, such as the noise level of a step.
    """

    total: int | None = None
    by_branch: bool = False
    reads_output: bool = False
    verifies: bool = False
    by_kind: bool = False
    state: ClassVar[type] = type(None)
    needs: tuple[Ability, ...] = ()

    @property
    def probe(self) -> Probe | None:
        """Probe that `should_compute` looks at.

        The `residual` or the `output` of the lead blocks' main stream, `[B, T, D]`, the
        `modulated` input of the first block's attention (the block need not run for it), the
        `time` embedding or the `time-projection` that modulates every block, `[B, D]`, the
        `sample` that the denoiser is given, the `input` of every block, which then decides for
        itself (`skips_block`), or None when the step alone decides. A `residual` falls back to the
        output where the lead block changes the shape (UNets).
        """
        return None

    @property
    def waits(self) -> bool:
        """Return whether the decision waits for a probe that the model has to make."""
        return self.probe not in (None, "sample")

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that decide apart, empty where a step is skipped as a whole.

        A name is the path of a module (`transformer_blocks.0.attn`) or block
        (`transformer_blocks.3`), or an entry of the method's `blocks`. Sites that are not named
        are always computed.
        """
        return ()

    def computes_at(self, step: Step, site: str) -> bool:
        """Return whether one of `sites` is computed; asked at steps that are computed."""
        return True

    def init(self) -> Any:
        """Return the state of one run, in which nothing was seen."""
        return self.state()

    @abstractmethod
    def should_compute(self, state: Any, step: Step, probe: Tensor | None) -> bool:
        """Return True to compute this step, False to skip it; asking again changes nothing.

        A schedule that adds up what skipped steps showed may note it in `state`, once a step.
        """

    def computed(self, state: Any, step: Step, probe: Tensor | None) -> None:
        """Note that this step is computed."""

    def skips_block(self, state: Any, step: Step, block: str, value: Tensor) -> bool:
        """Return whether a block is skipped; asked with its input `[B, T, D]` at probe `input`."""
        return False

    def computed_block(self, state: Any, block: str, value: Tensor) -> None:
        """Note the input of a block that is computed, at probe `input`."""

    def returned(self, state: Any, step: Step, output: Tensor) -> None:
        """Note the denoiser's output at a computed step that this state decided."""

    def verified(self, state: Any, step: Step, output: Tensor) -> None:
        """Note the denoiser's output at a skipped step that this state decided."""

    def held(self, state: Any) -> list[Tensor]:
        """Return the tensors the state keeps, for the account of memory."""
        return tensors_in(state)


class Instead(Settings, ABC):
    """Keeps computed features and stands in for skipped ones. Immutable; state is made by `init`.

    One state belongs to one tensor of one site in one branch.

    Attributes:
        state: Class of the state.
    """

    state: ClassVar[type] = list

    def init(self) -> Any:
        """Return the state of one feature, in which none was kept."""
        return self.state()

    def init_at(self, site: str, index: int) -> Any:
        """Return the state of one feature, for a stand-in that is not the same at every site.

        Args:
            site: Path of the module, or of the block that closes the skipped span.
            index: Index of the tensor among those that are kept there, from 0.
        """
        return self.init()

    @abstractmethod
    def record(self, state: Any, step: Step, feature: Tensor) -> None:
        """Keep a fresh feature; `feature` belongs to the state from now on."""

    @abstractmethod
    def estimate(self, state: Any, step: Step) -> Tensor:
        """Return the stand-in for a skipped step.

        It may be a held tensor, which the caller does not write to. At the step that was just
        recorded it is the feature itself.
        """

    def link(self, states: Sequence[Any]) -> None:
        """Note the order in which the states of a branch are asked for; for fetching ahead."""

    def estimate_all(self, states: Sequence[Any], step: Step, bases: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return `estimate` of many states; a method may do them in fewer kernel launches.

        Args:
            states: States of the features of one call.
            step: The skipped step.
            bases: Tensors that are added to the estimates, one each; nothing by default.
        """
        guesses = [self.estimate(state, step) for state in states]
        return guesses if bases is None else list(map(add, bases, guesses))

    def adds_at_once(self, state: Any) -> bool:
        """Return whether a kernel adds a base to a state's estimate as it makes it."""
        return False

    def correct(self, state: Any, step: Step, value: Tensor) -> Tensor:
        """Return a better stand-in for the denoiser's output; asked at `feature="change"` only.

        Args:
            state: State of the output.
            step: The skipped step.
            value: `estimate` plus the sample, in the output's shape.
        """
        return value

    def held(self, state: Any) -> list[Tensor]:
        """Return the tensors the state keeps, for the account of memory."""
        return tensors_in(state)

    def is_held(self, state: Any) -> bool:
        """Return whether `estimate` returns a held tensor, which must be copied for a model."""
        return True
