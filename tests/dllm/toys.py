"""A tiny bidirectional Llama, decodings that note every step, and a forward written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import diffcache
from diffcache.dllm import ALL, Decoding, Policy, RowPlan, Sampler, Schedule, Threshold
from diffcache.targets import handle_of

MASK = 63
EOS = 62
LAYERS = 3
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4)
Kept = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [B, H, T, D]


def bidirectional(dtype: Any = torch.float64, config: Any = None, network: Any = LlamaForCausalLM, **changes) -> Any:
    """Return a model whose tokens depend on each other strongly; a Llama unless said otherwise."""
    own = dict(num_hidden_layers=LAYERS, num_key_value_heads=2, is_causal=False, mask_token_id=MASK)
    config = LlamaConfig(**SIZES | own | changes) if config is None else config
    model = network._from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.to(dtype).eval()


def prompts(*lengths: int) -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 60, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return prompts padded on the left, and which tokens are no padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[5] * (longest - len(row)) + list(row) for row in rows])
    valid = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids, None if bool(valid.all()) else valid


def blocks_of(width: int, length: int) -> Tensor:
    """Return the mask of attention that is causal over blocks, bool `[T, T]`."""
    number = torch.arange(width) // length
    return number <= number[:, None]


@dataclass(frozen=True, eq=False)
class Noted:
    """One step: what the model was given and what came out."""

    ids: Tensor
    plan: RowPlan
    rows: Tensor  # int64 [B, n]
    logits: Tensor
    kept: Kept  # after the forward; empty where the model is not wrapped
    starts: tuple[int, ...]  # of the active blocks
    steps: tuple[int, ...]  # within them
    more: list[Tensor]  # held besides keys and values after the forward
    tokens: int  # rows that all layers computed, by the report; 0 where the model is not wrapped

    def fed(self, row: int) -> set[int]:
        return set(self.rows[row].tolist())

    def decided(self, row: int) -> set[int]:
        return set((self.ids[row] != MASK).nonzero()[:, 0].tolist())


@torch.no_grad()
def trace(
    model: Any,
    policy: Policy | None,
    rows: Sequence[Sequence[int]],
    schedule: Schedule,
    sampler: Sampler | None = None,
) -> tuple[Decoding, list[Noted]]:
    """Decode with a policy, or without any cache, and note every step."""
    ids, valid = padded(rows)
    decoding = Decoding(ids, schedule, sampler or Sampler(), MASK, valid)
    notes: list[Noted] = []

    def step(plan: RowPlan, call: Callable[[], Tensor]) -> None:
        now, before = decoding.ids.clone(), decoding.rows.copy()
        logits = call()
        kept = [(k.clone(), v.clone()) for k, v in held(model)] if policy is not None else []
        more, tokens = [], 0
        if policy is not None:
            more, (tokens, _) = held_besides(model), handle_of(model).run().record.calls[-1].counts["token-layers"]
        index, starts, steps = plan.index(*now.shape, now.device), [r.start for r in before], [r.step for r in before]
        notes.append(Noted(now, plan, index, logits, kept, tuple(starts), tuple(steps), more, tokens))
        decoding.commit(logits, plan)

    if policy is None:
        whole = decoding.valid
        at = None if whole is None else (whole.long().cumsum(1) - 1).clamp_min(0)
        while not decoding.is_finished:
            given = dict(attention_mask=whole, position_ids=at, use_cache=False)
            step(ALL, lambda given=given: model(input_ids=decoding.ids, **given).logits)
        return decoding, notes
    with diffcache.wrapped(model, policy), diffcache.run(model):
        while not decoding.is_finished:
            plan = policy.plan(decoding.state)
            given = dict(attention_mask=decoding.valid, row_plan=plan, use_cache=False)
            step(plan, lambda given=given: model(input_ids=decoding.ids, **given).logits)
    return decoding, notes


def held(model: Any) -> Kept:
    """Return the keys and values that a wrapped model holds in this thread's run."""
    (run,) = (kept for kept in handle_of(model).run().storage.values() if hasattr(kept, "layers"))
    return [(layer.k, layer.v) for layer in run.layers]


def held_besides(model: Any) -> list[Tensor]:
    """Return what a wrapped model holds in this thread's run besides keys and values."""
    handle, known = handle_of(model), {id(tensor) for pair in held(model) for tensor in pair}
    return [tensor for tensor in handle.denoisers[0].tensors(handle.run()) if id(tensor) not in known]


def turns(core: Any, x: Tensor, at: Tensor) -> Tensor:
    """Return what pairs of channels at positions [B, n] are multiplied by, complex [B, n, D / 2], of float32's angles."""
    cosine, sine = core.rotary_emb(x, position_ids=at)
    return torch.complex(cosine, sine)[..., : cosine.shape[-1] // 2]


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the halves of channels."""
    pair = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([pair.real, pair.imag], dim=-1)


@torch.no_grad()
def by_hand(
    model: Any,
    ids: Tensor,
    rows: Tensor,
    kept: Kept | None,
    valid: Tensor | None = None,
    seen: Tensor | list[Tensor] | None = None,
    maps: list[Tensor] | None = None,
    queries: list[Tensor] | None = None,
) -> tuple[Tensor, Kept]:
    """Compute rows of a Llama against stale keys and values, with explicit attention weights.

    Args:
        model: The model, whose weights are read.
        ids: int64 [B, T].
        rows: int64 [B, n].
        kept: What every layer kept before; None where all rows are computed.
        valid: bool [B, T], False is padding.
        seen: bool [B, T], what the rows see, or a list of that for each layer; None for all that
            is no padding.
        maps: Gets the attention of every layer, [B, H, n, T] each.
        queries: Gets the rotated queries of every layer, [B, H, n, D] each.

    Returns:
        Logits of the rows [B, n, V], and what is kept now.
    """
    core, made = model.model, []
    at = torch.arange(ids.shape[1]).expand_as(ids)
    if valid is not None:
        at = (valid.long().cumsum(1) - 1).clamp_min(0)
    hidden = core.embed_tokens(ids.gather(1, rows))
    size = core.layers[0].self_attn.head_dim
    turn = turns(core, hidden, at.gather(1, rows))[:, None]
    for number, layer in enumerate(core.layers):
        inner, attn = layer.input_layernorm(hidden), layer.self_attn
        projections = attn.q_proj, attn.k_proj, attn.v_proj
        q, k, v = (project(inner).unflatten(2, (-1, size)).transpose(1, 2) for project in projections)
        q, k = rotated(q, turn), rotated(k, turn)
        if queries is not None:
            queries.append(q)
        if kept is None:
            keys, values = k.new_zeros(2, *k.shape[:2], ids.shape[1], size).unbind()
        else:
            keys, values = kept[number][0].clone(), kept[number][1].clone()
        for batch, places in enumerate(rows):
            keys[batch].index_copy_(1, places, k[batch])
            values[batch].index_copy_(1, places, v[batch])
        made.append((keys, values))
        groups = q.shape[1] // keys.shape[1]
        logits = q @ keys.repeat_interleave(groups, 1).mT / size**0.5
        for mask in (valid, seen[number] if isinstance(seen, list) else seen):
            if mask is not None:
                logits = logits.masked_fill(~mask[:, None, None], float("-inf"))
        weights = logits.softmax(-1)
        if maps is not None:
            maps.append(weights)
        mixed = weights @ values.repeat_interleave(groups, 1)
        hidden = hidden + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(core.norm(hidden)), made


def check_step(
    model: Any, now: Noted, kept: Any, valid: Tensor, *, found: Compared, **given: Any
) -> tuple[Tensor, Kept]:
    """Hold the logits of a step, and what is kept after it, against those by hand; return these."""
    logits, fresh = by_hand(model, now.ids, now.rows, kept, valid, **given)
    there = valid.gather(1, now.rows)
    torch.testing.assert_close(now.logits[there], logits[there], rtol=0, atol=1e-10)
    found.step(now.tokens, now.logits[there], logits[there])
    both = (torch.stack([x.transpose(1, 2)[valid] for pair in all_ for x in pair]) for all_ in (now.kept, fresh))
    torch.testing.assert_close(*both, rtol=0, atol=1e-10)
    return logits, fresh


@dataclass
class Compared:
    """Comparison of a decoding with one that is derived without our code."""

    text: bool | None = None  # whether it is the same; None where tokens were forced
    forwards: int = 0
    tokens: int = 0  # rows that all layers computed
    logits: float = 0.0  # largest difference

    def step(self, tokens: int, ours: Tensor, theirs: Tensor) -> None:
        self.forwards, self.tokens = self.forwards + 1, self.tokens + tokens
        self.logits = max(self.logits, float((ours - theirs).abs().max()))

    def goes_on(self, ids: Tensor, wanted: Tensor) -> None:
        self.text = self.text is not False and torch.equal(ids, wanted)


def following(decoding: Decoding, notes: Sequence[Noted], step: int) -> Tensor:
    """Return the tokens that a step left, int64 [B, T]."""
    return notes[step + 1].ids if step + 1 < len(notes) else decoding.ids


def after(now: Noted, logits: Tensor, schedule: Schedule, sampler: Sampler, order: Tensor | None = None) -> Tensor:
    """Return the tokens after a step, int64 [B, T], by logits of its rows and the order drawn."""
    ids, size = now.ids.clone(), schedule.size
    steps = size if schedule.steps is None else schedule.steps * size // schedule.length
    for row, start in enumerate(now.starts):
        columns = {place: column for column, place in enumerate(now.rows[row].tolist())}
        masks = [place for place in range(start, start + size) if ids[row, place] == MASK][: schedule.window]
        sure, tokens = {}, {}
        for place in columns.keys() & masks:
            odds = logits[row, columns[place]].softmax(-1)
            odds[MASK] = 0
            sure[place], tokens[place] = float(odds.max()), int(odds.argmax())
            if order is not None:
                sure[place] = float(order[row, place - ids.shape[1] + schedule.length])
        count = size // steps + (now.steps[row] < size % steps)
        if isinstance(sampler.rule, Threshold):
            count = max(sum(one >= sampler.rule.threshold for one in sure.values()), 1)
        for place in sorted(sure, key=lambda place: -sure[place])[:count]:
            ids[row, place] = tokens[place]
    return ids
