"""Models whose attention is causal over blocks, against loops written from their authors' code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import diffcache
from diffcache import dllm
from diffcache.dllm import BlockCache, DKVCache, Dynamic, FastDLLM, Policy, Sampler, Schedule, Threshold, Uncached
from diffcache.dllm.block_cache import within_blocks
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.remote_models import LLaDA2MoeModelLM
from tests.dllm.test_llada2 import ask, pipeline
from tests.dllm.test_remote import made
from tests.dllm.toys import MASK, Compared, bidirectional, blocks_of, by_hand, prompts

BLOCK, LENGTH = 8, 11
Call = Callable[[list[int]], Tensor]  # the logits of a text, [T, V]


@torch.no_grad()
def whole(model: Any, texts: list[Tensor]) -> Call:
    """Return a function that computes a text as a whole, and keeps the logits."""

    def call(ids: list[int]) -> Tensor:
        at = torch.arange(len(ids))[None]
        given: dict[str, Any] = {"attention_mask": blocks_of(len(ids), BLOCK)[None, None]}
        if model.config.model_type == "Fast_dLLM_Qwen":
            given = {"block_size": BLOCK}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), position_ids=at, **given).logits[0]
        texts.append(logits)
        return logits

    return call


def guesses(logits: Tensor, noise: Tensor | None = None) -> tuple[list[int], list[float]]:
    """Return the most probable token of each row, or one drawn, and its probability."""
    noisy = logits.clone() if noise is None else logits.double() - 0.8 * (-noise.log()).log()
    noisy[:, MASK] = -torch.inf
    tokens = noisy.argmax(-1)
    share = logits.double().softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), share.tolist()


def ends(ids: list[int], prompt: list[int], eos: int | None, length: int) -> bool:
    answer = ids[len(prompt) : len(prompt) + length]
    return eos in answer and MASK not in answer[: answer.index(eos)]


def llada2_by_hand(
    call: Call,
    prompt: list[int],
    steps=BLOCK,
    threshold=1.0,
    eos=None,
    editing=None,
    post_steps=16,
    noise=None,
    length=LENGTH,
) -> list[int]:
    """Decode as LLaDA2's `generate` does, and SDAR's, with edits as LLaDA2.1 makes them."""
    total = -(-(len(prompt) + length) // BLOCK) * BLOCK
    ids = prompt + [MASK] * (total - len(prompt))
    shares = [BLOCK // steps + (step < BLOCK % steps) for step in range(steps)]
    for start in range(len(prompt) // BLOCK * BLOCK, total, BLOCK):
        stop, step, after = start + BLOCK, 0, 0
        while not ends(ids, prompt, eos, length):
            masks = [place for place in range(start, stop) if ids[place] == MASK]
            if not masks and editing is None:
                break
            drawn = None
            if noise is not None:
                drawn = torch.rand((BLOCK, 64), dtype=torch.float64, generator=noise)
            tokens, sure = guesses(call(ids[:stop])[start:], drawn)
            chosen = [place for place in masks if sure[place - start] > threshold]
            if len(chosen) < shares[min(step, steps - 1)]:
                best = sorted(masks, key=lambda place: -sure[place - start])
                chosen = best[: shares[min(step, steps - 1)]]
            edits = [
                place
                for place in range(max(start, len(prompt)), stop)
                if editing is not None
                and place not in masks
                and tokens[place - start] != ids[place]
                and sure[place - start] > editing
            ]
            for place in chosen + edits:
                ids[place] = tokens[place - start]
            step, after = step + bool(masks), after + (not masks)
            if (masks and step >= steps) or (not masks and (not edits or after > post_steps)):
                break
    return finished(ids, prompt, eos, length)


def fast_dllm_by_hand(
    call: Call, prompt: list[int], size: int = BLOCK, threshold=1.0, eos=None, part=None, length: int = LENGTH
) -> list[int]:
    """Decode as Fast-dLLM v2's `generate` does: row p predicts token p + 1.

    Args:
        call: Computes a text as a whole.
        prompt: Tokens of the prompt.
        size: Tokens of a sub-block.
        threshold: Probability above which masks are decided.
        eos: Token that ends the answer.
        part: Computes rows of the last block with the sub-block cache; None for whole texts.
        length: Tokens of the answer.
    """
    ids, total = list(prompt), -(-(len(prompt) + length) // BLOCK) * BLOCK
    while len(ids) < total and not ends(ids, prompt, eos, length):
        if len(ids) % BLOCK == 0:  # a finished block decides the first token after it
            ids.append(guesses(call(ids)[-1:])[0][0])
        start = (len(ids) - 1) // BLOCK * BLOCK
        ids += [MASK] * (start + BLOCK - len(ids))
        fills = True
        for first in range(start, min(start + BLOCK, len(prompt) + length), size):
            while MASK in ids[first : first + size] and not ends(ids, prompt, eos, length):
                masks = [place for place in range(first, first + size) if ids[place] == MASK]
                if part is None:
                    begin, logits = 0, call(ids)
                else:
                    fills = fills or ids[first] == MASK
                    run = range(start, start + BLOCK) if fills else range(first, first + size)
                    begin, logits, fills = run.start, part(ids, run), False
                tokens, sure = guesses(logits)
                at = {place: place - 1 - begin for place in masks}
                best = max(masks, key=lambda place: sure[at[place]])
                for place in masks:
                    if place == best or sure[at[place]] > threshold:
                        ids[place] = tokens[at[place]]
    return finished(ids, prompt, eos, length)


def finished(ids: list[int], prompt: list[int], eos: int | None, length: int) -> list[int]:
    answer = (ids + [MASK] * length)[len(prompt) : len(prompt) + length]
    return [eos if token == MASK and eos is not None else token for token in answer]


@contextmanager
def seen_of(model: Any) -> Iterator[list[Tensor]]:
    """Keep the logits of every forward of a decoding."""
    found: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, args, out: found.append(out.logits[0]))
    yield found
    hook.remove()


RULES: dict[str, tuple[dict[str, Any], Any, int | None]] = {
    "one a step": ({}, dllm.Quota(), None),
    "three steps a block": ({"steps": 3}, dllm.Quota(), 3),
    "confident": ({"steps": 4, "threshold": 0.3}, Dynamic(0.3), 4),
    "edited": ({"steps": 4, "threshold": 0.3, "editing": 0.25}, Dynamic(0.3, 0.25), 4),
    "edited to the last": ({"steps": 8, "threshold": 0.6, "editing": 0.02, "post_steps": 3}, Dynamic(0.6, 0.02, 3), 8),
}
LENGTHS = (13, 16, 3)  # of prompts: none ends like the others within its block


def schedule(steps: int | None, eos: int | None = None, block: int | None = None) -> Schedule:
    steps = None if steps is None else -(-steps * LENGTH // BLOCK)  # of the whole answer
    return Schedule(LENGTH, block, steps, eos)


def check(one: Compared, lm: DiffusionLM, wanted: Any, texts: list[Tensor], prompt: Any, *how: Any) -> None:
    """Compare a decoding to a loop: with all rows, to the bit; with finished blocks kept, in rows."""
    is_cached = lm.network.dtype == torch.float64
    with seen_of(lm.network) as seen:
        answer = lm.generate([prompt], *how)
    one.goes_on(answer.ids[0], torch.tensor(wanted))
    assert answer.forwards == len(texts)
    for now, text in zip(seen, texts, strict=True):
        one.step(len(now) * len(lm.network.model.layers), now, text[-len(now) :])
        assert is_cached or torch.equal(now, text)
        torch.testing.assert_close(now, text[-len(now) :], rtol=0, atol=1e-10)
    assert answer.rows == sum(map(len, seen))
    if is_cached:
        check_rows(texts, seen, lm.shift, how[1].rule.editing is not None)


def check_rows(texts: list[Tensor], seen: list[Tensor], shift: bool, edits: bool) -> None:
    """Check that the prompt is computed once, then a block, and a finished one once more as it stays.

    The last row of a finished block decides by itself where rows predict the next token; where
    tokens are edited, the last look at a block may have been at what stays.
    """
    counts, widths = list(map(len, seen)), list(map(len, texts))
    assert counts[0] == widths[0]
    for (before, width), count in zip(pairwise(widths), counts[1:], strict=True):
        twice = width > before and not shift
        assert count in ({BLOCK, 2 * BLOCK} if twice and edits else {(1 + twice) * BLOCK})


def compared(name: str, dtype: torch.dtype) -> dict[str, Compared]:
    """Hold a model, by policies, against its authors' decoder with all of its rules.

    All rows: to the bit. Cached, in float64: 1e-10, since other rows share their products.
    """
    model, found, runs = made(name, dtype, num_hidden_layers=2), dict[str, Compared](), []
    rules = list(RULES.values())
    if name == "fast-dllm":
        rules = [({"threshold": threshold}, Threshold(threshold), None) for threshold in (1.0, 0.2)]
    by_hand = fast_dllm_by_hand if name == "fast-dllm" else llada2_by_hand
    for (settings, rule, steps), prompt in product(rules, prompts(*LENGTHS)):
        texts: list[Tensor] = []
        wanted = by_hand(whole(model, texts), prompt, **settings)
        runs.append((wanted, texts, prompt, schedule(steps), Sampler(rule=rule)))
    lm = DiffusionLM(model)
    lm.generate([1, 2], Schedule(1, None))  # tries the model
    policies: list[Policy | None] = [None, Uncached()]
    if dtype == torch.float64:
        policies = [BlockCache(), FastDLLM(), dllm.FreeCache(commit=True)]
    for policy in policies:
        one = found["no cache" if policy is None else policy.name] = Compared()
        with nullcontext() if policy is None else diffcache.wrapped(model, policy):
            for run in runs:
                if isinstance(policy, FastDLLM | dllm.FreeCache) and run[-1].rule.editing is not None:
                    continue  # they compute a block whole
                check(one, lm, *run)
    return found


class Kept:
    """Keys and values of a Llama, computed by hand block by block, stale where nobody renews them."""

    def __init__(self, model: Any) -> None:
        self.model, self.kept = model, None

    def rows(self, ids: list[int], places: list[int], shown: Tensor | None = None) -> Tensor:
        """Return the logits of some rows, which see what is shown of their block and those before."""
        text, found = torch.tensor([ids]), []
        config = self.model.config
        shape = 1, config.num_key_value_heads, len(ids), config.head_dim
        kept = self.kept or [(torch.zeros(shape).double(),) * 2] * config.num_hidden_layers
        more = (0, 0, 0, len(ids) - kept[0][0].shape[2])
        self.kept = [tuple(functional.pad(x, more) for x in pair) for pair in kept]
        for number in sorted({place // BLOCK for place in places}):
            own = torch.tensor([[place for place in places if place // BLOCK == number]])
            seen = torch.arange(len(ids))[None] < (number + 1) * BLOCK
            seen = seen if shown is None else seen & shown
            logits, self.kept = by_hand(self.model, text, own, self.kept, seen=seen)
            found.append(logits[0])
        return torch.cat(found)


@pytest.mark.parametrize("threshold", [1.0, 0.2])
def test_sub_blocks_are_those_of_fast_dllm_v2(threshold: float) -> None:
    """Its cache inside of a block, stale rows and all."""
    model, fed = bidirectional(), list[int]()
    lm = DiffusionLM(model, shift=True, block=BLOCK)
    how = Schedule(20, 4), Sampler(rule=Threshold(threshold))
    for prompt in prompts(*LENGTHS):
        kept = Kept(model)
        fed.clear()

        def call(ids: list[int], kept: Kept = kept) -> Tensor:
            fed.append(len(ids) if kept.kept is None else BLOCK)
            return kept.rows(ids, list(range(len(ids))))

        def part(ids: list[int], run: range, kept: Kept = kept) -> Tensor:
            if kept.kept is None:  # a prompt that is no longer than a block
                return call(ids)[run.start :]
            fed.append(len(run))
            return kept.rows(ids, list(run))

        wanted = fast_dllm_by_hand(call, prompt, 4, threshold, part=part, length=20)
        with diffcache.wrapped(model, FastDLLM(dual=True)):
            answer = lm.generate([prompt], *how)
        assert answer.ids[0].tolist() == wanted and answer.forwards == len(fed)
        with diffcache.wrapped(model, BlockCache()):  # exact, and other rows
            assert lm.generate([prompt], *how).rows > answer.rows


INSIDE: dict[str, tuple[Policy, Schedule]] = {
    "dual": (FastDLLM(dual=True), Schedule(20, 4)),
    "decode": (DKVCache(every=3), Schedule(20, None)),
    "prefill": (DKVCache("prefill"), Schedule(20, None)),
    "greedy": (DKVCache("greedy", every=3), Schedule(20, None)),
    "free": (dllm.FreeCache(), Schedule(20, 4)),
    "window": (dllm.WindowDiffusion(4, 3), Schedule(20, None, window=3)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_policies_choose_rows_of_the_active_block(name: str) -> None:
    """Every forward is that by hand, with what it left stale; no other block is touched."""
    policy, when = INSIDE[name]
    model, calls = bidirectional(), list[Any]()
    (prompt,) = prompts(13)
    lm = DiffusionLM(model, block=BLOCK)
    lm.generate(prompt, when)
    with diffcache.wrapped(model, policy), seen_of(model) as seen:
        model.register_forward_pre_hook(lambda _, args, given: calls.append(given), with_kwargs=True, prepend=True)
        sampler = Sampler(by="random" if policy.needs_order else "confidence")
        answer = lm.generate(prompt, when, sampler, check=name != "free")
    kept, width, fewer, rows = Kept(model), 0, 0, 0
    for given, logits in zip(calls, seen, strict=True):
        ids, plan = given["input_ids"][0].tolist(), given["row_plan"]
        places = plan.index(1, len(ids), torch.device("cpu"))[0].tolist()
        first = len(ids) - BLOCK * (1 + (len(ids) > width > 0)) if width else 0
        assert first <= places[0] and (len(ids) == width or len(places) == len(ids) - first)
        fewer, rows, width = fewer + (len(places) < BLOCK), rows + len(places), len(ids)
        wanted = kept.rows(ids, places, plan.seen)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    assert fewer and answer.rows == rows


BATCH: dict[str, tuple[str, Policy | None, Sampler, int | None]] = {
    "blocks": ("llada2", BlockCache(), Sampler(rule=Dynamic(0.3, 0.25)), None),
    "decode": ("sdar", DKVCache(every=3), Sampler(rule=Threshold(0.3)), None),
    "dual": ("fast-dllm", FastDLLM(dual=True), Sampler(rule=Threshold(0.5)), 4),
    "blocks, shifted": ("fast-dllm", BlockCache(), Sampler(rule=Threshold(0.2)), None),
}


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_of_different_lengths_is_its_prompts_alone(name: str) -> None:
    """Each has blocks of its own, and some end early, in the midst of one."""
    code, policy, sampler, block = BATCH[name]
    model, rows = made(code, num_hidden_layers=2), prompts(7, 15, 3, 16)  # the first two at one place in their blocks
    if policy is not None:
        diffcache.wrap(model, policy)
    lm = DiffusionLM(model)
    free = [lm.generate([row], Schedule(20, block), sampler) for row in rows]
    for eos in (None, int(free[0].ids[0, 9])):
        how = Schedule(20, block, eos_id=eos), sampler
        alone = free if eos is None else [lm.generate([row], *how) for row in rows]
        together = lm.generate(rows, *how)
        assert together.ids.tolist() == [answer.ids[0].tolist() for answer in alone]
        assert together.forwards == max(answer.forwards for answer in alone)
    assert alone[0].forwards < together.forwards or not torch.equal(alone[0].ids, free[0].ids)


class TakesTokens(LLaDA2MoeModelLM):
    """Makes the mask of blocks from one of tokens, as the pipeline asks."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, **more: Any) -> Any:
        mask = blocks_of(input_ids.shape[1], BLOCK) & attention_mask.bool()[:, None, None]
        return super().forward(input_ids, mask, position_ids, **more)


@pytest.mark.parametrize("policy", [None, Uncached(), BlockCache()], ids=repr)
def test_llada2s_pipeline_goes_through_the_same_door(policy: Policy | None) -> None:
    model = made("llada2", torch.float32)
    model.__class__ = TakesTokens
    with torch.no_grad():
        model.lm_head.weight[MASK] = 0  # the pipeline would take the mask for a token
    pipe, (prompt,) = pipeline(model), prompts(13)
    wanted = ask(pipe, torch.tensor([prompt]), gen_length=LENGTH, threshold=0.3, editing_threshold=0.25)
    lm = DiffusionLM(pipe)
    assert lm.block == BLOCK and lm.network is model
    if policy is not None:
        diffcache.wrap(lm, policy)
    sampler = Sampler(rule=Dynamic(0.3, 0.25), softmax="float32")
    assert torch.equal(lm.generate([prompt], schedule(4), sampler).ids, wanted)


def test_a_models_own_blocks_are_found() -> None:
    assert DiffusionLM(made("llada2")).generate([1], Schedule(32, 16)).ids.shape == (1, 32)  # of 8


def test_a_sequence_that_begins_a_block_computes_it_and_the_one_before_whatever_is_planned() -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    rows = (
        RowState(8, 12, 3, 1, span=range(8, 12), final=8, known=12),
        RowState(12, 16, 0, 2, span=range(12, 16), final=8, known=12),  # its last commit is not computed yet
    )
    every, few = ids == 0, ids.index_fill(1, torch.tensor([9]), 1) == 1
    plan = replace(RowPlan.of(few), seen=few)
    plan = within_blocks(State(ids, every, every, every, ids, 4, 5, rows, every), plan)
    wanted = torch.stack([few[0], torch.arange(16) >= 8])
    assert torch.equal(plan.mask(2, 16, ids.device), wanted)
    assert plan.seen is not None and torch.equal(plan.seen, few | torch.tensor([[False], [True]]))
