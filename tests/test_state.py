"""Memory of a cache: never more than one run, never another branch, thread or pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache import Combine, Every, Interval
from diffcache.api import handle_of
from diffcache.features.parts.when import Listed, Table
from diffcache.step import CURRENT
from tests.internals import marks
from tests.zoo.pipe import noise
from tests.zoo_runs import CASES, EVERY, PIPES, SEER, STEPS, run, wrapped_pipe

pytestmark = pytest.mark.usefixtures("quiet")


# branches --------------------------------------------------------------------------------------


def drive(
    model: Any, batches: list[list[dict[str, Any]]], method: Any = EVERY
) -> list[list[Tensor]]:
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
        {
            k: v
            for k, v in case.kwargs(model, seed).items()
            if k in ("encoder_hidden_states", "pooled_projections")
        }
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


def test_swapped_calls_are_told_apart_by_their_conditions(flux: Any):
    model, calls = flux
    straight = drive(model, [calls(s, 0, 1) for s in range(STEPS)])
    swapped = drive(model, [calls(s, 0, 1) if s % 2 == 0 else calls(s, 1, 0) for s in range(STEPS)])
    assert drive.branches == [0, 1, 1, 0] * 3
    for s in range(STEPS):
        found = swapped[s] if s % 2 == 0 else swapped[s][::-1]
        assert all(torch.equal(a, b) for a, b in zip(straight[s], found, strict=True))


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
        assert [c.reason for c in handle_of(model).last.calls if c.branch == 1][
            2
        ] == "missed a step"
    exact = model(**calls(5, 1)[0]).sample
    assert torch.equal(outs[5][1], exact)


def test_a_call_that_takes_the_place_of_another_is_not_given_its_features(flux: Any):
    model, calls = flux
    text = ("encoder_hidden_states", "pooled_projections")
    held = [{name: calls(0, which)[0][name] for name in text} for which in (0, 1)]
    plan = [(0,), (0,), (1, 0), (1, 0)]  # guidance from the third step on, its call the first
    with diffcache.wrapped(model, Interval(every=4)) as handle:
        run, token = handle.begin(in_pipeline=True)  # of a pipeline that names no branches
        handle.restart(len(plan))
        outs = []
        for step, row in enumerate(plan):
            outs.append([model(**calls(step, w)[0] | held[w]).sample.clone() for w in row])
            run.ticks += 1
        assert marks(model) == "CsCCss"
        handle.end(run, token, True)
    for which, out in zip(plan[2], outs[2], strict=True):
        assert torch.equal(out, model(**calls(2, which)[0] | held[which]).sample)


@pytest.mark.parametrize("name", ["WanPipeline", "QwenImagePipeline"])
def test_guidance_changed_between_steps_by_a_callback(name: str):
    pipe = wrapped_pipe(name)
    attribute = "_guidance_scale" if name == "WanPipeline" else None

    def cut(pipe: Any, step: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if attribute and step == 2:
            setattr(pipe, attribute, 1.0)
        return kwargs

    run(pipe, name, callback_on_step_end=cut)
    assert marks(pipe, "cond") == "CssCss"
    assert marks(pipe, "uncond") == ("Css" if attribute else "CssCss")


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


# bare models: nobody ends their runs -------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4])
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


def test_an_interrupt_leaves_no_step_behind_in_a_pipeline():
    pipe = wrapped_pipe("FluxPipeline")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = pipe.transformer.proj_out.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(pipe, "FluxPipeline")
    hook.remove()
    assert CURRENT.get() is None


@pytest.mark.parametrize(
    "when", [Listed((0, 3), total=4), Table({"transformer_blocks.1": (0, 3)}, total=4)]
)
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


# one run after another ---------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "steps": lambda pipe: {"num_inference_steps": 8},
    "resolution": lambda pipe: {"height": 96, "width": 32},
    "batch": lambda pipe: {"num_images_per_prompt": 2},
    "prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 6, 24)},
    "longer prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 9, 24)},
    "dtype": lambda pipe: {"prompt_embeds": noise(1000, 1, 6, 24).double(), "pooled_prompt_embeds": noise(1005, 1, 12).double()} if pipe.transformer.double() else {},
    "scheduler": lambda pipe: _heun(pipe),
    "sigmas": lambda pipe: {"sigmas": [1.0, 0.8, 0.6, 0.3, 0.1], "num_inference_steps": 5},
}  # fmt: skip


def _heun(pipe: Any) -> dict[str, Any]:
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe.scheduler = FlowMatchHeunDiscreteScheduler.from_config({"shift": 3.0})
    return {}


@pytest.mark.parametrize(
    "method", [EVERY, SEER, diffcache.FirstBlock(threshold=5.0)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_equals_that_of_a_fresh_wrap(change: str, method: Any):
    name = "StableDiffusion3Pipeline" if change == "scheduler" else "FluxPipeline"
    used, fresh = wrapped_pipe(name, method), wrapped_pipe(name, method)
    run(used, name)
    out = run(used, name, **CHANGES[change](used))
    assert torch.isfinite(out).all()
    assert torch.equal(out, run(fresh, name, **CHANGES[change](fresh)))
    assert "s" in marks(used) and marks(used) == marks(fresh)


# runs that end early -----------------------------------------------------------------------------


def _callback(error: type[BaseException]) -> Callable[..., Any]:
    def callback(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
        if step == 3:
            raise error("stop here")
        return kwargs

    return callback


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline"])
@pytest.mark.parametrize("how", ["callback", "keyboard", "hook", "block", "interrupt"])
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

        def fail(*_: Any) -> None:
            if len(handle.last.calls) >= 3 * PIPES[name].branches:
                raise RuntimeError("stop here")

        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stop here"):
            run(pipe, name)
        hook.remove()
    assert handle.held_bytes() == 0
    assert not handle.last.finished
    assert torch.equal(run(pipe, name, seed=1), fresh)
    assert handle.last.finished
