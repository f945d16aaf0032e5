"""TeaCache on the time embedding: official schedules by loops of their own, what is looked at."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.reuse.time_probe import TimeWatch
from diffcache.errors import AttachError, TablesError
from diffcache.eval.workshop.small.sticker_wan import DIRECTORY
from diffcache.features.combine import Combine
from diffcache.features.parts.accumulated import Accumulated, Rescaled
from diffcache.features.tables import Tables
from diffcache.features.teacache import BY_TIME, TeaCache
from tests.internals import computed_steps, reuse_in
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

# TeaCache4Wan2.1/teacache_generate.py of ali-vilab/TeaCache (Apache-2.0), lines 883 and 890
WAN_1_3B_PROJECTION = (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02)
WAN_1_3B = (2.39676752e03, -1.31110545e03, 2.01331979e02, -8.29855975e00, 1.37887774e-01)
SETTINGS = {"time": {"input": "time"}, "time-projection": {"input": "time-projection", "warmup": 5, "last": False}}

pytestmark = pytest.mark.usefixtures("quiet")


def embeddings(model, timesteps, which):
    """The time embedding of Wan at every step, or its projection, by the modules themselves."""
    parts = model.condition_embedder
    rows = []
    for timestep in timesteps:
        sinus = parts.timesteps_proj(timestep.reshape(1)).to(torch.float32)
        row = parts.time_embedder(sinus)
        rows.append(row if which == "time" else parts.time_proj(nn.functional.silu(row)))
    return rows


def official(rows, coefficients, threshold, which):
    """Steps at which the conditional and the unconditional call run, each with sums of its own."""
    first, beyond = (5, len(rows)) if which == "time-projection" else (1, len(rows) - 1)
    curve, computed = np.poly1d(coefficients), []
    for _ in range(2):
        total, steps = 0.0, []
        for index, row in enumerate(rows):
            runs = index < first or index >= beyond
            if not runs:
                before = rows[index - 1]
                total += curve(((row - before).abs().mean() / before.abs().mean()).item())
                runs = total >= threshold
            if runs:
                total = 0.0
                steps.append(index)
        computed.append(steps)
    return computed


@pytest.mark.parametrize(
    ("which", "coefficients", "threshold", "count"),
    [
        ("time", WAN_1_3B, 0.08, 34),
        ("time", WAN_1_3B, 0.2, 20),
        ("time-projection", WAN_1_3B_PROJECTION, 0.08, 30),
        ("time-projection", WAN_1_3B_PROJECTION, 0.2, 17),
    ],
)
def test_published_polynomials_take_the_official_steps(which, coefficients, threshold, count):
    """On the embedder of sticker-wan, whose weights are trained."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(DIRECTORY, subfolder="transformer")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(DIRECTORY, subfolder="scheduler")
    scheduler.set_timesteps(50)
    rows = embeddings(model, scheduler.timesteps, which)
    steps = computed_steps(TeaCache(threshold, coefficients, **SETTINGS[which]), 50, rows)
    assert [steps, steps] == official(rows, coefficients, threshold, which)
    assert len(steps) == count


@pytest.mark.parametrize("which", ["time", "time-projection"])
@pytest.mark.parametrize("by_branch", [False, True])
def test_both_branches_of_a_pipeline_take_the_official_steps(which, by_branch, agrees):
    case, curve = pipes()["WanPipeline"], (0.2, 0.9, 0.05)
    pipe = case.build(0)
    counts = set()
    for threshold in (1.0, 3.0):
        method = TeaCache(threshold, curve, by_branch=by_branch, **SETTINGS[which])
        with diffcache.wrapped(pipe, method) as handle:
            case.run(pipe, steps=14)
            calls = handle.last.calls
        found = [[c.index for c in calls if c.computed and c.branch == name] for name in ("cond", "uncond")]
        rows = embeddings(pipe.transformer, pipe.scheduler.timesteps, which)
        steps = found, official(rows, curve, threshold, which)
        agrees("teacache", "official code (Wan2.1, HiDream), as a loop", steps=steps)
        counts.add(len(found[0]))
    assert len(counts) > 1


class Noted(Accumulated):
    """The gate, with notes of the probes it was given."""

    def computed(self, state, step, probe):
        NOTES.append(probe)
        super().computed(state, step, probe)


NOTES: list = []


def noted(model, probe, calls):
    NOTES.clear()
    with diffcache.wrapped(model, Combine(Noted(0.0, of=probe))):
        for kwargs in calls:
            model(**kwargs)
    return list(NOTES)


@pytest.mark.parametrize(
    ("name", "probe"),
    [(name, "time") for name in BY_TIME]
    + [
        ("WanTransformer3DModel", "time-projection"),
        ("FluxTransformer2DModel", "time"),
        ("SD3Transformer2DModel", "time"),
        ("UNet2DConditionModel", "time"),
        ("ChronoEditTransformer3DModel", "time-projection"),
    ],
)
def test_what_is_looked_at_depends_on_the_timestep_alone(name, probe):
    case = cases()[name]
    model = case.build()
    calls = [case.kwargs(model, seed, step=step, steps=4) for step in (0, 1) for seed in (0, 1)]
    taken = []
    block = model.get_submodule(case.blocks[0] + ".0")
    hook = block.register_forward_pre_hook(
        lambda m, args, kwargs: taken.append(kwargs.get("temb", args)), with_kwargs=True
    )
    # two calls at a timestep would be two branches of one decision
    one, other, later = [noted(model, probe, [calls[place]])[0] for place in (0, 1, 2)]
    hook.remove()
    assert torch.equal(one, other)
    assert one.shape == later.shape and not torch.equal(one, later)
    if name in ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"):
        assert torch.equal(taken[0] if torch.is_tensor(taken[0]) else taken[0][2], one)
    if probe == "time-projection":
        assert torch.equal(taken[0][2].flatten(1), one)


def test_parts_of_an_embedding_are_added():
    """CogVideoX with an offset embedding hands its blocks the sum of the two."""
    case = cases()["CogVideoXTransformer3DModel"]
    model = case.build()
    kwargs = case.kwargs(model, 0, step=0, steps=4)
    alone = noted(model, "time", [kwargs])[0]
    torch.manual_seed(0)
    model.ofs_embedding = nn.Linear(4, alone.shape[1])
    model.ofs_proj = lambda ofs: ofs.expand(4)[None]
    both = noted(model, "time", [{**kwargs, "ofs": torch.ones(1)}])[0]
    assert torch.allclose(both, alone + model.ofs_embedding(torch.ones(1, 4)))
    assert not any(m._forward_hooks for m in model.modules())


def test_a_published_polynomial_needs_its_input_named():
    for name in BY_TIME:
        model = cases()[name].build()
        with pytest.raises(AttachError, match=f"on {name}.*time embedding .input='time'"):
            diffcache.wrap(model, TeaCache(0.1, WAN_1_3B))
        for named in ("time", "modulated"):
            diffcache.unwrap(diffcache.wrap(model, TeaCache(0.1, WAN_1_3B, input=named)))
    diffcache.unwrap(diffcache.wrap(cases()["FluxTransformer2DModel"].build(), TeaCache(0.1, WAN_1_3B)))


def test_inputs_that_are_not_there_are_refused():
    flux = cases()["FluxTransformer2DModel"].build()
    before = {name: sorted(m.__dict__) for name, m in flux.named_modules()}
    with pytest.raises(AttachError, match=r"no time-projection embedding.*time_proj"):
        diffcache.wrap(flux, TeaCache(0.1, WAN_1_3B, input="time-projection"))
    assert {name: sorted(m.__dict__) for name, m in flux.named_modules()} == before
    entries = {"coefficients": torch.ones(2), "range": torch.ones(2), "points": torch.ones(3, 2)}
    tables = Tables({"method": "teacache", "steps": 3, "degree": 1}, entries)
    with pytest.raises(TablesError, match="measured with input='modulated', not 'time'"):
        TeaCache(tables=tables, input="time")
    strange = Tables({"method": "teacache", "steps": 3, "degree": 1, "input": ["time"]}, entries)
    with pytest.raises(TablesError, match=r"input=\['time'\] in their header: must be"):
        TeaCache(tables=strange)


def test_an_embedding_that_is_made_twice_is_refused():
    """The later call may be of another time, such as that of clean tokens."""
    case = cases()["HiDreamImageTransformer2DModel"]
    model = case.build()
    clean = torch.zeros(2), torch.float32

    def embed(*_):
        model.t_embedder(*clean)

    model.x_embedder.register_forward_pre_hook(embed)
    with diffcache.wrapped(model, TeaCache(0.1, (1.0, 0.0), input="time")):
        model(**case.kwargs(model, 0, step=0, steps=4))
        with pytest.raises(AttachError, match="must be computed once in a call.*t_embedder 2 tim"):
            model(**case.kwargs(model, 0, step=1, steps=4))


def test_calibration_on_the_time_embedding(tmp_path):
    case = pipes()["WanPipeline"]
    pipe = case.build(0)
    prompt = case.call(pipe, 0, 6)
    prompt.pop("generator", None)
    file = tmp_path / "tables.safetensors"
    method = TeaCache(0.3, degree=1, input="time")
    made = diffcache.calibrate(pipe, method, [prompt], steps=6, batch_size=1, out=file)
    rows = embeddings(pipe.transformer, pipe.scheduler.timesteps, "time")
    moved = [float((b - a).abs().sum() / a.abs().sum()) for a, b in pairwise(rows)]
    assert made.tables["points"][:, 0].tolist() == pytest.approx(moved, rel=1e-5)
    loaded = TeaCache(0.3, tables=str(file))
    assert loaded.parts().when.of == "time"
    with pytest.raises(TablesError, match="measured with input='time', not 'modulated'"):
        replace(loaded, input="modulated")
    with diffcache.wrapped(pipe, loaded) as handle:
        case.run(pipe, steps=6)
        assert handle.last.calls
    assert not any(isinstance(h, TimeWatch) for m in pipe.transformer.modules() for h in m._forward_hooks.values())


@pytest.mark.parametrize("threshold", [0.2, 0.3])
def test_branches_that_decide_apart_run_as_if_alone(threshold):
    """Two conditions whose inputs move differently, called in turn and one by one."""
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    method = TeaCache(threshold, (1.0, 0.0), by_branch=True)
    steps, alone, schedules = 10, [], []
    for seed in (0, 1):
        with diffcache.wrapped(model, method) as handle:
            calls = [case.kwargs(model, seed, step=s, steps=steps) for s in range(steps)]
            alone.append([model(**kwargs).sample.clone() for kwargs in calls])
            schedules.append([c.index for c in handle.last.calls if c.computed])
    with diffcache.wrapped(model, method) as handle:
        for step in range(steps):
            for seed in (0, 1):
                out = model(**case.kwargs(model, seed, step=step, steps=steps)).sample
                assert torch.equal(out, alone[seed][step])
        calls = handle.last.calls
    found = [[c.index for c in calls if c.computed and c.branch == seed] for seed in (0, 1)]
    assert found == schedules
    assert found[0] != found[1]


def test_a_gate_of_its_own_for_every_branch_holds_its_state():
    when = Accumulated(0.1, Rescaled(), of="time", by_branch=True)
    assert when.probe == "time" and when.by_branch
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    with diffcache.wrapped(model, Combine(when)) as handle:
        for seed in (0, 1):
            model(**case.kwargs(model, seed, step=0, steps=4))
        (denoiser,), reuse = handle.denoisers, reuse_in(handle)
        branches = handle.run().timelines[denoiser].branches
        states = [branch.storage[reuse].decision.state for branch in branches]
        assert len({id(state) for state in states}) == 2
        held = {id(tensor) for tensor in denoiser.tensors(handle.run())}
        assert all(id(state.value) in held for state in states)
