"""Offline stages that train: gates of heads, mixing weights, retaining heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diffcache.errors import AttachError
from diffcache.eval.kv.offline import Prepared, Report, Sample, Work, observations, read, seen_by
from diffcache.foreign import attention_names, set_attention_names
from diffcache.kv.attend import Query
from diffcache.kv.hf.model import decoder_of
from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn.duo import Gates, GateTraining, fit_gates, mixed_attention, retrieval_heads
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import h2o
from diffcache.kv.slots import Slots, span

NAME = "diffcache-gates"
_BUDGETS = (0.5, 0.25, 0.125, 0.0625)


def duo_attention(work: Work, *, share: float = 0.5, sinks: int = 4, recent: int = 32, epochs: int = 4) -> Prepared:
    """Return which heads hold everything, and the gates.

    A `share` of the heads holds everything; the others see the first `sinks` and the latest `recent` tokens.
    """
    gates, total = Gates.open(*_shape(work)), work.samples.count * epochs
    places = _places(work.model)

    def student(values: Tensor, sample: Sample) -> Tensor:
        gate = {layer: values[number] for layer, number in places.items()}
        with torch.enable_grad(), _gated(work.model, gate, sinks, recent):
            return _answers(work.model, sample)

    needed = [parameter.requires_grad for parameter in work.model.parameters()]
    work.model.requires_grad_(False)
    try:
        with torch.enable_grad():
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


def _shape(work: Work) -> tuple[int, int]:
    """Return the layers of full attention and their key-value heads."""
    layers = seen_by(work.model, next(iter(work.samples.each())).ids[:, :2])
    return len(layers), layers[0].slots.k.shape[1]


def _places(model: Any) -> dict[int, int]:
    """Return layer -> its place among those of full attention."""
    cache = read(model, Recipe(), torch.zeros(1, 2, dtype=torch.long, device=model.device))
    return {layer: number for number, layer in enumerate(cache.owned)}


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
            plain: tuple[Tensor, None] = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
            return plain
        slots = Slots(k, v, {"pos": span(0, k.shape[2], len(k), k.device)})
        if len(gate) != k.shape[1]:
            raise AttachError(
                f"{type(model).__name__} holds {len(gate)} and attends with {k.shape[1]} key-value "
                "heads: gates of heads are not of what it holds; take another recipe"
            )
        scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
        out = mixed_attention(Query(q, 0, scale), slots, gate.to(q.device), sinks, recent)
        return out.transpose(1, 2).contiguous(), None

    decoder: Any = decoder_of(model)
    before = attention_names(decoder)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        set_attention_names(before)


def lococo(
    work: Work, *, steps: int = 400, memory: int | None = None, recent: int | None = None, taps: int = 7
) -> Prepared:
    """Return trained mixing weights.

    A memory has at most `memory` slots, half of a context by default; the last `recent` tokens are always kept,
    a 32nd of a context by default; `taps` slots, an odd number, are under the convolution.
    """
    found = []
    context = work.samples.context
    last = max(context // 32, 1) if recent is None else recent
    most = context // 2 if memory is None else memory
    for number, sample in enumerate(work.each("memories")):
        budget = min(int(context * _BUDGETS[number % len(_BUDGETS)]), most)
        recipe = h2o(budget)
        cache = read(work.model, recipe, sample.prompt)
        layers = seen_by(work.model, sample.ids)
        for seen, whole in zip(observations(cache), layers, strict=True):
            size = torch.full(seen.lengths.shape, budget)
            plan = TopK(recent=last)(recipe.score(seen).float(), size, seen)  # type: ignore[misc]
            later = whole.query.narrow(context, whole.query.count)
            found.append(mixing.MixSample(seen, plan, Query(later.q, context, later.scale)))
    slots = found[0].seen.slots
    channels = slots.k.shape[3] + slots.v.shape[3]
    layers_count = 1 + max(each.seen.layer for each in found)
    fresh = mixing.fresh(layers_count, most, channels, taps)
    first = replace(fresh, **{name: x.to(slots.k.device) for name, x in vars(fresh).items()})
    losses: list[float] = []
    with torch.enable_grad():
        made = mixing.train(first, found, recent=last, steps=steps, watch=_noting(losses, steps, work.report))
    tensors = {name: getattr(made, name).half().cpu() for name in ("weight", "bias", "gate")}
    about = _went(losses, len(found)) | {"recent": last}
    return Prepared("MixWeights", tensors, {"weights": ["weight"]}, about)


def locret(work: Work, *, steps: int = 1200, width: int = 64) -> Prepared:
    """Return trained retaining heads.

    `width` are the hidden channels of a layer's network.
    """
    found = []
    for sample in work.each("targets"):
        for number, seen in enumerate(seen_by(work.model, sample.ids)):
            q, k, v = (x.float().cpu() for x in (seen.query.q, seen.slots.k, seen.slots.v))
            found.append(retaining.RetainCase(number, q, k, v, work.samples.context, float(seen.query.scale)))
    one = found[0]
    channels = sum(x.shape[1] * x.shape[3] for x in (one.q, one.k, one.v))
    first = retaining.fresh(1 + max(each.layer for each in found), channels, one.k.shape[1], width)
    losses: list[float] = []
    with torch.enable_grad():
        made = retaining.train(first, found, steps=steps, watch=_noting(losses, steps, work.report))
    tensors = {"first": made.first.half(), "second": made.second.half()}
    return Prepared("RetainingHeads", tensors, {"heads": ["first"]}, _went(losses, len(found)))


def _noting(losses: list[float], steps: int, report: Report) -> Callable[[int, float], None]:
    def note(step: int, loss: float) -> None:
        losses.append(loss)
        report(step + 1, steps, f"training, loss {loss:.3g}")

    return note


def _went(losses: list[float], samples: int) -> dict[str, Any]:
    """Return how training went: the mean loss of the first and of the last round."""
    first, last = losses[:samples], losses[-samples:]
    return {"steps": len(losses), "loss": [sum(first) / len(first), sum(last) / len(last)]}
