"""A small pipeline, a call of it, and the FLOPs of its denoiser in closed form.

Tests cannot import one another, so each function is handed out by a fixture of its name.
"""

import pytest
import torch

from diffcache.pipelines.small import flux


@pytest.fixture(scope="module")
def pipe():
    return flux.load()


def call(steps=2, batch=1):
    prompts = ["a small red ring on the left, on a yellow background"] * batch
    return dict(
        flux.CALL, prompt=prompts, num_inference_steps=steps, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def flux_form(config, image, text, batch=1):
    """FLOPs of FluxTransformer2DModel from its layers: 2 for each multiply-add of each matrix."""
    D = config["num_attention_heads"] * config["attention_head_dim"]
    S, C = image + text, config["in_channels"]
    times = 2 if config["guidance_embeds"] else 1
    vectors = times * (256 * D + D * D) + config["pooled_projection_dim"] * D + D * D + 2 * D * D
    embed = image * C * D + text * config["joint_attention_dim"] * D + image * D * C
    attention = 2 * S * S * D
    double = 2 * 6 * D * D + S * (4 + 8) * D * D + attention
    single = 3 * D * D + S * (3 + 4 + 5) * D * D + attention
    blocks = config["num_layers"] * double + config["num_single_layers"] * single
    number = config["num_layers"] + config["num_single_layers"]
    return [2 * batch * n for n in (vectors + embed + blocks, blocks, number * attention)]


@pytest.fixture(name="call")
def give_call():
    return call


@pytest.fixture(name="flux_form")
def give_flux_form():
    return flux_form
