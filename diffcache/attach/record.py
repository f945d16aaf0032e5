"""Records of a run: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from diffcache.method import Method

TOKEN_LAYERS = "token-layers"  # site of a call that computes some tokens of every layer


@dataclass
class CallRecord:
    """One denoiser call.

    Attributes:
        denoiser: Name of the denoiser in its pipeline.
        index: Step index, from 0.
        timestep: Timestep in model units, None where reading it would make an accelerator wait.
        branch: Guidance branch, from 0, or the name its pipeline gave it.
        computed: Whether the sites were computed; None until it is decided.
        reason: Reason for it: `method`, `first call`, `inputs changed`, `missed a step`, ...
        seconds: Wall time of the call on the host.
        counts: Per site, evaluations that ran and that were skipped.
        flops: Floating-point operations of the sites that ran, a gate's look at them included, and
            of those that were skipped, less that look. None where they could not be counted
            (compiled blocks, flex attention).
        started: Clock of the host at its start, in seconds.
        writes: Whether it wrote to a stream, so that it was no step; `index` is of the last one.
    """

    denoiser: str
    index: int
    timestep: float | None
    branch: int | str
    computed: bool | None = None
    reason: str = ""
    seconds: float = 0.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    flops: tuple[float, float] | None = None
    started: float = field(default=0.0, repr=False)
    writes: bool = False

    @property
    def share(self) -> float:
        """Part of the call that was computed, 0 to 1: of its tokens where these are counted."""
        ran, skipped = self.counts.get(TOKEN_LAYERS, (int(bool(self.computed)), 0))
        return ran / max(ran + skipped, 1)


@dataclass
class RunRecord:
    """Record of one sampling run: computed and skipped work.

    Attributes:
        calls: The denoiser calls in order.
        peak_bytes: Most bytes held at the end of any call.
        finished: Whether the run ended without an exception.
        remarks: Remarks on the run.
        method: Method with which the run started, None before.
    """

    calls: list[CallRecord] = field(default_factory=list)
    peak_bytes: int = 0
    finished: bool = False
    remarks: list[str] = field(default_factory=list)
    method: Method | None = None

    @property
    def computed(self) -> int:
        """Block or module evaluations that ran."""
        return sum(ran for call in self.calls for ran, _ in call.counts.values())

    @property
    def skipped(self) -> int:
        """Block or module evaluations that were skipped."""
        return sum(skipped for call in self.calls for _, skipped in call.counts.values())
