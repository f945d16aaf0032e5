"""Elastic-Cache through the front door: windows, turns, host reads, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import diffcache
from diffcache.api import handle_of
from diffcache.dllm import (
    Decoding,
    DKVCache,
    ElasticCache,
    RowPlan,
    Sampler,
    Schedule,
    Threshold,
)
from diffcache.errors import AttachError
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.test_diffusion_lm import Reads
from tests.dllm.test_elastic_cache import CHANNELS, LAYERS, SCHEDULE, SIZE, toy
from tests.dllm.toys import MASK, bidirectional, padded, prompts

# the front door ----------------------------------------------------------------------------------------


def test_wrap_and_generate_slide_a_window_of_sixteen() -> None:
    model = toy()
    diffcache.wrap(model, ElasticCache(gamma=0.9, similarity="key"))
    lm, last = DiffusionLM(model), None
    for decoding in lm.steps(prompts(9, 5), sampler=Sampler(rule=Threshold(0.9))):
        masks = (last if last is not None else torch.full((2, 128), MASK)) == MASK
        last = decoding.ids[:, 9:]
        done = masks & (last != MASK)
        assert bool(done.any(1).all()) and not bool((done & (masks.cumsum(1) > 16)).any())
        if decoding.step == 6:
            break
    answer = lm.generate(prompts(6), Schedule(8, None, window=4), check=True)
    assert answer.report is not None and "one number a layer" in str(answer.report)
    size, width = CHANNELS * 8, 14  # bytes of a token's hidden state in float64
    held = LAYERS * width * size * 3  # X, Q, and K and V of half as many heads
    held += width * (2 * SIZE + 1) * 8  # cosines, sines and positions
    assert answer.report.peak_bytes == held
    assert handle_of(model).held_bytes() == 0


@torch.no_grad()
@pytest.mark.parametrize("gamma", [0.0, 1e-9])
def test_a_layer_reads_one_number_where_it_is_tested(
    gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, policy = toy(), ElasticCache(gamma=gamma)
    decoding = Decoding(padded(prompts(9))[0], SCHEDULE, Sampler(), MASK)
    lists, to_list = [], Tensor.tolist  # which no dispatch shows
    monkeypatch.setattr(Tensor, "tolist", lambda x: lists.append(x.shape) or to_list(x))
    with diffcache.wrapped(model, policy), diffcache.run(model):
        for _ in range(3):
            plan = policy.plan(decoding.state)
            lists.clear()
            with Reads() as reads:
                logits = model(decoding.ids, row_plan=plan, use_cache=False).logits
            tests = lists.copy()
            decoding.commit(logits, plan)
    assert tests == [(1,)] * (LAYERS - 1) * (gamma > 0)
    looks = 2  # on a CPU, where nobody waits, at both ends of the rows that are written
    assert reads.count == looks + 3  # for all layers; rows, window, tracked tokens are counted once


# what is refused -----------------------------------------------------------------------------------


class Lexical(torch.nn.Module):
    """A rotary embedding that depends on the tokens, not on their positions alone."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cosine, sine = self.inner(x, position_ids=position_ids)
        return cosine + 0 * sine, sine + 1e-3 * x[..., :SIZE]


@torch.no_grad()
def test_models_and_plans_that_do_not_fit_are_refused() -> None:
    model = toy()
    model.model.rotary_emb = Lexical(model.model.rotary_emb)
    with diffcache.wrapped(model, ElasticCache()), pytest.raises(AttachError, match="block 0 is g"):
        DiffusionLM(model).generate(prompts(6), SCHEDULE)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, is_causal=False, mask_token_id=MASK
    )
    model = bidirectional(config=config, network=GPT2LMHeadModel)
    with diffcache.wrapped(model, ElasticCache()):
        for _ in range(2):  # however often it is asked
            with pytest.raises(AttachError, match="counts on as many rows after its last block"):
                DiffusionLM(model).generate(prompts(6), SCHEDULE)
    with diffcache.wrapped(model, DKVCache()):
        DiffusionLM(model).generate(prompts(6), SCHEDULE)
    model = toy()
    with diffcache.wrapped(model, ElasticCache()), pytest.raises(AttachError, match="must be the"):
        model(torch.tensor(prompts(5)), row_plan=RowPlan())
