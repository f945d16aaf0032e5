"""Tensors that the attention layers of a Llama see, for the presses of kvpress and for tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diffcache.foreign import with_cache


@dataclass
class Seen:
    """Inputs and outputs of one attention layer: tensors with B rows.

    `hidden` is the input of the layer; `q` [B, Hq, S, D] and `k` are rotated; `attentions` are the
    eager weights [B, Hq, S, S]; `cos` and `sin` are [B, S, D].
    """

    module: Any
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attentions: Tensor
    cos: Tensor
    sin: Tensor

    def row(self, b: int) -> Seen:
        """Return row `b` alone, copied: presses write into what they are given."""
        parts = (self.hidden, self.q, self.k, self.v, self.attentions, self.cos, self.sin)
        return Seen(self.module, *(part[b : b + 1].clone() for part in parts))

    @property
    def rotation(self) -> dict[str, Any]:
        """Return the keyword arguments that presses read."""
        return {"position_embeddings": (self.cos, self.sin), "hidden_states": self.hidden}


@contextmanager
def showing(model: Any) -> Iterator[None]:
    """Have a model show its attention, and its rotary embedding where kvpress looks for it."""
    attentions = [layer.self_attn for layer in model.model.layers]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for attention in attentions:
        attention.rotary_emb = model.model.rotary_emb
    try:
        yield
    finally:
        for attention in attentions:
            del attention.rotary_emb
        model.set_attn_implementation(before)


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> list[Seen]:
    """Run a model that shows its attention once, and return what every layer saw.

    Args:
        model: Model of the Llama architecture.
        ids: int64 [B, S], without padding.
    """
    layers: list[Seen] = []
    cache = DynamicCache(config=model.config)

    def look(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        q = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        layer = cache.layers[module.layer_idx]
        rows = ids.shape[0]
        cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
        layers.append(Seen(module, hidden, q, layer.keys, layer.values, output[1], cos, sin))

    handles = [
        layer.self_attn.register_forward_hook(look, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        model(ids, **with_cache(model, cache))
    finally:
        for handle in handles:
            handle.remove()
    return layers
