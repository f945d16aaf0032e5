"""Samplers, schedules and row counts, without a model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache import dllm
from diffcache.dllm import ALL, Credit, Decoding, DPad, Factor, Policy, Quota, RowPlan, Sampler, Schedule, Threshold
from diffcache.dllm.dkv_cache import nearest
from diffcache.dllm.rules import Rule

MASK, WORDS = 15, 16


def finish(policy: Policy, schedule: Schedule, sampler: Sampler) -> Decoding:
    """Decode by random logits."""
    generator = torch.Generator().manual_seed(3)
    decoding = Decoding(torch.zeros(1, 50, dtype=torch.int64), schedule, sampler, MASK)
    while not decoding.is_finished:
        plan = policy.plan(decoding.state)
        count = plan.count(decoding.ids.shape[1])
        decoding.commit(torch.randn(1, count, WORDS, generator=generator, dtype=torch.float64), plan)
    return decoding


def scores_of(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_quotas_are_llada_s_and_dream_s() -> None:
    assert Quota().quotas(10, 4) == [3, 3, 2, 2]
    masks, left, wanted = 32, 32, []
    for i in range(8):
        now, after = 1 - i * 0.999 / 8, 1 - (i + 1) * 0.999 / 8
        wanted.append(left if i == 7 else int(left * (1 - after / now)))
        left -= wanted[-1]
    assert Quota("time").quotas(masks, 8) == wanted
    assert sum(wanted) == masks


def test_rules_choose_the_confident() -> None:
    nothing = -torch.inf
    scores = scores_of(0.2, 0.95, nothing, 0.9, 0.3)
    assert Threshold(0.9).choose(scores, 1).tolist() == [[False, True, False, True, False]]
    assert Threshold(1).choose(scores, 1).tolist() == [[False, True, False, False, False]]
    assert Threshold(0).choose(scores, 1).tolist() == [[True, True, False, True, True]]
    assert Quota().choose(scores, 3).tolist() == [[False, True, False, True, True]]
    assert Quota().choose(scores_of(0.5, 0.5, 0.5), 2).tolist() == [[True, True, False]]
    assert not bool(Threshold(0).choose(scores_of(nothing, nothing), 1).any())


@pytest.mark.parametrize("low", [0.0, 0.4, 0.7])
def test_the_best_of_every_run_is_committed(low: float) -> None:
    """As dInfer's decoder does, one run after the other."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(40, 12, generator=generator, dtype=torch.float64)
    scores = scores.masked_fill(torch.rand(40, 12, generator=generator) < 0.4, float("-inf"))
    chosen = dllm.Hierarchical(0.9, low).choose(scores, 1)
    for row, flags in zip(scores.tolist(), chosen.tolist(), strict=True):
        wanted = {place for place, score in enumerate(row) if score > 0.9} | {row.index(max(row))}
        for is_mask, run in groupby(range(12), lambda place: row[place] >= 0):  # noqa: B023
            best = max(run, key=lambda place: row[place])
            wanted |= {best} if is_mask and row[best] > low else set()
        assert {place for place, flag in enumerate(flags) if flag} == wanted


Told = Iterator[dict[int, int]]  # tokens that each forward decides, by their place in the block
SIZE = 12  # of the blocks that rules with a memory are tried on


def slow_fast(step: Callable[[], Tensor]) -> Told:
    """Tell the commits of one block, as the paper has its two stages."""
    masks, begin = set(range(SIZE)), 0

    def decided(end: int) -> dict[int, int]:
        among = {n for n in masks if n < end}
        sure = {n for n in among if odds[n] >= 0.8}
        chosen = sure if len(sure) > 1 else {max(among, key=lambda n: odds[n])}
        masks.difference_update(chosen)
        return {n: words[n] for n in chosen}

    while masks:
        ends, end = [], 0
        for _ in range(3):
            if not masks:
                return
            odds, words = (x.tolist() for x in step().softmax(-1)[:, :MASK].max(-1))
            if not end:
                far = [n for n in masks if n >= begin and odds[n] >= 0.3]
                ends.append(max(far, default=begin) + 1)
                end = ends[-1] if len(ends) > 1 and abs(ends[-1] - ends[-2]) < 2 else 0
            yield decided(SIZE)
        begin = end or sum(ends[-2:]) // 2
        while any(n < begin for n in masks):
            odds, words = (x.tolist() for x in step().softmax(-1)[:, :MASK].max(-1))
            yield decided(begin)


def credit(step: Callable[[], Tensor]) -> Told:
    """Tell the commits of one block by credit, token for token."""
    gained = [[0.0] * WORDS for _ in range(SIZE)]
    masks = set(range(SIZE))
    while masks:
        logits, chosen = step(), {}
        gained = [[value * 0.8 for value in row] for row in gained]
        for n in masks:
            best = logits[n].softmax(-1).max(-1)
            gained[n][int(best.indices)] += float(best.values) ** 0.2
        odds = (logits + 0.7 * (torch.tensor(gained, dtype=logits.dtype) + 1).log()).softmax(-1)
        sure, words = (x.tolist() for x in odds[:, :MASK].max(-1))
        best_one = max(masks, key=lambda n: sure[n])
        chosen = {n: words[n] for n in masks if sure[n] >= 0.8 or n == best_one}
        masks -= set(chosen)
        yield chosen


@pytest.mark.parametrize(("rule", "told"), [(dllm.SlowFast(0.8, 0.3, 3), slow_fast), (Credit(0.8), credit)])
def test_rules_with_a_memory_commit_as_their_papers_say(rule: Rule, told: Callable[[Callable[[], Tensor]], Told]):
    """Two sequences with blocks of their own, by logits that were drawn."""
    generator, steps = torch.Generator().manual_seed(4), []
    sampler, prompt = Sampler(rule=rule), torch.zeros(2, 3, dtype=torch.int64)
    decoding = Decoding(prompt, Schedule(3 * SIZE, SIZE), sampler, MASK)
    while not decoding.is_finished:
        logits = torch.randn(2, 3 + 3 * SIZE, WORDS, generator=generator, dtype=torch.float64) * 2.5
        before = decoding.ids
        decoding.commit(logits, ALL)
        steps.append((logits[:, 3:], before[:, 3:], decoding.ids[:, 3:]))
    lengths = []
    for row in range(2):
        taken = iter(steps)
        for block in range(3):
            now: list[Any] = []

            def step(row: int = row, block: int = block, now: list[Any] = now) -> Tensor:
                now[:] = next(taken)  # noqa: B023
                return now[0][row].split(SIZE)[block]

            for chosen in told(step):
                before, after = now[1][row].tolist(), now[2][row].tolist()
                changed = {n: x for n, x in enumerate(after) if x != before[n]}
                assert changed == {n + block * SIZE: word for n, word in chosen.items()}
        lengths.append(len(steps) - len(list(taken)))
    assert max(lengths) == len(steps)


def test_masks_far_from_the_block_are_kept_by_chance() -> None:
    """Of 400 blocks, by the density at their distance; the same ones in every step of a block."""
    policy, kept = DPad(window=8, sigma=2.0, scale=1.5), torch.zeros(24)
    schedule = Schedule(400 * 4 + 24, 4)
    decoding = Decoding(torch.zeros(1, 3, dtype=torch.int64), schedule, Sampler(), MASK)
    state = decoding.state
    for block in range(400):
        row = replace(state.rows[0], start=3 + 4 * block, stop=7 + 4 * block, block=block)
        found = [policy.plan(replace(state, rows=(replace(row, step=step),), last=ALL)) for step in (0, 1)]
        assert found[0].seen is not None and torch.equal(found[0].seen, found[1].seen)  # type: ignore[arg-type]
        kept += found[0].seen[0, row.stop : row.stop + 24]
    density = 1.5 * torch.exp(-torch.linspace(0, 2, 8).square() / 2) / (2 * torch.pi) ** 0.5
    assert (kept[:8] / 400 - density).abs().max() < 0.08 and not kept[8:].any()


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 3.0])
def test_the_factor_commits_the_largest_number_that_fits(factor: float) -> None:
    scores = torch.rand(4, 9, dtype=torch.float64).sqrt().sqrt()
    scores[0, :4] = -torch.inf
    chosen = Factor(factor).choose(scores, 1)
    for row, picked in zip(scores.tolist(), chosen.tolist(), strict=True):
        best = sorted((c for c in row if c > 0), reverse=True)
        most = max([n for n in range(1, len(best) + 1) if (n + 1) * (1 - best[n - 1]) < factor], default=1)
        assert {c for c, is_in in zip(row, picked, strict=True) if is_in} == set(best[:most])


def test_scores_are_their_closed_forms() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).log()
    for by, score in (("confidence", 0.5), ("margin", 0.25), ("entropy", -1.75 * 0.6931471805599453)):
        tokens, scores = Sampler(by=by).candidates(logits, 3, None)  # type: ignore[arg-type]
        assert tokens.item() == 0
        assert scores.item() == pytest.approx(score, abs=1e-6)


def test_the_mask_and_banned_tokens_are_never_chosen() -> None:
    """A weak model asks for the mask, whose probability still counts; that of a banned one is none."""
    logits = torch.tensor([[[1.0, 2.0, 5.0, 4.0]]])
    tokens, scores = Sampler(banned=(3,)).candidates(logits, 2, None)
    assert tokens.item() == 1
    assert scores.item() == pytest.approx(logits[..., :3].softmax(-1)[0, 0, 1].item())
    hot = Sampler(temperature=50.0, banned=(3,))
    drawn = hot.candidates(logits.expand(1, 500, 4), 2, torch.Generator().manual_seed(0))[0]
    assert set(drawn.flatten().tolist()) == {0, 1}
    for banned, message in (
        ((1, 4), r"banned=\(1, 4\): names a token outside .* has 4; leave 4 out"),
        ((0, 3, 1), r"banned=\(0, 3, 1\): leaves none of .* 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampler(banned=banned).candidates(logits, 2, None)


def test_temperature_draws_from_the_tempered_softmax_and_a_seed_repeats_it() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -9.0]).expand(1, 20_000, 4)
    sampler = Sampler(temperature=2.0)
    drawn = sampler.candidates(logits, 3, torch.Generator().manual_seed(0))[0]
    wanted = (logits[0, 0, :3] / 2).softmax(-1)
    found = torch.bincount(drawn.flatten(), minlength=3)[:3] / drawn.numel()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.015)
    ids = [
        finish(dllm.FastDLLM(), Schedule(8, 4), Sampler(temperature=1.0, seed=seed)).ids.tolist() for seed in (0, 0, 1)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_an_answer_ends_at_its_end_token() -> None:
    """The sequence with the end token stops after its block; the other goes on."""
    eos, schedule = 7, Schedule(12, 4, eos_id=7)
    decoding = Decoding(torch.zeros(2, 3, dtype=torch.int64), schedule, Sampler(), MASK)
    logits = torch.zeros(2, 15, WORDS)
    logits[0, 4, eos] = logits[:, :, 1].fill_(3.0)[0, 4] + 6
    steps = 0
    while not decoding.is_finished:
        assert decoding.rows[0].is_active == (steps < 4)
        decoding.commit(logits, RowPlan())
        steps += 1
    assert steps == 12
    assert decoding.ids[0, 3:].tolist() == [1, eos, 1, 1] + [eos] * 8
    assert decoding.ids[1, 3:].tolist() == [1] * 12


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(by="random")], ids=["best", "random"])
def test_a_window_slides_over_the_first_masks(sampler: Sampler) -> None:
    schedule = Schedule(10, None, 5, window=3)
    decoding = Decoding(torch.zeros(2, 3, dtype=torch.int64), schedule, sampler, MASK)
    generator = torch.Generator().manual_seed(0)
    while not decoding.is_finished:
        for row, now in zip(decoding.state.open, decoding.ids, strict=True):
            assert row.nonzero()[:, 0].tolist() == (now == MASK).nonzero()[:3, 0].tolist()
        before = decoding.state
        decoding.commit(torch.randn(2, 13, WORDS, generator=generator), RowPlan())
        done = decoding.state.committed
        assert done.sum(1).tolist() == [2, 2] and not bool((done & ~before.open).any())
    assert decoding.step == 5


def test_the_nearest_masks_are_found() -> None:
    """A later center finds what an earlier one took gone, and reaches further."""
    masks = torch.tensor([[1, 0, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)

    def taken(centers: list[int], count: int) -> list[int]:
        return nearest(torch.tensor([centers]), masks, count)[0].nonzero()[:, 0].tolist()

    near = [taken([4], n) for n in range(6)]
    assert near == [[], [5], [2, 5], [2, 5, 6], [0, 2, 5, 6], [0, 2, 5, 6]]
    assert taken([4, 7], 1) == [5, 6] and taken([4, 3], 2) == [0, 2, 5, 6]
    assert taken([1, 4, -1], 1) == [0, 5] and taken([-1], 3) == []


@pytest.mark.parametrize(
    ("schedule", "sampler", "step"),
    [
        (Schedule(8, 4), Sampler(), 3),
        (Schedule(8, 4), Sampler(by="random"), 3),
        (Schedule(8, 4), Sampler(by="entropy"), 3),
        (Schedule(8, 4, eos_id=1), Sampler(by="margin"), 3),
        (Schedule(8, None, 4, eos_id=1, window=3), Sampler(rule=Quota("time")), 3),
        (Schedule(8, 4), Sampler(rule=Threshold()), 0),
        (Schedule(8, None), Sampler(rule=Factor()), 0),
    ],
    ids=str,
)
def test_masks_that_nothing_decides_are_noticed(schedule: Schedule, sampler: Sampler, step: int) -> None:
    """Logits that are not finite would end in an answer of masks, or in no answer ever."""
    decoding = Decoding(torch.tensor([[1, 2]]), schedule, sampler, MASK)
    logits = torch.full((1, decoding.ids.shape[1], 16), float("nan"))
    for _ in range(step):
        decoding.commit(logits, ALL)
    with pytest.raises(ValueError, match=f"step {step}: masks of sequence 0 could not be decided"):
        decoding.commit(logits, ALL)
