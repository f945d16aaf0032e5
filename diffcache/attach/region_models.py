"""The classes of denoisers that can compute a few rows: their attention and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.region_attention import RowProcessor, Turn
from diffcache.errors import AttachError
from diffcache.features.region_mask import gather


class FluxRows(RowProcessor):
    """`FluxAttnProcessor` for both kinds of blocks, over present rows."""

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Run attention as the original does, or of present rows over all."""
        turn = self._turn()
        if turn is None:
            return self.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        if attention_mask is not None:
            raise AttachError("attention_mask: cannot be given with attention over kept rows")
        query, key, value = _split(attn, hidden_states, "to_q", "to_k", "to_v", "to_qkv")
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            text_query, text_key, text_value = _split(
                attn, encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj",
                "to_added_qkv",
            )  # fmt: skip
            query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        query, key = (_rotate_pairs(x, _flux_rotary(turn, image_rotary_emb)) for x in (query, key))
        states = self._attend(attn, turn, (query, key, value))
        if encoder_hidden_states is None:
            return states
        text = encoder_hidden_states.shape[1]
        picture = attn.to_out[1](attn.to_out[0](states[:, text:].contiguous()))
        return picture, attn.to_add_out(states[:, :text].contiguous())


class QwenRows(RowProcessor):
    """`QwenDoubleStreamAttnProcessor2_0` over present rows."""

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Run attention as the original does, or of present rows over all."""
        turn = self._turn()
        if turn is None or encoder_hidden_states is None or attention_mask is not None:
            return self.original(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask,
                attention_mask, image_rotary_emb,
            )  # fmt: skip
        text = encoder_hidden_states.shape[1]
        size = attn.inner_dim // attn.heads
        states = []
        for rows, names in ((encoder_hidden_states, "add_{}_proj"), (hidden_states, "to_{}")):
            states.append([
                getattr(attn, names.format(x))(rows).unflatten(-1, (-1, size)) for x in "qkv"
            ])  # fmt: skip
        norms = ((attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k))
        rotary = _qwen_rotary(turn, image_rotary_emb)
        for stream, pair, angles in zip(states, norms, rotary, strict=True):
            for index, norm in enumerate(pair):
                normed = stream[index] if norm is None else norm(stream[index])
                stream[index] = _rotate_complex(normed, angles)
        query, key, value = (torch.cat(both, dim=1) for both in zip(*states, strict=True))
        joint = None
        if encoder_hidden_states_mask is not None:
            every = len(hidden_states), _picture_rows(turn, hidden_states)
            seen = torch.ones(every, dtype=torch.bool, device=hidden_states.device)
            joint = torch.cat([encoder_hidden_states_mask, seen], dim=1)[:, None, None, :]
        out = self._attend(attn, turn, (query, key, value), joint)
        picture = attn.to_out[0](out[:, text:].contiguous())
        if len(attn.to_out) > 1:
            picture = attn.to_out[1](picture)
        return picture, attn.to_add_out(out[:, :text].contiguous())


def _split(attn: Any, rows: Tensor, query: str, key: str, value: str, fused: str) -> list[Tensor]:
    """Return the projections of rows by heads, `[B, rows, H, D]` each."""
    if attn.fused_projections:
        projected = getattr(attn, fused)(rows).chunk(3, dim=-1)
    else:
        projected = [getattr(attn, name)(rows) for name in (query, key, value)]
    return [part.unflatten(-1, (-1, attn.head_dim)) for part in projected]


def _picture_rows(turn: Turn, hidden_states: Tensor) -> int:
    """Return how many picture rows are attended to."""
    if turn.rows is None:
        return hidden_states.shape[1]
    assert turn.store.velocity is not None
    return turn.store.velocity.shape[1]


def _flux_rotary(turn: Turn, given: Any) -> Any:
    """Return cosines and sines of the present rows, `[.., rows, 1, D]`; None where there are none.

    On a full step they are kept, and what the model computes on later steps is not looked at.
    """
    store = turn.store
    if turn.rows is None:
        store.rotary, store.present = given, None
        return None if given is None else [x[None, :, None] for x in given]
    if store.present is None and store.rotary is not None:
        store.present = [_joint(x, turn)[:, :, None] for x in store.rotary]
    return store.present


def _qwen_rotary(turn: Turn, given: Any) -> tuple[Any, Any]:
    """Return complex rotations of the text rows and of the present picture rows."""
    store = turn.store
    if turn.rows is None:
        store.rotary, store.present = given, None
        return (None, None) if given is None else (given[1][None, :, None], given[0][None, :, None])
    if store.present is None and store.rotary is not None:
        picture, text = store.rotary
        store.present = text[None, :, None], _of(picture, turn)[:, :, None]
    return store.present or (None, None)


def _joint(angles: Tensor, turn: Turn) -> Tensor:
    """Return the angles of the text rows and of every sample's present rows."""
    picture, text = _of(angles[turn.store.text :], turn), angles[: turn.store.text]
    return torch.cat([text.expand(len(picture), -1, -1).to(picture.device), picture], dim=1)


def _of(angles: Tensor, turn: Turn) -> Tensor:
    """Return the angles `[T, D]` of every sample's present rows, `[B, M, D]`."""
    assert turn.rows is not None
    return gather(angles.to(turn.rows.device).expand(len(turn.rows), -1, -1), turn.rows)


def _rotate_pairs(states: Tensor, angles: Any) -> Tensor:
    """Rotate neighbouring channels by angles given as cosines and sines."""
    if angles is None:
        return states
    cosine, sine = (x.to(states.device) for x in angles)
    real, imaginary = states.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    made: Tensor = (states.float() * cosine + turned.float() * sine).to(states.dtype)
    return made


def _rotate_complex(states: Tensor, angles: Any) -> Tensor:
    """Rotate neighbouring channels by unit complex numbers."""
    if angles is None:
        return states
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)).contiguous())
    turned: Tensor = torch.view_as_real(pairs * angles.to(states.device)).flatten(3)
    return turned.to(states.dtype)


# ------------------------------------------------------------------------------ model classes


def _flux_grid(given: dict[str, Any]) -> tuple[int, int]:
    ids = given["img_ids"]
    ids = ids[0] if ids.dim() == 3 else ids
    first = ids[ids[:, 0] == 0]
    height, width = (first[:, 1:].amax(dim=0) + 1).long().tolist()
    return int(height), int(width)


def _qwen_grid(given: dict[str, Any]) -> tuple[int, int]:
    shapes = given["img_shapes"][0]
    frames, height, width = shapes[0] if isinstance(shapes, list) else shapes
    return int(frames * height), int(width)


def _qwen_shapes(given: dict[str, Any], rows: int) -> dict[str, Any]:
    # which only tells it which rows are noisy: all that are present
    return {"img_shapes": [[(1, 1, rows)]] * len(given["img_shapes"])}


@dataclass(frozen=True)
class Kind:
    """How a class of denoisers is served.

    Attributes:
        processor: Class name of the processors that are replaced.
        rows: What replaces them.
        grid: Reads height and width of the token grid off a call's arguments.
        reshape: What else to change in the arguments when only M rows are given.
    """

    processor: str
    rows: type[RowProcessor]
    grid: Callable[[dict[str, Any]], tuple[int, int]]
    reshape: Callable[[dict[str, Any], int], dict[str, Any]] | None = None


KINDS = {
    "FluxTransformer2DModel": Kind("FluxAttnProcessor", FluxRows, _flux_grid),
    "QwenImageTransformer2DModel": Kind(
        "QwenDoubleStreamAttnProcessor2_0", QwenRows, _qwen_grid, _qwen_shapes
    ),
}


def attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and attention modules of a model's blocks."""
    for name, module in model.named_modules():
        if "blocks." in name and getattr(module, "processor", None) is not None:
            yield name, module
