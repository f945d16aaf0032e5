"""Offline stages that fit bases and codebooks of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.eval.kv.offline import Prepared, Sample, Work
from diffcache.eval.kv.tables import basis_tensors
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import cache_for
from diffcache.kv.hf.model import attentions
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn import codebook, latents
from diffcache.kv.learn import cskv as low_rank
from diffcache.kv.learn import kv_heads as fewer_heads
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieval.a2ats import rotary_of
from diffcache.kv.retrieval.summary import news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.view import View

_NEAR = 1e-2  # of the largest; rotating there and back in bfloat16 is off by up to 4e-3
SHARES = (0.75, 0.5, 0.375, 0.25)  # of the channels of all key-value heads


def cskv(work: Work, *, ranks: tuple[int, ...] = (), steps: int = 300) -> Prepared:
    """Return bases of some ranks.

    Ranks are coordinates of a token's keys and of its values; shares of 0.75, 0.5, 0.375 and 0.25 of their
    channels by default. Each basis takes so many training steps.
    """
    pairs, given = _projections(work)
    channels = pairs[0][0].out_features
    chosen = ranks or tuple(int(channels * share) for share in SHARES)
    tensors: dict[str, Tensor] = {}
    for number, rank in enumerate(chosen):
        work.report(number, len(chosen), f"rank {rank}")
        bases = low_rank.fit(pairs, given, low_rank.BasisFit(rank, steps=steps))
        tensors |= basis_tensors(str(rank), bases)
    return Prepared("Bases", tensors, {"bases": list(map(str, chosen))}, {"ranks": chosen})


def kv_heads(work: Work, *, groups: int = 1) -> Prepared:
    """Return bases that leave fewer key-value heads.

    `groups` are the heads that are left.
    """
    pairs, given = _projections(work)
    heads = work.model.config.get_text_config(decoder=True).num_key_value_heads
    bases = fewer_heads.fit(pairs, given, heads, groups)
    return Prepared("Bases", basis_tensors("bases", bases), {"bases": ["bases"]}, {"groups": groups})


def xquant_latent(work: Work) -> Prepared:
    """Return the bases of the projections' weights.

    One context is read to see what is held.
    """
    work.report(0, 1, "weights")
    pairs = _pairs(work.model)
    _check_held(work.model, pairs, next(work.samples.each()))
    bases = latents.latents(pairs)
    return Prepared("Bases", basis_tensors("bases", bases), {"bases": ["bases"]})


def _pairs(model: Any) -> list[tuple[nn.Linear, nn.Linear]]:
    """Return the key and value projections of the layers of full attention.

    Raises:
        AttachError: If a layer has no such projections.
    """
    owned = cache_for(model, Recipe(), mode="stock").owned
    found, pairs = attentions(model, owned), []
    for index in owned:
        keys, values = (getattr(found.get(index), name, None) for name in ("k_proj", "v_proj"))
        if not isinstance(keys, nn.Linear) or not isinstance(values, nn.Linear):
            raise AttachError(
                f"{type(model).__name__}: layer {index} has no linear k_proj and v_proj, which "
                "these tables are fitted to; take a recipe without bases"
            )
        pairs.append((keys, values))
    return pairs


@torch.no_grad()
def _projections(work: Work) -> tuple[list[tuple[nn.Linear, nn.Linear]], list[list[Tensor]]]:
    """Return the key and value projections of all layers, and what they are given."""
    pairs = _pairs(work.model)
    _check_held(work.model, pairs, next(work.samples.each()))
    with low_rank.inputs_of([keys for keys, _ in pairs]) as given:
        for sample in work.each("inputs"):
            work.model(input_ids=sample.ids, use_cache=False)
    return pairs, given


@torch.no_grad()
def _check_held(model: Any, pairs: Sequence[tuple[nn.Linear, nn.Linear]], sample: Sample) -> None:
    """Check that a cache holds what the projections make.

    Raises:
        AttachError: If the model changes keys or values in between, as by normalization.
    """
    cache = cache_for(model, Recipe(space="pre"), mode="native")
    with low_rank.inputs_of([keys for keys, _ in pairs]) as given:
        model(input_ids=sample.prompt, **with_cache(model, cache))
    for layer, pair, inputs in zip(cache.store.layers, pairs, given, strict=True):
        slots = layer.read()
        for what, held, module in zip(("keys", "values"), (slots.k, slots.v), pair, strict=True):
            found = held[0].transpose(0, 1).flatten(1).float().cpu()
            wanted = low_rank.outputs_of(module, inputs[0])
            near = _NEAR * float(wanted.abs().max())
            if found.shape != wanted.shape or not torch.allclose(found, wanted, atol=near):
                raise AttachError(
                    f"{type(model).__name__}: the {what} that are held are not what the "
                    "projections give, as the model changes them afterwards (as by normalization): "
                    "bases fitted to the projections would not be theirs; take another recipe"
                )


class _Keys(Retriever):
    """Take note of keys before rotation, and of how queries meet far ones; change nothing.

    Far keys are met at a distance of `far` positions.
    """

    def __init__(self, far: int) -> None:
        self.far = far
        self.keys: dict[int, list[Tensor]] = {}
        self.weight: dict[int, list[Tensor]] = {}

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Note unrotated keys and the covariance of queries; read everything."""
        slots = news(layer, layer.held - query.count, stored=True)
        rotary = rotary_of(layer)
        q = rotary.rotate(rotary.unrotate(query.q, slots.rpos[:, :1]), float(self.far))
        heads = slots.k.shape[1]
        q = q.unflatten(1, (heads, -1)).flatten(2, 3)
        self.keys.setdefault(layer.index, []).append(slots.k.float().cpu())
        self.weight.setdefault(layer.index, []).append(codebook.covariance(q).cpu())
        return layer.views()


def a2ats(work: Work, *, codes: int = 256, far: int = 64, steps: int = 8) -> Prepared:
    """Return a codebook of the unrotated keys of every head.

    A codebook has `codes` vectors and takes `steps` rounds of k-means; far keys are met at a distance of `far`
    positions.
    """
    watch = _Keys(far)
    for sample in work.each("keys"):
        with torch.no_grad():
            cache = cache_for(work.model, Recipe(retrieve=watch, space="pre"), mode="native")
            work.model(input_ids=sample.prompt, **with_cache(work.model, cache))
    books, weights = [], []
    for number, index in enumerate(sorted(watch.keys)):
        work.report(number, len(watch.keys), "codebooks")
        keys, weight = torch.cat(watch.keys[index], 2), torch.stack(watch.weight[index]).mean(0)
        valid = torch.ones(keys.shape[:3], dtype=torch.bool)
        books.append(codebook.fit(keys, valid, weight, codes, steps)[0])
        weights.append(weight[0])
    tensors = {"vectors": torch.stack(books), "weight": torch.stack(weights)}
    return Prepared("Codebook", tensors, {"codebook": ["vectors"]}, {"codes": codes, "far": far})
