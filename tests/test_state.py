"""Memory of a cache, of threads and requests at once: each runs as if it were alone, and leaves nothing."""

import contextlib
import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from diffusers.callbacks import PipelineCallback
from torch import Tensor

import diffcache
from diffcache import AttachError, Combine, Every, Interval
from diffcache.attach.reuse import reusing
from diffcache.features.parts.when import Listed, Table
from diffcache.step import CURRENT
from diffcache.targets import handle_of
from tests.internals import marks
from tests.zoo.pipe import noise
from tests.zoo_runs import CASES, EVERY, PIPES, SEER, STEPS, in_threads, run, wrapped_pipe

pytestmark = pytest.mark.usefixtures("quiet")


def drive(model: Any, batches: list[list[dict[str, Any]]], method: Any = EVERY) -> list[list[Tensor]]:
    """Call a wrapped model with the calls of every step; return their outputs."""
    with diffcache.wrapped(model, method) as handle:
        outs = [[model(**call).sample.clone() for call in calls] for calls in batches]
        drive.marks = marks(model)  # type: ignore[attr-defined]
        drive.branches = [c.branch for c in handle.last.calls]  # type: ignore[attr-defined]
    return outs


@pytest.fixture(scope="module")
def flux():
    """A bare FLUX, its conditions A and B, and a trajectory."""
    case = CASES["FluxTransformer2DModel"]
    model = case.build(0)
    conditions = [
        {k: v for k, v in case.kwargs(model, seed).items() if k in ("encoder_hidden_states", "pooled_projections")}
        for seed in (0, 1)
    ]

    def calls(step: int, *which: int) -> list[dict[str, Any]]:
        return [{**case.kwargs(model, 0, step, STEPS), **conditions[w]} for w in which]

    return model, calls


@pytest.mark.parametrize("method", [EVERY, SEER])
def test_guidance_in_one_batch_and_in_two_calls_agree(flux: Any, method: Any):
    model, calls = flux
    two = drive(model, [calls(s, 0, 1) for s in range(STEPS)], method)
    assert drive.marks == "CCssssCCssss"
    assert drive.branches == [0, 1] * STEPS
    batch = [
        [{k: torch.cat([a[k], b[k]]) if k not in ("img_ids", "txt_ids") else a[k] for k in a}]
        for a, b in (calls(s, 0, 1) for s in range(STEPS))
    ]
    one = drive(model, batch, method)
    assert drive.marks == "CssCss"
    for (both,), (a, b) in zip(one, two, strict=True):
        assert torch.allclose(both, torch.cat([a, b]), atol=2e-5, rtol=1e-4)


def test_three_branches_keep_apart(flux: Any):
    """Two of them are given the same, so that only their names tell them apart."""
    model, calls = flux
    single = [drive(model, [calls(s, w) for s in range(STEPS)]) for w in (0, 1)]
    with diffcache.wrapped(model, EVERY):
        for s in range(STEPS):
            for place, which in enumerate((0, 1, 0)):
                with diffcache.branch(f"pass {place}"):
                    out = model(**calls(s, which)[0]).sample
                assert torch.equal(out, single[which][s][0])
        assert marks(model) == ("CCC" + "ssssss") * 2


def test_guidance_switched_off_and_on_within_a_run(flux: Any):
    model, calls = flux
    plan = [(0, 1), (0, 1), (0,), (0,), (0,), (0, 1), (0, 1), (0, 1)]
    steps = len(plan)
    with diffcache.wrapped(model, EVERY):
        outs = [[model(**c).sample.clone() for c in calls(s, *plan[s])] for s in range(steps)]
        # the second branch returns at step 5, after step 3 was computed without it
        assert marks(model, 0) == "CssCssCs"
        assert marks(model, 1) == "CsCCs"
        assert [c.reason for c in handle_of(model).last.calls if c.branch == 1][2] == "missed a step"
    exact = model(**calls(5, 1)[0]).sample
    assert torch.equal(outs[5][1], exact)


def test_a_call_that_takes_the_place_of_another_is_not_given_its_features(flux: Any):
    model, calls = flux
    text = ("encoder_hidden_states", "pooled_projections")
    held = [{name: calls(0, which)[0][name] for name in text} for which in (0, 1)]
    plan = [(0,), (0,), (1, 0), (1, 0)]  # guidance from the third step on, its call the first
    with diffcache.wrapped(model, Interval(every=4)) as handle:
        run, token = handle.begin(in_pipeline=True)  # of a pipeline that names no branches
        handle.restart(plan)
        outs = []
        for step, row in enumerate(plan):
            outs.append([model(**calls(step, w)[0] | held[w]).sample.clone() for w in row])
            run.ticks += 1
        assert marks(model) == "CsCCss"
        handle.end(run, token, True)
    for which, out in zip(plan[2], outs[2], strict=True):
        assert torch.equal(out, model(**calls(2, which)[0] | held[which]).sample)


@pytest.mark.parametrize("name", ["WanPipeline", "StableDiffusion3Pipeline"])
def test_guidance_switched_off_by_a_callback(name: str):
    """Of guidance in one batch, the callback cuts the unconditional half off the embeddings."""
    pipe, in_two_calls = wrapped_pipe(name), name == "WanPipeline"
    given = ["latents"] if in_two_calls else ["prompt_embeds", "pooled_prompt_embeds"]

    def cut(pipe: Any, step: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step != 2:
            return kwargs
        pipe._guidance_scale = 1.0
        return kwargs if in_two_calls else {key: held.chunk(2)[1] for key, held in kwargs.items()}

    run(pipe, name, callback_on_step_end=cut, callback_on_step_end_tensor_inputs=given)
    assert marks(pipe, "cond" if in_two_calls else 0) == "CssCss"
    assert marks(pipe, "uncond") == ("Css" if in_two_calls else "")


@pytest.mark.parametrize("how", ["anew", "in place", "as an object"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FluxPipeline", "prompt_embeds"),
        ("StableDiffusion3Pipeline", "prompt_embeds"),
        ("StableDiffusionXLPipeline", "add_text_embeds"),
    ],
)
def test_a_prompt_that_a_callback_changes_is_not_answered_by_features_of_the_one_before(
    name: str, text: str, at: int, how: str
):
    pipe = wrapped_pipe(name)

    def change(pipe: Any, step: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        held = kwargs[text]
        return {text: held.neg_() if how == "in place" else -held} if step == at else kwargs

    class Change(PipelineCallback):
        tensor_inputs = property(lambda self: [text])

        def callback_fn(self, *given: Any) -> Any:
            return change(*given)

    as_object = how == "as an object"
    given = {} if as_object else {"callback_on_step_end_tensor_inputs": [text]}
    run(pipe, name, callback_on_step_end=Change() if as_object else change, **given)
    assert marks(pipe) == ("CsCssC" if at else "CCssCs")


def test_steps_that_a_pipeline_leaves_out_at_its_end_are_none_of_the_run():
    pipe, total = wrapped_pipe("StableDiffusionXLPipeline", Combine(Listed((0, 2), total=3))), 7
    with pytest.raises(AttachError, match="this one has 7"):
        run(pipe, "StableDiffusionXLPipeline", steps=total)
    run(pipe, "StableDiffusionXLPipeline", steps=total, denoising_end=0.5)
    assert marks(pipe) == "CsC"


def test_a_control_network_whose_control_ends_is_not_answered_by_what_it_gave_before():
    name = "StableDiffusionControlNetPipeline"
    pipe = diffcache.wrap(PIPES[name].build(0), Combine(Every(6), site="model"), components="controlnet")
    run(pipe, name, control_guidance_end=0.5)
    assert marks(pipe) == "CssCss"


def test_features_of_an_earlier_run_are_gone(flux: Any):
    """Poison every tensor a run holds: the next run must not see it."""
    model, calls = flux
    clean = drive(model, [calls(s, 0) for s in range(STEPS)], SEER)
    with diffcache.wrapped(model, SEER) as handle:
        for s in range(5):
            model(**calls(s, 0)[0])
        for tensor in handle.denoisers[0].tensors(handle.run()):
            tensor.fill_(float("nan"))
        assert not torch.isfinite(model(**calls(5, 0)[0]).sample).any()
        for s in range(STEPS):  # the timestep turns back: a new run
            assert torch.equal(model(**calls(s, 0)[0]).sample, clean[s][0])


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("method", [EVERY, Combine(Every(3), site="module")], ids=["list", "child"])
def test_an_interrupt_leaves_nothing_behind_in_a_bare_model(flux: Any, method: Any, at: int):
    """No hook of torch hears of it, so that the next call has to clear up."""
    model, calls = flux
    fresh = drive(model, [calls(s, 0) for s in range(STEPS)], method)
    with diffcache.wrapped(model, method) as handle:
        seen: list[int] = []

        def interrupt(*_: Any) -> None:
            seen.append(0)
            if len(seen) > at:
                raise KeyboardInterrupt

        hook = model.proj_out.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            [model(**calls(s, 0)[0]) for s in range(STEPS)]
        hook.remove()
        again = [model(**calls(s, 0)[0]).sample.clone() for s in range(STEPS)]
        assert marks(model) == "CssCss"
        assert {call.branch for call in handle.last.calls} == {0}
        assert all(torch.equal(a, b[0]) for a, b in zip(again, fresh, strict=True))


@pytest.mark.parametrize("how", ["reset", "unwrap"])
def test_reset_and_unwrap_leave_a_call_that_an_interrupt_cut_short(flux: Any, how: str):
    model, calls = flux
    blocks = list(model.transformer_blocks)
    diffcache.wrap(model, SEER)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.norm_out.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**calls(0, 0)[0])
    hook.remove()
    assert CURRENT.get() is not None
    getattr(diffcache, how)(model)
    assert CURRENT.get() is None
    assert all(a is b for a, b in zip(model.transformer_blocks, blocks, strict=True))
    if how == "reset":
        diffcache.unwrap(model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_behind_the_forward_drops_the_half_done_step(flux: Any, error: Any):
    """The first call of a kind is checked behind its forward, where memory may run out."""
    model, calls = flux
    fresh = drive(model, [calls(s, 0) for s in range(STEPS)])
    with diffcache.wrapped(model, EVERY) as handle:
        seen: list[int] = []

        def fail(*_: Any) -> None:
            seen.append(0)
            if len(seen) > 1:  # the model itself, then the check
                raise error("out of memory")

        hook = model.proj_out.register_forward_pre_hook(fail)
        with pytest.raises(error, match="out of memory"):
            model(**calls(0, 0)[0])
        hook.remove()
        assert handle.held_bytes() == 0
        again = [model(**calls(s, 0)[0]).sample.clone() for s in range(STEPS)]
        assert {call.branch for call in handle.last.calls} == {0}
        assert all(torch.equal(a, b[0]) for a, b in zip(again, fresh, strict=True))


@pytest.mark.parametrize("when", [Listed((0, 3), total=4), Table({"transformer_blocks.1": (0, 3)}, total=4)])
def test_a_bare_model_that_runs_past_its_tables_is_refused(flux: Any, when: Any):
    model, calls = flux
    method = Combine(when, site="block")
    with diffcache.wrapped(model, method):
        short = [[model(**calls(s, 0)[0]).sample.clone() for s in range(4)] for _ in range(2)]
        assert all(map(torch.equal, *short))  # as many as they are for, and anew
        for s in range(4):
            model(**calls(s, 0)[0])
        with pytest.raises(diffcache.AttachError, match="made for runs of 4 steps, .* has more"):
            model(**calls(4, 0)[0])
        again = [model(**calls(s, 0)[0]).sample for s in range(4)]
        assert all(map(torch.equal, again, short[0]))


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "steps": lambda pipe: {"num_inference_steps": 8},
    "resolution": lambda pipe: {"height": 96, "width": 32},
    "batch": lambda pipe: {"num_images_per_prompt": 2},
    "prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 6, 24)},
    "longer prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 9, 24)},
    "dtype": lambda pipe: (
        {"prompt_embeds": noise(1000, 1, 6, 24).double(), "pooled_prompt_embeds": noise(1005, 1, 12).double()}
        if pipe.transformer.double()
        else {}
    ),
    "scheduler": lambda pipe: setattr(pipe, "scheduler", FlowMatchHeunDiscreteScheduler(shift=3.0)) or {},
    "sigmas": lambda pipe: {"sigmas": [1.0, 0.8, 0.6, 0.3, 0.1], "num_inference_steps": 5},
}


@pytest.mark.parametrize(
    ("method", "change"), [(SEER, change) for change in CHANGES] + [(diffcache.FirstBlock(5.0), "resolution")]
)
def test_a_changed_run_equals_that_of_a_fresh_wrap(change: str, method: Any):
    name = "StableDiffusion3Pipeline" if change == "scheduler" else "FluxPipeline"
    used, fresh = wrapped_pipe(name, method), wrapped_pipe(name, method)
    run(used, name)
    out = run(used, name, **CHANGES[change](used))
    assert torch.isfinite(out).all()
    assert torch.equal(out, run(fresh, name, **CHANGES[change](fresh)))
    assert "s" in marks(used) and marks(used) == marks(fresh)


def _callback(error: type[BaseException]) -> Callable[..., Any]:
    def callback(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
        if step == 3:
            raise error("stop here")
        return kwargs

    return callback


@pytest.mark.parametrize(
    ("name", "how"),
    [("FluxPipeline", how) for how in ("callback", "keyboard", "hook", "block", "interrupt")]
    + [("WanPipeline", how) for how in ("hook", "interrupt")],
)
def test_a_run_after_one_that_was_cut_short_equals_a_fresh_one(name: str, how: str):
    fresh = run(wrapped_pipe(name, SEER), name, seed=1)
    pipe = wrapped_pipe(name, SEER)
    handle = handle_of(pipe)
    if how in ("callback", "keyboard"):
        error = RuntimeError if how == "callback" else KeyboardInterrupt
        with pytest.raises(error, match="stop here"):
            run(pipe, name, callback_on_step_end=_callback(error))
    elif how == "interrupt":

        def stop(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
            pipe._interrupt = step >= 1
            return kwargs

        run(pipe, name, callback_on_step_end=stop)
        assert len(handle.last.calls) == 2 * PIPES[name].branches
    else:
        model = pipe.transformer
        blocks = model.transformer_blocks if name == "FluxPipeline" else model.blocks
        place = model.norm_out if how == "hook" else blocks[2]
        error = KeyboardInterrupt if how == "hook" else RuntimeError

        def fail(*_: Any) -> None:
            if len(handle.last.calls) >= 3 * PIPES[name].branches:
                raise error("stop here")

        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(error, match="stop here"):
            run(pipe, name)
        hook.remove()
        assert CURRENT.get() is None
    assert handle.held_bytes() == 0
    assert not handle.last.finished
    assert torch.equal(run(pipe, name, seed=1), fresh)
    assert handle.last.finished


@pytest.mark.parametrize("names", [("FluxPipeline", "FluxPipeline"), ("FluxPipeline", "WanPipeline")])
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
    given = [diffcache.TaylorSeer(every=3, warmup=1), {"transformer": Interval(every=3)}, diffcache.FirstBlock(9.0)]
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
    with pytest.raises(ValueError, match=r"settings \['evry'\]: not of what is wrapped, Each"):
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
    with patch.object(reusing, "learn", side_effect=reusing.learn) as learned:
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
