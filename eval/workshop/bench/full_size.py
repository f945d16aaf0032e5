"""Seconds of whole runs of FLUX.1-dev and Wan2.1-1.3B in full size, with caches of all makers.

Weights are random: speed does not depend on them, and nothing here says anything about quality. All
caches are static schedules that compute the same steps, in one process and in turn. How often the
last block's attention ran is counted, so that a cache that computes more or less is seen. On a CPU
the models are tiny, which only shows that every row runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn

import diffcache
from diffcache.errors import AttachError, MissingError
from diffcache.eval.cost.interleave import Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting
from diffcache.eval.runs.peers import make_peer
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer

STEPS, EVERY = 21, 5
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"diffusers TaylorSeer{' lite' if lite else ''}": ("diffusers/taylorseer", {
        "cache_interval": EVERY, "disable_cache_before_step": 1, "max_order": 1,
        "use_lite_mode": lite, "taylor_factors_dtype": torch.bfloat16,
    })
    for lite in (True, False)
} | {
    f"cache-dit{name}": ("cache-dit/dbcache", {
        "steps_computation_mask": "".join(str(int(s % EVERY == 0)) for s in range(STEPS)),
        "Fn_compute_blocks": 1, "residual_diff_threshold": 1e9, **more,
    })
    for name, more in (("", {}), (" TaylorSeer", {"taylorseer_order": 1}))
}  # fmt: skip


@dataclass
class FullSizeModel:
    """A pipeline without encoders and decoder, and the arguments of a run."""

    name: str  # whose sizes it has
    pipe: Any
    call: dict[str, Any]
    counted: nn.Module  # A module of the last block: a step that is computed calls it once a branch
    branches: int = 1  # calls of the denoiser in a step


def made(cls: Any, setting: Setting, **config: Any) -> Any:
    """Return a model with random weights, made where it stays."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with setting.device:
            torch.manual_seed(0)
            return cls(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def flux(setting: Setting, tiny: bool) -> FullSizeModel:
    """Return FLUX.1-dev at 1024 x 1024 pixels: 4,096 tokens of the picture, 512 of the prompt."""
    sizes: dict[str, Any] = {}
    if tiny:
        heads = dict(num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6))
        sizes = dict(num_layers=2, num_single_layers=2, joint_attention_dim=32, pooled_projection_dim=32, **heads)
    model = made(FluxTransformer2DModel, setting, guidance_embeds=True, **sizes)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)
    config, side, words = model.config, (64 if tiny else 1024), (8 if tiny else 512)
    noise = _noise(setting)
    call = {
        "prompt_embeds": noise(1, words, config.joint_attention_dim),
        "pooled_prompt_embeds": noise(1, config.pooled_projection_dim),
        "height": side,
        "width": side,
    }
    return FullSizeModel("FLUX.1-dev", pipe, call, model.single_transformer_blocks[-1].attn.to_q)


def wan(setting: Setting, tiny: bool) -> FullSizeModel:
    """Return Wan2.1-1.3B with 33 frames of 832 x 480 pixels: 14,040 tokens, guided."""
    sizes: dict[str, Any] = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
    if tiny:
        sizes = dict(num_layers=3, num_attention_heads=2, ffn_dim=32, text_dim=32, attention_head_dim=12, freq_dim=16)
    model = made(WanTransformer3DModel, setting, **sizes)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(None, None, None, scheduler, model)
    noise, text = _noise(setting), model.config.text_dim
    call = {
        "prompt_embeds": noise(1, 8 if tiny else 512, text),
        "negative_prompt_embeds": noise(1, 8 if tiny else 512, text),
        "height": 32 if tiny else 480,
        "width": 32 if tiny else 832,
        "num_frames": 5 if tiny else 33,
    }
    return FullSizeModel("Wan2.1-1.3B", pipe, call, model.blocks[-1].attn1.to_q, branches=2)


def _noise(setting: Setting) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda *size: torch.randn(size, generator=generator).to(setting.device, setting.dtype)


def caches(model: FullSizeModel) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts in which a run has each cache; those that are not installed left out."""
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {"uncached": nullcontext}
    ours = {
        "Interval": Interval(EVERY),
        **{
            f"TaylorSeer {site}": TaylorSeer(EVERY, 1, warmup=1, site=site)
            for site in ("stack", "model", "block", "module")
        },
    }
    for name, method in ours.items():
        found[name] = lambda method=method: diffcache.wrapped(model.pipe, method)  # type: ignore[misc]
    for name, (kind, settings) in PEERS.items():
        try:
            peer = make_peer(kind, settings)
        except MissingError:
            continue
        found[name] = lambda peer=peer: peer.applied(model.pipe)  # type: ignore[misc]
    return found


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = 3) -> dict[str, Any]:
    """Measure whole runs, `rounds` with each cache."""
    tiny = setting.device.type == "cpu"
    found = []
    for make in (flux, wan):
        model = make(setting, tiny)
        model.pipe.set_progress_bar_config(disable=True)
        found += rows(model, setting, rounds)
        del model
        if not tiny:
            torch.cuda.empty_cache()
    return {
        "shapes": {"device": setting.device.type, "steps": STEPS, "every": EVERY},
        "rounds": rounds,
        "tiny": tiny,
        "rows": found,
    }


def rows(model: FullSizeModel, setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Return what was measured of one model."""

    def run() -> Any:
        return model.pipe(**model.call, num_inference_steps=STEPS, output_type="latent")

    contexts, computed, held, refused = caches(model), {}, {}, {}
    for name, context in list(contexts.items()):
        calls: list[None] = []
        hook = model.counted.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        before = torch.cuda.memory_allocated() if setting.device.type == "cuda" else 0
        try:
            with context():
                run()
                after = torch.cuda.memory_allocated() if setting.device.type == "cuda" else 0
        except AttachError as error:
            refused[name] = str(error)
            del contexts[name]
        finally:
            hook.remove()
        computed[name], held[name] = len(calls) / model.branches, after - before
    turns: dict[str, Any] = {n: Turn(run, context, run) for n, context in contexts.items()}
    timings = take_turns(turns, rounds, 0, setting)
    ratios = timings.ratios()
    plain = summary(timings.seconds["uncached"])["median"]
    found: list[dict[str, Any]] = []
    for name in contexts:
        ratio, allowed = summary(ratios[name]), computed["uncached"] / computed[name]
        step = (summary(timings.seconds[name])["median"] - plain * computed[name] / STEPS) / max(
            STEPS - computed[name], 1
        )
        found.append(
            {
                "name": f"{model.name}, {name}",
                "seconds": summary(timings.seconds[name]),
                "ratio": ratio,
                "computed": computed[name],
                "held_bytes": held[name],
                "share_of_allowed": ratio["median"] / allowed,
                "skipped_step_ms": 1e3 * step if name != "uncached" else None,
            }
        )
    return found + [{"name": f"{model.name}, {n}", "refused": why} for n, why in refused.items()]
