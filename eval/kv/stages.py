"""Make the tables that recipes need, for any model: `diffcache kv calibrate`.

Stages fit bases and codebooks of keys and values, measure heads and layers, and train gates, mixing weights and
retaining heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diffcache.errors import AttachError
from diffcache.eval.kv.contexts import Prepared, Report, Sample, Work, attending, observations, read, seen_by
from diffcache.eval.kv.recipe_words import basis_tensors, write_table
from diffcache.eval.methods import naming
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.attention import attention as stock
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.model import attentions
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn import codebook, latents, razor
from diffcache.kv.learn import compresskv as heads_that_retrieve
from diffcache.kv.learn import cskv as low_rank
from diffcache.kv.learn import epicache as blockwise
from diffcache.kv.learn import kv_heads as fewer_heads
from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn.duo import Gates, GateTraining, fit_gates, mixed_attention, retrieval_heads
from diffcache.kv.learn.label_channels import LabelCalibration
from diffcache.kv.learn.prefixkv import layer_shares
from diffcache.kv.life.on_request import prefill_by_blocks
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import compresskv as compresskv_recipe
from diffcache.kv.recipes.eviction import epicache as epicache_recipe
from diffcache.kv.recipes.eviction import h2o
from diffcache.kv.recipes.eviction import prefixkv as prefixkv_recipe
from diffcache.kv.retrieval.a2ats import far_weight
from diffcache.kv.retrieval.summary import news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View

_NEAR = 1e-2  # relative to the largest value; rotating there and back in bfloat16 is off by up to 4e-3
SHARES = (0.75, 0.5, 0.375, 0.25)  # of the channels of all key-value heads


def cskv(work: Work, *, ranks: tuple[int, ...] = (), steps: int = 300) -> Prepared:
    """Return bases of some ranks.

    Ranks are coordinates of a token's keys and of its values; shares of 0.75, 0.5, 0.375 and 0.25 of their channels by
    default. `steps` are the training steps of each basis.
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
    """Return bases that leave only `groups` key-value heads."""
    pairs, given = _projections(work)
    heads = work.model.config.get_text_config(decoder=True).num_key_value_heads
    bases = fewer_heads.fit(pairs, given, heads, groups)
    return Prepared("Bases", basis_tensors("bases", bases), {"bases": ["bases"]}, {"groups": groups})


def xquant_latent(work: Work) -> Prepared:
    """Return the bases of the projections' weights; one context is read to check the cache's content."""
    work.report(0, 1, "weights")
    pairs = _pairs(work.model)
    _check_held(work.model, pairs, next(work.samples.each()))
    bases = latents.latents(pairs)
    return Prepared("Bases", basis_tensors("bases", bases), {"bases": ["bases"]})


def _pairs(model: Any) -> list[tuple[nn.Linear, nn.Linear]]:
    """Return the key and value projections of the layers of full attention.

    Raises AttachError if a layer has no such projections.
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
    """Return the key and value projections of all layers, and their inputs."""
    pairs = _pairs(work.model)
    _check_held(work.model, pairs, next(work.samples.each()))
    with low_rank.inputs_of([keys for keys, _ in pairs]) as given:
        for sample in work.each("inputs"):
            work.model(input_ids=sample.ids, use_cache=False)
    return pairs, given


@torch.no_grad()
def _check_held(model: Any, pairs: Sequence[tuple[nn.Linear, nn.Linear]], sample: Sample) -> None:
    """Check that a cache holds what the projections make.

    Raises AttachError if the model changes keys or values in between, as by normalization.
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
        self.keys.setdefault(layer.index, []).append(slots.k.float().cpu())
        self.weight.setdefault(layer.index, []).append(far_weight(query, layer, self.far).cpu())
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


BUDGETS = (0.5, 0.25, 0.125, 0.0625)


def razor_attention(work: Work, *, period: int = 128) -> Prepared:
    """Return the heads that look for copies, found on random tokens that repeat after `period`.

    Of the contexts only the seed is used.
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
    """Return the number of query heads that read one key-value head."""
    seen = seen_by(model, torch.zeros(1, 2, dtype=torch.long, device=model.device))[0]
    return seen.query.q.shape[1] // seen.slots.k.shape[1]


def compresskv(work: Work, *, heads: int = 2, budget: float = 0.25) -> Prepared:
    """Return the heads that retrieve answers, and the error of each layer under eviction.

    `heads` heads of each layer are taken, where the paper takes four of 32; the eviction keeps the share `budget` of
    the tokens.
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
    """Return the change that eviction makes to the questions' attention output in each layer."""
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
    """Return the tokens that each layer keeps, for each budget.

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

    By default they are an eighth of a head's channels, where the paper takes a sixteenth of 128.
    """
    watch = LabelCalibration()
    for sample in work.each("channels"):
        read(work.model, Recipe(retrieve=watch), sample.prompt)
    size = watch.importance().shape[-1]
    found = torch.tensor(watch.channels(max(size // 8, 1) if channels is None else channels))
    return Prepared("table", {"channels": found}, {"channels": ["channels"]}, {"by": "qk"})


def epicache(work: Work, *, budget: float = 0.25, block: int = 128) -> Prepared:
    """Return the error of each layer when a context is read block by block with eviction.

    The questions of a context are its probe. The share `budget` of the tokens is kept after each block of `block`
    tokens.
    """
    found = []
    for sample in work.each("blocks"):
        whole = read(work.model, Recipe(), sample.prompt)
        cache = cache_for(work.model, epicache_recipe(budget), mode="native")
        keys: list[list[Tensor]] = []
        forward = partial(_read_block, work.model, cache, keys)
        with torch.no_grad():
            prefill_by_blocks(cache, forward, sample.prompt, sample.ids[:, sample.context :], block)
        full = [layer.read().k for layer in whole.store.layers]
        parts = [torch.cat(layer, 2) for layer in zip(*keys, strict=True)]
        found.append(blockwise.sensitivity(full, parts).cpu())
    weights = blockwise.layer_weights(torch.stack(found).mean(0))
    made = {"weights": torch.tensor(weights, dtype=torch.float64)}
    return Prepared("table", made, {"weights": ["weights"]}, {"budget": budget, "block": block})


def _read_block(model: Any, noted: KVCache, keys: list[list[Tensor]], ids: Tensor, cache: KVCache) -> None:
    """Run a model on ids, and note the new keys of one cache, [B, H, n, D] of each layer."""
    model(input_ids=ids, **with_cache(model, cache))
    if cache is noted:  # this cache, and not a fork that a probe is run on
        new = ids.shape[1]
        read_slots = [layer.read().k for layer in cache.store.layers]
        keys.append([k[:, :, -new:].clone() for k in read_slots])


def duo_attention(work: Work, *, share: float = 0.5, sinks: int = 4, recent: int = 32, epochs: int = 4) -> Prepared:
    """Return the heads that hold everything, and the gates, trained in `epochs` passes over the contexts.

    A `share` of the heads holds everything; the others see the first `sinks` and the latest `recent` tokens.
    """
    cache = read(work.model, Recipe(), torch.zeros(1, 2, dtype=torch.long, device=work.model.device))
    form = cache.store.layers[0].form
    assert form is not None
    gates, total = Gates.open(len(cache.owned), form.heads), work.samples.count * epochs
    places = {layer: number for number, layer in enumerate(cache.owned)}

    def student(values: Tensor, sample: Sample) -> Tensor:
        gate = {layer: values[number] for layer, number in places.items()}
        with _gated(work.model, gate, sinks, recent):
            return _answers(work.model, sample)

    needed = [parameter.requires_grad for parameter in work.model.parameters()]
    work.model.requires_grad_(False)
    try:
        found = fit_gates(
            gates,
            list(work.samples.each()),
            student=student,
            teacher=lambda sample: _answers(work.model, sample),
            training=GateTraining(epochs=epochs),
            report=lambda step, _: work.report(step, total, "gates"),
        )
    finally:
        for parameter, before in zip(work.model.parameters(), needed, strict=True):
            parameter.requires_grad_(before)
    heads = torch.tensor(retrieval_heads(found.values, share))
    about = {"sinks": sinks, "recent": recent, "share": share, "loss": found.losses[-1]}
    return Prepared("table", {"heads": heads, "gates": found.values}, {"heads": ["heads"]}, about)


def _answers(model: Any, sample: Sample) -> Tensor:
    """Return the last hidden states that answers are read from."""
    hidden: Tensor = model.base_model(input_ids=sample.ids, use_cache=False).last_hidden_state
    return hidden[:, torch.cat([answer.said for answer in sample.answers])]


@contextmanager
def _gated(model: Any, gates: dict[int, Tensor], sinks: int, recent: int) -> Iterator[None]:
    """Have layers mix attention over everything with that over few tokens, by their gates [H]."""

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        gate = gates.get(module.layer_idx)  # type: ignore[call-overload]
        if gate is None:
            return stock(sdpa_attention_forward, module, q, k, v, mask, **kwargs)
        slots = Slots(k, v, {"pos": span(0, k.shape[2], len(k), k.device)})
        if len(gate) != k.shape[1]:
            raise AttachError(
                f"{type(model).__name__} holds {len(gate)} and attends with {k.shape[1]} key-value "
                "heads: gates of heads are not of what it holds; take another recipe"
            )
        scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
        query = Query(q, 0, scale, mask=mask, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"))
        out = mixed_attention(query, slots, gate.to(q.device), sinks, recent)
        return out.transpose(1, 2).contiguous(), None

    with attending(model, "diffcache-gates", attention):
        yield


def lococo(
    work: Work, *, steps: int = 400, memory: int | None = None, recent: int | None = None, taps: int = 7
) -> Prepared:
    """Return mixing weights after `steps` training steps.

    A memory has at most `memory` slots, half of a context by default; the last `recent` tokens are always kept, a 32nd
    of a context by default; `taps` slots, an odd number, are under the convolution.
    """
    found = []
    context = work.samples.context
    last = max(context // 32, 1) if recent is None else recent
    most = context // 2 if memory is None else memory
    for number, sample in enumerate(work.each("memories")):
        budget = min(int(context * BUDGETS[number % len(BUDGETS)]), most)
        recipe = h2o(budget)
        cache = read(work.model, recipe, sample.prompt)
        layers = seen_by(work.model, sample.ids)
        for seen, whole in zip(observations(cache), layers, strict=True):
            size = torch.full(seen.lengths.shape, budget)
            plan = TopK(recent=last)(recipe.score(seen).float(), size, seen)  # type: ignore[misc]
            found.append(mixing.MixSample(seen, plan, whole.query.narrow(context, whole.query.count)))
    slots = found[0].seen.slots
    channels = slots.k.shape[3] + slots.v.shape[3]
    layers_count = 1 + max(each.seen.layer for each in found)
    fresh = mixing.fresh(layers_count, most, channels, taps)
    first = replace(fresh, **{name: x.to(slots.k.device) for name, x in vars(fresh).items()})
    losses: list[float] = []
    made = mixing.train(first, found, recent=last, steps=steps, watch=_noting(losses, steps, work.report))
    tensors = {name: getattr(made, name).half().cpu() for name in ("weight", "bias", "gate")}
    about = _went(losses, len(found)) | {"recent": last}
    return Prepared("MixWeights", tensors, {"weights": ["weight"]}, about)


def locret(work: Work, *, steps: int = 1200, width: int = 64) -> Prepared:
    """Return retaining heads after `steps` training steps; the network of a layer has `width` hidden channels."""
    found = []
    for sample in work.each("targets"):
        for number, seen in enumerate(seen_by(work.model, sample.ids)):
            q, k, v = (x.float().cpu() for x in (seen.query.q, seen.slots.k, seen.slots.v))
            found.append(retaining.RetainCase(number, q, k, v, work.samples.context, float(seen.query.scale)))
    one = found[0]
    channels = sum(x.shape[1] * x.shape[3] for x in (one.q, one.k, one.v))
    first = retaining.fresh(1 + max(each.layer for each in found), channels, one.k.shape[1], width)
    losses: list[float] = []
    made = retaining.train(first, found, steps=steps, watch=_noting(losses, steps, work.report))
    tensors = {"first": made.first.half(), "second": made.second.half()}
    return Prepared("RetainingHeads", tensors, {"heads": ["first"]}, _went(losses, len(found)))


def _noting(losses: list[float], steps: int, report: Report) -> Callable[[int, float], None]:
    def note(step: int, loss: float) -> None:
        losses.append(loss)
        report(step + 1, steps, f"training, loss {loss:.3g}")

    return note


def _went(losses: list[float], samples: int) -> dict[str, Any]:
    """Return a summary of a training: the mean loss of the first and of the last round."""
    first, last = losses[:samples], losses[-samples:]
    return {"steps": len(losses), "loss": [sum(first) / len(first), sum(last) / len(last)]}


# Recipe -> function that makes its tables, called with the work and settings.
_STAGES = (
    duo_attention,
    razor_attention,
    compresskv,
    prefixkv,
    epicache,
    lococo,
    locret,
    double_sparsity,
    a2ats,
    cskv,
    kv_heads,
    xquant_latent,
)
MAKERS: dict[str, Callable[..., Prepared]] = {stage.__name__: stage for stage in _STAGES}


def check(name: str, settings: dict[str, Any]) -> None:
    """Check that tables of a name can be made, and that its stage has these settings.

    Raises ValueError if not; the message lists the valid ones.
    """
    if name not in MAKERS:
        raise ValueError(f"no table {name!r}; there are {', '.join(MAKERS)}")
    known = settings_of(name)
    wrong = sorted(set(settings) - set(known))
    if wrong:
        taken = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "none"
        raise ValueError(f"{name}: measuring has no setting {wrong[0]!r}; it has {taken}")


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of the stage that makes the tables of a recipe, with their defaults."""
    parameters = inspect.signature(MAKERS[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def make(name: str, work: Work, file: Path, weights: str, **settings: Any) -> Prepared:
    """Make the tables of a recipe for a model, and write them to a file.

    The model is in the state that it is used in; the digest of its weights is checked where the tables are read.
    Raises AttachError if the model has no such tables, and ValueError if there is no such name or setting, or one is
    out of its range.
    """
    check(name, settings)
    try:
        with naming(f"tables of {name}"):
            found = MAKERS[name](work, **settings)
    finally:
        detach(work.model)
    gives = {setting: list(entries) for setting, entries in found.gives.items()}
    about: dict[str, Any] = {"kind": found.kind, "recipe": name, "weights": weights}
    about |= {"samples": work.samples.about(), "gives": gives}
    about |= {"settings": settings_of(name) | settings, **found.about}
    write_table(file, found.tensors, about)
    return found


def shown(found: Prepared) -> str:
    """Return small tables as text, and the shapes of large ones."""
    parts = []
    for name, value in found.tensors.items():
        small = value.numel() <= 32
        parts.append(f"{name}={value.tolist() if small else list(value.shape)}")
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
