"""Runs of bare denoisers that are said: threads, tasks, lifetimes, and caches that come later."""

import asyncio
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Combine, Every, Interval
from diffcache.targets import handle_of
from tests.bare.toys import EVERY, PLAIN, STEPS, Toy, alone, said, sample, track
from tests.internals import marks
from tests.zoo.pipes import pipes
from tests.zoo_runs import in_threads


def test_a_run_starts_clean_knows_its_length_and_frees_at_its_end():
    method = Combine(Every(3), site="stack")
    model = diffcache.wrap(Toy(), method)
    handle = handle_of(model)
    for call in track(0, steps=2):
        model(*call)
    for _ in range(2):
        with diffcache.run(model, steps=4):
            outs = [model(*call) for call in track(1, steps=4)]
            assert handle.run().timeline(handle.denoisers[0]).step(0).is_last
            assert handle.held_bytes() > 0
        assert marks(model) == "CssC" and handle.last.finished
        assert all(map(torch.equal, outs, alone(track(1, steps=4))))
    assert handle.last.calls[0].reason == "first call"
    diffcache.reset(model)
    assert handle.held_bytes() == 0


def test_a_run_may_jump_and_turn(model):
    with diffcache.run(model):
        for t in (999.0, 998.0, 500.0, 499.0):
            model(sample(int(t)), t)
    assert marks(model) == "CssC"


def test_bad_runs_and_branches_are_errors():
    model = Toy()
    diffcache.wrap(model, EVERY)
    for steps in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="steps=.*: must be a whole number of at least 1"):
            diffcache.run(model, steps=steps)  # type: ignore[arg-type]
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
    async def to_threads(job: Any) -> None:
        await asyncio.gather(*(asyncio.to_thread(job, k) for k in (0, 1)))

    in_turns(lambda job: in_threads(*(partial(job, k) for k in (0, 1))))
    in_turns(lambda job: asyncio.run(to_threads(job)))


@pytest.mark.parametrize("told", [False, True])
def test_tasks_that_await_in_the_middle_of_a_run_do_not_meet(model, told: bool):
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


def test_a_run_reaches_into_the_threads_it_hands_its_calls_to(model):

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


def test_a_pipeline_inside_a_told_run_keeps_its_record():
    zoo = pipes()["FluxPipeline"]
    pipe = diffcache.wrap(zoo.build(0), EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", diffcache.CacheWarning)
        with diffcache.run(pipe):
            pipe(**zoo.call(pipe, 0, STEPS))
    assert len(diffcache.report(pipe).calls) == STEPS * zoo.branches


def test_a_denoiser_that_calls_itself_from_inside_is_an_error(model):
    armed: list[bool] = []

    def nest(*_: Any) -> None:
        if armed:
            armed.clear()
            model(sample(9), 5.0)

    hook = model.blocks[1].register_forward_pre_hook(nest)
    with torch.no_grad(), diffcache.run(model):
        for step in range(3):
            model(sample(step), 10.0 - step)
        armed.append(True)
        with pytest.raises(diffcache.AttachError, match="from inside a call of its own"):
            model(sample(3), 7.0)
    hook.remove()


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


def test_features_of_a_thread_go_with_it(model):

    def work() -> None:
        with torch.no_grad():
            model(*track(0)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert handle_of(model).held_bytes() == 0


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
    with pytest.raises(AttachError, match=r"call disable_cache\(\) first"):
        diffcache.wrap(diffcache.unwrap(pipe), EVERY)


def test_a_cache_like_cache_dit_that_comes_later_is_an_error(model):
    model._is_cached = True
    with pytest.raises(AttachError, match="under another cache, such as cache-dit"):
        model(*track(0)[0])
    with pytest.raises(AttachError, match="under another cache"):
        diffcache.wrap(copy.deepcopy(diffcache.unwrap(model)), EVERY)
