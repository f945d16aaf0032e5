"""Guided Diffusion: its limits, a guide with a cache against one without, batches, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.dllm import ALL, Decoding, DKVCache, FastDLLM, FreeCache, Guided, Policy, Quota, Sampler, Schedule
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.pipelines.masked_model import MaskedModel
from tests.dllm.toys import EOS, MASK, bidirectional, padded, prompts

LENGTHS = (6, 3)
SCHEDULE = Schedule(16, 8)
POLICIES = [None, FreeCache(), FreeCache(commit=True), FastDLLM(dual=True), DKVCache("pd")]


def guide_of(seed: int = 7, **changes: Any) -> Any:
    """Return a causal model that agrees with the diffusion model now and then."""
    model = bidirectional(is_causal=True, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise)
    return model


class Opinion:
    """A guide that wants given tokens, whatever the draft."""

    rows = 0

    def __init__(self, wanted: Any) -> None:
        self.wanted, self.drafts = wanted, []

    def __call__(self, ids: Tensor, at: Tensor, asked: Tensor, valid: Tensor | None) -> Tensor:
        self.drafts.append(ids.clone())
        return torch.nn.functional.one_hot(self.wanted(ids, at), 64).double()


def decode(opinion: Opinion, rows: list[list[int]], schedule: Schedule, rule: Guided | None = None) -> Decoding:
    model, (ids, valid) = MaskedModel(bidirectional(), None), padded(rows)
    decoding = Decoding(ids, schedule, Sampler(rule=rule or Guided()), MASK, valid, opinion)
    while not decoding.is_finished:
        decoding.commit(model.logits(decoding, ALL, is_wrapped=False), ALL)
    return decoding


def test_a_guide_that_never_agrees_decodes_greedily_from_the_left() -> None:
    rows = prompts(6)
    never = Opinion(lambda ids, at: (ids.gather(1, at) + 1) % 64)
    found = decode(never, rows, Schedule(16, None), Guided(k=1))
    model, ids = bidirectional(), torch.tensor([rows[0] + [MASK] * 16])
    with torch.no_grad():
        for place in range(6, 22):
            logits = model(ids).logits[0, place].index_fill(0, torch.tensor(MASK), -1e9)
            ids[0, place] = logits.argmax()
    assert found.step == 16 and torch.equal(found.ids, ids)


def test_agreement_is_rank_and_ratio() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.29, 0.11], [0.1, 0.2, 0.7]]).log()[None]
    open_, none = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)
    second = torch.tensor([[1, 1, 1]])
    for rule, wanted in (
        (Guided(), [1, 0, 0]),  # 0.3 of 0.5, 0.29 of 0.6
        (Guided(ratio=0.4), [1, 1, 0]),
        (Guided(ratio=0.0), [1, 1, 1]),
        (Guided(k=1, ratio=0.0), [0, 0, 0]),
        (Guided(k=3, ratio=0.6), [1, 0, 0]),
    ):
        scores = rule.scores(second, logits, open_, none)
        assert scores.tolist() == [wanted]
        chosen = rule.choose(scores, 1)
        assert chosen.tolist() == [[True, *(bool(one) for one in wanted[1:])]]
    best = logits.argmax(-1)
    ends = torch.tensor([[False, True, False]])
    assert Guided().scores(best, logits, open_, ends).tolist() == [[1, 1, 0]]
    later = torch.tensor([[False, True, True]])  # the first is decided
    assert Guided().scores(second, logits, later, none)[0, 1:].tolist() == [0, 0]


@torch.no_grad()
def by_hand(model: Any, guide: Any, rows: list[int], schedule: Schedule, rule: Guided) -> Any:
    """Decode one prompt with full forwards of both models, one token after the other."""
    ids = torch.tensor([rows + [MASK] * schedule.length])
    forwards = 0
    for start in range(len(rows), ids.shape[1], schedule.size):
        place = start
        while place < start + schedule.size:
            logits = model(ids).logits
            logits[..., MASK] = -1e9
            draft = torch.where(ids == MASK, logits.argmax(-1), ids)
            forwards += 1
            first = place
            while place < start + schedule.size:
                known = guide(draft[:, :place]).logits[0, -1]
                token = int(draft[0, place])
                best = known.softmax(-1).topk(rule.k)
                share = known.softmax(-1)[token] / best.values[0]
                agrees = token in best.indices.tolist() and share >= rule.ratio
                if not agrees and place > first:
                    break
                ids[0, place] = token
                place += 1
                if token == schedule.eos_id:
                    ids[0, place:] = token
                    return ids[0, len(rows) :], forwards
                if not agrees:
                    break
    return ids[0, len(rows) :], forwards


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_batch_is_its_rows_alone_with_any_cache(policy: Policy | None) -> None:
    model, guide = bidirectional(), guide_of()
    lm = DiffusionLM(model, guide=guide)
    sampler = Sampler(rule=Guided(k=20, ratio=0))
    if policy is not None:
        diffcache.wrap(model, policy)
    rows = prompts(*LENGTHS, 9)
    schedule = Schedule(8, 4)
    check = policy not in (None, FreeCache())  # which leaves out a block's last commit, as released
    alone = [lm.generate([row], schedule, sampler, check=check) for row in rows]
    together = lm.generate(rows, schedule, sampler, check=check)
    assert torch.equal(together.ids, torch.cat([one.ids for one in alone]))
    steps = [one.forwards for one in alone]
    assert together.forwards == max(steps) and sum(steps) < 3 * 8


def test_an_answer_ends_with_its_end_token() -> None:
    model, guide = bidirectional(), guide_of()
    with torch.no_grad():
        plain = DiffusionLM(model, guide=guide).generate(prompts(*LENGTHS), SCHEDULE)
    end = int(plain.ids[0, 5])  # what comes out becomes the end token
    schedule = Schedule(16, 8, eos_id=end)
    lm = DiffusionLM(model, eos_id=end, guide=guide)
    answer = lm.generate(prompts(*LENGTHS), schedule)
    for row, ids in zip(prompts(*LENGTHS), answer.ids, strict=True):
        wanted, _ = by_hand(model, guide, row, schedule, Guided())
        assert torch.equal(ids, wanted)
    assert answer.ids[0, 5:].eq(end).all()
    assert answer.forwards <= plain.forwards


def test_other_rules_ask_no_guide() -> None:
    model = bidirectional()
    plain = DiffusionLM(model).generate(prompts(4), SCHEDULE)
    asked = DiffusionLM(model, guide=guide_of()).generate(prompts(4), SCHEDULE, Sampler(rule=Quota()))
    assert torch.equal(plain.ids, asked.ids) and asked.guide_rows == 0
    assert EOS not in plain.ids
