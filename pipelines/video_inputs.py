"""Checks of the inputs of a video stream, guidance, and the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from diffcache.anchor import owner_of
from diffcache.api import run
from diffcache.errors import AttachError
from diffcache.kv.rotary_nd import RotaryND
from diffcache.method import check_int, is_number


def checked_size(size: tuple[int, int], patch: tuple[int, int, int]) -> tuple[int, int]:
    """Return a size in latents that patches divide."""
    height, width = size
    for name, value, each in (("height", height, patch[1]), ("width", width, patch[2])):
        check_int(f"size={size}: {name}", value, each)
        if value % each:
            raise ValueError(f"size={size}: {name} must be a multiple of the patch size, {each}")
    if patch[0] != 1:
        raise AttachError(f"patch_size={patch}: a token must be of one frame, a patch of 1 in time")
    return height, width


def check_latents(latents: Tensor, wanted: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless these are latents of a stream: finite numbers `[B, C, F, H, W]`, with a frame at least.

    `wanted` are batch, channels, height and width.
    """
    _check_numbers("latents", latents)
    shape = latents.shape
    if latents.dim() != 5 or (*shape[:2], *shape[3:]) != wanted or not shape[2]:
        raise ValueError(
            f"latents={list(shape)}: must be [B, C, F, H, W] with B={wanted[0]}, C={wanted[1]}, "
            f"H={wanted[2]}, W={wanted[3]}, and a frame at least"
        )


def check_places(config: Any, shape: Sequence[int]) -> None:
    """Raise ValueError unless a transformer has positions for all tokens of one call, a chunk `[B, C, F, H, W]`.

    Its table of positions bounds frames, rows and columns. Frames in the cache do not count: they are numbered here.
    """
    most = config.rope_max_seq_len
    frames, height, width = (size // each for size, each in zip(shape[2:], config.patch_size, strict=True))
    if frames > most:
        raise ValueError(f"frames={frames}: the transformer numbers at most {most} of one call")
    if max(height, width) > most:
        raise ValueError(
            f"size={tuple(shape[3:])}: is {height} rows and {width} columns of tokens, of which "
            f"the transformer numbers at most {most}"
        )


def check_text(name: str, text: Tensor, width: int) -> None:
    """Raise ValueError unless these are finite text embeddings `[B, S, width]`; `name` is for the error."""
    _check_numbers(name, text)
    if text.dim() != 3 or text.shape[2] != width or not text.numel():
        raise ValueError(f"{name}={list(text.shape)}: must be [B, S, {width}]")


def _check_numbers(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor of finite floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}={given}: must be a tensor of floating-point numbers")
    if not value.isfinite().all():
        raise ValueError(f"{name}: has infinite numbers or NaN; all must be finite")


def text_rows(transformer: Any, prompt: Tensor, negative: Tensor | None, guidance: float) -> Tensor:
    """Return the text of all rows, those of the unguided branch last.

    Args:
        transformer: Transformer that reads it.
        prompt: Text embeddings, `[B, S, E]`.
        negative: Text embeddings of the unguided branch; not used without guidance.
        guidance: Scale of classifier-free guidance; 1 for none.

    Raises:
        ValueError: If guidance is no finite number, or has no negative prompt of the prompt's shape.
    """
    if not is_number(guidance) or not isfinite(guidance):
        raise ValueError(f"guidance={guidance!r}: must be a finite number")
    prompt = prompt.to(transformer.device, transformer.dtype)
    if guidance == 1:
        return prompt
    if negative is None:
        raise ValueError(
            f"guidance={guidance}: takes negative, the text embeddings of the unguided branch; or leave guidance=1"
        )
    check_text("negative", negative, transformer.config.text_dim)
    if negative.shape[0] not in (1, len(prompt)) or negative.shape[1] not in (1, prompt.shape[1]):
        raise ValueError(
            f"negative={list(negative.shape)}: must be {list(prompt.shape)} as the prompt; pad the shorter"
        )
    return torch.cat([prompt, negative.to(prompt).expand_as(prompt)])


def refuse_copy(stream: object, _protocol: SupportsIndex) -> NoReturn:
    """Raise TypeError for a copy or pickle of a stream, since the transformer in use attends through it."""
    raise TypeError(
        f"{type(stream).__name__}: cannot be copied or pickled, as its transformer attends through "
        "the object itself; write a session with save(folder), read it with "
        "CausalVideo.restore(folder)"
    )


def one_run(transformer: Any, steps: int) -> AbstractContextManager[None]:
    """Let calls be one sampling run of a feature cache, if the transformer is wrapped with one."""
    return nullcontext() if owner_of(transformer) is None else run(transformer, steps=steps)


def guided(found: Tensor, guidance: float) -> Tensor:
    """Return the velocity that guidance makes of the predictions `found`; rows of the unguided branch come last.

    A scale of 1 means that there is no other branch.
    """
    if guidance == 1:
        return found
    with_prompt, without = found.chunk(2)
    return without + guidance * (with_prompt - without)


def rotary_of(transformer: Any, grid: tuple[int, int]) -> RotaryND:
    """Return the rotary embedding of a transformer, by frame, row and column."""
    rope = transformer.rope
    return replace(RotaryND.sections((rope.t_dim, rope.h_dim, rope.w_dim)), grid=grid)
