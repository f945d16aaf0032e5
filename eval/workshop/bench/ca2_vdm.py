"""The cost of a chunk with Ca2-VDM's cache, beside one that computes its prefix anew in every step.

Both run the same transformer on the same chunk, once a denoising step. The cached one runs the
finished chunk once more, to write it, and reads keys and values of the prefix; the other runs all
frames of the prefix in every step. Weights are random, which costs do not see; both predict the
same, and the record says how nearly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.flops import counted
from diffcache.eval.cost.interleave import Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting
from diffcache.pipelines.ca2_vdm import FactorizedSession, FactorizedVideo
from diffcache.pipelines.factorized import FactorizedTransformer
from diffcache.video import Ca2VDM, FewSteps
from diffcache.video.ca2_vdm import OnePass

PREFIXES = (8, 16, 24, 48)
CHUNK, SIZE, TEXT = 2, (16, 16), 8  # frames, latents, tokens of text
STEPS = FewSteps()


@torch.no_grad()
def measure(
    setting: Setting, *, rounds: int = 7, prefixes: Sequence[int] = PREFIXES
) -> dict[str, Any]:
    """Measure a chunk after each prefix, cached and computed anew, in turn.

    Args:
        setting: Device and dtype.
        rounds: Timed chunks of each.
        prefixes: Chunks before the one that is timed.
    """
    torch.manual_seed(0)
    model = FactorizedTransformer(num_attention_heads=4, attention_head_dim=32, num_layers=4)
    model = model.to(setting.device, setting.dtype).eval()
    most = (max(prefixes) + 2) * CHUNK  # nothing leaves the queue: one pass sees the same frames
    policy = Ca2VDM(queue=most, length=most + CHUNK)
    pairs = {prefix: _Pair(model, policy, prefix, setting) for prefix in prefixes}
    turns = {}
    for prefix, pair in pairs.items():
        turns[_name("recompute", prefix)] = Turn(pair.recompute)
        turns[_name("cached", prefix)] = Turn(pair.cached, after=pair.forget)
    timed = take_turns(turns, rounds, 1, setting)
    return {
        "shapes": {
            "device": setting.device.type, "model": dict(model.config), "batch": 1,
            "chunk_frames": CHUNK, "latents": list(SIZE), "steps": len(STEPS.levels),
        },
        "rounds": rounds,
        "rows": [_row(prefix, pair, timed.own(setting)) for prefix, pair in pairs.items()],
        "warning": timed.warning,
    }  # fmt: skip


class _Pair:
    """A session after a prefix, and the frames of that prefix."""

    def __init__(
        self, model: FactorizedTransformer, policy: Ca2VDM, prefix: int, setting: Setting
    ) -> None:
        noise = torch.Generator().manual_seed(prefix)
        channels, text = model.config.in_channels, model.config.text_dim
        frames = torch.randn(1, channels, (prefix + 1) * CHUNK, *SIZE, generator=noise)
        frames = frames.to(setting.device, setting.dtype)
        self.model, self.clean = model, frames[:, :, :-CHUNK]
        self.noisy = frames[:, :, -CHUNK:]
        self.text = torch.randn(1, TEXT, text, generator=noise).to(frames)
        video = FactorizedVideo(model, chunk=CHUNK, sampler=STEPS)
        self.session: FactorizedSession = video.session(self.text, size=SIZE, policy=policy)
        self.session.take(self.clean)
        self.nbytes = self.session.store.nbytes

    def cached(self) -> None:
        """Make a chunk and write it."""
        self.session.next()

    def forget(self) -> None:
        """Go back to the prefix."""
        self.session.frames = self.clean.shape[2]
        for layer in self.session.store.layers:
            layer.rollback(layer.seen - self.session.frames)

    def recompute(self) -> None:
        """Run the prefix with the chunk in every step, and sample as the session does."""
        clean = self.noisy
        for step, level in enumerate(STEPS.levels):
            noise = self.session.noise(CHUNK)
            x = noise if step == 0 else STEPS.noised(clean, noise, step)
            clean = STEPS.clean(x, self.predicted(x, 1000 * level), step)

    def predicted(self, x: Tensor, level: float) -> Tensor:
        """Return the prediction of a chunk after the prefix, from one pass over all frames."""
        once = OnePass(self.session.policy, self.clean.shape[2])
        times = torch.full((1,), level, device=x.device)
        found: Tensor = self.model(torch.cat([self.clean, x], 2), times, self.text, once)
        return found[:, :, -CHUNK:]

    def difference(self) -> float:
        """Return how far both predictions of a noisy chunk are apart, as a share of the larger."""
        with self.session.chunk(CHUNK):
            cached = self.session._velocity(self.noisy, 500.0)
        self.forget()
        whole = self.predicted(self.noisy, 500.0)
        return float((cached - whole).abs().max() / whole.abs().max())

    def operations(self) -> tuple[float, float]:
        """Return floating-point operations of a chunk, computed anew and cached."""
        _, anew = counted(self.model, (), {}, self.recompute)
        _, cached = counted(self.model, (), {}, self.cached)
        self.forget()
        assert anew is not None
        assert cached is not None
        return anew, cached


def _name(kind: str, prefix: int) -> str:
    return f"{kind} {prefix}"


def _row(prefix: int, pair: _Pair, clock: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return what a chunk after a prefix costs; ratios are of recompute over cached."""
    anew, cached = clock[_name("recompute", prefix)], clock[_name("cached", prefix)]
    flops = pair.operations()
    return {
        "name": f"{prefix} chunks", "prefix_chunks": prefix, "prefix_frames": prefix * CHUNK,
        "recompute_seconds": summary(anew), "cached_seconds": summary(cached),
        "ratio": summary([one / other for one, other in zip(anew, cached, strict=True)]),
        "recompute_flops": flops[0], "cached_flops": flops[1], "flops_ratio": flops[0] / flops[1],
        "cache_bytes": pair.nbytes, "difference": pair.difference(),
    }  # fmt: skip
