"""Project, rotate and put together as diffusers' attention processors do, family by family.

A family is a generator: it yields the `AttentionCall` of a call, is sent the attention, and returns
what the processor returns. The arithmetic is that of the processor, operation by operation, so that
plain attention gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcache.attach.attention_call import (
    AttentionCall,
    CallRotary,
    Kind,
    dispatched,
    fused,
    rotate_by_pair,
    rotate_complex,
    rotate_pairs,
)

Served = Generator[AttentionCall, Tensor, Any]
WAN_TEXT = 512  # text rows of Wan, after those of an image; a constant in its source too


class ProcessorFamily(NamedTuple):
    """One class of processors."""

    serve: Callable[..., Served]  # generator function of the processor, the attention module and its arguments
    kind: Callable[[Any, str], Kind]  # function of the module and its path, which returns the kind of its attention


def _pairs(given: Any, like: Tensor, first: int = 0, *, some: bool = False) -> CallRotary | None:
    """Return rotary given as cosines and sines `[T, D]`."""
    if given is None:
        return None
    cosine, sine = given[0].to(like.device), given[1].to(like.device)
    tables = cosine[None, :, None], sine[None, :, None]
    return CallRotary(rotate_pairs, tables, first, some)


# -------------------------------------------------------------------------------- projections


def _own(attn: Any, rows: Tensor, *shape: int) -> list[Tensor]:
    """Return the normed projections of an image's rows by heads, `[B, T, H, D]` each."""
    return _heads((attn.to_q(rows), attn.to_k(rows), attn.to_v(rows)), shape, attn.norm_q, attn.norm_k)


def _added(attn: Any, rows: Tensor, *shape: int) -> list[Tensor]:
    """Return those of text rows, which have weights of their own."""
    parts = attn.add_q_proj(rows), attn.add_k_proj(rows), attn.add_v_proj(rows)
    return _heads(parts, shape, attn.norm_added_q, attn.norm_added_k)


def _fused(rows: Tensor, q_norm: Any, k_norm: Any, *shape: int) -> list[Tensor]:
    """Return those of rows that one layer projected."""
    return _heads(rows.chunk(3, dim=-1), shape, q_norm, k_norm)


def _heads(parts: Iterable[Tensor], shape: tuple[int, ...], q_norm: Any, k_norm: Any) -> list[Tensor]:
    """Return queries, keys and values by heads, `[B, T, H, D]` each; `shape` is (H, D) with -1 for one of them."""
    q, k, v = (part.unflatten(-1, shape) for part in parts)
    return [q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k), v]


def _joined(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Return the projections of two sets of rows, one after the other."""
    return [torch.cat(both, dim=1) for both in zip(first, second, strict=True)]


def _ends(out: Tensor, text: int, *, text_first: bool) -> tuple[Tensor, Tensor]:
    """Return the image's rows and the text's."""
    if text_first:
        return out[:, text:], out[:, :text]
    return out[:, : out.shape[1] - text], out[:, out.shape[1] - text :]


def _out(attn: Any, rows: Tensor) -> Tensor:
    made: Tensor = attn.to_out[1](attn.to_out[0](rows))
    return made


# ----------------------------------------------------------------------------------- families


def _flux(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *,
    projects: bool = False,  # the output where all tokens are one stream, as FLUX.2 does
) -> Served:
    shape, words, text = (-1, attn.head_dim), encoder_hidden_states, None
    if attn.fused_projections:
        parts = _fused(attn.to_qkv(hidden_states), attn.norm_q, attn.norm_k, *shape)
    else:
        parts = _own(attn, hidden_states, *shape)
    if words is not None:
        text = words.shape[1]
        if attn.fused_projections:
            rows = attn.to_added_qkv(words)
            more = _fused(rows, attn.norm_added_q, attn.norm_added_k, *shape)
        else:
            more = _added(attn, words, *shape)
        parts = _joined(more, parts)
    q, k, v = parts
    rotary = _pairs(image_rotary_emb, q)
    out = yield AttentionCall(q, k, v, dispatched(processor), rotary, attention_mask, text)
    out = out.flatten(2, 3).to(q.dtype)
    if text is None:
        return _out(attn, out) if projects else out
    picture, text_rows = _ends(out, text, text_first=True)
    return _out(attn, picture.contiguous()), attn.to_add_out(text_rows.contiguous())


def _flux2_parallel(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Served:
    rows = attn.to_qkv_mlp_proj(hidden_states)
    inner, wide = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
    count = rows.shape[-1] * inner // (inner + wide)  # of a rank, where ranks split the channels
    joint, mlp = rows.split([count, rows.shape[-1] - count], dim=-1)
    q, k, v = _fused(joint, attn.norm_q, attn.norm_k, -1, attn.head_dim)
    rotary = _pairs(image_rotary_emb, q)
    out = yield AttentionCall(q, k, v, dispatched(processor), rotary, attention_mask, None)
    out = out.flatten(2, 3).to(q.dtype)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1))


def _qwen(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Served:
    if attention_mask is not None:
        raise ValueError("attention_mask: must be None; give encoder_hidden_states_mask")
    size, text = attn.inner_dim // attn.heads, encoder_hidden_states.shape[1]
    mask = None
    if encoder_hidden_states_mask is not None:
        seen = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        mask = torch.cat([encoder_hidden_states_mask, seen], dim=1)[:, None, None, :]
    words = _added(attn, encoder_hidden_states, -1, size)
    q, k, v = _joined(words, _own(attn, hidden_states, -1, size))
    rotary = None
    if image_rotary_emb is not None:
        numbers = torch.cat([image_rotary_emb[1], image_rotary_emb[0]], dim=0)
        rotary = CallRotary(rotate_complex, (numbers[None, :, None],))
    out = yield AttentionCall(q, k, v, dispatched(processor), rotary, mask, text)
    rows, text_rows = _ends(out.flatten(2, 3).to(q.dtype), text, text_first=True)
    made = attn.to_out[0](rows.contiguous())
    if len(attn.to_out) > 1:
        made = attn.to_out[1](made)
    return made, attn.to_add_out(text_rows.contiguous())


def _wan(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: Any = None,
) -> Served:
    source, images = encoder_hidden_states, None
    if attn.add_k_proj is not None and source is not None:
        count = source.shape[1] - WAN_TEXT
        images, source = source[:, :count], source[:, count:]
    q, k, v = _wan_projections(attn, hidden_states, source)
    q, k = attn.norm_q(q), attn.norm_k(k)
    shape = (attn.heads, -1)
    q, k, v = q.unflatten(2, shape), k.unflatten(2, shape), v.unflatten(2, shape)
    rotary = None
    if rotary_emb is not None:
        tables = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
        rotary = CallRotary(rotate_by_pair, tables)
    attend = dispatched(processor, split=encoder_hidden_states is None)
    seen = None
    if images is not None:
        if attn.fused_projections:
            k_image, v_image = attn.to_added_kv(images).chunk(2, dim=-1)
        else:
            k_image, v_image = attn.add_k_proj(images), attn.add_v_proj(images)
        k_image = attn.norm_added_k(k_image)
        k_image, v_image = k_image.unflatten(2, shape), v_image.unflatten(2, shape)
        seen = yield AttentionCall(q, k_image, v_image, attend)
        seen = seen.flatten(2, 3).to(q.dtype)
    out = yield AttentionCall(q, k, v, attend, rotary, attention_mask)
    out = out.flatten(2, 3).to(q.dtype)
    return _out(attn, out if seen is None else out + seen)


def _wan_projections(attn: Any, rows: Tensor, source: Tensor | None) -> tuple[Tensor, ...]:
    source = rows if source is None else source
    if not attn.fused_projections:
        return attn.to_q(rows), attn.to_k(source), attn.to_v(source)
    if not attn.is_cross_attention:
        return tuple(attn.to_qkv(rows).chunk(3, dim=-1))
    return attn.to_q(rows), *attn.to_kv(source).chunk(2, dim=-1)


def _joint(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Served:
    # The processor of Stable Diffusion 3 looks at no mask.
    parts = _own(attn, hidden_states, attn.heads, -1)
    text = 0
    if encoder_hidden_states is not None:
        text = encoder_hidden_states.shape[1]
        parts = _joined(parts, _added(attn, encoder_hidden_states, attn.heads, -1))
    q, k, v = parts
    out = yield AttentionCall(q, k, v, fused, text=text, text_first=False)
    out = out.flatten(2, 3).to(q.dtype)
    if encoder_hidden_states is None:
        return _out(attn, out)
    picture, text_rows = _ends(out, text, text_first=False)
    if not attn.context_pre_only:
        text_rows = attn.to_add_out(text_rows)
    return _out(attn, picture), text_rows


def _hunyuan_video(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Served:
    text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
    words = None  # projections of the text, where it has some of its own
    if encoder_hidden_states is not None and attn.add_q_proj is not None:
        words = _added(attn, encoder_hidden_states, attn.heads, -1)
    elif encoder_hidden_states is not None:
        hidden_states = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    parts = _own(attn, hidden_states, attn.heads, -1)
    q, k, v = parts if words is None else _joined(parts, words)
    rotary = _pairs(image_rotary_emb, q, some=text > 0)
    out = yield AttentionCall(q, k, v, dispatched(processor), rotary, attention_mask, text, text_first=False)
    out = out.flatten(2, 3).to(q.dtype)
    if encoder_hidden_states is None:
        return out, None
    picture, text_rows = _ends(out, text, text_first=False)
    if getattr(attn, "to_out", None) is not None:
        picture = _out(attn, picture)
    if getattr(attn, "to_add_out", None) is not None:
        text_rows = attn.to_add_out(text_rows)
    return picture, text_rows


def _ltx(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Served:
    source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = _prepared(attn, attention_mask, source)
    q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source))
    q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(source)))
    rotary = None
    if image_rotary_emb is not None:  # for all heads' channels, one after the other
        tables = tuple(table.unflatten(2, (attn.heads, -1)) for table in image_rotary_emb)
        rotary = CallRotary(rotate_pairs, tables)
    out = yield AttentionCall(q, k, v, dispatched(processor), rotary, mask)
    return _out(attn, out.flatten(2, 3).to(q.dtype))


def _cogvideox(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Served:
    text = encoder_hidden_states.shape[1]
    rows = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    # The processor of fused projections pads a mask to the text's length.
    is_fused = type(processor).__name__.startswith("Fused")
    mask = _prepared(attn, attention_mask, encoder_hidden_states if is_fused else rows)
    if is_fused:
        q, k, v = _fused(attn.to_qkv(rows), attn.norm_q, attn.norm_k, attn.heads, -1)
    else:
        q, k, v = _own(attn, rows, attn.heads, -1)
    rotary = _pairs(image_rotary_emb, q, text, some=True)
    out = yield AttentionCall(q, k, v, fused, rotary, mask, text)
    return _ends(_out(attn, out.flatten(2, 3)), text, text_first=True)


def _plain(
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temb: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Served:
    residual, shape = hidden_states, hidden_states.shape
    if attn.spatial_norm is not None:
        hidden_states = attn.spatial_norm(hidden_states, temb)
    if len(shape) == 4:
        hidden_states = hidden_states.flatten(2).transpose(1, 2)
    source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = _prepared(attn, attention_mask, source)
    if attn.group_norm is not None:
        hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
    if encoder_hidden_states is None:
        source = hidden_states
    elif attn.norm_cross:
        source = attn.norm_encoder_hidden_states(source)
    parts = attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
    q, k, v = _heads(parts, (attn.heads, -1), attn.norm_q, attn.norm_k)
    out = yield AttentionCall(q, k, v, fused, mask=mask)
    made = _out(attn, out.flatten(2, 3).to(q.dtype))
    if len(shape) == 4:
        made = made.transpose(-1, -2).reshape(shape)
    if attn.residual_connection:
        made = made + residual
    return made / attn.rescale_output_factor


def _prepared(attn: Any, mask: Tensor | None, source: Tensor) -> Tensor | None:
    """Return a mask for every head."""
    if mask is None:
        return None
    batch, width, _ = source.shape
    mask = attn.prepare_attention_mask(mask, width, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


# ----------------------------------------------------------------------------------- the table


def _joint_or_self(module: Any, path: str) -> Kind:
    return "self" if module.added_kv_proj_dim is None else "joint"


def _cross_or_self(module: Any, path: str) -> Kind:
    cross = getattr(module, "is_cross_attention", path.endswith("attn2"))  # LTX does not say
    return "cross" if cross else "self"


FAMILIES = {
    "AttnProcessor2_0": ProcessorFamily(_plain, _cross_or_self),
    "CogVideoXAttnProcessor2_0": ProcessorFamily(_cogvideox, lambda *_: "joint"),
    "FluxAttnProcessor": ProcessorFamily(_flux, lambda *_: "joint"),
    "Flux2AttnProcessor": ProcessorFamily(partial(_flux, projects=True), lambda *_: "joint"),
    "Flux2ParallelSelfAttnProcessor": ProcessorFamily(_flux2_parallel, lambda *_: "joint"),
    "FusedCogVideoXAttnProcessor2_0": ProcessorFamily(_cogvideox, lambda *_: "joint"),
    "HunyuanVideoAttnProcessor2_0": ProcessorFamily(_hunyuan_video, lambda *_: "joint"),
    "JointAttnProcessor2_0": ProcessorFamily(_joint, _joint_or_self),
    "LTXVideoAttnProcessor": ProcessorFamily(_ltx, _cross_or_self),
    "QwenDoubleStreamAttnProcessor2_0": ProcessorFamily(_qwen, lambda *_: "joint"),
    "WanAttnProcessor": ProcessorFamily(_wan, _cross_or_self),
}
