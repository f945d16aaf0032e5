"""One query that stands for a chunk, and the queries as keys are stored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.summary import news


def stored_query(query: Query, layer: KVLayer) -> Query:
    """Return queries before rotation, if the layer's keys are held so; as they are otherwise.

    Their own keys are the last that were written, which says at which rotary positions they are.
    """
    if layer.rotary is None:
        return query
    rpos = news(layer, layer.held - query.count, stored=True).rpos[:, :1]
    at = layer.query_places(rpos, query.q.shape[1])
    return replace(query, q=layer.rotary.unrotate(query.q, at))


def query_valid(query: Query) -> Tensor:
    """Return which queries are of tokens, not of padding, bool [B, n]."""
    batch = len(query.q)
    if query.mask is None:
        return torch.ones(batch, query.count, dtype=torch.bool, device=query.q.device)
    at = query.positions().expand(batch, -1).clamp_max(query.mask.shape[-1] - 1)
    mask = query.mask[:, 0].expand(batch, -1, -1)
    return mask.gather(2, at[..., None])[..., 0]


def probe(query: Query, weight: Tensor) -> Query:
    """Return one query, the weighted sum of several.

    Args:
        query: n queries.
        weight: [B, Hq or 1, n], which add up to 1.
    """
    q = (query.q.float() * weight[..., None]).sum(2, keepdim=True)
    return replace(query, q=q, pos=None, mask=None, start=query.start + query.count - 1)
