"""Bare denoisers: nobody says where runs start and which call is which, unless the user does."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, CacheWarning, Combine, Every, Interval
from diffcache.api import handle_of
from diffcache.pipelines.zoo.pipes import pipes

EVERY = Interval(every=3)
STEPS = 6


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.value(hidden_states)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.tanh(self.attn(hidden_states))


class Toy(nn.Module):
    """Takes any condition, which is added to the sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden_states: Tensor, timestep: Any, cond: Any = None) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states if cond is None else hidden_states * cond + cond

    def forward_with_cfg(self, *args: Any) -> Tensor:
        return self.forward(*args)


def sample(number: int) -> Tensor:
    return torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(number))


COND = [torch.full((1, 4, 8), value) for value in (1.0, -1.0, 0.5)]
PLAIN = Toy()  # what every output is compared with
Call = tuple[Tensor, float, Any]  # sample, timestep, condition


def alone(calls: Sequence[Call]) -> list[Tensor]:
    """Return the outputs of one run of one branch under the cache."""
    model = diffcache.wrap(Toy(), EVERY)
    with diffcache.run(model, steps=len(calls)):
        return [model(*call) for call in calls]


def is_own(out: Tensor, calls: Sequence[Call]) -> bool:
    """Return whether the last call, of no condition, was computed, or skipped with features of the calls before."""
    x = calls[-1][0]
    return any(
        torch.allclose(out, x + PLAIN(*call) - call[0], atol=1e-5) for call in reversed(calls)
    )


def track(number: int, start: int = 9, cond: Any = None, steps: int = STEPS) -> list[Call]:
    """Return the calls of one trajectory."""
    return [(sample(100 * number + i), float(start - i), cond) for i in range(steps)]


def marks(model: Any, branch: int | str | None = None) -> str:
    calls = handle_of(model).last.calls
    return "".join("sC"[c.computed] for c in calls if branch is None or c.branch == branch)


def said(caught: Sequence[warnings.WarningMessage], words: str) -> int:
    return sum(words in str(w.message) for w in caught if w.category is CacheWarning)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        yield log


# what must go on being skipped -------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True], ids=["same tensors", "equal tensors"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_with_guidance_skips_and_keeps_its_branches_apart(
    caught: Any, mode: Callable[[], Any], fresh: bool
):
    model = diffcache.wrap(Toy(), EVERY)
    own = [alone(track(0, cond=COND[which])) for which in (0, 1)]
    with mode():
        for step, (x, t, _) in enumerate(track(0)):
            for which in (0, 1) if step % 2 == 0 else (1, 0):
                cond = COND[which].clone() if fresh else COND[which]
                out = model(x.clone() if fresh else x, torch.tensor([t]), cond)
                assert torch.equal(out, own[which][step])
    assert marks(model, 0) == marks(model, 1) == "CssCss"
    assert not caught


@pytest.mark.parametrize("up", [False, True])
def test_a_model_without_conditions_skips(caught: Any, up: bool):
    model = diffcache.wrap(Toy(), EVERY)
    for _ in range(2):
        for step in range(STEPS):
            model(sample(step), float(step if up else STEPS - step))
        assert marks(model) == "CssCss"
    assert not caught


def test_control_may_move_from_step_to_step(caught: Any):
    class Controlled(Toy):
        def forward(self, hidden_states: Tensor, timestep: Any, control: list[Tensor]) -> Tensor:
            return super().forward(hidden_states, timestep) + control[0]

    model = diffcache.wrap(Controlled(), EVERY)
    for x, t, _ in track(0):
        model(x, t, control=[x + 1])
    assert marks(model) == "CssCss" and not caught


# what nothing tells apart is computed, and said ----------------------------------------------------


def test_a_branch_that_is_left_out_is_not_taken_for_the_other(caught: Any):
    model = diffcache.wrap(Toy(), EVERY)
    own = [alone(track(0, cond=COND[which])) for which in (0, 1)]
    for step, (x, t, _) in enumerate(track(0)):
        for which in (0, 1) if step in (0, 3) else (1,):
            out = model(x, t, COND[which].clone())
            assert torch.equal(out, own[which][step])
    assert marks(model, 1) == "CssCss" and not caught


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_is_written_over_is_not_taken_for_what_it_held(
    caught: Any, mode: Callable[[], Any]
):
    model = diffcache.wrap(Toy(), EVERY)
    own = [alone(track(0, cond=COND[which])) for which in (0, 1)]
    with mode():
        buffer = torch.empty(1, 4, 8)
        for step, (x, t, _) in enumerate(track(0)):
            for which in (0, 1):
                buffer.copy_(COND[which])
                out, exact = model(x, t, buffer), PLAIN(x, t, COND[which])
                assert torch.equal(out, exact) or torch.equal(out, own[which][step])
    assert said(caught, "not those of any branch so far") == (mode is torch.no_grad)


def test_conditions_that_change_at_every_step_are_computed_and_said_once(caught: Any):
    model = diffcache.wrap(Toy(), EVERY)
    calls = [(x, t, COND[0] + t) for x, t, _ in track(0)]
    for call in calls:
        assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "its conditions are not those of any branch so far") == 1
    assert len(handle_of(model).run().timelines[handle_of(model).engines[0]].branches) <= 2
    diffcache.reset(model)
    for call in calls:
        with diffcache.branch("only"):
            model(*call)
    assert marks(model) == "CssCss"


@pytest.mark.parametrize("many", [2, 8, 10])
@pytest.mark.parametrize("cond", [None, COND[0]], ids=["unconditional", "same condition"])
def test_samples_at_one_timestep_are_no_branches(caught: Any, many: int, cond: Any):
    model = diffcache.wrap(Toy(), EVERY)
    tracks = [track(k, cond=cond) for k in range(many)]
    for together in zip(*tracks, strict=True):
        for call in together:
            assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "calls at one timestep are given the same conditions") == 1
    assert handle_of(model).held_bytes() == 0


def test_samples_at_one_timestep_that_differ_in_their_conditions_are_told_apart(caught: Any):
    model = diffcache.wrap(Toy(), EVERY)
    tracks = [track(k, cond=torch.full((1, 4, 8), float(k))) for k in range(10)]
    own = [alone(calls) for calls in tracks]
    for step, together in enumerate(zip(*tracks, strict=True)):
        for number, call in enumerate(together):
            assert torch.equal(model(*call), own[number][step])
    assert marks(model, 9) == "CssCss" and not caught


def test_samples_at_one_timestep_can_be_named():
    model = diffcache.wrap(Toy(), EVERY)
    tracks = [track(k) for k in range(10)]
    own = [alone(calls) for calls in tracks]
    for step, together in enumerate(zip(*tracks, strict=True)):
        for number, call in enumerate(together):
            with diffcache.branch(f"part {number}"):
                assert torch.equal(model(*call), own[number][step])
    assert marks(model, "part 9") == "CssCss"


def test_two_calls_that_look_alike_are_computed_and_said_once(caught: Any):
    """Something outside the arguments may differ, such as a layer that is switched off."""
    model = diffcache.wrap(Toy(), EVERY)
    for x, t, _ in track(0):
        for _ in range(2):
            assert torch.equal(model(x, t), PLAIN(x, t))
    assert said(caught, "calls at one timestep are given the same conditions") == 1


def test_a_name_that_is_used_twice_at_a_timestep_is_computed_and_said_once(caught: Any):
    model = diffcache.wrap(Toy(), EVERY)
    for together in zip(track(0), track(1), strict=True):
        for call in together:
            with diffcache.branch("cond"):
                assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "in the same diffcache.branch") == 1


@pytest.mark.parametrize(
    "order",
    ["ABAABBABABAB", "AABBAABBAABB", "AAABABBBAABB", "ABBBBBABAAAA", "AAAABBBBAABB"],
)
def test_runs_that_take_turns_are_not_mixed(caught: Any, order: str):
    model = diffcache.wrap(Toy(), EVERY)
    tracks = {"A": track(0), "B": track(1)}
    at = {"A": 0, "B": 0}
    for name in order:
        at[name] += 1
        calls = tracks[name][: at[name]]
        assert is_own(model(*calls[-1]), calls), at
    assert said(caught, "diffcache.run(model)")


def test_a_run_that_starts_again_lower_is_doubted_until_the_next(caught: Any):
    """Of two runs that were cut short and ran on, nobody knows which goes on."""
    model = diffcache.wrap(Toy(), EVERY)
    for call in track(0, steps=3):
        model(*call)
    for call in track(1):
        model(*call)
    assert marks(model) == "CssCCC"
    assert said(caught, "the timestep turned back and then went past") == 1
    for call in track(2):
        model(*call)
    assert marks(model) == "CssCss"
    diffcache.reset(model)
    for call in track(3):
        model(*call)
    assert marks(model) == "CssCss"


def test_inversion_and_then_sampling(caught: Any):
    model = diffcache.wrap(Toy(), EVERY)
    for step in range(5):
        model(sample(step), float(step))
    first = sample(50), 9.0
    assert torch.equal(model(*first), PLAIN(*first))
    assert said(caught, "moved much further than at any step before") == 1
    for step in range(1, 5):
        model(sample(50 + step), 9.0 - step)
    assert marks(model) == "CssC"  # a run of its own from where the timestep turns


# words for it ----------------------------------------------------------------------------------


def test_a_run_starts_clean_knows_its_length_and_frees_at_its_end():
    method = Combine(Every(3), site="stack")
    model = diffcache.wrap(Toy(), method)
    handle = handle_of(model)
    for call in track(0, steps=2):
        model(*call)
    for _ in range(2):
        with diffcache.run(model, steps=4):
            outs = [model(*call) for call in track(1, steps=4)]
            assert handle.run().timeline(handle.engines[0]).step(0).is_last
            assert handle.held_bytes() > 0
        assert marks(model) == "CssC" and handle.last.finished
        assert all(map(torch.equal, outs, alone(track(1, steps=4))))
    assert handle.last.calls[0].reason == "first call"
    diffcache.reset(model)
    assert handle.held_bytes() == 0


def test_a_run_may_jump_and_turn():
    model = diffcache.wrap(Toy(), EVERY)
    with diffcache.run(model):
        for t in (999.0, 998.0, 500.0, 499.0):
            model(sample(int(t)), t)
    assert marks(model) == "CssC"


def test_bad_runs_and_branches_are_errors():
    model = Toy()
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.run(model)
    diffcache.wrap(model, EVERY)
    for steps in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="steps=.*: must be a whole number of at least 1"):
            diffcache.run(model, steps=steps)  # type: ignore[arg-type]
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="branch name .*: must be text"):
            diffcache.branch(name)  # type: ignore[arg-type]
    with diffcache.run(model), pytest.raises(AttachError, match="is open in this thread already"):
        diffcache.run(model).__enter__()
    with diffcache.run(model, steps=2):
        for call in track(0, steps=2):
            model(*call)
        with pytest.raises(AttachError, match=r"steps=2\): a step more than that began"):
            model(*track(0)[2])
    assert handle_of(model).held_bytes() == 0


ORDER = [0, 0] + [1, 0] * 4 + [1, 1]


def in_turns(jobs: Callable[[Callable[[int], Any]], None]) -> None:
    """Run two trajectories in an order that is always the same; each must be as if alone."""
    model = diffcache.wrap(Toy(), EVERY)
    own = [alone(track(k)) for k in (0, 1)]
    lock, done = threading.Condition(), list[int]()

    def job(number: int) -> None:
        with torch.no_grad():
            for step, call in enumerate(track(number)):
                with lock:
                    lock.wait_for(lambda: ORDER[len(done)] == number, 20)
                    out = model(*call)
                    done.append(number)
                    lock.notify_all()
                assert torch.equal(out, own[number][step])

    for call in track(9):  # in this thread first, whose context others may copy
        model(*call)
    jobs(job)


def test_threads_and_tasks_do_not_meet():
    def threads(job: Any) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                job(number)
            except BaseException as error:
                failures.append(error)

        both = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert not failures

    async def to_threads(job: Any) -> None:
        await asyncio.gather(*(asyncio.to_thread(job, k) for k in (0, 1)))

    in_turns(threads)
    in_turns(lambda job: asyncio.run(to_threads(job)))


@pytest.mark.parametrize("told", [False, True])
def test_tasks_that_await_in_the_middle_of_a_run_do_not_meet(told: bool):
    model = diffcache.wrap(Toy(), EVERY)
    own = [alone(track(k)) for k in (0, 1)]

    async def job(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)
        if told:
            with diffcache.run(model, steps=STEPS):
                await loop(number)
        else:
            await loop(number)

    async def loop(number: int) -> None:
        for step, call in enumerate(track(number)):
            assert torch.equal(model(*call), own[number][step])
            await asyncio.sleep(0)

    async def main() -> None:
        for call in track(9):
            model(*call)
        await asyncio.gather(job(0), job(1))

    asyncio.run(main())


def test_a_run_reaches_into_the_threads_it_hands_its_calls_to():
    model = diffcache.wrap(Toy(), EVERY)

    def call(*given: Any) -> Tensor:
        with torch.no_grad():
            return model(*given)

    async def main() -> list[Tensor]:
        with diffcache.run(model):
            return [await asyncio.to_thread(call, *one) for one in track(0)]

    assert all(map(torch.equal, asyncio.run(main()), alone(track(0))))
    assert marks(model) == "CssCss"


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline", "StableDiffusionPipeline"])
def test_a_sibling_that_runs_in_a_callback_is_a_run_of_its_own(name: str):
    zoo = pipes()[name]
    pipe = zoo.build(0)
    plain = pipe(**zoo.call(pipe, 1, 3))[0]
    diffcache.wrap(pipe, EVERY)
    alone_out = pipe(**zoo.call(pipe, 0, STEPS))[0]
    parts = {**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)}
    sibling = getattr(diffusers, name)(**parts)
    sibling.set_progress_bar_config(disable=True)
    inner = []

    def between(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        if step in (1, 3):
            inner.append(sibling(**zoo.call(sibling, 1, 3))[0])
        return kwargs

    outer = pipe(**zoo.call(pipe, 0, STEPS), callback_on_step_end=between)[0]
    assert torch.equal(outer, alone_out)
    assert len(handle_of(pipe).last.calls) == STEPS * zoo.branches
    assert torch.equal(inner[0], inner[1]) and inner[0].shape == plain.shape


# models are freed ------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "block", "attention", "model"])
def test_a_bare_model_is_freed_at_once_when_it_is_unwrapped(site: str):
    PLAIN(sample(0), 1.0)

    def used(unwrap: bool) -> weakref.ref[nn.Module]:
        model = diffcache.wrap(Toy(), Combine(Every(3), site=site))
        for call in track(0):
            model(*call)
        if unwrap:
            diffcache.unwrap(model)
        return weakref.ref(model)

    used(True)  # torch imports what counts operations, and keeps the frames that it did so in
    gc.collect()
    gc.disable()
    try:
        assert used(True)() is None
    finally:
        gc.enable()
    left = used(False)
    gc.collect()
    assert left() is None


def test_a_denoiser_that_ran_in_a_sibling_pipeline_is_freed():
    zoo = pipes()["FluxPipeline"]
    pipe = diffcache.wrap(zoo.build(0), EVERY)
    sibling = diffusers.FluxPipeline(**pipe.components)
    sibling(**zoo.call(sibling, 0, 3))
    left = weakref.ref(pipe.transformer)
    diffcache.unwrap(pipe)
    del pipe, sibling
    gc.collect()
    assert left() is None


def test_features_of_a_thread_go_with_it():
    model = diffcache.wrap(Toy(), EVERY)

    def work() -> None:
        with torch.no_grad():
            model(*track(0)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert handle_of(model).held_bytes() == 0


# what would not be cached says so -----------------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "attention"])
@pytest.mark.parametrize("how", ["forward", "forward_with_cfg"])
def test_a_forward_that_is_called_directly_is_said_once(caught: Any, site: str, how: str):
    model = diffcache.wrap(Toy(), Interval(every=3, site=site))
    for block in model.blocks:  # looking is no running
        assert block.attn is not None
    assert not caught
    for x, t, _ in track(0):
        assert torch.equal(getattr(model, how)(x, t), PLAIN(x, t))
    assert said(caught, "Toy.forward was called directly") == 1
    for call in track(0):
        model(*call)
    assert "s" in marks(model) and len(caught) == 1


def test_a_cache_of_diffusers_that_comes_later_is_an_error():
    from diffusers import FirstBlockCacheConfig
    from diffusers.hooks import apply_first_block_cache

    zoo = pipes()["FluxPipeline"]
    pipe = diffcache.wrap(zoo.build(0), EVERY)
    config = FirstBlockCacheConfig(threshold=0.1)
    pipe.transformer.enable_cache(config)
    with pytest.raises(AttachError, match=r"under diffusers' .*; call disable_cache\(\) first"):
        pipe(**zoo.call(pipe, 0, 3))
    pipe.transformer.disable_cache()
    out = pipe(**zoo.call(pipe, 0, 3))[0]
    assert torch.equal(out, pipe(**zoo.call(pipe, 0, 3))[0]) and "s" in marks(pipe)
    apply_first_block_cache(pipe.transformer, config)
    with pytest.raises(AttachError, match=r"call disable_cache\(\) first"):
        pipe(**zoo.call(pipe, 0, 3))


def test_a_cache_like_cache_dit_that_comes_later_is_an_error():
    model = diffcache.wrap(Toy(), EVERY)
    model._is_cached = True
    with pytest.raises(AttachError, match="under another cache, such as cache-dit"):
        model(*track(0)[0])
    with pytest.raises(AttachError, match="under another cache"):
        diffcache.wrap(copy.deepcopy(diffcache.unwrap(model)), EVERY)
