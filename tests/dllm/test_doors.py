"""Contract of every door to a diffusion language model: decodings are apart, unwrapping is whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import diffcache
from diffcache.api import handle_of
from diffcache.dllm import DKVCache, DLLMCache, ElasticCache, FastDLLM, Policy, Schedule
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.test_remote import alone, made
from tests.dllm.toys import bidirectional, prompts

LENGTHS = (9, 5)
BLOCKS, WINDOW = Schedule(8, 4), Schedule(16, None, window=5)


@dataclass(frozen=True)
class Door:
    """A model with a policy.

    Attributes:
        make: Makes the model.
        policy: The policy.
        layer: Path of a module in a layer, where a forward is cut off.
        schedule: Schedule.
        plain: Returns the logits of tokens without a plan.
    """

    make: Callable[[], Any]
    policy: Policy
    layer: str = "model.layers.1.mlp"
    schedule: Schedule = BLOCKS
    plain: Callable[[Any, Tensor], Tensor] = lambda model, ids: model(ids).logits


DOORS = {
    "rows": Door(bidirectional, DKVCache(every=3)),
    "two ways": Door(bidirectional, FastDLLM(dual=True)),
    "blocks": Door(bidirectional, DLLMCache(5, 3)),
    "drift": Door(bidirectional, ElasticCache(0.95, "key"), schedule=WINDOW),
    "llada": Door(
        partial(made, "llada"),
        FastDLLM(dual=True),
        "model.transformer.blocks.1.attn_out",
        plain=lambda model, ids: alone(model, ids, None),
    ),
    "dream": Door(
        partial(made, "dream"),
        DKVCache(every=3),
        "model.layers.1.mlp.down_proj",
        plain=lambda model, ids: alone(model, ids, None),
    ),
}


@pytest.fixture(params=DOORS)
def door(request: Any) -> tuple[Door, Any, DiffusionLM]:
    """Return a door, its model, wrapped, and the pipeline that decodes with it."""
    one = DOORS[request.param]
    model = one.make()
    diffcache.wrap(model, one.policy)
    return one, model, DiffusionLM(model)


def test_decodings_in_turns_and_in_threads_are_apart(door: tuple[Door, Any, DiffusionLM]) -> None:
    one, model, lm = door
    rows = prompts(*LENGTHS)
    wanted = [lm.generate([row], one.schedule).ids for row in rows]
    *_, last = zip(*(lm.steps([row], one.schedule) for row in rows), strict=True)
    found = [decoding.ids[:, decoding.prompt :] for decoding in last]
    assert all(map(torch.equal, found, wanted))
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda row: lm.generate([row], one.schedule).ids, rows)
        assert all(map(torch.equal, answers, wanted))
    assert handle_of(model).held_bytes() == 0


def test_a_decoding_that_is_cut_off_leaves_nothing_behind(
    door: tuple[Door, Any, DiffusionLM],
) -> None:
    one, model, lm = door
    handle, wanted = handle_of(model), lm.generate(prompts(6), one.schedule).ids
    steps = lm.steps(prompts(9), one.schedule)
    next(steps), next(steps)
    assert handle.held_bytes() > 0
    steps.close()
    assert handle.held_bytes() == 0

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lm.generate(prompts(9), one.schedule, on_settled=stop)
    assert handle.held_bytes() == 0
    hook = model.get_submodule(one.layer).register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        lm.generate(prompts(9), one.schedule)
    hook.remove()
    assert handle.held_bytes() == 0
    q = torch.randn(1, 1, 2, 4)
    for _ in range(2):
        functional.scaled_dot_product_attention(q, q, q)  # nobody's
    assert torch.equal(lm.generate(prompts(6), one.schedule).ids, wanted)


@pytest.mark.parametrize("name", DOORS)
def test_unwrapping_gives_the_model_back(name: str) -> None:
    one = DOORS[name]
    model = one.make()
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    ids = torch.tensor(prompts(7))
    with torch.no_grad():
        wanted = one.plain(model, ids)
        diffcache.wrap(model, one.policy)
        assert torch.equal(one.plain(model, ids), wanted)  # no plan: the model's own
        DiffusionLM(model).generate(prompts(7), one.schedule)
        diffcache.unwrap(model)
        assert torch.equal(one.plain(model, ids), wanted)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == before[path].keys()
        assert type(module.__dict__["_modules"]) is type(before[path]["_modules"])
