"""One tiny random pipeline of the zoo: how to build it and how to call it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.zoo.case import randomize
from tests.zoo.catalog import cases

TEXT_TOKENS, TEXT_DIM, POOLED_DIM = 6, 24, 12

Build = Callable[[int], Any]
Call = Callable[[Any, int, int], dict[str, Any]]


@dataclass(frozen=True)
class PipeCase:
    """A diffusers pipeline at a tiny size, without tokenizers and text encoders.

    Attributes:
        name: Unique id: the class name, with a suffix where one class has several cases.
        build: Makes the pipeline from a seed of the weights.
        call: Makes the arguments of the call from (pipeline, seed, steps).
        denoisers: Names of the components that run in the sampling loop, in their order.
        branches: Calls of the denoiser in most steps.
    """

    name: str
    build: Build
    call: Call
    denoisers: tuple[str, ...] = ("transformer",)
    branches: int = 1

    def run(self, pipe: Any, seed: int = 0, steps: int = 6) -> torch.Tensor:
        """Call a pipeline and return its result as one tensor."""
        return result(pipe(**self.call(pipe, seed, steps)))

    def prompt(self, pipe: Any, seed: int, steps: int) -> dict[str, Any]:
        """Make the arguments of a call as a calibration takes them: it draws the noise."""
        return {name: value for name, value in self.call(pipe, seed, steps).items() if name != "generator"}


def result(output: Any) -> torch.Tensor:
    """Return the images or frames of a pipeline's output as one tensor."""
    first = output[0]
    if isinstance(first, (list, tuple)):
        first = torch.stack([torch.as_tensor(part) for part in first])
    return torch.as_tensor(first)


def denoiser(name: str, seed: int, **config: Any) -> nn.Module:
    """Build the denoiser of a zoo case, with some of its configuration replaced."""
    case = cases()[name]
    return replace(case, config={**case.config, **config}).build(seed)


def settings(model: Any, *names: str) -> dict[str, Any]:
    """Read some settings from a model's configuration."""
    return {name: model.config[name] for name in names}


def component(cls: str, seed: int, *, module: str = "diffusers", **config: Any) -> nn.Module:
    """Build another model of diffusers with random weights, such as an autoencoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(import_module(module), cls)(**config)
    return randomize(model, seed).eval()


def assemble(cls: str, scheduler: Any, **components: Any) -> Any:
    """Put a pipeline together; components that are not given are None."""
    import inspect

    import diffusers

    found = getattr(diffusers, cls)
    absent = {
        name: None
        for name, argument in inspect.signature(found.__init__).parameters.items()
        if name != "self" and argument.default is argument.empty
    }
    pipe = found(**{**absent, "scheduler": scheduler, **components})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flow_euler(**config: Any) -> Any:
    """Make a flow-matching Euler scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def tiny_vae(seed: int, channels: int) -> nn.Module:
    """Build an image autoencoder that halves the resolution."""
    return component(
        "AutoencoderKL",
        seed,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Draw a standard normal tensor from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int, side: int = 16) -> torch.Tensor:
    """Draw an image with values in 0..1, [1, 3, side, side]."""
    return noise(2000 + seed, 1, 3, side, side).sigmoid()


def picture(seed: int) -> Any:
    """Draw a 32 x 32 image of PIL."""
    from PIL import Image

    pixels = noise(2000 + seed, 32, 32, 3).sigmoid().mul(255).byte()
    return Image.fromarray(pixels.numpy())


def image_encoder(seed: int) -> nn.Module:
    """Build a CLIP image encoder."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = dict(hidden_size=16, intermediate_size=32, image_size=16, patch_size=8)
    layers = dict(num_hidden_layers=2, num_attention_heads=2)
    return randomize(CLIPVisionModel(CLIPVisionConfig(**sizes, **layers)), seed).eval()


def image_processor() -> Any:
    """Make the processor of the image encoder's pictures."""
    from transformers import CLIPImageProcessor

    size = {"height": 16, "width": 16}
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)


class Words:
    """Tokenizer of a chat model that makes every character a token."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, token: str) -> int:
        """Return the id of the only special token that is asked for."""
        return 2

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        """Return the ids of the texts."""
        text = "".join(str(message["content"]) for message in messages)
        ids = [3 + ord(letter) % 29 for letter in text][-6:]
        return SimpleNamespace(input_ids=ids)


def scaled(scheduler: Any, **config: Any) -> Any:
    """Make a scheduler with the noise levels of Stable Diffusion."""
    return scheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction", **config
    )


def prompt(seed: int, *, negative: bool = False, pooled: bool = False, mask: str = "") -> dict[str, Any]:
    """Make prompt embeddings in place of a prompt."""
    made: dict[str, Any] = {}
    for offset, prefix in enumerate(("", "negative_")[: 1 + negative]):
        draw = 1000 + 10 * seed + offset
        made[f"{prefix}prompt_embeds"] = noise(draw, 1, TEXT_TOKENS, TEXT_DIM)
        if pooled:
            made[f"{prefix}pooled_prompt_embeds"] = noise(draw + 5, 1, POOLED_DIM)
        if mask:
            made[f"{prefix}{mask}"] = torch.ones(1, TEXT_TOKENS, dtype=torch.long)
    return made
