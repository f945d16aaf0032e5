"""Several pipelines, threads and requests at once: each runs as if it were alone."""

from __future__ import annotations

import contextlib
import copy
import threading
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache import AttachError, Interval
from diffcache.api import handle_of
from diffcache.attach.reuse import extension
from tests.internals import marks
from tests.zoo_runs import CASES, EVERY, PIPES, SEER, STEPS, in_threads, run

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(
    "names", [("FluxPipeline", "FluxPipeline"), ("FluxPipeline", "WanPipeline")]
)
def test_pipelines_interleaved(names: tuple[str, str]):
    alone = [run(diffcache.wrap(PIPES[n].build(s), SEER), n, seed=s) for s, n in enumerate(names)]
    one, two = (diffcache.wrap(PIPES[n].build(s), SEER) for s, n in enumerate(names))
    inner = []

    def between(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
        if step in (1, 4):
            inner.append(run(two, names[1], seed=1))
        return kwargs

    outer = run(one, names[0], callback_on_step_end=between)
    assert torch.equal(outer, alone[0])
    assert len(inner) == 2 and all(torch.equal(out, alone[1]) for out in inner)
    assert marks(one) == "CssCss"


def test_two_pipelines_in_two_threads():
    both = [
        diffcache.wrap(PIPES[n].build(0), SEER) for n in ("FluxPipeline", "HunyuanVideoPipeline")
    ]
    names = ("FluxPipeline", "HunyuanVideoPipeline")
    alone = [run(pipe, name) for pipe, name in zip(both, names, strict=True)]
    outs = in_threads(*(lambda p=p, n=n: run(p, n) for p, n in zip(both, names, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(alone, outs, strict=True))


def trajectory(model: Any, case: Any, seed: int, pause: threading.Barrier | None = None) -> Tensor:
    total = torch.zeros(())
    for step in range(STEPS):
        if pause is not None:
            pause.wait(30)
        total = total + (step + 1) * model(**case.kwargs(model, seed, step, STEPS)).sample
    return total


def test_threads_that_share_a_bare_denoiser():
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), SEER)
    alone = [trajectory(model, case, seed) for seed in range(3)]
    pause = threading.Barrier(3)
    outs = in_threads(*(lambda s=s: trajectory(model, case, s, pause) for s in range(3)))
    assert all(torch.equal(a, b) for a, b in zip(alone, outs, strict=True))
    handle_of(model).detach()


def test_wrapping_twice_is_an_error():
    pipe = diffcache.wrap(PIPES["FluxPipeline"].build(0), EVERY)
    for target in (pipe, pipe.transformer):
        with pytest.raises(
            AttachError, match=r"already runs under Interval\(every=3.*unwrap it first"
        ):
            diffcache.wrap(target, SEER)
    diffcache.unwrap(diffcache.wrap(diffcache.unwrap(pipe), SEER))
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.unwrap(pipe)


def test_other_caches_are_an_error():
    from diffusers import FirstBlockCacheConfig

    pipe = PIPES["FluxPipeline"].build(0)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(
        AttachError, match=r"already runs under diffusers' .*disable_cache\(\) first"
    ):
        diffcache.wrap(pipe, EVERY)
    pipe.transformer.disable_cache()
    diffcache.wrap(pipe, EVERY)
    run(pipe, "FluxPipeline")
    assert marks(pipe) == "CssCss"


@dataclass(frozen=True)
class Slow(Interval):
    """A method that waits while it is attached, until another thread is as far."""

    gate: Any = None

    def check_model(self, facts: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.gate.wait(0.5)


def sibling_of(pipe: Any) -> Any:
    """Return another pipeline with the same denoiser, as a pool of requests has it."""
    parts = {**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)}
    sibling = type(pipe)(**parts)
    sibling.set_progress_bar_config(disable=True)
    return sibling


def test_of_two_threads_that_wrap_one_denoiser_one_is_refused():
    pipe, gate = PIPES["FluxPipeline"].build(0), threading.Barrier(2)
    both = pipe, sibling_of(pipe)
    refused = []

    def job(pipe: Any) -> None:
        try:
            diffcache.wrap(pipe, Slow(every=3, gate=gate))
        except AttachError as error:
            refused.append(str(error))

    in_threads(*(lambda pipe=pipe: job(pipe) for pipe in both))
    (message,) = refused
    assert "already runs under" in message


@pytest.mark.parametrize("shares", [False, True], ids=["the pipeline itself", "a sibling"])
def test_other_threads_do_not_reach_into_a_run(shares: bool):
    pipe = diffcache.wrap(PIPES["FluxPipeline"].build(0), EVERY)
    alone = run(pipe, "FluxPipeline")
    drawn = sibling_of(pipe) if shares else pipe
    said = []

    def meddle() -> None:
        diffcache.reset(pipe)
        with pytest.raises(AttachError, match="is open in another thread") as refusal:
            diffcache.unwrap(pipe)
        said.append(refusal)

    def between(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        in_threads(meddle)
        return kwargs

    assert torch.equal(run(drawn, "FluxPipeline", callback_on_step_end=between), alone)
    assert len(said) == STEPS and marks(pipe) == "CssCss"
    with pytest.raises(AttachError, match="is not wrapped itself: it shares a denoiser"):
        diffcache.unwrap(sibling_of(pipe))
    diffcache.unwrap(pipe)


@pytest.mark.parametrize("caller", ["the pipeline itself", "a sibling", "a loop"])
def test_a_run_that_began_without_a_cache_ends_without_one(caller: str):
    """Nothing noted that it began, and half a picture would be cached."""
    pipe, case = PIPES["FluxPipeline"].build(0), CASES["FluxTransformer2DModel"]
    said = []

    def meddle() -> None:
        for target in (pipe, pipe.transformer):
            with pytest.raises(AttachError, match="is in a call of its own in another thread"):
                diffcache.wrap(target, EVERY)
            said.append(target)

    def between(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        in_threads(meddle)
        return kwargs

    if caller == "a loop":
        inside = pipe.transformer.transformer_blocks[0]
        hook = inside.register_forward_pre_hook(lambda *_: in_threads(meddle) and None)
        with torch.no_grad():
            pipe.transformer(**case.kwargs(pipe.transformer, 0, 0, STEPS))
        hook.remove()
        assert len(said) == 2
    else:
        drawn = sibling_of(pipe) if caller == "a sibling" else pipe
        plain = run(pipe, "FluxPipeline")
        assert torch.equal(run(drawn, "FluxPipeline", callback_on_step_end=between), plain)
        assert len(said) == 2 * STEPS
    diffcache.unwrap(diffcache.wrap(pipe, EVERY))


def test_a_request_has_settings_of_its_own():
    name, seer = "FluxPipeline", diffcache.TaylorSeer(every=3, order=1, warmup=2)
    pipe = PIPES[name].build(0)
    asked = [{}, {"every": 2}, {"order": 0}, {"every": 5, "warmup": 1}]
    own = []
    for settings in asked:
        with diffcache.wrapped(pipe, replace(seer, **settings)):
            own.append(run(pipe, name))
    diffcache.wrap(pipe, seer)
    pipes = [sibling_of(pipe) for _ in asked]

    def request(number: int) -> Tensor:
        with diffcache.settings(pipe, **asked[number]):
            return run(pipes[number], name)

    outs = in_threads(*(lambda number=number: request(number) for number in range(len(asked))))
    assert all(map(torch.equal, outs, own)) and len({out.sum().item() for out in own}) == 4
    with diffcache.settings(pipe, every=2), diffcache.settings(pipe, order=0):
        run(pipe, name)
    assert diffcache.report(pipe).method == replace(seer, every=2, order=0)
    assert torch.equal(run(pipe, name), own[0])


def test_a_gate_and_packed_features_have_settings_of_a_request():
    name, method = "FluxPipeline", diffcache.FirstBlock(threshold=0.0)
    pipe = diffcache.wrap(PIPES[name].build(0), diffcache.Held(method, "int8"))
    run(pipe, name)
    assert marks(pipe) == "CCCCCC"
    with diffcache.settings(pipe, threshold=1e9):
        run(pipe, name)
    assert marks(pipe) == "Csssss"


def test_settings_without_a_target_are_those_of_all_that_have_them(monkeypatch: Any):
    fresh = WeakSet()  # what other tests left wrapped is none of ours
    for module in ("diffcache.api", "diffcache.attach.handle"):
        monkeypatch.setattr(f"{module}.WRAPPED", fresh)
    names = ["FluxPipeline"] * 3
    given = [diffcache.TaylorSeer(every=3, warmup=1), Interval(every=3), diffcache.FirstBlock(9.0)]
    pipes = [PIPES[name].build(0) for name in names]
    with pytest.raises(AttachError, match="nothing is wrapped"):
        diffcache.settings(every=2)
    for pipe, method in zip(pipes, given, strict=True):
        diffcache.wrap(pipe, method)

    def all_marks() -> list[str]:
        for pipe in pipes:
            run(pipe, names[0])
        return [marks(pipe) for pipe in pipes]

    own = all_marks()
    with diffcache.settings(every=2):
        assert all_marks() == ["CsCsCs", "CsCsCs", own[2]]
        seen: list[list[str]] = []
        thread = threading.Thread(target=lambda: seen.append(all_marks()))
        thread.start()
        thread.join()
        assert seen == [own]
        with diffcache.settings(pipes[1], every=6):
            assert all_marks() == ["CsCsCs", "Csssss", own[2]]
    assert all_marks() == own
    with pytest.raises(
        ValueError, match=r"settings \['evry'\]: not of what is wrapped, FirstBlock"
    ):
        diffcache.settings(evry=2)
    with pytest.raises(ValueError, match="every=0: must be a whole number"):
        diffcache.settings(every=0)
    for pipe in pipes[:2]:
        diffcache.unwrap(pipe)
    with pytest.raises(ValueError, match=r"settings \['every'\]: not of what is wrapped"):
        diffcache.settings(every=2)
    diffcache.unwrap(pipes[2])


def test_settings_are_updated_without_learning_the_model_again():
    name, seer = "FluxPipeline", diffcache.TaylorSeer(every=3, order=1, warmup=2)
    pipe, own = PIPES[name].build(0), []
    for every in (3, 2):
        with diffcache.wrapped(pipe, replace(seer, every=every)):
            own.append(run(pipe, name))
    with patch.object(extension, "learn", side_effect=extension.learn) as learned:
        diffcache.wrap(pipe, seer)
        run(pipe, name)

        def change(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
            if step == 2:
                assert diffcache.update(pipe, every=2) is pipe
            return kwargs

        assert torch.equal(run(pipe, name, callback_on_step_end=change), own[0])  # it was open
        assert torch.equal(run(pipe, name), own[1])
        assert diffcache.report(pipe).method == replace(seer, every=2)
        with diffcache.settings(pipe, every=3):
            diffcache.update(pipe, order=0)
            assert torch.equal(run(pipe, name), own[0])
        assert learned.call_count == 1
    diffcache.unwrap(pipe)
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.update(pipe, every=2)


@pytest.mark.parametrize("change", [diffcache.settings, diffcache.update])
def test_tables_of_another_model_are_refused_when_settings_change(change: Any):
    """The published list of one model is refused on another, as by wrap."""
    model = CASES["FluxTransformer2DModel"].build(0)
    method = diffcache.MagCache(ratios=(1.0, 0.99, 0.98))
    with diffcache.wrapped(model, method):
        with pytest.raises(AttachError, match="ratios for wan2.1-t2v-1.3b, and this Flux"):
            change(model, model="wan2.1-t2v-1.3b")
        assert diffcache.report(model).method == method


@pytest.mark.parametrize("change", [diffcache.settings, diffcache.update])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evry": 2}, "TaylorSeer has no setting 'evry'; it has every"),
        ({"every": 0}, "every=0: must be a whole number"),
        ({"site": "block"}, "site: must change only when TaylorSeer computes.*wrap anew"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, message: str, change: Any):
    model = CASES["FluxTransformer2DModel"].build(0)
    with (
        diffcache.wrapped(model, diffcache.TaylorSeer(every=3)),
        pytest.raises(ValueError, match=message),
    ):
        change(model, **settings)
