"""Offline stages of recipes on recall-llama: which heads, layers and channels matter, and bases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.offline import Prepared, Samples, observations, read, seen_by
from diffcache.eval.kv.tables import basis_tensors
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.cache import detach
from diffcache.kv.learn import compresskv as heads_that_retrieve
from diffcache.kv.learn import cskv as low_rank
from diffcache.kv.learn import kv_heads as fewer_heads
from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn import razor
from diffcache.kv.learn.label_channels import LabelCalibration
from diffcache.kv.learn.prefixkv import layer_shares
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import h2o
from diffcache.kv.recipes.eviction_offline import compresskv as compresskv_recipe
from diffcache.kv.recipes.eviction_offline import prefixkv as prefixkv_recipe
from diffcache.pipelines.small.recall import BOS

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
RANKS = (48, 32, 24, 16)  # coordinates of 64 channels
_PERIOD = 128  # of repeated tokens
_CHANNELS = 4  # of 32, that Double Sparsity looks at: an eighth
_MEMORY, _TAPS, _WIDTH = 256, 7, 64


def razor_attention(model: Any, samples: Samples) -> Prepared:
    """Return which heads look for copies, on random tokens that repeat."""
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    ids = razor.repeated_tokens(model.config.vocab_size, _PERIOD, first=BOS, seed=samples.seed)
    try:
        cache = read(model, razor.probe(_PERIOD, first=1, groups=groups), ids)
        echo, induction = razor.head_scores(cache.store)
    finally:
        detach(model)
    heads = razor.retrieval_heads(echo, induction, groups)
    tensors = {"heads": torch.tensor(heads), "echo": echo, "induction": induction}
    return Prepared("table", tensors, {"period": _PERIOD})


def compresskv(model: Any, samples: Samples) -> Prepared:
    """Return which heads retrieve answers, two a layer, and how much each layer suffers."""
    found = []
    for batch in samples.each():
        layers = seen_by(model, batch.ids)
        for number in range(samples.questions):
            start = int(batch.facts[0, batch.asked[0, number]]) + 2
            said = batch.answers[number] - 1
            found.append(torch.stack([
                heads_that_retrieve.retrieval_score(seen.attentions[0][:, said], start, start + 2)
                for seen in layers
            ]))  # fmt: skip
    heads = heads_that_retrieve.top_heads(torch.stack(found).mean(0), 2)
    recipe = compresskv_recipe(0.25, heads=heads)
    try:
        errors = [_errors(model, recipe, batch.ids, samples.context) for batch in samples.each()]
    finally:
        detach(model)
    weights = heads_that_retrieve.layer_weights(errors)
    tensors = {"heads": torch.tensor(heads), "weights": torch.tensor(weights, dtype=torch.float64)}
    return Prepared("table", tensors)


def _errors(model: Any, recipe: Recipe, ids: Tensor, context: int) -> list[float]:
    """Return by how much eviction changes what the questions get from each layer."""
    cache = read(model, recipe, ids[:, :context])
    whole = cache.fork()
    cache.settle()
    found = []
    layers = zip(seen_by(model, ids), whole.store.layers, cache.store.layers, strict=True)
    for seen, full, kept in layers:
        asked = Query(seen.q[:, :, context:], context, seen.module.scaling)
        pair = attend(asked, full.views()), attend(asked, kept.views())
        found.append(heads_that_retrieve.eviction_error(*pair))
    return found


def prefixkv(model: Any, samples: Samples) -> Prepared:
    """Return what each layer keeps, for each budget."""
    recipe = prefixkv_recipe(0.5)
    assert recipe.score is not None
    scores = []
    try:
        for batch in samples.each():
            cache = read(model, recipe, batch.context)
            scores.append([recipe.score(seen).float() for seen in observations(cache)])
    finally:
        detach(model)
    shares = {f"{budget}": layer_shares(scores, budget) for budget in BUDGETS}
    made = {name: torch.tensor(each, dtype=torch.float64) for name, each in shares.items()}
    return Prepared("table", made)


def double_sparsity(model: Any, samples: Samples) -> Prepared:
    """Return the label channels of every head."""
    watch = LabelCalibration()
    try:
        for batch in samples.each():
            read(model, Recipe(retrieve=watch), batch.context)
    finally:
        detach(model)
    channels = torch.tensor(watch.channels(_CHANNELS))
    return Prepared("table", {"channels": channels}, {"by": "qk"})


def lococo(model: Any, samples: Samples, steps: int = 400) -> Prepared:
    """Return trained mixing weights, for any memory up to 256 slots."""
    found = []
    recent = max(samples.context // 32, 1)
    try:
        for number, batch in enumerate(samples.each()):
            budget = int(samples.context * BUDGETS[number % len(BUDGETS)])
            cache = read(model, h2o(budget), batch.context)
            layers = seen_by(model, batch.ids)
            for seen, whole in zip(observations(cache), layers, strict=True):
                size = torch.full(seen.lengths.shape, budget)
                plan = TopK(recent=recent)(h2o(budget).score(seen).float(), size, seen)  # type: ignore[misc]
                later = Query(
                    whole.q[:, :, samples.context :], samples.context, whole.module.scaling
                )
                found.append(mixing.Sample(seen, plan, later))
    finally:
        detach(model)
    slots = found[0].seen.slots
    first = mixing.fresh(
        model.config.num_hidden_layers, _MEMORY, slots.k.shape[3] + slots.v.shape[3], _TAPS
    )
    losses: list[float] = []
    with torch.enable_grad():
        made = mixing.train(first, found, recent=recent, steps=steps, watch=_note(losses, steps))
    tensors = {name: getattr(made, name).half() for name in ("weight", "bias", "gate")}
    return Prepared("MixWeights", tensors, _about(losses, len(found)) | {"recent": recent})


def locret(model: Any, samples: Samples, steps: int = 1200) -> Prepared:
    """Return trained retaining heads."""
    found = []
    for batch in samples.each():
        for number, seen in enumerate(seen_by(model, batch.ids)):
            found.append(retaining.Sample(
                number, seen.q, seen.k, seen.v, samples.context, seen.module.scaling
            ))  # fmt: skip
    one = found[0]
    channels = sum(x.shape[1] * x.shape[3] for x in (one.q, one.k, one.v))
    first = retaining.fresh(model.config.num_hidden_layers, channels, one.k.shape[1], _WIDTH)
    losses: list[float] = []
    with torch.enable_grad():
        made = retaining.train(first, found, steps=steps, watch=_note(losses, steps))
    tensors = {"first": made.first.half(), "second": made.second.half()}
    return Prepared("RetainingHeads", tensors, _about(losses, len(found)))


def cskv(model: Any, samples: Samples) -> Prepared:
    """Return bases of four ranks."""
    pairs, given = _projections(model, samples)
    tensors: dict[str, Tensor] = {}
    for rank in RANKS:
        bases = low_rank.fit(pairs, given, low_rank.Fit(rank, steps=300))
        tensors |= basis_tensors(str(rank), bases)
    return Prepared("Bases", tensors, {"ranks": RANKS})


def kv_heads(model: Any, samples: Samples) -> Prepared:
    """Return bases that leave one key-value head."""
    pairs, given = _projections(model, samples)
    bases = fewer_heads.fit(pairs, given, model.config.num_key_value_heads, 1)
    return Prepared("Bases", basis_tensors("bases", bases), {"groups": 1})


@torch.no_grad()
def _projections(model: Any, samples: Samples) -> tuple[list[Any], list[list[Tensor]]]:
    """Return the key and value projections of all layers, and what they are given."""
    pairs = [(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in model.model.layers]
    with low_rank.inputs_of([keys for keys, _ in pairs]) as given:
        for batch in samples.each():
            model(input_ids=batch.ids)
    return pairs, given


def _note(losses: list[float], steps: int) -> Any:
    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if (step + 1) % max(steps // 4, 1) == 0:
            print(f"  step {step + 1} of {steps}, loss {loss:.4g}", flush=True)

    return note


def _about(losses: list[float], samples: int) -> dict[str, Any]:
    """Return how training went: the mean loss of the first and of the last round."""
    first, last = losses[:samples], losses[-samples:]
    return {"steps": len(losses), "loss": [sum(first) / len(first), sum(last) / len(last)]}
