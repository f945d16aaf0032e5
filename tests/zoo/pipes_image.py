"""Pipelines that make images with a transformer, except those of FLUX."""

from __future__ import annotations

from typing import Any

import torch

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
    settings,
    tiny_vae,
)

_SD3_KEYS = (
    "sample_size",
    "patch_size",
    "in_channels",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "caption_projection_dim",
    "pooled_projection_dim",
    "out_channels",
    "pos_embed_max_size",
)


def _image(seed: int) -> torch.Tensor:
    return noise(2000 + seed, 1, 3, 16, 16).sigmoid()


def _sd3(
    cls: str = "StableDiffusion3Pipeline", scheduler: str = "", control: bool = False, **more: Any
) -> Build:
    def build(seed: int) -> Any:
        import diffusers

        model = denoiser("SD3Transformer2DModel", seed)
        parts: dict[str, Any] = {"transformer": model, **more}
        if control:
            config = settings(model, *_SD3_KEYS)
            parts["controlnet"] = component("SD3ControlNetModel", seed + 1, **config, num_layers=2)
            parts["vae"] = tiny_vae(seed, 4)
        name = scheduler or "FlowMatchEulerDiscreteScheduler"
        return assemble(cls, getattr(diffusers, name)(shift=3.0), **parts)

    return build


def _sd3_call(size: int = 64, **more: Any) -> Call:
    def call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        made = {
            **common(seed, steps, size),
            **prompt(seed, negative=True, pooled=True),
            "guidance_scale": 4.0,
        }
        for name, value in more.items():
            made[name] = value(seed) if callable(value) else value
        return made

    return call


def _sd3_control_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)  # the pipeline encodes the control image with the global generator
    more = {"control_image": _image, "controlnet_conditioning_scale": 0.7}
    return _sd3_call(16, **more)(pipe, seed, steps)


def _pixart(cls: str, **more: Any) -> Build:
    def build(seed: int) -> Any:
        from diffusers import DPMSolverMultistepScheduler

        model = denoiser("PixArtTransformer2DModel", seed)
        return assemble(
            cls, DPMSolverMultistepScheduler(prediction_type="v_prediction"), transformer=model
        )

    return build


def _pixart_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 64),
        **prompt(seed, negative=True, mask="prompt_attention_mask"),
        "negative_prompt": None,
        "guidance_scale": 4.0,
        "use_resolution_binning": False,
    }


def _pixart_pag_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {**_pixart_call(pipe, seed, steps), "pag_scale": 2.0}


def _dit(seed: int) -> Any:
    from diffusers import DDIMScheduler

    return assemble(
        "DiTPipeline",
        DDIMScheduler(clip_sample=False, prediction_type="v_prediction"),
        transformer=denoiser("DiTTransformer2DModel", seed, num_embeds_ada_norm=1000),
        vae=tiny_vae(seed, 4),
    )


def _dit_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return dict(
        class_labels=[seed % 10],
        guidance_scale=4.0,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )


def _qwen(cls: str, control: bool = False) -> Build:
    def build(seed: int) -> Any:
        model = denoiser("QwenImageTransformer2DModel", seed)
        parts: dict[str, Any] = {"transformer": model}
        if control:
            config = settings(model, *_QWEN_KEYS)
            parts["controlnet"] = component(
                "QwenImageControlNetModel", seed + 1, **config, num_layers=2
            )
            parts["vae"] = component(
                "AutoencoderKLQwenImage",
                seed,
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 1],
                num_res_blocks=1,
                temperal_downsample=[False],
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
            )
        return assemble(cls, flow_euler(use_dynamic_shifting=True), **parts)

    return build


_QWEN_KEYS = (
    "patch_size",
    "in_channels",
    "out_channels",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "axes_dims_rope",
)


def _qwen_call(size: int = 64, **more: Any) -> Call:
    def call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        made = {
            **common(seed, steps, size),
            **prompt(seed, negative=True, mask="prompt_embeds_mask"),
            "true_cfg_scale": 3.0,
        }
        for name, value in more.items():
            made[name] = value(seed) if callable(value) else value
        return made

    return call


def _sana(seed: int) -> Any:
    model = denoiser("SanaTransformer2DModel", seed)
    return assemble("SanaPipeline", flow_euler(shift=3.0), transformer=model)


def _sana_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 128),
        **prompt(seed, negative=True, mask="prompt_attention_mask"),
        "negative_prompt": None,
        "guidance_scale": 4.0,
        "use_resolution_binning": False,
    }


def _z_image(seed: int) -> Any:
    model = denoiser("ZImageTransformer2DModel", seed)
    return assemble("ZImagePipeline", flow_euler(shift=3.0), transformer=model)


def _z_image_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 64),
        "prompt_embeds": [noise(1000 + seed, 6, TEXT_DIM)],
        "negative_prompt_embeds": [noise(1100 + seed, 4, TEXT_DIM)],
        "guidance_scale": 3.0,
    }


PIPES = [
    PipeCase("StableDiffusion3Pipeline", _sd3(), _sd3_call(), batched=2),
    PipeCase(
        "StableDiffusion3Pipeline-slg",
        _sd3(),
        _sd3_call(
            skip_guidance_layers=[1], skip_layer_guidance_start=0.1, skip_layer_guidance_stop=0.7
        ),
        batched=2,
        note="skip-layer guidance: in the middle steps one more call, which leaves block 1 out",
    ),
    PipeCase(
        "StableDiffusion3Pipeline-heun",
        _sd3(scheduler="FlowMatchHeunDiscreteScheduler"),
        _sd3_call(),
        batched=2,
        note="second-order solver: nearly every timestep comes twice",
    ),
    PipeCase(
        "StableDiffusion3ControlNetPipeline",
        _sd3("StableDiffusion3ControlNetPipeline", control=True),
        _sd3_control_call,
        batched=2,
        note="`call` seeds the global generator, which the pipeline draws from",
    ),
    PipeCase(
        "StableDiffusion3PAGPipeline",
        _sd3("StableDiffusion3PAGPipeline", pag_applied_layers=["transformer_blocks.1"]),
        _sd3_call(pag_scale=2.0),
        batched=3,
        note="three branches in one batch: unconditional, conditional, perturbed attention",
    ),
    PipeCase("PixArtAlphaPipeline", _pixart("PixArtAlphaPipeline"), _pixart_call, batched=2),
    PipeCase(
        "PixArtSigmaPAGPipeline",
        _pixart("PixArtSigmaPAGPipeline", pag_applied_layers=["transformer_blocks.1"]),
        _pixart_pag_call,
        batched=3,
        note="three branches in one batch",
    ),
    PipeCase("DiTPipeline", _dit, _dit_call, batched=2, note="always decodes"),
    PipeCase("QwenImagePipeline", _qwen("QwenImagePipeline"), _qwen_call(), branches=2),
    PipeCase(
        "QwenImageControlNetPipeline",
        _qwen("QwenImageControlNetPipeline", control=True),
        _qwen_call(16, control_image=_image, controlnet_conditioning_scale=0.7),
        branches=2,
    ),
    PipeCase("SanaPipeline", _sana, _sana_call, batched=2),
    PipeCase(
        "ZImagePipeline",
        _z_image,
        _z_image_call,
        batched=2,
        note="prompts of different lengths, as lists",
    ),
]
