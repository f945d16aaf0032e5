"""Contract of every policy and every door: whatever rows are computed, decodings are apart."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import diffcache
from diffcache import dllm
from diffcache.dllm import BlockCache, DKVCache, DLLMCache, ElasticCache, FastDLLM, Policy, Sampler, Schedule
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.targets import handle_of
from tests.dllm.cases import CASES, CONFIDENT, LENGTHS, LIMITS, LONGEST, WIDTH, model, traced
from tests.dllm.test_remote import alone, made
from tests.dllm.toys import LAYERS, bidirectional, prompts, trace

every_policy = pytest.mark.parametrize("name", CASES)


@cache
def uncached(schedule: Schedule, sampler: Sampler, lengths: tuple[int, ...]) -> Any:
    """Return a decoding without a cache, in float32, and its steps."""
    return trace(model(torch.float32), None, prompts(*lengths), schedule, sampler)


@pytest.mark.parametrize("lengths", [(9,), LENGTHS], ids=["alone", "padded"])
@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_the_uncached_model_bit_for_bit(name: str, lengths: tuple[int, ...]) -> None:
    case, network = LIMITS[name], model(torch.float32)
    ours, notes = trace(network, case.policy, prompts(*lengths), case.schedule, case.sampler)
    stock, plain = uncached(case.schedule, case.sampler, lengths)
    assert len(notes) == len(plain)
    for now, other in zip(notes, plain, strict=True):
        assert now.plan.rows is None
        assert torch.equal(now.logits, other.logits)
    assert torch.equal(ours.ids, stock.ids)


def test_every_policy_has_a_limit() -> None:
    limits = {type(case.policy) for case in LIMITS.values()}
    assert limits >= {type(case.policy) for case in CASES.values()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.freezes_masks])
def test_plans_that_leave_out_what_changed_are_refused(name: str) -> None:
    """All other policies are decoded with the same check, further down."""
    case, network = CASES[name], model()
    with diffcache.wrapped(network, case.policy):
        lm = DiffusionLM(network)
        with pytest.raises(ValueError, match="leaves out position .* was changed by the last step"):
            lm.generate(prompts(*LENGTHS), case.schedule, case.sampler, check=True)


@pytest.mark.parametrize(
    "name", {type(case.policy): n for n, case in CASES.items() if case.sampler == CONFIDENT}.values()
)
def test_a_padded_batch_is_its_prompts_alone(name: str) -> None:
    """With a threshold, sequences leave their blocks at different steps."""
    case, sampler = CASES[name], Sampler(rule=dllm.Threshold(0.4))
    together = trace(model(), case.policy, prompts(*LENGTHS), case.schedule, sampler)[0]
    steps = set()
    for row, prompt in enumerate(prompts(*LENGTHS)):
        alone = trace(model(), case.policy, [prompt], case.schedule, sampler)[0]
        assert torch.equal(alone.ids[0, len(prompt) :], together.ids[row, LONGEST:])
        steps.add(alone.step)
    assert len(steps) > 1
    rows = prompts(5, 1)
    with diffcache.wrapped(model(), case.policy):  # rows that predict the token after their own
        shifted = partial(DiffusionLM(model(), shift=True).generate, schedule=case.schedule, sampler=sampler)
        assert torch.equal(shifted(rows).ids, torch.cat([shifted([row]).ids for row in rows]))


@every_policy
def test_decodings_follow_each_other_and_are_counted(name: str) -> None:
    """A longer one that is given up, and this one, with one object."""
    case, network = CASES[name], model()
    wanted, notes = traced(name)
    rows = sum(now.rows.numel() for now in notes)
    with diffcache.wrapped(network, case.policy):
        lm = DiffusionLM(network)
        longer = lm.steps(prompts(11), replace(case.schedule, length=24, steps=None), case.sampler)
        next(longer), next(longer), longer.close()
        checked = {"check": not case.freezes_masks}
        answer = lm.generate(prompts(*LENGTHS), case.schedule, case.sampler, **checked)
        assert torch.equal(answer.ids, wanted.ids[:, LONGEST:])
        assert (answer.forwards, answer.rows) == (len(notes), rows)
        assert handle_of(network).held_bytes() == 0
    report = answer.report
    assert report is not None
    computed, left_out = report.sites["model"]["token-layers"]
    assert computed + left_out == len(notes) * 2 * WIDTH * LAYERS
    held = [*sum(notes[-1].kept, ()), *notes[-1].more]  # type: ignore[arg-type]
    assert report.peak_bytes == sum(x.nbytes for x in held)
    if case.computes_its_plan:
        assert computed == rows * LAYERS
        assert report.peak_bytes == 2 * LAYERS * 2 * 2 * WIDTH * 8 * 8  # K, V; 2 heads of 8


BLOCKS, WINDOW = Schedule(8, 4), Schedule(8, None, window=3)


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


def masked(model: Any, ids: Tensor) -> Tensor:
    return model(ids, torch.ones_like(ids)).logits


DOORS = {
    "rows": Door(bidirectional, DKVCache(every=3)),
    "two ways": Door(bidirectional, FastDLLM(dual=True)),
    "blocks": Door(bidirectional, DLLMCache(5, 3)),
    "drift": Door(bidirectional, ElasticCache(0.95, "key"), schedule=WINDOW),
    "llada": Door(partial(made, "llada"), FastDLLM(dual=True), "model.transformer.blocks.1.attn_out", plain=alone),
    "dream": Door(partial(made, "dream"), DKVCache(every=3), "model.layers.1.mlp.down_proj", plain=alone),
    "finished blocks": Door(partial(made, "llada2"), BlockCache(), schedule=Schedule(8, None), plain=masked),
    "sub-blocks": Door(partial(made, "fast-dllm"), FastDLLM(dual=True)),
}


# A run that is not ended where it began is ended when it is collected, in another context.
LEFT_OPEN = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(params=DOORS)
def door(request: Any) -> tuple[Door, Any, DiffusionLM]:
    """Return a door, its model, wrapped, and the pipeline that decodes with it."""
    one = DOORS[request.param]
    model = one.make()
    diffcache.wrap(model, one.policy)
    return one, model, DiffusionLM(model)


@LEFT_OPEN
def test_decodings_in_turns_and_in_threads_are_apart(door: tuple[Door, Any, DiffusionLM]) -> None:
    one, model, lm = door
    rows = prompts(*LENGTHS)
    wanted = [lm.generate([row], one.schedule).ids for row in rows]
    turns = list(zip_longest(*(lm.steps([row], one.schedule) for row in rows)))
    found = [turns[0][place].answer for place in range(len(rows))]  # one object from first to last
    assert all(map(torch.equal, found, wanted))
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda row: lm.generate([row], one.schedule).ids, rows)
        assert all(map(torch.equal, answers, wanted))
    assert handle_of(model).held_bytes() == 0


@LEFT_OPEN
def test_a_decoding_that_is_cut_off_leaves_nothing_behind(door: tuple[Door, Any, DiffusionLM]) -> None:
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
