"""Small editing pipelines, calls of them, and RegionE for short runs."""

from typing import Any

import torch
from torch import Tensor

from diffcache.attach.fingerprint import facts_of
from diffcache.features.regione import RegionE
from diffcache.features.tables import Tables
from tests.zoo.pipe import assemble, component, denoiser, flow_euler, noise, tiny_vae

SIZE = 32  # pixels a side; 8 x 8 noisy tokens, as many of the reference
TOKENS = 64
STEPS = 12


def method(pipe: Any, **settings: Any) -> RegionE:
    """Return RegionE for short runs: 0-2, 6 and 11 compute all tokens, 3-5 and 7-10 a part."""
    header = {"method": "regione", "steps": STEPS, **facts_of(pipe.transformer, pipe.scheduler)}
    tables = Tables(header, {"gamma": torch.full((STEPS - 1,), 1.08)})
    return RegionE(tables=tables, **{"threshold": 0.0, "morphology": False, **settings})


def kontext(layers: int = 2) -> Any:
    model = denoiser("FluxTransformer2DModel", 0, num_layers=layers, num_single_layers=2)
    return assemble("FluxKontextPipeline", flow_euler(), transformer=model, vae=tiny_vae(0, 2))


def kontext_call(which: tuple[int, ...] = (0,), guided: bool = False) -> dict[str, Any]:
    """Return the arguments for the samples numbered in `which`."""

    def drawn(seed: int, *shape: int) -> Tensor:
        return torch.cat([noise(100 * number + seed, 1, *shape) for number in which])

    made = {
        "image": drawn(5, 3, SIZE, SIZE).sigmoid(),
        "height": SIZE,
        "width": SIZE,
        "max_area": SIZE * SIZE,
        "_auto_resize": False,
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": [torch.Generator().manual_seed(number) for number in which],
        "prompt_embeds": drawn(1, 6, 24),
        "pooled_prompt_embeds": drawn(2, 12),
    }
    if guided:
        made |= {"negative_prompt_embeds": drawn(3, 6, 24), "true_cfg_scale": 2.0}
        made |= {"negative_pooled_prompt_embeds": drawn(4, 12)}
    return made


def qwen(zero_cond_t: bool = False) -> Any:
    model = denoiser("QwenImageTransformer2DModel", 0, num_layers=2, zero_cond_t=zero_cond_t)
    vae = component(
        "AutoencoderKLQwenImage",
        0,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return assemble("QwenImageEditPipeline", flow_euler(), transformer=model, vae=vae)


def qwen_call() -> dict[str, Any]:
    from PIL import Image

    picture = (noise(9, SIZE, SIZE, 3).sigmoid() * 255).byte().numpy()
    return {
        "image": Image.fromarray(picture),
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(0),
        "prompt_embeds": noise(1, 1, 6, 24),
        "prompt_embeds_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "negative_prompt_embeds": noise(3, 1, 5, 24),
        "negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long),
        "true_cfg_scale": 3.0,
    }


def latents_of(pipe: Any, call: dict[str, Any]) -> list[Tensor]:
    """Return the latents behind every step."""
    seen: list[Tensor] = []

    def note(pipe: Any, index: int, timestep: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(given["latents"].clone())
        return given

    pipe(**call, callback_on_step_end=note)
    return seen
