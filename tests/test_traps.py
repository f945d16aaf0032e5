"""Copies, pickles, hooks and schedulers of wrapped pipelines."""

import copy
import filecmp
import gc
import inspect
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache import AttachError, CacheWarning, Interval
from diffcache.anchor import owner_of
from diffcache.attach import pipeline_hooks
from diffcache.targets import handle_of
from tests.internals import marks
from tests.zoo.catalog import cases
from tests.zoo_runs import EVERY, PIPES, STEPS, flux, run

CASES = cases()

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("site", ["stack", "module"])
def test_a_deep_copy_of_a_model_runs_its_own_weights_and_says_that_it_is_uncached(site: str):
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), Interval(every=3, site=site))
    model(**case.kwargs(model, 0))
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.mul_(1.1)
    changed = case.build(0)
    for parameter in changed.parameters():
        parameter.mul_(1.1)
    expected = changed(**case.kwargs(changed, 0)).sample
    with pytest.warns(CacheWarning, match="a copy of a wrapped one and runs uncached; wrap it too"):
        out = twin(**case.kwargs(twin, 0)).sample
    assert torch.equal(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        for step in range(4):
            made = case.kwargs(twin, 0, step)
            assert torch.equal(twin(**made).sample, changed(**case.kwargs(changed, 0, step)).sample)
    assert len(handle_of(model).last.calls) == 1  # the original heard nothing
    with pytest.raises(AttachError, match="is not wrapped"):
        handle_of(twin)
    diffcache.wrap(twin, EVERY)
    twin(**case.kwargs(twin, 0))


def test_a_shallow_copy_leaves_the_original_cached():
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), EVERY)
    twin = copy.copy(model)
    exact = case.build(0)
    for step in range(4):
        model(**case.kwargs(model, 0, step))
        out = twin(**case.kwargs(twin, 0, step)).sample
        assert torch.equal(out, exact(**case.kwargs(exact, 0, step)).sample)
    assert marks(model) == "CssC"


@pytest.mark.parametrize("site", ["stack", "module"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickled_model_comes_back_plain(how: str, site: str):
    case = CASES["FluxTransformer2DModel"]
    model = case.build(0)
    expected = model(**case.kwargs(model, 0)).sample
    diffcache.wrap(model, Interval(every=3, site=site))
    model(**case.kwargs(model, 0))
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert type(twin) is type(model)
    assert all(type(module.__dict__["_modules"]) is dict for module in twin.modules())
    assert all(type(m) is not type(model.transformer_blocks) for m in twin.modules() if site == "stack")
    assert torch.equal(twin(**case.kwargs(twin, 0)).sample, expected)
    assert handle_of(model).last.calls[-1].index == 0


def test_a_copy_hears_no_contexts_until_it_is_wrapped_itself():
    name = "WanPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    expected = run(diffcache.wrap(pipe, EVERY), name)
    twin = copy.deepcopy(pipe)
    with pytest.warns(CacheWarning, match="runs uncached"):
        assert torch.equal(run(twin, name), plain)
    assert torch.equal(run(pipe, name), expected)
    diffcache.wrap(twin, EVERY)
    assert torch.equal(run(twin, name), expected)
    assert {call.branch for call in handle_of(twin).last.calls} == {"cond", "uncond"}
    assert list(twin.transformer._diffusers_hook._hook_order) == ["diffcache"]


def test_a_tapped_scheduler_pickles_and_copies_as_its_class():
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = diffcache.wrap(flux(), EVERY)
    for twin in (pickle.loads(pickle.dumps(pipe.scheduler)), copy.deepcopy(pipe.scheduler)):
        assert type(twin) is FlowMatchEulerDiscreteScheduler
        assert owner_of(twin) is None
        assert twin.config == pipe.scheduler.config
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler


def test_a_state_dict_knows_nothing_of_the_cache():
    model = CASES["FluxTransformer2DModel"].build(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    diffcache.wrap(model, Interval(every=3, site="module"))
    after = model.state_dict()
    assert list(before) == list(after)
    model.load_state_dict(before)
    model.to(torch.bfloat16).to(torch.float32)
    assert [name for name, _ in model.named_parameters()] == list(before)


@pytest.mark.parametrize("order", ["hook first", "cache first"])
def test_accelerate_hooks_come_and_go(order: str):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    pipe = flux()
    plain = run(pipe)
    cached = run(diffcache.wrap(pipe, EVERY))
    diffcache.unwrap(pipe)
    if order == "hook first":
        add_hook_to_module(pipe.transformer, ModelHook())
        diffcache.wrap(pipe, EVERY)
    else:
        diffcache.wrap(pipe, EVERY)
        add_hook_to_module(pipe.transformer, ModelHook())
    assert torch.equal(run(pipe), cached) and marks(pipe) == "CssCss"
    remove_hook_from_module(pipe.transformer, recurse=True)
    assert torch.equal(run(pipe), cached) and marks(pipe) == "CssCss"
    diffcache.unwrap(pipe)
    assert torch.equal(run(pipe), plain)


def test_from_pipe_shares_the_wrapped_denoiser():
    from diffusers import FluxImg2ImgPipeline

    source = PIPES["FluxImg2ImgPipeline"].build(0)
    name = "FluxImg2ImgPipeline"
    expected = run(diffcache.wrap(source, EVERY), name, strength=1.0)
    diffcache.unwrap(source)
    pipe = PIPES["FluxPipeline"].build(0)
    diffcache.wrap(pipe, EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        other = FluxImg2ImgPipeline.from_pipe(pipe, vae=source.vae)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is pipe.transformer
    out = run(other, name, strength=1.0)
    assert marks(other) == "CssCss"
    assert torch.equal(out, expected)
    assert torch.equal(run(other, name, strength=1.0), expected)


@pytest.mark.parametrize("site", ["stack", "module", "model"])
def test_inference_mode(site: str):
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), Interval(every=2, site=site))
    expected = [model(**case.kwargs(model, 0, s)).sample for s in range(4)]
    diffcache.reset(model)
    with torch.inference_mode():
        outs = [model(**case.kwargs(model, 0, s)).sample for s in range(4)]
    assert marks(model) == "CsCs"
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    diffcache.reset(model)  # and back: no inference tensor is left in the way
    with torch.enable_grad():
        model(**case.kwargs(model, 0, 0))
        out = model(**case.kwargs(model, 0, 1)).sample
        if site != "model":  # whose estimate is all there is
            out.sum().backward()


@pytest.mark.parametrize("site", ["stack", "module"])
def test_saving_while_wrapped_writes_the_same_files(tmp_path: Path, site: str):
    pipe = flux()
    pipe.save_pretrained(tmp_path / "plain")
    diffcache.wrap(pipe, Interval(every=3, site=site))
    run(pipe)
    pipe.save_pretrained(tmp_path / "wrapped")
    names = sorted(str(f.relative_to(tmp_path / "plain")) for f in (tmp_path / "plain").rglob("*") if f.is_file())
    others = sorted(str(f.relative_to(tmp_path / "wrapped")) for f in (tmp_path / "wrapped").rglob("*") if f.is_file())
    assert names == others and any(name.endswith(".safetensors") for name in names)
    same, different, _ = filecmp.cmpfiles(tmp_path / "plain", tmp_path / "wrapped", names, shallow=False)
    assert (sorted(same), different) == (names, [])
    assert isinstance(pipe.transformer, nn.Module) and os.listdir(tmp_path)


def test_a_copied_scheduler_does_not_drive_the_clock():
    pipe = diffcache.wrap(flux(), EVERY)

    def meddle(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
        twin = copy.deepcopy(pipe.scheduler)
        twin.set_timesteps(7, mu=1.0)
        twin.step(torch.zeros(1), twin.timesteps[0], torch.zeros(1))
        return kwargs

    expected = run(pipe)
    assert torch.equal(run(pipe, callback_on_step_end=meddle), expected)
    assert marks(pipe) == "CssCss"


def test_a_scheduler_replaced_after_wrapping():
    from diffusers import FlowMatchHeunDiscreteScheduler

    name = "StableDiffusion3Pipeline"
    scheduler = FlowMatchHeunDiscreteScheduler.from_config({"shift": 2.0})
    fresh = PIPES[name].build(0)
    fresh.scheduler = copy.deepcopy(scheduler)
    expected = run(diffcache.wrap(fresh, EVERY), name)
    pipe = diffcache.wrap(PIPES[name].build(0), EVERY)
    run(pipe, name)
    old = pipe.scheduler
    pipe.scheduler = type(scheduler).from_config(scheduler.config)
    assert torch.equal(run(pipe, name), expected)
    assert marks(pipe) == ("Css" * 4)[: 2 * STEPS - 1]
    assert owner_of(old) is None and owner_of(pipe.scheduler) is handle_of(pipe)
    assert handle_of(pipe).run().total is None
    diffcache.unwrap(pipe)
    assert type(pipe.scheduler) is type(scheduler) and "_diffcache" not in vars(pipe.scheduler)
    assert "_diffcache" not in vars(old)


def totals(pipe: Any, name: str, **more: Any) -> list[int | None]:
    """The step count that the method sees at the end of every step."""
    seen: list[int | None] = []
    handle = handle_of(pipe)
    denoiser = handle.denoisers[0]

    def look(*_: Any) -> None:
        seen.append(handle.run().timelines[denoiser].total)

    hook = denoiser.model.register_forward_hook(look)
    run(pipe, name, **more)
    hook.remove()
    return seen


@pytest.mark.parametrize(
    ("name", "more", "total"),
    [
        ("FluxPipeline", {"sigmas": [1.0, 0.7, 0.4, 0.2], "num_inference_steps": 4}, 4),
        ("FluxImg2ImgPipeline", {"strength": 0.5}, 3),
        ("StableDiffusion3Pipeline-heun", {}, 11),
        ("StableDiffusionPipeline-pndm", {}, 15),
    ],
)
def test_the_step_count_is_that_of_the_solver(name: str, more: dict[str, Any], total: int):
    pipe = diffcache.wrap(PIPES[name].build(0), EVERY)
    assert totals(pipe, name, **more) == [total] * total


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "WanPipeline"])
def test_the_step_count_of_a_late_start_is_known_where_no_begin_index_is_told(name: str):
    """DDIM has none, and some video-to-video pipelines tell none."""
    pipe = diffcache.wrap(PIPES[name].build(0), EVERY)
    kind, model = (
        ("UNet2DConditionModel", pipe.unet) if "Stable" in name else ("WanTransformer3DModel", pipe.transformer)
    )
    handle = handle_of(pipe)
    pipe.scheduler.set_timesteps(6)
    for t in pipe.scheduler.timesteps[2:]:
        given = {**CASES[kind].kwargs(model, 0), "timestep": t.expand(1)}
        out = model(**given).sample
        assert handle.run().timelines[handle.denoisers[0]].total == 4
        sample = given["sample" if "Stable" in name else "hidden_states"]
        pipe.scheduler.step(out, t, sample[:, : out.shape[1]])


def test_a_step_too_many_is_refused_where_a_scheduler_steps():
    pipe = diffcache.wrap(PIPES["WanPipeline"].build(0), EVERY)
    given = CASES["WanTransformer3DModel"].kwargs(pipe.transformer, 0)
    pipe.scheduler.set_timesteps(3)
    times = pipe.scheduler.timesteps[:, None]
    with diffcache.run(pipe, steps=2):
        for t in times[:2]:
            out = pipe.transformer(**{**given, "timestep": t}).sample
            pipe.scheduler.step(out, t[0], given["hidden_states"][:, : out.shape[1]])
        with pytest.raises(AttachError, match="a step more than that began"):
            pipe.transformer(**{**given, "timestep": times[2]})


def test_pipelines_that_share_a_scheduler_take_turns():
    """Each call claims the scheduler; unwrapping one pipeline spares the other."""
    case = PIPES["WanPipeline"]
    one, other = case.build(0), case.build(1)
    other.scheduler = one.scheduler
    expected = []
    for pipe in (one, other):
        with diffcache.wrapped(pipe, Interval(every=3)):
            expected.append(case.run(pipe, 0, 6))
    diffcache.wrap(one, Interval(every=3))
    diffcache.wrap(other, Interval(every=3))
    for _ in range(2):
        for pipe, wanted in zip((one, other), expected, strict=True):
            assert torch.equal(case.run(pipe, 0, 6), wanted)
            calls = diffcache.report(pipe).calls
            assert [c.index for c in calls if c.computed and c.branch == calls[0].branch] == [0, 3]
    diffcache.unwrap(one)
    assert owner_of(one.scheduler) is handle_of(other)
    assert torch.equal(case.run(other, 0, 6), expected[1])
    assert diffcache.report(other).skipped > 0
    diffcache.unwrap(other)
    assert owner_of(one.scheduler) is None


def own_classes(*pipes: Any) -> tuple[type, type]:
    """Give pipelines and their schedulers classes that no other test watches."""
    kinds = type(pipes[0]), type(pipes[0].scheduler)
    mine = tuple(type(kind.__name__, (kind,), dict(vars(kind))) for kind in kinds)
    for pipe in pipes:
        pipe.__class__, pipe.scheduler.__class__ = mine
    return mine


def members(*kinds: type) -> list[dict[str, Any]]:
    """Return the members of classes, but for what pickling notes in them."""
    return [{k: v for k, v in vars(kind).items() if k != "__slotnames__"} for kind in kinds]


def test_classes_stay_what_they_were_and_get_their_methods_back():
    """BriaPipeline compares `type(self.scheduler)`, and others inspect what `step` takes."""
    pipe, other = flux(), flux(1)
    kinds = own_classes(pipe, other)
    before, seen = members(*kinds), []
    asked = inspect.signature(pipe.scheduler.step), inspect.signature(pipe.scheduler.set_timesteps)
    plain = run(other)
    diffcache.wrap(pipe, EVERY)

    def look(running: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        scheduler = running.scheduler
        seen.append((type(running) is kinds[0], type(scheduler) is kinds[1]))
        seen.append((inspect.signature(scheduler.step), inspect.signature(scheduler.set_timesteps)))
        return given

    run(pipe, num_inference_steps=2, callback_on_step_end=look)
    assert seen == [(True, True), asked] * 2
    first = handle_of(pipe).last
    assert torch.equal(run(other), plain)  # another of the class passes straight through
    assert handle_of(pipe).last is first and len(first.calls) == 2
    for twin in (copy.copy(pipe), copy.deepcopy(pipe.scheduler), copy.copy(pipe.scheduler)):
        assert type(twin) in kinds and owner_of(twin) is None and "_diffcache" not in vars(twin)
    diffcache.wrap(other, EVERY)
    diffcache.unwrap(pipe)
    assert members(*kinds) != before  # the other one is still wrapped
    del other
    gc.collect()
    after = members(*kinds)
    assert after == before and [list(kind) for kind in after] == [list(kind) for kind in before]


def test_a_scheduler_of_a_derived_class_steps_once():
    """Its own `step` calls that of a class which is watched as well."""
    pipe, other = flux(), flux(1)

    class Derived(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    other.scheduler = Derived.from_config(other.scheduler.config)
    diffcache.wrap(pipe, EVERY)
    diffcache.wrap(other, EVERY)
    run(other)
    assert marks(other) == "CssCss"
    diffcache.unwrap(other)
    assert set(vars(Derived)) & {"step", "set_timesteps", "set_begin_index"} == {"step"}


def test_a_call_replaced_while_wrapped_is_kept():
    """Another library wraps the class's call; the watch below it ends, and the next one is new."""
    pipe, calls = flux(), []
    Mine, _ = own_classes(pipe)
    diffcache.wrap(pipe, EVERY)
    watched = Mine.__call__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return watched(self, *args, **kwargs)

    Mine.__call__ = theirs
    diffcache.unwrap(pipe)
    assert Mine.__call__ is theirs
    diffcache.wrap(pipe, EVERY)
    handle, begun = handle_of(pipe), []
    begin = handle.begin
    handle.begin = lambda *given, **named: begun.append(None) or begin(*given, **named)
    run(pipe)
    assert marks(pipe) == "CssCss" and len(calls) == len(begun) == 1  # not by the old watch too
    diffcache.unwrap(pipe)
    assert Mine.__call__ is theirs


def test_many_views_a_step_are_branches():
    """Panoramas call the denoiser once a view; the scheduler tells the steps all the same."""
    case = cases()["FluxTransformer2DModel"]
    model, views = case.build(0), 11
    with diffcache.wrapped(model, Interval(every=2)) as handle, torch.no_grad():
        handle.begin(in_pipeline=True)
        handle.restart(range(4))
        for step in range(4):
            handle.run().ticks = step
            for view in range(views):
                model(**case.kwargs(model, view, step=step, steps=4))
        calls = handle.last.calls
        assert [call.index for call in calls] == [step for step in range(4) for _ in range(views)]
        assert [call.computed for call in calls] == [step % 2 == 0 for step in range(4) for _ in range(views)]


def test_a_scheduler_whose_attributes_were_put_back_from_a_copy_is_let_go():
    """Panoramas do so for every view."""
    pipe = diffcache.wrap(flux(), EVERY)
    vars(pipe.scheduler).update(copy.deepcopy(vars(pipe.scheduler)))
    diffcache.unwrap(pipe)
    assert "_diffcache" not in vars(pipe.scheduler) and id(pipe.scheduler) not in pipeline_hooks._TAPPED
