"""Records of a run: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from diffcache.method import Method

TOKEN_LAYERS = "token-layers"  # site of a call that computes some tokens of every layer


@dataclass
class CallRecord:
    """One denoiser call."""

    denoiser: str  # name of the denoiser in its pipeline
    index: int  # step index, from 0
    timestep: float | None  # timestep in model units, None where reading it would make an accelerator wait
    branch: int | str  # guidance branch, from 0, or the name its pipeline gave it
    computed: bool | None = None  # whether the sites were computed; None until it is decided
    reason: str = ""  # reason for it: `method`, `first call`, `inputs changed`, `missed a step` and so on
    seconds: float = 0.0  # wall time of the call on the host
    # per site, evaluations that ran and that were skipped
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    # floating-point operations of the sites that ran, a gate's look at them included, and of those that were skipped,
    # less that look. None where they could not be counted (compiled blocks, flex attention).
    flops: tuple[float, float] | None = None
    started: float = field(default=0.0, repr=False)  # clock of the host at its start, in seconds
    writes: bool = False  # whether it wrote to a stream, so that it was no step; `index` is of the last one

    @property
    def share(self) -> float:
        """Part of the call that was computed, 0 to 1: of its tokens where these are counted."""
        ran, skipped = self.counts.get(TOKEN_LAYERS, (int(bool(self.computed)), 0))
        return ran / max(ran + skipped, 1)


@dataclass
class RunRecord:
    """Record of one sampling run: computed and skipped work."""

    calls: list[CallRecord] = field(default_factory=list)  # the denoiser calls in order
    peak_bytes: int = 0  # most bytes held at the end of any call
    finished: bool = False  # whether the run ended without an exception
    remarks: list[str] = field(default_factory=list)
    method: Method | None = None  # method with which the run started, None before

    @property
    def computed(self) -> int:
        """Block or module evaluations that ran."""
        return sum(ran for call in self.calls for ran, _ in call.counts.values())

    @property
    def skipped(self) -> int:
        """Block or module evaluations that were skipped."""
        return sum(skipped for call in self.calls for _, skipped in call.counts.values())
