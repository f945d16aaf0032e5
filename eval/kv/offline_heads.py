"""Offline stages that count: which heads retrieve, what layers need, which channels tell keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.offline import Prepared, Sample, Work, observations, read, seen_by
from diffcache.foreign import with_cache
from diffcache.kv.attend import attend
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.learn import compresskv as heads_that_retrieve
from diffcache.kv.learn import epicache as blockwise
from diffcache.kv.learn import razor
from diffcache.kv.learn.label_channels import LabelCalibration
from diffcache.kv.learn.prefixkv import layer_shares
from diffcache.kv.life.on_request import prefill_by_blocks
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import compresskv as compresskv_recipe
from diffcache.kv.recipes.eviction import epicache as epicache_recipe
from diffcache.kv.recipes.eviction import prefixkv as prefixkv_recipe

BUDGETS = (0.5, 0.25, 0.125, 0.0625)


def razor_attention(work: Work, *, period: int = 128) -> Prepared:
    """Return which heads look for copies, on random tokens that repeat.

    They repeat after `period`; of the contexts the seed alone counts.
    """
    config, groups = work.model.config.get_text_config(decoder=True), groups_of(work.model)
    first = config.bos_token_id if isinstance(config.bos_token_id, int) else None
    ids = razor.repeated_tokens(config.vocab_size, period, first=first, seed=work.samples.seed)
    work.report(0, 1, "repeated tokens")
    probe = razor.probe(period, first=int(first is not None), groups=groups)
    cache = read(work.model, probe, ids.to(work.model.device))
    echo, induction = (found.cpu() for found in razor.head_scores(cache.store))
    heads = razor.retrieval_heads(echo, induction, groups)
    tensors = {"heads": torch.tensor(heads), "echo": echo, "induction": induction}
    return Prepared("table", tensors, {"heads": ["heads"]}, {"period": period})


def groups_of(model: Any) -> int:
    """Return how many query heads read a key-value head."""
    seen = seen_by(model, torch.zeros(1, 2, dtype=torch.long, device=model.device))[0]
    return seen.query.q.shape[1] // seen.slots.k.shape[1]


def compresskv(work: Work, *, heads: int = 2, budget: float = 0.25) -> Prepared:
    """Return which heads retrieve answers, and how much each layer suffers from eviction.

    So many heads of a layer are taken, where the paper takes four of 32; the eviction keeps the share `budget`
    of the tokens.
    """
    found = []
    for sample in work.each("heads"):
        layers = seen_by(work.model, sample.ids)
        for answer in sample.answers:
            scores = []
            for seen in layers:
                said = seen.attention(answer.said)[0], answer.start, answer.stop
                scores.append(heads_that_retrieve.retrieval_score(*said).cpu())
            found.append(torch.stack(scores))
    chosen = heads_that_retrieve.top_heads(torch.stack(found).mean(0), heads)
    recipe = compresskv_recipe(budget, heads=chosen)
    errors = [_errors(work.model, recipe, sample) for sample in work.each("layers")]
    weights = torch.tensor(heads_that_retrieve.layer_weights(errors), dtype=torch.float64)
    tensors = {"heads": torch.tensor(chosen), "weights": weights}
    return Prepared("table", tensors, {"heads": ["heads"], "weights": ["weights"]}, {"budget": budget})


def _errors(model: Any, recipe: Recipe, sample: Sample) -> list[float]:
    """Return by how much eviction changes what the questions get from each layer."""
    cache = read(model, recipe, sample.prompt)
    whole = cache.fork()
    cache.settle()
    found = []
    layers = zip(seen_by(model, sample.ids), whole.store.layers, cache.store.layers, strict=True)
    for seen, full, kept in layers:
        asked = seen.query.narrow(sample.context, seen.query.count)
        pair = attend(asked, full.views()), attend(asked, kept.views())
        found.append(heads_that_retrieve.eviction_error(*pair))
    return found


def prefixkv(work: Work, *, budgets: tuple[float, ...] = BUDGETS) -> Prepared:
    """Return what each layer keeps, for each budget.

    Budgets are shares of the tokens that all layers keep together.
    """
    recipe = prefixkv_recipe(0.5)
    assert recipe.score is not None
    scores = []
    for sample in work.each("attention"):
        cache = read(work.model, recipe, sample.prompt)
        scores.append([recipe.score(seen).float().cpu() for seen in observations(cache)])
    shares = {f"{budget}": layer_shares(scores, budget) for budget in budgets}
    made = {name: torch.tensor(each, dtype=torch.float64) for name, each in shares.items()}
    return Prepared("table", made, {"shares": list(made)})


def double_sparsity(work: Work, *, channels: int | None = None) -> Prepared:
    """Return the label channels of every head.

    Of a head an eighth of its channels by default, where the paper takes a sixteenth of 128.
    """
    watch = LabelCalibration()
    for sample in work.each("channels"):
        read(work.model, Recipe(retrieve=watch), sample.prompt)
    size = watch.importance().shape[-1]
    found = torch.tensor(watch.channels(max(size // 8, 1) if channels is None else channels))
    return Prepared("table", {"channels": found}, {"channels": ["channels"]}, {"by": "qk"})


def epicache(work: Work, *, budget: float = 0.25, block: int = 128) -> Prepared:
    """Return how much each layer suffers from reading block by block with eviction.

    The questions of a context are its probe. The share `budget` of the tokens is kept after each block of
    `block` tokens.
    """
    found = []
    for sample in work.each("blocks"):
        whole = read(work.model, Recipe(), sample.prompt)
        cache = cache_for(work.model, epicache_recipe(budget), mode="native")
        keys: list[list[Tensor]] = []
        forward = partial(_noting, work.model, cache, keys)
        with torch.no_grad():
            prefill_by_blocks(cache, forward, sample.prompt, sample.ids[:, sample.context :], block)
        full = [layer.read().k for layer in whole.store.layers]
        parts = [torch.cat(layer, 2) for layer in zip(*keys, strict=True)]
        found.append(blockwise.sensitivity(full, parts).cpu())
    weights = blockwise.layer_weights(torch.stack(found).mean(0))
    made = {"weights": torch.tensor(weights, dtype=torch.float64)}
    return Prepared("table", made, {"weights": ["weights"]}, {"budget": budget, "block": block})


def _noting(model: Any, noted: KVCache, keys: list[list[Tensor]], ids: Tensor, cache: KVCache) -> None:
    """Run a model on ids, and note the new keys of one cache, [B, H, n, D] of each layer."""
    model(input_ids=ids, **with_cache(model, cache))
    if cache is noted:  # not a fork that a probe is run on
        new = ids.shape[1]
        read_slots = [layer.read().k for layer in cache.store.layers]
        keys.append([k[:, :, -new:].clone() for k in read_slots])
