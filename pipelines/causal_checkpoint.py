"""Load causal Wan weights, as Self-Forcing and its kin release them, for diffusers.

Layouts that are read, as the loaders of their public code show them; `tests/video/test_checkpoint` has one of each:

| weights | under | names |
|---|---|---|
| Self-Forcing, Rolling Forcing | `generator_ema`, `generator` | `model.`, with what FSDP wraps |
| CausVid | `generator`, or `model` for image to video | `model.` |
| LongLive | `generator`, and `generator_lora` in a file of its own | `model.`; those of peft |
| Krea Realtime 14B | nothing, a file of safetensors | `model.` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.foreign import in_float32

PARTS = ("generator_ema", "generator", "model")  # the first one in the file is taken
LORA = ("generator_lora",)
PREFIXES = ("base_model.", "model.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_TWO_TIMES = ("delta_embedder.", "far_patch_embedding.")  # of AnyFlow


class CheckpointError(DiffcacheError, ValueError):
    """A file of weights cannot be read, or does not belong to a text-to-video Wan."""


def load_causal(
    path: str | os.PathLike[str],
    *,
    lora: str | os.PathLike[str] | None = None,
    alpha: float | None = None,
    head: int = 128,
    dtype: torch.dtype | None = None,
) -> WanTransformer3DModel:
    """Load weights of the Self-Forcing family into an ordinary transformer of diffusers.

    Sizes are read off the weights. Of a training checkpoint the averaged weights are taken where there are some.
    Weights stay on the CPU.

    Args:
        path: File of torch or of safetensors, with names as in Wan2.1's own code.
        lora: File of low-rank updates that are added to the weights, as LongLive's `lora.pt`; None for none.
        alpha: Scale of the updates, which is divided by their rank; None for the rank itself, as LongLive uses. It is
            not saved in any file.
        head: Channels of an attention head, 128 in all released models; the weights do not tell it.
        dtype: Dtype of the weights; norms, modulation and the embedding of time become float32, as in
            `from_pretrained`. None for the dtype that they are saved in.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file holds anything but the weights of a Wan for text to video, or the updates do not
            fit these.
    """
    named = _unwrapped(_read(path, PARTS))
    if any(name.startswith(_TWO_TIMES) or f".{_TWO_TIMES[0]}" in name for name in named):
        raise CheckpointError(
            f"path={os.fspath(path)!r}: is of AnyFlow, whose steps go from one time to another, "
            "both of which its transformer is told; run it with AnyFlowFARPipeline of diffusers"
        )
    if lora is not None:
        named = _updated(named, lora, alpha)
    weights: dict[str, Tensor] = convert_wan_transformer_to_diffusers(dict(named))
    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel(**_config(path, named, head))
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    wrong = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (
            ("missing", wanted.keys() - weights.keys()),
            ("unexpected", weights.keys() - wanted.keys()),
            ("of another shape", {n for n in wanted.keys() & weights if wanted[n] != weights[n].shape}),
        )
        if names
    ]
    if wrong:
        raise CheckpointError(
            f"path={os.fspath(path)!r}: weights do not fit a Wan for text to video, by their names "
            f"in diffusers: {'; '.join(wrong)}"
        )
    if dtype is not None:
        whole = set(in_float32(model))
        weights = {
            name: value.to(torch.float32 if whole & set(name.split(".")) else dtype) for name, value in weights.items()
        }
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _read(path: str | os.PathLike[str], parts: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the weights in a file, under the first of some names that is there; no code in the file is run."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"path={os.fspath(path)!r}: there is no such file")
    try:
        if Path(path).suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"path={os.fspath(path)!r}: cannot be read as weights and nothing else: {error}"
        ) from error
    part = next((name for name in parts if isinstance(found, dict) and name in found), None)
    weights = found if part is None else found[part]
    if not isinstance(weights, Mapping) or not all(isinstance(x, Tensor) for x in weights.values()):
        raise CheckpointError(
            f"path={os.fspath(path)!r}: must hold weights by name, or have them under {' or '.join(map(repr, parts))}"
        )
    return weights


def _unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without the prefixes that training put before their names."""
    found = {}
    for name, value in weights.items():
        for prefix in PREFIXES:
            name = name.replace(prefix, "")
        found[name] = value
    return found


def _updated(weights: dict[str, Tensor], lora: str | os.PathLike[str], alpha: float | None) -> dict[str, Tensor]:
    """Return weights with low-rank updates added to them.

    Raises:
        CheckpointError: If an update has no weight, or does not fit its weight.
    """
    parts, found = _unwrapped(_read(lora, LORA)), dict(weights)
    downs = [name for name in parts if name.endswith(".lora_A.weight")]
    for name in downs:
        target = name.replace(".lora_A.weight", ".weight")
        down, up = parts[name].float(), parts.get(name.replace(".lora_A.", ".lora_B."))
        if up is None or target not in found or found[target].shape != (len(up), down.shape[1]):
            raise CheckpointError(f"lora={os.fspath(lora)!r}: {name} updates none of the {len(weights)} weights")
        scale = 1.0 if alpha is None else alpha / len(down)
        found[target] = found[target].float().add(up.float() @ down, alpha=scale).to(found[target])
    if not downs or 2 * len(downs) != len(parts):
        raise CheckpointError(
            f"lora={os.fspath(lora)!r}: must hold pairs NAME.lora_A.weight and NAME.lora_B.weight "
            f"alone; {len(downs)} of its {len(parts)} tensors are the first of a pair"
        )
    return found


def _config(path: str | os.PathLike[str], named: Mapping[str, Tensor], head: int) -> dict[str, Any]:
    """Return the configuration that the shapes of weights tell."""
    try:
        width, channels, *patch = named["patch_embedding.weight"].shape
        ffn = named["blocks.0.ffn.0.weight"].shape[0]
        text = named["text_embedding.0.weight"].shape[1]
        frequencies = named["time_embedding.0.weight"].shape[1]
        out = named["head.head.weight"].shape[0]
    except KeyError as error:
        raise CheckpointError(
            f"path={os.fspath(path)!r}: has no {error} among its {len(named)} weights; names must "
            "be those of Wan2.1's own code (a folder of diffusers loads with from_pretrained)"
        ) from error
    if head < 1 or width % head:
        raise CheckpointError(f"head={head}: must divide the width of the model, {width}")
    blocks = {int(name.split(".")[1]) for name in named if name.startswith("blocks.")}
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": channels,
        "out_channels": out // torch.Size(patch).numel(),
        "text_dim": text,
        "freq_dim": frequencies,
        "ffn_dim": ffn,
        "num_layers": max(blocks) + 1,
        "cross_attn_norm": "blocks.0.norm3.weight" in named,
    }
