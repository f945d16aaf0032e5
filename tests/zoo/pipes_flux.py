"""Pipelines of FLUX: text to image, image to image, editing, inpainting, control."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.pipe import (
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
    settings,
    tiny_vae,
)

_CASE = "FluxTransformer2DModel"


def _build(cls: str, *, vae: bool = False, control: bool = False) -> Build:
    def build(seed: int) -> Any:
        model = denoiser(_CASE, seed)
        parts: dict[str, Any] = {"transformer": model}
        if vae:
            parts["vae"] = tiny_vae(seed, 2)
        if control:
            config = settings(model, *_CONTROL_KEYS)
            parts["controlnet"] = component(
                "FluxControlNetModel", seed + 1, **config, num_layers=2, num_single_layers=2
            )
        return assemble(cls, flow_euler(use_dynamic_shifting=True), **parts)

    return build


_CONTROL_KEYS = (
    "in_channels",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "pooled_projection_dim",
    "guidance_embeds",
    "axes_dims_rope",
)


def _image(seed: int) -> torch.Tensor:
    return noise(2000 + seed, 1, 3, 16, 16).sigmoid()


def _call(size: int = 64, **more: Any) -> Call:
    def call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        made = {**common(seed, steps, size), **prompt(seed, pooled=True), "guidance_scale": 3.5}
        for name, value in more.items():
            made[name] = value(seed) if callable(value) else value
        return made

    return call


def _true_cfg(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **_call()(pipe, seed, steps),
        **prompt(seed, negative=True, pooled=True),
        "true_cfg_scale": 3.0,
    }


def _mask(seed: int) -> torch.Tensor:
    return (noise(3000 + seed, 1, 1, 16, 16) > 0).float()


def _bria(seed: int) -> Any:
    model = denoiser("BriaTransformer2DModel", seed)
    vae = tiny_vae(seed, 2)
    return assemble("BriaPipeline", flow_euler(), transformer=model, vae=vae)


def _bria_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 16),
        **prompt(seed, negative=True),
        "guidance_scale": 3.0,
    }


_CONTROL = dict(control_image=_image, controlnet_conditioning_scale=0.7)

PIPES = [
    PipeCase("FluxPipeline", _build("FluxPipeline"), _call()),
    PipeCase(
        "FluxPipeline-true-cfg",
        _build("FluxPipeline"),
        _true_cfg,
        branches=2,
        note="classifier-free guidance in two calls",
    ),
    PipeCase(
        "FluxImg2ImgPipeline",
        _build("FluxImg2ImgPipeline", vae=True),
        _call(16, image=_image, strength=0.6),
        note="starts late: fewer steps run than were asked for",
    ),
    PipeCase(
        "FluxInpaintPipeline",
        _build("FluxInpaintPipeline", vae=True),
        _call(16, image=_image, mask_image=_mask, strength=0.8),
    ),
    PipeCase(
        "FluxKontextPipeline",
        _build("FluxKontextPipeline", vae=True),
        _call(16, image=_image, max_area=256, _auto_resize=False),
        note="tokens of the image to edit follow the noisy ones and are cut off the output",
    ),
    PipeCase(
        "FluxControlNetPipeline",
        _build("FluxControlNetPipeline", vae=True, control=True),
        _call(16, **_CONTROL),
        note="residuals of a control network are added between the blocks",
    ),
    PipeCase(
        "FluxControlNetPipeline-half",
        _build("FluxControlNetPipeline", vae=True, control=True),
        _call(
            16, control_image=_image, controlnet_conditioning_scale=0.7, control_guidance_end=0.5
        ),
        note="control stops after half of the steps",
    ),
    PipeCase(
        "BriaPipeline",
        _bria,
        _bria_call,
        batched=2,
        note="looks at the very class of its scheduler",
    ),
]
