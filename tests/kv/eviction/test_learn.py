"""Heads are told apart: by gates that are trained, and by what they look at in repeated tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.learn import duo, razor
from diffcache.kv.learn.duo import Gates, GateTraining, fit_gates, mixed_attention
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View
from tests.kv.tiny import llama

CPU = torch.device("cpu")


def prompt(tokens: int = 30, pad: int = 0) -> tuple[Query, Slots]:
    k, v = torch.randn(2, 2, 2, tokens, 8).unbind()
    pos = span(0, tokens, 2, CPU).clone()
    pos[1, :, :pad] = -1
    return Query(torch.randn(2, 4, tokens, 8), 0, 8**-0.5), Slots(k, v, {"pos": pos})


def test_mixed_attention_mixes_two_attentions() -> None:
    query, slots = prompt(pad=6)
    query = replace(query, softcap=2.0, sinks=torch.randn(4))
    gate = torch.tensor([0.3, 0.9])
    order = torch.arange(30)
    near = order[:, None] - order < 7
    sinks = torch.stack([order < 3, order < 9])  # the second row begins at 6
    causal = order <= order[:, None]
    mask = (causal & (near | sinks[:, None])) & (slots.pos >= 0)
    few = replace(query, mask=mask[:, None])
    whole = attend(query, [View(slots)])
    share = gate.repeat_interleave(2).view(1, 4, 1, 1)
    wanted = share * whole + (1 - share) * attend(few, [View(slots)])
    found = mixed_attention(query, slots, gate, 3, 7)
    for row, first in ((0, 0), (1, 6)):
        torch.testing.assert_close(found[row, :, first:], wanted[row, :, first:])
    assert found.isfinite().all()


class Gated:
    """A tiny Llama that runs with mixed attention."""

    def __init__(self) -> None:
        self.model: Any = llama(seed=2, num_hidden_layers=2)
        with torch.no_grad():  # nobody listens to the second key-value head of the first layer
            self.model.model.layers[0].self_attn.o_proj.weight[:, 32:] = 0
        self.gates: Tensor | None = None
        AttentionInterface.register("gated", self.attention)
        AttentionMaskInterface.register("gated", sdpa_mask)
        self.model.set_attn_implementation("gated")

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        query = Query(q, 0, kwargs["scaling"])
        slots = Slots(k, v, {"pos": span(0, k.shape[2], len(k), CPU)})
        if self.gates is None:
            out = attend(query, [View(slots)])
        else:
            out = mixed_attention(query, slots, self.gates[module.layer_idx], 2, 6)
        return out.transpose(1, 2), None

    def run(self, gates: Tensor | None, ids: Tensor) -> Tensor:
        self.gates = gates
        hidden: Tensor = self.model.model(ids).last_hidden_state
        return hidden[:, -12:]


@pytest.fixture(scope="module")
def gated() -> Gated:
    return Gated()


def test_gates_of_a_model_fall_where_they_do_not_matter(gated: Gated) -> None:
    ids = torch.randint(3, 256, (8, 2, 40), generator=torch.Generator().manual_seed(0))
    steps: list[tuple[int, float]] = []
    settings: dict[str, Any] = {"student": gated.run, "teacher": lambda batch: gated.run(None, batch)}
    settings["training"] = GateTraining(penalty=0.05, rate=0.05, epochs=3)
    with torch.no_grad():
        opened = float((gated.run(torch.ones(2, 2), ids[0]) - gated.run(None, ids[0])).abs().max())
    assert opened < 1e-4  # gates of one are the model itself
    first = fit_gates(Gates.open(2, 2), ids, report=lambda *at: steps.append(at), **settings)
    assert first.losses[-1] < first.losses[0] == pytest.approx(0.05, rel=1e-3)
    assert steps == list(enumerate(first.losses, 1)) and len(steps) == 24
    values = first.values
    assert values[0, 1] == values.min() < 0.1 and values.max() > 0.5
    assert not duo.retrieval_heads(values, 0.75)[0][1]
    whole = fit_gates(Gates.open(2, 2), [*ids[:4], *ids[4:]], **{**settings, "training": GateTraining(rate=0.05)})
    half = fit_gates(Gates.open(2, 2), ids[:4], **{**settings, "training": GateTraining(rate=0.05)})
    both = fit_gates(half, ids[4:], **{**settings, "training": GateTraining(rate=0.05)})
    assert torch.equal(both.values, whole.values) and both.losses == whole.losses
    assert all(p.grad is None for p in gated.model.parameters())


@torch.no_grad()
def test_scores_are_sums_over_eager_attention() -> None:
    model: Any = llama(seed=3, num_hidden_layers=2)
    period, ids = 11, razor.repeated_tokens(200, 11, 3, first=1)
    assert ids.shape == (1, 34) and torch.equal(ids[:, 1:12], ids[:, 23:])
    cache = cache_for(model, razor.probe(period, first=1, groups=2))
    model(ids, past_key_values=cache)
    echo, induction = razor.head_scores(cache.store)
    detach(model)
    model.set_attn_implementation("eager")
    for layer, probs in enumerate(model(ids, output_attentions=True).attentions):
        for head in range(4):
            copies = follows = 0.0
            for at in range(1 + period, 34):
                for back in range(1, at):
                    copies += float(probs[0, head, at, at - back]) * (back % period == 0)
                for slot in range(2, at + 1):
                    follows += float(probs[0, head, at, slot]) * ((at - slot + 1) % period == 0)
            assert float(echo[layer, head]) == pytest.approx(copies / 22, rel=1e-4, abs=1e-6)
            assert float(induction[layer, head]) == pytest.approx(follows / 22, rel=1e-4, abs=1e-6)
