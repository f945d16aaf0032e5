"""Elastic-Cache against a dense recompute with stale states put in by hand, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.dllm import Decoding, ElasticCache, Quota, Sampler, Schedule, Threshold, check_coverage
from diffcache.dllm.rules import Rule
from diffcache.targets import handle_of
from tests.dllm.toys import MASK, Compared, bidirectional, padded, prompts, rotated, turns

LAYERS, HEADS, SIZE, CHANNELS = 4, 4, 8, 32
LENGTHS = (9, 5)  # of the prompts
LONGEST, ANSWER = max(LENGTHS), 12
WIDTH = LONGEST + ANSWER
SCHEDULE = Schedule(ANSWER, None, window=5)
SETTINGS: dict[str, tuple[ElasticCache, Rule]] = {
    "head": (ElasticCache(gamma=0.8), Quota()),
    "key": (ElasticCache(gamma=0.5, similarity="key", track=2), Threshold(0.16)),
    "all masks": (ElasticCache(gamma=0.8, similarity="key", block_caching=False), Quota()),
    "never": (ElasticCache(gamma=-1), Quota()),
    "always": (ElasticCache(gamma=2), Threshold(0.16)),
}


def toy(dtype: torch.dtype = torch.float64) -> Any:
    return bidirectional(dtype, num_hidden_layers=LAYERS)


@dataclass(eq=False)
class Seen:
    """One step: what went in, what came out and what is held."""

    ids: Tensor
    plan: Any
    logits: Tensor
    held: Any  # clones
    tokens: tuple[int, int]

    def places(self, flags: Tensor, row: int) -> set[int]:
        return set(flags[row].nonzero()[:, 0].tolist())


@torch.no_grad()
def follow(model: Any, policy: Any, rule: Rule, compiled: bool = False) -> list[Seen]:
    """Decode by random logits, so that every policy meets the same tokens, and note each step."""
    ids, valid = padded(prompts(*LENGTHS))
    decoding = Decoding(ids, SCHEDULE, Sampler(rule=rule), MASK, valid)
    generator, found = torch.Generator().manual_seed(4), []
    with diffcache.wrapped(model, policy), diffcache.run(model):
        handle = handle_of(model)
        while not decoding.is_finished:
            plan = replace(policy.plan(decoding.state), compiled=compiled)
            check_coverage(decoding.state, plan)
            logits = model(decoding.ids, attention_mask=decoding.valid, row_plan=plan, use_cache=False).logits
            held = handle.run().storage[handle.denoisers[0].extensions[0]]
            kept = replace(
                held,
                layers=[[x.clone() for x in layer.tensors()] for layer in held.layers],
                inputs={n: x.clone() for n, x in held.inputs.items()},
                queries={n: x.clone() for n, x in held.queries.items()},
            )
            counts = handle.run().record.calls[-1].counts["token-layers"]
            found.append(Seen(decoding.ids, plan, logits, kept, counts))
            forced = torch.randn(*ids.shape[:1], WIDTH, 64, generator=generator) * 2
            rows = plan.index(*decoding.ids.shape, ids.device)
            decoding.commit(forced[torch.arange(len(ids))[:, None], rows], plan)
    return found


# the oracle ----------------------------------------------------------------------------------------


class Oracle:
    """One sequence. Rows that a layer does not compute are NaN, so that nothing can use them."""

    def __init__(self, model: Any, policy: ElasticCache, width: int) -> None:
        self.core, self.head, self.policy, self.width = model.model, model.lm_head, policy, width
        x = torch.zeros(1, width, CHANNELS, dtype=torch.float64)
        self.turn = turns(self.core, x, torch.arange(width)[None])[0, :, None]
        nothing = torch.full((LAYERS, width, CHANNELS), torch.nan, dtype=torch.float64)
        self.x = nothing.clone()
        self.q = nothing.clone().view(LAYERS, width, HEADS, SIZE)
        self.k, self.v = self.q.clone(), self.q.clone()
        self.tracked: list[set[int]] = [set() for _ in range(LAYERS)]
        self.rows: set[int] = set()
        self.start = 0

    def attention(self, q: Tensor, layer: int, keys: Tensor) -> Tensor:
        """Return weights [H, n, T]."""
        return torch.einsum("nhd,thd->hnt", q, keys).div(SIZE**0.5).softmax(-1)

    def step(self, ids: Tensor, wanted: set[int] | None, window: set[int]) -> Tensor:
        """Return logits [T, V]; `wanted` is None for the first step."""
        tracked = sorted(set().union(*self.tracked))
        every = list(range(self.width))
        self.rows = set(every) if wanted is None else wanted | set(tracked)
        self.start, fed = (0 if wanted is None else LAYERS), sorted(self.rows)
        hidden = torch.full((self.width, CHANNELS), torch.nan, dtype=torch.float64)
        hidden[fed] = self.core.embed_tokens(ids[fed])
        decided = set((ids != MASK).nonzero()[:, 0].tolist())
        for number, layer in enumerate(self.core.layers):
            self.x[number, fed] = hidden[fed]
            if number >= self.start:
                fed = every
                hidden = self.x[number].clone()
            inner, attn = layer.input_layernorm(hidden), layer.self_attn
            q, k, v = (
                project(inner).view(self.width, -1, SIZE).repeat_interleave(repeats, 1)
                for project, repeats in ((attn.q_proj, 1), (attn.k_proj, 2), (attn.v_proj, 2))
            )
            old = self.attention(self.q[number, tracked], number, self.k[number])
            self.q[number, fed], self.k[number, fed] = (rotated(x, self.turn)[fed] for x in (q, k))
            self.v[number, fed] = v[fed]
            weights = self.attention(self.q[number], number, self.k[number])
            if number < self.start:
                self.test(number, old, weights[:, tracked])
            mass = weights[:, sorted(window)].sum((0, 1))
            best = sorted(decided, key=lambda t: -mass[t])[: self.policy.track]
            self.tracked[number] = set(best)
            out = torch.einsum("hnt,thd->nhd", weights[:, fed], self.v[number])
            fresh = torch.full_like(hidden, torch.nan)
            fresh[fed] = hidden[fed] + attn.o_proj(out.flatten(1))
            fresh[fed] += layer.mlp(layer.post_attention_layernorm(fresh[fed]))
            hidden = fresh
        return self.head(self.core.norm(hidden))

    def test(self, number: int, old: Tensor, new: Tensor) -> None:
        axis = 2 if self.policy.similarity == "key" else 0
        norms = old.square().sum(axis).sqrt() * new.square().sum(axis).sqrt()
        if float(((old * new).sum(axis) / norms).mean()) < self.policy.gamma:
            self.start = min(self.start, number + 1)


@torch.no_grad()
def compared(name: str, compiled: bool = False) -> Compared:
    """Hold every layer and step of a padded batch against the oracle."""
    model, (policy, rule), found = toy(), SETTINGS[name], Compared()
    oracles = [Oracle(model, policy, length + ANSWER) for length in LENGTHS]
    starts, commits = set(), set()
    notes = follow(model, policy, rule, compiled)
    for step, now in enumerate(notes):
        rows, before, both = [], notes[max(step - 1, 0)].ids, ([], [])
        for row, oracle in enumerate(oracles):
            skip = WIDTH - oracle.width
            ids = now.ids[row, skip:]
            masks = (ids == MASK).nonzero()[:, 0].tolist()
            if not masks:
                assert now.held.starts[row] == LAYERS
                continue
            window = set(masks[:5] if policy.block_caching else masks)
            just = set((ids != before[row, skip:]).nonzero()[:, 0].tolist())
            fed = window | just
            logits = oracle.step(ids, fed if step else None, window)
            at = now.plan.index(2, WIDTH, ids.device)[row]
            assert step == 0 or set(at.tolist()) == {p + skip for p in fed}
            there = at >= skip
            torch.testing.assert_close(now.logits[row][there], logits[at[there] - skip], rtol=0, atol=1e-10)
            for some, one in zip(both, (now.logits[row][there], logits[at[there] - skip]), strict=True):
                some.append(one)
            for layer in range(LAYERS):
                k, v = (x[row, :, skip:].transpose(0, 1).repeat_interleave(2, 1) for x in now.held.layers[layer])
                pairs = [(k, oracle.k), (v, oracle.v)]
                if policy.gamma > 0:  # else no layer is ever widened, and these are not held
                    pairs.append((now.held.inputs[layer][row, skip:], oracle.x))
                    pairs.append((now.held.queries[layer][row, skip:], oracle.q))
                for ours, theirs in pairs:
                    torch.testing.assert_close(ours, theirs[layer], rtol=0, atol=1e-10)
                assert (layer in now.held.inputs) == (policy.gamma > 0)
            assert now.places(now.held.tracked, row) == {p + skip for p in set().union(*oracle.tracked)}
            assert now.held.starts[row] == oracle.start
            old = sorted({p + skip for p in range(oracle.width)} - {p + skip for p in oracle.rows})
            for layer in range(oracle.start):  # frozen to the bit
                pairs = zip(now.held.layers[layer], notes[step - 1].held.layers[layer], strict=True)
                assert all(torch.equal(a[row, :, old], b[row, :, old]) for a, b in pairs)
            starts.add((step, oracle.start))
            commits.add(len(just))
            rows.append(len(oracle.rows))
        found.step(now.tokens[0], *map(torch.cat, both))
        wide = LAYERS - min(now.held.starts)
        assert now.tokens[0] == 2 * (wide * WIDTH + (LAYERS - wide) * max(rows))
        assert sum(now.tokens) == 2 * LAYERS * WIDTH
    later = {start for step, start in starts if step}
    assert later == {"never": {LAYERS}, "always": {1}}.get(name, later)
    if name not in ("never", "always"):  # layers in between, and sequences that differ
        assert len(later) > 2 and len(starts) > len(notes)
    assert rule.is_fixed or max(commits) > 1
    return found


# the front door ----------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count the passes that are one graph, and run them as they are written."""
    found: list[Any] = []

    def count(forward: Any) -> Any:
        return lambda *args, **kwargs: found.append(1) or forward(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", count)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_of_all_layers_and_what_follows_a_drift_are_those_of_the_oracle(passes: list[Any], name: str) -> None:
    compared(name, compiled=True)
    assert bool(passes) == (name not in ("key", "always"))  # which drift early in all steps


@torch.no_grad()
@pytest.mark.parametrize(("compiled", "tests"), [(False, [(1,)] * 3), (True, [(3, 1)])])
def test_an_interrupt_at_the_test_of_a_layer_drops_the_run(
    passes: list[Any], monkeypatch: pytest.MonkeyPatch, compiled: bool, tests: list[Any]
) -> None:
    """The host reads one number a layer, all at once where that is compiled; the last layer has none."""
    model, policy, reads, to_list = toy(), ElasticCache(gamma=1e-9), [], Tensor.tolist
    decoding = Decoding(torch.tensor(prompts(9)), SCHEDULE, Sampler(), MASK)

    def read(x: Tensor) -> Any:
        reads.append(x.shape)
        if reads == tests:
            raise KeyboardInterrupt
        return to_list(x)

    with diffcache.wrapped(model, policy), diffcache.run(model):
        for step in range(4):
            plan = replace(policy.plan(decoding.state), compiled=compiled)
            if step < 3:
                decoding.commit(model(decoding.ids, row_plan=plan, use_cache=False).logits, plan)
        monkeypatch.setattr(Tensor, "tolist", read)
        with pytest.raises(KeyboardInterrupt):
            model(decoding.ids, row_plan=plan, use_cache=False)
        assert bool(passes) == compiled
        with pytest.raises(diffcache.AttachError, match="nothing is held"):
            model(decoding.ids, row_plan=plan, use_cache=False)


# what is refused -----------------------------------------------------------------------------------


class Lexical(torch.nn.Module):
    """A rotary embedding that depends on the tokens, not on their positions alone."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cosine, sine = self.inner(x, position_ids=position_ids)
        return cosine + 0 * sine, sine + 1e-3 * x[..., :SIZE]
