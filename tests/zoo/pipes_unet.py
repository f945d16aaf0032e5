"""Pipelines whose denoiser is a UNet."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.pipe import (
    Build,
    PipeCase,
    assemble,
    common,
    component,
    denoiser,
    noise,
    prompt,
    settings,
    tiny_vae,
)

_UNET_KEYS = (
    "in_channels",
    "down_block_types",
    "block_out_channels",
    "layers_per_block",
    "norm_num_groups",
    "cross_attention_dim",
    "attention_head_dim",
)


def _scheduler(name: str) -> Any:
    import diffusers

    config: dict[str, Any] = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "prediction_type": "v_prediction",
    }
    if name == "DDIMScheduler":
        config["clip_sample"] = False
    return getattr(diffusers, name)(**config)


def _sd(scheduler: str = "DDIMScheduler", cls: str = "StableDiffusionPipeline") -> Build:
    def build(seed: int) -> Any:
        model = denoiser("UNet2DConditionModel", seed)
        parts: dict[str, Any] = {"unet": model}
        if "ControlNet" in cls:
            config = settings(model, *_UNET_KEYS)
            parts["controlnet"] = component(
                "ControlNetModel",
                seed + 1,
                **config,
                conditioning_embedding_out_channels=(4, 8),
            )
            parts["vae"] = tiny_vae(seed, 4)
        return assemble(
            cls, _scheduler(scheduler), **parts, safety_checker=None, requires_safety_checker=False
        )

    return build


def _sd_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {**common(seed, steps, 128), **prompt(seed, negative=True), "guidance_scale": 4.0}


def _sd_control_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **_sd_call(pipe, seed, steps),
        "height": 32,
        "width": 32,
        "image": noise(2000 + seed, 1, 3, 32, 32).sigmoid(),
        "controlnet_conditioning_scale": 0.7,
    }


def _sdxl(seed: int) -> Any:
    return assemble(
        "StableDiffusionXLPipeline",
        _scheduler("EulerDiscreteScheduler"),
        unet=denoiser("UNet2DConditionModel-sdxl", seed),
        add_watermarker=False,
    )


def _sdxl_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 128),
        **prompt(seed, negative=True, pooled=True),
        "guidance_scale": 4.0,
    }


def _unconditional(seed: int) -> Any:
    return assemble("DDIMPipeline", _scheduler("DDIMScheduler"), unet=denoiser("UNet2DModel", seed))


def _unconditional_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return dict(
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )


def _cascade(seed: int) -> Any:
    from diffusers import DDPMWuerstchenScheduler

    model = denoiser(
        "StableCascadeUNet",
        seed,
        clip_text_in_channels=None,
        clip_image_in_channels=None,
        effnet_in_channels=4,
        clip_text_pooled_in_channels=12,
    )
    return assemble("StableCascadeDecoderPipeline", DDPMWuerstchenScheduler(), decoder=model)


def _cascade_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return dict(
        image_embeddings=noise(2000 + seed, 1, 4, 2, 2),
        prompt_embeds=noise(1000 + seed, 1, 6, 24),
        negative_prompt_embeds=noise(1001 + seed, 1, 6, 24),
        prompt_embeds_pooled=noise(1002 + seed, 1, 1, 12),
        negative_prompt_embeds_pooled=noise(1003 + seed, 1, 1, 12),
        guidance_scale=2.0,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    )


PIPES = [
    PipeCase("StableDiffusionPipeline", _sd(), _sd_call, ("unet",), batched=2),
    PipeCase(
        "StableDiffusionPipeline-pndm",
        _sd("PNDMScheduler"),
        _sd_call,
        ("unet",),
        batched=2,
        note="the solver repeats timesteps while it warms up",
    ),
    PipeCase(
        "StableDiffusionPipeline-heun",
        _sd("HeunDiscreteScheduler"),
        _sd_call,
        ("unet",),
        batched=2,
        note="second-order solver: nearly every timestep comes twice",
    ),
    PipeCase(
        "StableDiffusionControlNetPipeline",
        _sd(cls="StableDiffusionControlNetPipeline"),
        _sd_control_call,
        ("unet",),
        batched=2,
        note="residuals of a control network are added to the skip connections",
    ),
    PipeCase("StableDiffusionXLPipeline", _sdxl, _sdxl_call, ("unet",), batched=2),
    PipeCase("DDIMPipeline", _unconditional, _unconditional_call, ("unet",), note="unconditional"),
    PipeCase(
        "StableCascadeDecoderPipeline",
        _cascade,
        _cascade_call,
        ("decoder",),
        batched=2,
        note="the denoiser is called `decoder`",
    ),
]
