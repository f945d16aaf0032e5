"""Several runs at once, adapters, other caches, memory: what a cache shares and what it does not."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache import AttachError, Combine, Every, Interval, Newton, Reuse, Taylor
from diffcache.api import handle_of
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

CASES, PIPES = cases(), pipes()
EVERY = Interval(every=3)
SEER = Combine(Every(3), Taylor(2), site="block")
STEPS = 6


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        yield


def run(pipe: Any, name: str, seed: int = 0, steps: int = STEPS, **more: Any) -> Tensor:
    return pipe(**{**PIPES[name].call(pipe, seed, steps), **more})[0]


def marks(target: Any) -> str:
    return "".join("sC"[call.computed] for call in handle_of(target).last.calls)


# several at once -----------------------------------------------------------------------------------


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


def in_threads(*jobs: Any) -> list[Any]:
    """Run every job in a thread of its own, all at once."""
    results: list[Any] = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def work(place: int) -> None:
        gate.wait()
        with torch.no_grad():
            try:
                results[place] = jobs[place]()
            except BaseException as error:
                results[place] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


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


# bare denoisers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ZImageTransformer2DModel"])
def test_a_bare_denoiser_starts_a_run_where_the_timestep_turns_back(name: str):
    case = CASES[name]
    model = diffcache.wrap(case.build(0), EVERY)
    first = [model(**case.kwargs(model, 0, s, STEPS)) for s in range(STEPS - 1)]
    assert marks(model) == "CssCs"
    again = [model(**case.kwargs(model, 0, s, STEPS)) for s in range(STEPS - 1)]
    assert marks(model) == "CssCs"
    for one, two in zip(first, again, strict=True):
        assert torch.equal(
            torch.cat([t.flatten() for t in one.sample]),
            torch.cat([t.flatten() for t in two.sample]),
        )


def test_reset_starts_a_run():
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), EVERY)
    for step in (0, 1):
        model(**case.kwargs(model, 0, step, STEPS))
    assert handle_of(model).held_bytes() > 0
    diffcache.reset(model)
    assert handle_of(model).held_bytes() == 0
    model(**case.kwargs(model, 0, 2, STEPS))
    last = handle_of(model).last.calls[-1]
    assert last.computed and last.index == 0 and last.reason == "first call"


def test_the_same_timestep_over_and_over_is_never_taken_for_guidance():
    """A one-step model is called with one timestep only."""
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), EVERY)
    exact = case.build(0)
    for seed in range(20):
        out = model(**case.kwargs(model, seed)).sample
        assert torch.equal(out, exact(**case.kwargs(exact, seed)).sample)
    assert handle_of(model).held_bytes() == 0


# other things that touch a model ------------------------------------------------------------------------


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(5)
    targets = ["to_q", "to_v", "proj_mlp", "to_out.0"]
    pipe.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    )


@pytest.mark.parametrize(
    "method",
    [EVERY, diffcache.TaylorSeer(every=3, warmup=1, site="module")],
    ids=["stack", "module"],
)
def test_lora_loaded_and_unloaded_while_wrapped(method: Any):
    name = "FluxPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    tuned = PIPES[name].build(0)
    lora(tuned)
    diffcache.wrap(tuned, method)
    expected = run(tuned, name)

    diffcache.wrap(pipe, method)
    cached = run(pipe, name)
    lora(pipe)
    out = run(pipe, name)
    assert torch.equal(out, expected) and not torch.allclose(out, cached, atol=1e-3)
    assert "s" in marks(pipe)
    pipe.transformer.delete_adapters("default")
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe, name), cached)
    diffcache.unwrap(pipe)
    assert torch.equal(run(pipe, name), plain)


def test_lora_from_a_file(tmp_path: Any):
    from peft.utils import get_peft_model_state_dict

    name = "FluxPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    lora(pipe)
    state = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=state)
    expected = run(diffcache.wrap(pipe, EVERY), name)

    other = diffcache.wrap(PIPES[name].build(0), EVERY)
    other.load_lora_weights(tmp_path)
    assert torch.allclose(run(other, name), expected, atol=1e-6)
    assert marks(other) == "CssCss"
    other.unload_lora_weights()
    diffcache.unwrap(other)
    assert torch.equal(run(other, name), plain)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evry": 2}, "TaylorSeer has no setting 'evry'; it has every"),
        ({"every": 0}, "every=0: must be a whole number"),
        ({"site": "block"}, "site: must change only when TaylorSeer computes.*wrap anew"),
    ],
)
def test_settings_of_a_request_that_do_not_fit_are_refused(settings: Any, message: str):
    model = CASES["FluxTransformer2DModel"].build(0)
    with (
        diffcache.wrapped(model, diffcache.TaylorSeer(every=3)),
        pytest.raises(ValueError, match=message),
    ):
        diffcache.settings(model, **settings)


# memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "tensors"),
    [
        (Interval(every=3), lambda b, d, s: d + s),
        (Combine(Every(3), Taylor(2)), lambda b, d, s: 3 * (d + s)),
        (Combine(Every(3), Newton(1)), lambda b, d, s: 2 * (d + s)),
        (Combine(Every(3), Reuse(), site="block"), lambda b, d, s: b * (d + s)),
        (Combine(Every(3), Reuse(), feature="output"), lambda b, d, s: s),
    ],
    ids=["reuse", "taylor2", "newton1", "block", "output"],
)
def test_held_bytes_follow_the_formula(method: Any, tensors: Any):
    """Lists of 4 double and 4 single blocks; 16 image and 6 text tokens of 32 channels, batch 2."""
    case = CASES["FluxTransformer2DModel"]
    model = case.build(0)
    depth, joint = len(model.transformer_blocks), 2 * (16 + 6) * 32 * 4
    assert depth == len(model.single_transformer_blocks) == 4
    with diffcache.wrapped(model, method) as handle:
        for step in range(9):  # three computed steps fill the differences
            model(**case.kwargs(model, 0, step, 9))
        assert handle.held_bytes() == tensors(depth, joint, joint)
        assert handle.last.peak_bytes == handle.held_bytes()
    assert handle.held_bytes() == 0


def test_an_exception_inside_a_bare_denoiser_forgets_the_run():
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), EVERY)
    for step in (0, 1):
        model(**case.kwargs(model, 0, step, STEPS))
    assert handle_of(model).held_bytes() > 0

    def fail(*_: Any) -> None:
        raise RuntimeError("stop here")

    hook = model.norm_out.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        model(**case.kwargs(model, 0, 2, STEPS))
    hook.remove()
    assert handle_of(model).held_bytes() == 0
    model(**case.kwargs(model, 0, 3, STEPS))
    assert handle_of(model).last.calls[-1].computed
