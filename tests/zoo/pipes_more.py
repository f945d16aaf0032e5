"""Further pipelines, each for something its sampling loop does differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo.pipe import (
    TEXT_DIM,
    Build,
    Call,
    PipeCase,
    assemble,
    common,
    component,
    denoiser,
    flow_euler,
    noise,
    prompt,
    tiny_vae,
)


def _simple(cls: str, case: str, scheduler: Callable[[], Any] = flow_euler, **config: Any) -> Build:
    def build(seed: int) -> Any:
        return assemble(cls, scheduler(), transformer=denoiser(case, seed, **config))

    return build


def _call(
    size: int = 64, *, negative: bool = True, pooled: bool = False, mask: str = "", **more: Any
) -> Call:
    def call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        made = {
            **common(seed, steps, size),
            **prompt(seed, negative=negative, pooled=pooled, mask=mask),
            "guidance_scale": 4.0,
        }
        for name, value in more.items():
            made[name] = value(seed) if callable(value) else value
        return made

    return call


def _image(seed: int) -> Any:
    return noise(2000 + seed, 1, 3, 16, 16).sigmoid()


def _ddpm() -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler(clip_sample=False, prediction_type="v_prediction")


def _chroma_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    made = _call(mask="prompt_attention_mask")(pipe, seed, steps)
    masks = {name: value.bool() for name, value in made.items() if name.endswith("mask")}
    return {**made, **masks}


def _hunyuan_dit_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    import torch

    made = {**common(seed, steps, 64), "guidance_scale": 4.0, "use_resolution_binning": False}
    for shift, prefix in enumerate(("", "negative_")):
        for part, width in (("", 16), ("_2", 16)):
            draw = 1000 + 10 * seed + shift + 5 * len(part)
            made[f"{prefix}prompt_embeds{part}"] = noise(draw, 1, 4, width)
            made[f"{prefix}prompt_attention_mask{part}"] = torch.ones(1, 4)
    return made


def _hidream(seed: int) -> Any:
    model = denoiser("HiDreamImageTransformer2DModel", seed)
    pipe = assemble("HiDreamImagePipeline", flow_euler(), transformer=model)
    pipe.default_sample_size = 8  # else every image is scaled up to the 1024 pixels of the release
    return pipe


def _hidream_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    made = {**common(seed, steps, 64), "guidance_scale": 4.0}
    for shift, prefix in enumerate(("", "negative_")):
        draw = 1000 + 10 * seed + shift
        made[f"{prefix}prompt_embeds_t5"] = noise(draw, 1, 6, 24)
        made[f"{prefix}prompt_embeds_llama3"] = noise(draw + 3, 2, 1, 6, 12)
        made[f"{prefix}pooled_prompt_embeds"] = noise(draw + 6, 1, 8)
    return made


def _skyreels(seed: int) -> Any:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    model = denoiser("SkyReelsV2Transformer3DModel-forcing", seed)
    return assemble("SkyReelsV2DiffusionForcingPipeline", scheduler, transformer=model)


def _kandinsky_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    import torch

    made = {**common(seed, steps, 64), "num_frames": 5, "guidance_scale": 4.0}
    for shift, prefix in enumerate(("", "negative_")):
        draw = 1000 + 10 * seed + shift
        made[f"{prefix}prompt_embeds_qwen"] = noise(draw, 1, 6, TEXT_DIM)
        made[f"{prefix}prompt_embeds_clip"] = noise(draw + 5, 1, 12)
        made[f"{prefix}prompt_cu_seqlens"] = torch.tensor([0, 6], dtype=torch.int32)
    return made


def _animate(seed: int) -> Any:
    from diffusers import DDIMScheduler

    return assemble(
        "AnimateDiffPipeline",
        DDIMScheduler(clip_sample=False, prediction_type="v_prediction"),
        unet=denoiser("UNetMotionModel", seed),
        motion_adapter=None,
    )


def _flux_control(seed: int) -> Any:
    model = denoiser("FluxTransformer2DModel", seed, in_channels=16, out_channels=8)
    return assemble(
        "FluxControlPipeline",
        flow_euler(use_dynamic_shifting=True),
        transformer=model,
        vae=tiny_vae(seed, 2),
    )


def _flux2(seed: int) -> Any:
    model = denoiser("Flux2Transformer2DModel", seed)
    vae = component(
        "AutoencoderKLFlux2",
        seed,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=4,
    )
    scheduler = flow_euler(use_dynamic_shifting=True)
    return assemble("Flux2Pipeline", scheduler, transformer=model, vae=vae)


PIPES = [
    PipeCase(
        "ChromaPipeline",
        _simple("ChromaPipeline", "ChromaTransformer2DModel"),
        _chroma_call,
        branches=2,
    ),
    PipeCase(
        "AuraFlowPipeline",
        _simple("AuraFlowPipeline", "AuraFlowTransformer2DModel"),
        _call(mask="prompt_attention_mask"),
        batched=2,
    ),
    PipeCase(
        "Lumina2Pipeline",
        _simple("Lumina2Pipeline", "Lumina2Transformer2DModel"),
        _call(mask="prompt_attention_mask"),
        branches=2,
        note="the model's timestep grows",
    ),
    PipeCase(
        "Lumina2Pipeline-truncated",
        _simple("Lumina2Pipeline", "Lumina2Transformer2DModel"),
        _call(mask="prompt_attention_mask", cfg_trunc_ratio=0.5),
        branches=2,
        note="guidance stops after half of the steps: two branches, then one",
    ),
    PipeCase(
        "CogView4Pipeline",
        _simple("CogView4Pipeline", "CogView4Transformer2DModel"),
        _call(),
        branches=2,
    ),
    PipeCase(
        "HunyuanDiTPipeline",
        _simple("HunyuanDiTPipeline", "HunyuanDiT2DModel", _ddpm),
        _hunyuan_dit_call,
        batched=2,
        note="a stochastic solver; long skips between the blocks",
    ),
    PipeCase(
        "HiDreamImagePipeline",
        _hidream,
        _hidream_call,
        batched=2,
    ),
    PipeCase(
        "FluxControlPipeline",
        _flux_control,
        _call(16, negative=False, pooled=True, control_image=_image),
        note="control by channels: the image is concatenated to the latents",
    ),
    PipeCase("Flux2Pipeline", _flux2, _call(16, negative=False)),
    PipeCase(
        "SkyReelsV2DiffusionForcingPipeline",
        _skyreels,
        _call(prompt=None, num_frames=9, base_num_frames=9, ar_step=2, causal_block_size=1),
        branches=2,
        note="frames are at different timesteps; one solver for each frame",
    ),
    PipeCase(
        "Kandinsky5T2VPipeline",
        _simple("Kandinsky5T2VPipeline", "Kandinsky5Transformer3DModel"),
        _kandinsky_call,
        branches=2,
    ),
    PipeCase(
        "AnimateDiffPipeline",
        _animate,
        _call(num_frames=2),
        ("unet",),
        batched=2,
        note="frames are folded into the batch inside the model",
    ),
]
