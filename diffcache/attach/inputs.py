"""Make the inputs of diffusers' denoisers for an image or video of a given size, shapes only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_CLIP_TOKENS = 257  # a picture in CLIP ViT-H: 16 x 16 patches and the class token


@dataclass(frozen=True)
class Size:
    """Size of one denoiser call.

    Attributes:
        height: Pixels.
        width: Pixels.
        frames: Frames of a film, 1 for a picture.
        text_tokens: Length of the prompt as the denoiser sees it, padding included.
        batch: Samples in the call; guidance in one batch doubles it.
        references: Pictures of the same size whose tokens stand behind those of the latents, as
            in FLUX Kontext.
        skip_layers: Blocks that skip-layer guidance leaves out, in a call beside the one with
            guidance in one batch.
    """

    height: int
    width: int
    frames: int = 1
    text_tokens: int = 512
    batch: int = 1
    references: int = 0
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames", "text_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Latents:
    """The latents of one call: their sizes, and the tensors that go with them."""

    config: Mapping[str, Any]  # configuration of the denoiser
    frames: int  # frames of the latents
    rows: int  # rows of the latents
    columns: int  # columns of the latents
    text: int  # tokens of the prompt
    batch: int  # samples
    device: torch.device  # device of the tensors; `meta` has shapes only
    references: int = 0  # pictures whose tokens stand behind those of the latents

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros, one for each sample first."""
        return torch.zeros(self.batch, *shape, dtype=dtype, device=self.device)

    @property
    def picture(self) -> Tensor:
        """Latents of a picture, [B, C, rows, columns]."""
        return self.zeros(self.config["in_channels"], self.rows, self.columns)

    @property
    def film(self) -> Tensor:
        """Latents of a film, [B, C, frames, rows, columns]."""
        return self.zeros(self.config["in_channels"], self.frames, self.rows, self.columns)

    @property
    def packed(self) -> Tensor:
        """Latents as tokens of two by two, and those of references, [B, T, C]."""
        tokens = self.rows // 2 * (self.columns // 2)
        return self.zeros((1 + self.references) * tokens, self.config["in_channels"])

    @property
    def pooled(self) -> Tensor:
        """Features of the whole prompt, [B, pooled_projection_dim]."""
        return self.zeros(self.config["pooled_projection_dim"])

    def prompt(self, width: str) -> Tensor:
        """Return text features, [B, text, width]; `width` is their name in the configuration."""
        return self.zeros(self.text, self.config[width])


Make = Callable[[Latents], dict[str, Any]]


@dataclass(frozen=True)
class CallInputs:
    """Arguments of the forward of a denoiser class."""

    make: Make  # forward arguments from latents
    spatial: int = 8  # pixels of a latent row in the class's usual autoencoder
    temporal: int = 1  # frames of a latent frame
    patch: int | str = 2  # latent rows of a token, a number or its name in the configuration
    more_text: int = 0  # tokens of the prompt that the pipeline puts before those of its `max_sequence_length`
    rounds_up: bool = False  # whether its pipeline makes a latent frame of frames left over, else leaves them out
    # how its pipeline guides by default: the samples with and without a prompt in one `batch`, in two `calls` a step,
    # or `none` (a distilled model is told the strength)
    guidance: Literal["batch", "calls", "none"] = "batch"


def _arguments(at: Latents, sample: Tensor, width: str = "", /, *, whole: bool = False, **more: Any) -> dict[str, Any]:
    """Return the arguments that most forwards have: sample, times, guidance where it is told, and a prompt.

    `width` names the width of text features in the configuration, empty for no prompt; times may be whole numbers.
    """
    made = {"hidden_states": sample, "timestep": at.zeros(dtype=torch.long if whole else torch.float32), **more}
    if width:
        made["encoder_hidden_states"] = at.prompt(width)
    if at.config.get("guidance_embeds"):
        made["guidance"] = at.zeros()
    return made


def _flux2(at: Latents, axes: int = 4) -> dict[str, Any]:
    ids = {"img_ids": at.packed.shape[1], "txt_ids": at.text}
    places: dict[str, Any] = {name: torch.zeros(count, axes, device=at.device) for name, count in ids.items()}
    return _arguments(at, at.packed, "joint_attention_dim", **places)


def _flux(at: Latents) -> dict[str, Any]:
    return {**_flux2(at, axes=3), "pooled_projections": at.pooled}


def _sd3(at: Latents) -> dict[str, Any]:
    return _arguments(at, at.picture, "joint_attention_dim", pooled_projections=at.pooled)


def _auraflow(at: Latents) -> dict[str, Any]:
    return _arguments(at, at.picture, "joint_attention_dim")


def _dit(at: Latents) -> dict[str, Any]:
    return _arguments(at, at.picture, whole=True, class_labels=at.zeros(dtype=torch.long))


def _pixart(at: Latents) -> dict[str, Any]:
    width = "caption_channels" if at.config["caption_channels"] else "cross_attention_dim"
    sizes = {"resolution": at.zeros(2), "aspect_ratio": at.zeros(1)}
    mask = at.zeros(at.text)
    return _arguments(at, at.picture, width, whole=True, encoder_attention_mask=mask, added_cond_kwargs=sizes)


def _sana(at: Latents) -> dict[str, Any]:
    return _arguments(at, at.picture, "caption_channels", encoder_attention_mask=at.zeros(at.text))


class _FullMask(Tensor):
    """Mask of prompts without padding, whose lengths can be read on the `meta` device too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Return the lengths for a sum over the tokens, which Lumina 2 reads; else as ever."""
        if func is Tensor.sum:
            return torch.full((args[0].shape[0],), args[0].shape[1])
        return super().__torch_function__(func, types, args, kwargs or {})


def _lumina2(at: Latents) -> dict[str, Any]:
    mask = torch.ones(at.batch, at.text, dtype=torch.bool, device=at.device).as_subclass(_FullMask)
    return _arguments(at, at.picture, "cap_feat_dim", encoder_attention_mask=mask)


def _qwen(at: Latents) -> dict[str, Any]:
    mask, shapes = at.zeros(at.text, dtype=torch.bool), [[(1, at.rows // 2, at.columns // 2)]] * at.batch
    return _arguments(at, at.packed, "joint_attention_dim", encoder_hidden_states_mask=mask, img_shapes=shapes)


def _wan(at: Latents) -> dict[str, Any]:
    width = at.config["image_dim"]
    more = {} if width is None else {"encoder_hidden_states_image": at.zeros(_CLIP_TOKENS, width)}
    return _arguments(at, at.film, "text_dim", whole=True, **more)


def _hunyuan_video(at: Latents) -> dict[str, Any]:
    more = {"encoder_attention_mask": at.zeros(at.text), "pooled_projections": at.pooled}
    return _arguments(at, at.film, "text_embed_dim", whole=True, **more)


def _cogvideox(at: Latents) -> dict[str, Any]:
    most = at.config["max_text_seq_length"]
    if not at.config["use_rotary_positional_embeddings"] and at.text != most:
        raise ValueError(f"text_tokens={at.text}: this model's prompts have {most} tokens")
    step = at.config["patch_size_t"] or 1
    frames = -(-at.frames // step) * step  # the pipeline adds frames up to a whole patch
    film = at.zeros(frames, at.config["in_channels"], at.rows, at.columns)
    more = {} if at.config["ofs_embed_dim"] is None else {"ofs": torch.zeros(1, device=at.device)}
    return _arguments(at, film, "text_embed_dim", whole=True, **more)


def _ltx(at: Latents) -> dict[str, Any]:
    film = at.zeros(at.frames * at.rows * at.columns, at.config["in_channels"])
    sizes: dict[str, Any] = {"num_frames": at.frames, "height": at.rows, "width": at.columns}
    return _arguments(at, film, "caption_channels", encoder_attention_mask=at.zeros(at.text), **sizes)


def _unet(at: Latents) -> dict[str, Any]:
    width = at.config["cross_attention_dim"]
    text = at.zeros(at.text, width if isinstance(width, int) else width[0])
    made: dict[str, Any] = {
        "sample": at.picture,
        "timestep": at.zeros(dtype=torch.long),
        "encoder_hidden_states": text,
    }
    if at.config["addition_embed_type"] != "text_time":
        return made
    pooled = at.config["projection_class_embeddings_input_dim"]
    pooled -= 6 * at.config["addition_time_embed_dim"]
    return {**made, "added_cond_kwargs": {"text_embeds": at.zeros(pooled), "time_ids": at.zeros(6)}}


INPUTS: dict[str, CallInputs] = {
    "AuraFlowTransformer2DModel": CallInputs(_auraflow, patch="patch_size"),
    "CogVideoXTransformer3DModel": CallInputs(_cogvideox, 8, 4, "patch_size"),
    "DiTTransformer2DModel": CallInputs(_dit, patch="patch_size"),
    "Flux2Transformer2DModel": CallInputs(_flux2, guidance="none"),
    "FluxTransformer2DModel": CallInputs(_flux, guidance="none"),
    "HunyuanVideoTransformer3DModel": CallInputs(_hunyuan_video, 8, 4, "patch_size", guidance="none"),
    "LTXVideoTransformer3DModel": CallInputs(_ltx, 32, 8, 1),
    "Lumina2Transformer2DModel": CallInputs(_lumina2, patch="patch_size", guidance="calls"),
    "PixArtTransformer2DModel": CallInputs(_pixart, patch="patch_size"),
    "QwenImageTransformer2DModel": CallInputs(_qwen, guidance="calls"),
    "SD3Transformer2DModel": CallInputs(_sd3, patch="patch_size", more_text=77),  # of CLIP
    "SanaTransformer2DModel": CallInputs(_sana, 32, patch="patch_size"),
    "UNet2DConditionModel": CallInputs(_unet, patch=1),
    "WanTransformer3DModel": CallInputs(_wan, 8, 4, 2, rounds_up=True, guidance="calls"),
}


def inputs_of(
    cls: str,
    config: Mapping[str, Any],
    size: Size,
    compression: tuple[int, int] | None = None,
    device: torch.device | str = "meta",
) -> dict[str, Any]:
    """Return the forward arguments of a denoiser class, all zeros.

    Args:
        cls: Class name in diffusers.
        config: Its configuration, complete.
        size: Size of the call: pixels, frames, text tokens and batch.
        compression: Pixels of a latent row and frames of a latent frame; None is what the class's
            usual autoencoder has.
        device: Device of the tensors.

    Raises:
        ValueError: If the class is not known here, or the size does not fit the model.
    """
    if cls not in INPUTS:
        raise ValueError(
            f"{cls}: no inputs are known; known are {', '.join(INPUTS)}. Take one of these, or run "
            "the model: diffcache.report says what was computed and held"
        )
    known = INPUTS[cls]
    spatial, temporal = compression or (known.spatial, known.temporal)
    patch = config[known.patch] if isinstance(known.patch, str) else known.patch
    for name in ("height", "width"):
        if getattr(size, name) % (spatial * patch):
            raise ValueError(f"{name}={getattr(size, name)}: must be a multiple of {spatial * patch} for {cls}")
    if temporal == 1 and size.frames > 1:
        raise ValueError(f"frames={size.frames}: {cls} makes pictures; use frames=1")
    frames = (size.frames - (not known.rounds_up or size.frames == 1)) // temporal + 1
    rows, columns = size.height // spatial, size.width // spatial
    where = torch.device(device)
    call = (frames, rows, columns, size.text_tokens, size.batch, where, size.references)
    return known.make(Latents(config, *call))
