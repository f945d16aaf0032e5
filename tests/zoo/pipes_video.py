"""Pipelines that make videos."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import randomize
from tests.zoo.pipe import (
    Call,
    PipeCase,
    assemble,
    common,
    component,
    denoiser,
    flow_euler,
    noise,
    prompt,
)

_WAN = "WanTransformer3DModel"


def unipc(shift: float = 3.0) -> Any:
    """Make Wan's scheduler with a shift of its noise levels."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def _wan(seed: int) -> Any:
    return assemble("WanPipeline", unipc(), transformer=denoiser(_WAN, seed))


def _wan_two(seed: int) -> Any:
    return assemble(
        "WanPipeline",
        unipc(1.0),
        transformer=denoiser(_WAN, seed),
        transformer_2=denoiser(_WAN, seed + 1),
        boundary_ratio=0.5,
    )


def _wan_tokens(seed: int) -> Any:
    return assemble("WanPipeline", unipc(), transformer=denoiser(_WAN, seed), expand_timesteps=True)


def wan_vae(seed: int) -> Any:
    """Build Wan's video autoencoder."""
    return component(
        "AutoencoderKLWan",
        seed,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )


def image_encoder(seed: int) -> tuple[Any, Any]:
    """Build a CLIP image encoder and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = dict(hidden_size=16, intermediate_size=32, image_size=16, patch_size=8)
    layers = dict(num_hidden_layers=2, num_attention_heads=2)
    encoder = randomize(CLIPVisionModel(CLIPVisionConfig(**sizes, **layers)), seed).eval()
    size = {"height": 16, "width": 16}
    return encoder, CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)


def _wan_image(seed: int) -> Any:
    encoder, processor = image_encoder(seed)
    return assemble(
        "WanImageToVideoPipeline",
        unipc(),
        transformer=denoiser("WanTransformer3DModel-i2v", seed),
        vae=wan_vae(seed),
        image_encoder=encoder,
        image_processor=processor,
    )


def _wan_image_22(seed: int) -> Any:
    return assemble(
        "WanImageToVideoPipeline",
        unipc(1.0),
        transformer=denoiser(_WAN, seed, in_channels=12),
        transformer_2=denoiser(_WAN, seed + 1, in_channels=12),
        vae=wan_vae(seed),
        boundary_ratio=0.5,
    )


def _call(
    size: int = 64, frames: int = 5, *, mask: str = "", pooled: bool = False, **more: Any
) -> Call:
    def call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        return {
            **common(seed, steps, size),
            **prompt(seed, negative=True, mask=mask, pooled=pooled),
            "num_frames": frames,
            "guidance_scale": 4.0,
            **more,
        }

    return call


def picture(seed: int) -> Any:
    """Draw a 32 x 32 image."""
    from PIL import Image

    pixels = noise(2000 + seed, 32, 32, 3).sigmoid().mul(255).byte()
    return Image.fromarray(pixels.numpy())


def _wan_image_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {**_call(32)(pipe, seed, steps), "image": picture(seed)}


def _hunyuan(seed: int) -> Any:
    model = denoiser("HunyuanVideoTransformer3DModel", seed)
    return assemble("HunyuanVideoPipeline", flow_euler(shift=7.0), transformer=model)


def _hunyuan_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 64),
        **prompt(seed, pooled=True, mask="prompt_attention_mask"),
        "num_frames": 5,
        "guidance_scale": 6.0,
    }


def _ltx(seed: int) -> Any:
    model = denoiser("LTXVideoTransformer3DModel", seed)
    return assemble("LTXPipeline", flow_euler(use_dynamic_shifting=True), transformer=model)


def _cogvideox(seed: int) -> Any:
    from diffusers import CogVideoXDDIMScheduler

    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True
    )
    model = denoiser("CogVideoXTransformer3DModel", seed)
    return assemble("CogVideoXPipeline", scheduler, transformer=model)


def _mochi(seed: int) -> Any:
    model = denoiser("MochiTransformer3DModel", seed)
    return assemble("MochiPipeline", flow_euler(invert_sigmas=True), transformer=model)


def _ltx2(seed: int) -> Any:
    vae = component(
        "AutoencoderKLLTX2Video",
        seed,
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=4,
        patch_size_t=1,
    )
    audio_vae = component(
        "AutoencoderKLLTX2Audio",
        seed,
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mid_block_add_attention=False,
        mel_bins=8,
    )
    connectors = {
        f"{part}_connector_{key}": value
        for part in ("video", "audio")
        for key, value in dict(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_learnable_registers=None,
        ).items()
    }
    return assemble(
        "LTX2Pipeline",
        flow_euler(),
        transformer=denoiser("LTX2VideoTransformer3DModel-perturbed", seed),
        vae=vae,
        audio_vae=audio_vae,
        connectors=component(
            "LTX2TextConnectors",
            seed,
            module="diffusers.pipelines.ltx2",
            caption_channels=24,
            text_proj_in_factor=1,
            connector_rope_base_seq_len=16,
            rope_double_precision=False,
            **connectors,
        ),
    )


PIPES = [
    PipeCase("WanPipeline", _wan, _call(), branches=2),
    PipeCase(
        "WanPipeline-two",
        _wan_two,
        _call(guidance_scale_2=3.0),
        denoisers=("transformer", "transformer_2"),
        branches=2,
        note="Wan 2.2: a second denoiser takes over below half of the timesteps",
    ),
    PipeCase(
        "WanPipeline-tokens",
        _wan_tokens,
        _call(),
        branches=2,
        note="Wan 2.2 5B: the timestep is a tensor with one value for each token",
    ),
    PipeCase(
        "WanImageToVideoPipeline",
        _wan_image,
        _wan_image_call,
        branches=2,
        note="Wan 2.1: image tokens from a CLIP encoder, and the image as latent channels",
    ),
    PipeCase(
        "WanImageToVideoPipeline-two",
        _wan_image_22,
        _wan_image_call,
        denoisers=("transformer", "transformer_2"),
        branches=2,
        note="Wan 2.2: two denoisers, the image as latent channels only",
    ),
    PipeCase("HunyuanVideoPipeline", _hunyuan, _hunyuan_call, note="guidance is an input"),
    PipeCase("LTXPipeline", _ltx, _call(128, 9, mask="prompt_attention_mask"), batched=2),
    PipeCase("CogVideoXPipeline", _cogvideox, _call(), batched=2),
    PipeCase("MochiPipeline", _mochi, _call(64, 7, mask="prompt_attention_mask"), batched=2),
    PipeCase(
        "LTX2Pipeline",
        _ltx2,
        _call(32, 3, mask="prompt_attention_mask", stg_scale=0.0, modality_scale=1.0),
        batched=2,
        note="video and sound; guidance is worked out on the clean estimates",
    ),
    PipeCase(
        "LTX2Pipeline-guided",
        _ltx2,
        _call(
            32,
            3,
            mask="prompt_attention_mask",
            stg_scale=1.0,
            spatio_temporal_guidance_blocks=[1],
            modality_scale=2.0,
        ),
        branches=3,
        batched=2,
        note="three calls a step: both prompts in one batch, perturbed, modalities apart",
    ),
]
