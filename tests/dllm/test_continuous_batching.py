"""Prompts that take each other's places are answered as alone."""

from typing import Any

import pytest
import torch

import diffcache
from diffcache import dllm
from diffcache.dllm import BlockCache, Dynamic, FastDLLM, Sampler, Schedule, Threshold, Uncached, WindowDiffusion
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.targets import handle_of
from tests.dllm.test_remote import made
from tests.dllm.toys import MASK, bidirectional, prompts

SERVED: dict[str, tuple[str, dllm.Policy, Sampler, int | None]] = {
    "edits": ("llada2", BlockCache(), Sampler(rule=Dynamic(0.3, 0.25)), None),
    "quota": ("sdar", BlockCache(), Sampler(), None),
    "sub-blocks": ("fast-dllm", FastDLLM(dual=True), Sampler(rule=Threshold(0.2)), 4),
    "all rows": ("llada2", Uncached(), Sampler(rule=Threshold(0.3)), None),
}


@pytest.mark.parametrize("name", SERVED)
def test_prompts_that_take_turns_are_answered_as_alone(name: str) -> None:
    """Three places for nine prompts of other lengths, some of which end early."""
    code, policy, sampler, block = SERVED[name]
    rows = prompts(13, 3, 16, 40, 1, 8, 27, 5, 33)
    lm = DiffusionLM(diffcache.wrap(made(code, num_hidden_layers=2), policy))
    end = lm.generate([rows[0]], Schedule(20, block), sampler).ids[0, 6].item()
    how = Schedule(20, block, eos_id=int(end)), sampler
    alone = [lm.generate([row], *how) for row in rows]
    lengths = {answer.forwards for answer in alone}
    assert len(lengths) > 1  # some leave early
    calls: list[int] = []
    hook = lm.model.register_forward_hook(lambda *_: calls.append(1))
    served = list(lm.serve(iter(rows), *how, slots=3, longest=40, fill=8))
    hook.remove()
    assert sorted(number for number, _ in served) == list(range(9))
    for number, ids in served:
        assert ids == alone[number].ids[0].tolist()
    assert len(calls) < sum(answer.forwards for answer in alone) / 1.5
    assert [number for number, _ in served] != list(range(9))
    assert dict(lm.serve(rows, *how, slots=20)) == dict(served)


def test_places_are_left_free_by_who_stops_early() -> None:
    lm = DiffusionLM(diffcache.wrap(made("llada2"), BlockCache()))
    handle, rows = handle_of(lm.model), prompts(13, 3, 16, 40)
    answers = lm.serve(iter(rows), Schedule(8, None), slots=2, longest=40)
    wanted = dict(lm.serve(rows, Schedule(8, None)))
    number, ids = next(answers)
    assert wanted[number] == ids and handle.held_bytes() > 0
    answers.close()
    assert handle.held_bytes() == 0 and list(lm.serve([])) == []
    bad: list[Any] = [[1] * 41, rows[0], [99], rows[1], [MASK], rows[2], "text", rows[3]]
    told: dict[int, list[int]] = {}
    settled = lambda number, ids: told.setdefault(number, []).extend(ids)  # noqa: E731
    served = dict(lm.serve(iter(bad), Schedule(8, None), slots=2, longest=40, on_settled=settled))
    for place, said in (
        (0, "number 0 has 41 tokens where longest=40"),
        (2, "hold 99, which is no token"),
        (4, "or holds the mask, token 63"),
        (6, "is text, and there is no tokenizer"),
    ):
        assert said in str(served.pop(place))
    assert served == {2 * n + 1: ids for n, ids in wanted.items()} == told
    canceled = dict(lm.serve(rows, Schedule(8, None), slots=2, is_canceled={0, 3}.__contains__))
    assert canceled == {n: ids for n, ids in wanted.items() if n in (1, 2)}
    assert handle.held_bytes() == 0
    for other, policy, said in (
        (DiffusionLM(bidirectional()), Uncached(), "every token of this model sees all other"),
        (DiffusionLM(made("sdar")), WindowDiffusion(), "WindowDiffusion.*: sequences come and go"),
    ):
        with diffcache.wrapped(other, policy), pytest.raises(ValueError, match=said):
            next(other.serve(rows))


def test_a_model_unwrapped_in_the_midst_and_one_prompt_are_refused() -> None:
    model, (asked,) = made("llada2"), prompts(13)
    lm = DiffusionLM(model)
    diffcache.wrap(model, BlockCache())
    under_way = lm.serve([asked, asked], Schedule(8, None), slots=1)
    next(under_way)
    diffcache.unwrap(model)
    with pytest.raises(ValueError, match="was unwrapped, or wrapped anew, while it decodes"):
        next(under_way)
    diffcache.wrap(model, BlockCache())
    for one in ("abc", [1, 2, 3], torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="is one prompt; give several"):
            next(lm.serve(one))  # type: ignore[arg-type]
    for one in ([1, 2, 3], torch.tensor([1, 2, 3])):
        errors = [str(error) for _, error in lm.serve(iter(one))]  # type: ignore[arg-type]
        assert ["hold the token" in error for error in errors] == [True] * 3
