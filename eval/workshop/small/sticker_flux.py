"""The FluxPipeline that draws stickers: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `FluxPipeline.from_pretrained` loads.
It is no distilled model: guidance takes a second call a step, and a call has to pass `CALL`:

    pipe = load()
    picture = pipe("a fox left of an owl on grass", **CALL).images[0]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.job import Job, Settings, spread
from diffcache.eval.workshop.small.shipping import loader
from diffcache.eval.workshop.small.sticker_autoencoder import CHANNELS, load_autoencoder, to_unit
from diffcache.eval.workshop.small.sticker_text import TEXT_TOKENS, TEXT_WIDTH, Encoder, load_text
from diffcache.eval.workshop.small.stickers import Scene, caption, draw_scenes, render, say
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-flux"
GUIDANCE = 3.0
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "max_sequence_length": TEXT_TOKENS,
    "negative_prompt": "",
    "true_cfg_scale": GUIDANCE,
}
PROMPT_DROPOUT = 0.1
HELD = 256
_SIDE = 8  # packed tokens across a picture
_WIDTH = 160
load = loader(FluxPipeline, DIRECTORY, side=CALL["height"])


def build_transformer() -> FluxTransformer2DModel:
    """Build the denoiser: 2 double and 7 single blocks of width 160, adaLN-zero start."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=7,
        attention_head_dim=32,
        num_attention_heads=_WIDTH // 32,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            modulation = name == "proj_out" or name.endswith(("norm.linear", "norm_out.linear"))
            if modulation or ".norm1" in name:
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model


@torch.no_grad()
def encode(autoencoder: AutoencoderKL, pictures: Iterable[NDArray[np.uint8]]) -> Tensor:
    """Encode pictures uint8 [64, 64, 3] into scaled latents, float16 [B, 12, 16, 16], on the CPU.

    The first 2,000 set the shift and scaling factors if the autoencoder has none.
    """
    here, parts, waiting = torch.get_default_device(), [], iter(pictures)
    while part := list(islice(waiting, 200)):
        shown = to_unit(torch.from_numpy(np.stack(part)).to(here))
        parts.append(autoencoder.encode(shown).latent_dist.mean.cpu())
    means = torch.cat(parts)
    if autoencoder.config.shift_factor is None:
        autoencoder.register_to_config(
            shift_factor=round(float(means[:2000].mean()), 5), scaling_factor=round(1 / float(means[:2000].std()), 5)
        )
    config = autoencoder.config
    scaled: Tensor = (means - config.shift_factor) * config.scaling_factor
    return scaled.half().contiguous()


@torch.no_grad()
def decode(autoencoder: AutoencoderKL, latents: Tensor) -> Tensor:
    """Decode scaled latents [B, 12, 16, 16] into pictures, uint8 [B, 64, 64, 3], on the CPU."""
    config = autoencoder.config
    latents = latents / config.scaling_factor + (config.shift_factor or 0.0)
    made: Tensor = autoencoder.decode(latents).sample
    return ((made.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).byte().cpu()


def pack(latents: Tensor) -> Tensor:
    """Pack latents [B, 12, 16, 16] two by two into tokens [B, 64, 48], as the pipeline does."""
    packed: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


def keep_latents(folder: Path, autoencoder: AutoencoderKL, scenes: dict[str, list[Scene]]) -> dict[str, Tensor]:
    """Draw and encode scenes once, and keep their latents, float16 [B, 12, 16, 16], by name.

    Args:
        folder: Folder of the run.
        autoencoder: Autoencoder, which gets its shift and scaling factors if it has none.
        scenes: Scenes by name; the first sets the factors.
    """
    said = hashlib.sha1(repr([(k, len(v), v[:1], v[-1:]) for k, v in scenes.items()]).encode())
    path = folder / f"latents-{said.hexdigest()[:12]}.safetensors"
    if not path.exists():
        made = {name: encode(autoencoder, spread(render, part)) for name, part in scenes.items()}
        config = autoencoder.config
        made["factors"] = torch.tensor([config.shift_factor, config.scaling_factor], dtype=torch.float64, device="cpu")
        save_file(made, path)
    kept: dict[str, Tensor] = load_file(path)
    shift, scale = (round(float(value), 5) for value in kept.pop("factors"))
    autoencoder.register_to_config(shift_factor=shift, scaling_factor=scale)
    return kept


def retell(scene: Scene, rng: np.random.Generator) -> str:
    """Write a scene as a sentence with another choice of what is said; at times as none."""
    if rng.random() < PROMPT_DROPOUT:
        return ""
    stickers = scene.stickers if rng.random() < 0.5 else scene.stickers[::-1]
    return caption(Scene(stickers, scene.ground, scene.seed, *say(stickers, scene.ground, rng)))


class Flux(Job):
    """Train denoiser and text encoders by flow matching at logit-normal times.

    The model sees what `FluxPipeline` will show it: packed latents, the same position ids, text
    padded to the same length without a mask, sigma as the timestep, `noise - latents` as target.
    Autoencoder and text encoders are those of `sticker-autoencoder.state` and `sticker-text.state`
    in the folder, or the shipped ones.
    """

    on_gpu = True
    call = CALL
    kind: type[FluxPipeline] | type[FluxKontextPipeline] = FluxPipeline  # class of the pipeline

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.encoder = Encoder()
        self.autoencoder = load_autoencoder(folder / "sticker-autoencoder.state")
        self.image_ids = FluxPipeline._prepare_latent_image_ids(
            1, _SIDE, _SIDE, torch.get_default_device(), torch.float32
        )
        self.text_ids = torch.zeros(TEXT_TOKENS, 3)
        self.gather()

    def gather(self) -> None:
        """Draw scenes, and keep their latents."""
        self.scenes = draw_scenes(self.settings.examples, self.settings.seed + 1)
        held = draw_scenes(HELD, self.settings.seed + 2, held=True)
        kept = keep_latents(self.folder, self.autoencoder, {"latents": self.scenes, "held": held})
        self.latents = kept["latents"]
        self.held = {"latents": kept["held"], **self.ids([caption(scene) for scene in held])}

    def ids(self, texts: list[str]) -> dict[str, Tensor]:
        """Return token numbers of sentences for both encoders, int64 [B, T] each."""
        return dict(zip(("clip", "t5"), self.encoder.ids(texts), strict=True))

    def build(self) -> nn.ModuleDict:
        """Build the denoiser, and the text encoders as their own training left them."""
        models = nn.ModuleDict(load_text(self.folder / "sticker-text.state"))
        models["transformer"] = build_transformer()
        return models

    def velocity(self, models: nn.ModuleDict, tokens: Tensor, sigmas: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Return what the denoiser answers to tokens [B, 64, 48] at sigmas [B].

        Args:
            models: Denoiser and text encoders.
            tokens: Packed latents.
            sigmas: Noise levels in 0..1.
            drawn: Token numbers of the sentences, as `ids` gives them, and latents of pictures to edit,
                `references`, if there are any: they follow the tokens.
        """
        shown = torch.cat([tokens, pack(drawn["references"].float())], 1) if "references" in drawn else tokens
        states, pooled = self.encoder.encode(models, (drawn["clip"], drawn["t5"]))
        answer: Tensor = self.compile(models["transformer"])(
            hidden_states=shown,
            timestep=sigmas,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            return_dict=False,
        )[0]
        return answer[:, : tokens.shape[1]].float()

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents, and token numbers of sentences that tell them anew."""
        rng = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
        return {"latents": self.latents[chosen], **self.ids([retell(self.scenes[i], rng) for i in chosen])}

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of the velocity."""
        tokens = pack(drawn["latents"].float())
        sigmas = torch.sigmoid(torch.randn(len(tokens), generator=generator))
        noise = torch.randn(tokens.shape, generator=generator)
        noisy = torch.lerp(tokens, noise, sigmas[:, None, None])
        return functional.mse_loss(self.velocity(models, noisy, sigmas, drawn), noise - tokens)

    def pipeline(self, models: nn.ModuleDict) -> FluxPipeline | FluxKontextPipeline:
        """Put the pipeline together."""
        return self.kind(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
            vae=self.autoencoder,
            tokenizer=self.encoder.clip,
            tokenizer_2=self.encoder.t5,
            **dict(models.items()),
        )
