"""SeaCache: its filter against diffusers' and limits, its gate against a loop, grids and noise levels."""

from types import SimpleNamespace

import pytest
import torch

import diffcache
from diffcache.attach.extensions.noise_level import OF_NOISE, OF_SIGNAL, NoiseLevels, grids_of, level_at, weights_of
from diffcache.errors import AttachError
from diffcache.features.seacache import Filtered, SceneRule, SeaCache, gain, grid_of
from diffcache.step import Scene, Step
from tests.internals import noting
from tests.zoo.pipes import pipes

STEPS = 8

pytestmark = pytest.mark.usefixtures("quiet")


def test_along_one_axis_it_is_the_wiener_filter():
    signal, noise, power = 0.7, 0.3, 3.0
    found = gain((8,), signal, noise, power)
    frequencies = torch.fft.fftfreq(8, dtype=torch.float64)[1:].abs()
    spectrum = frequencies**-power
    wiener = signal * spectrum / (signal**2 * spectrum + noise**2)
    rest = 1 / signal  # an unbounded spectrum at rest
    every = torch.cat((torch.tensor([rest], dtype=torch.float64), wiener))
    assert torch.allclose(found, every / every.mean())


@pytest.mark.parametrize("sigma", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("power", [2.0, 3.0])
def test_the_filter_is_that_of_diffusers(sigma, power, agrees):
    from diffusers.hooks.sea_cache import _apply_sea_filter

    values = torch.randn(3, 4, 6, 5)  # frames, height, width, channels
    theirs = _apply_sea_filter(values, sigma, power)
    step = Step(3, scene=Scene(1 - sigma, sigma, ((3, 4, 6),)))
    mine = Filtered(power).see(values.reshape(1, -1, 5), step)
    assert mine.shape == (1, 3, 4, 6, 5)
    agrees("seacache", "filter of diffusers, run", [mine[0]], [theirs], 1e-5)


@pytest.mark.parametrize(("first", "warmup", "last"), [("filtered", 1, True), ("plain", 1, True), ("plain", 3, False)])
def test_the_schedule_follows_an_independent_trace(first, warmup, last, agrees):
    """Tokens on a 4 x 4 grid whose pattern and level move; distances by a loop written here.

    What is plain follows the official scripts: filtered always for HunyuanVideo, at the questions
    only for FLUX and Wan2.1.
    """
    torch.manual_seed(2)
    base, drift = torch.randn(1, 16, 3), torch.randn(1, 16, 3)
    values = [base + 0.06 * s * drift for s in range(30)]
    sigmas = [1 - s / 30 for s in range(30)]
    threshold, steps, total, before = 0.15, [], 0.0, None
    for index, (value, sigma) in enumerate(zip(values, sigmas, strict=True)):
        spectrum = torch.fft.fft2(value.double().reshape(4, 4, 3), dim=(0, 1))
        weights = gain((4, 4), 1 - sigma, sigma, 2.0)[..., None]
        now = torch.fft.ifft2(spectrum * weights, dim=(0, 1)).real
        if first == "plain" and index < warmup:
            now = value.double().reshape(4, 4, 3)
        if before is not None:
            total += float((now - before).abs().mean() / before.abs().mean())
        if index < warmup or (last and index == 29) or total >= threshold:
            steps.append(index)
            total = 0.0
        before = now
    when = SeaCache(threshold, first=first, warmup=warmup, last=last).parts().when
    state, found = when.init(), []
    for index, (value, sigma) in enumerate(zip(values, sigmas, strict=True)):
        step = Step(index, total=30, scene=Scene(1 - sigma, sigma, ((4, 4),)))
        if when.should_compute(state, step, value):
            when.computed(state, step, value)
            found.append(index)
    agrees("seacache", "official code, as a loop", steps=(found, steps))
    assert 2 < len(steps) < 30
    assert (warmup in steps) == (first == "plain")  # what is left plain is far off
    assert (29 in steps) == last


def test_the_power_is_that_of_the_official_scripts():
    values = torch.randn(1, 24, 5)
    for grid, power in (((4, 6), 2.0), ((1, 4, 6), 2.0), ((2, 3, 4), 3.0)):
        step = Step(3, scene=Scene(0.4, 0.6, (grid,)))
        see = [Filtered(given).see(values, step) for given in (None, power, 5.0 - power)]
        assert torch.equal(see[0], see[1]) and not torch.equal(see[0], see[2])


def test_grids_are_found_where_a_call_speaks_of_them():
    rows = torch.stack(
        torch.meshgrid(torch.zeros(1), torch.arange(6.0), torch.arange(4.0), indexing="ij"), -1
    ).reshape(24, 3)
    assert grids_of({"img_ids": rows, "txt_ids": torch.zeros(5, 3)}) == ((6, 4), (1,))
    assert grids_of({"img_ids": rows[None].expand(2, -1, -1)}) == ((6, 4),)
    assert grids_of({"img_shapes": [[(1, 6, 4)], [(1, 6, 4)]]}) == ((1, 6, 4), (1, 6, 4))
    assert grids_of({"num_frames": 3, "height": 6, "width": 4}) == ((3, 6, 4),)
    assert grids_of({"guidance": 3.0, "hidden_states": rows}) == ()


def test_noise_levels_of_schedulers():
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    flow = FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow.set_timesteps(5)
    assert weights_of(flow) == [(1 - s, s) for s in flow.sigmas[:5].tolist()]
    turned = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    turned.set_timesteps(5)
    assert weights_of(turned) == [(s, 1 - s) for s in turned.sigmas[:5].tolist()]
    wan = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    wan.set_timesteps(5)
    assert all(a + b == pytest.approx(1) for a, b in weights_of(wan))
    ddim = DDIMScheduler()
    ddim.set_timesteps(5)
    levels = weights_of(ddim)
    assert all(a**2 + b**2 == pytest.approx(1) for a, b in levels)
    assert levels[0][1] > 0.9 and levels[-1][0] > 0.9


PIPES = pipes()


def test_a_bare_model_is_told_its_noise_levels_as_a_pipeline_is():
    case = PIPES["FluxPipeline"]
    pipe = case.build(0)
    method = SeaCache(0.4, first="filtered")
    with noting(pipe.transformer) as calls, diffcache.wrapped(pipe, method) as handle:
        case.run(pipe, steps=STEPS)
        expected = [call.computed for call in handle.last.calls]
        sigmas = pipe.scheduler.sigmas
    assert 1 < sum(expected) < STEPS and len(sigmas) == STEPS + 1
    model = pipe.transformer

    def computed(handle, **told):
        with diffcache.run(model, **told):
            for call in calls:
                model(**call)
        return [call.computed for call in handle.last.calls]

    with diffcache.wrapped(model, method) as handle:
        assert computed(handle, sigmas=sigmas) == expected
        assert computed(handle, steps=STEPS, sigmas=sigmas[:-1].tolist()) == expected


def test_comfyui_tells_the_noise_level_in_an_argument():
    scenes, seen = NoiseLevels(SimpleNamespace(anatomy=SimpleNamespace(model="Flux")), SceneRule()), []
    for told in ({"sigmas": torch.tensor([0.75, 0.75])}, {"sigmas": torch.tensor([14.6])}, None):
        run = SimpleNamespace(begin=0, storage={}, sigmas=())
        timeline = SimpleNamespace(started_at=0)
        call = SimpleNamespace(run=run, timeline=timeline, step=Step(0), kwargs={"transformer_options": told})
        try:
            seen.append(scenes._weights(call))
        except AttachError:
            seen.append(None)
    assert seen == [(0.25, 0.75), None, None]


NOISE_LEVELS_STEPS = 4
FAMILIES = " ".join([*OF_NOISE.values(), *OF_SIGNAL.values()]).split()
# Family -> a pipeline that calls it.
PIPELINES = {family: f"{family}Pipeline" for family in FAMILIES} | {
    "SD3": "StableDiffusion3Pipeline",
    "LTXVideo": "LTXPipeline",
    "LTX2Video": "LTX2Pipeline",
    "Kandinsky5": "Kandinsky5T2VPipeline",
    "SkyReelsV2": "SkyReelsV2DiffusionForcingPipeline",
}


def watched(pipe, case):
    """Run a pipeline; return the arguments of its denoiser's calls, one a step, and its outputs."""
    seen, outs = {}, {}
    names = diffcache.inspect(pipe.transformer)

    def keep(module, args, kwargs, out):
        timestep = float(kwargs[names.timestep].flatten()[-1])
        seen.setdefault(timestep, dict(kwargs))
        outs.setdefault(timestep, out[0].clone())

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    case.run(pipe, 0, NOISE_LEVELS_STEPS)
    hook.remove()
    return seen, outs


@pytest.mark.parametrize("family", FAMILIES)
def test_timesteps_tell_what_the_scheduler_does(family):
    case = pipes().get(PIPELINES[family])
    if case is None:
        pytest.skip("not in this diffusers")
    pipe = case.build(0)
    timesteps, name = [], diffcache.inspect(pipe.transformer).timestep

    def keep(module, args, kwargs):
        value = kwargs[name] if name in kwargs else args[1]
        timesteps.append(float(torch.as_tensor(value).flatten()[-1]))

    pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    case.run(pipe, 0, NOISE_LEVELS_STEPS)
    levels = [level_at(type(pipe.transformer).__name__, t) for t in dict.fromkeys(timesteps)]
    expected = [noise for _, noise in weights_of(pipe.scheduler)]
    assert levels == pytest.approx(expected, abs=2e-3)  # some round timesteps to whole numbers


@pytest.mark.parametrize("name", ["FluxPipeline", "LTXPipeline"])
def test_seacache_decides_in_a_bare_loop_as_in_a_pipeline(name):
    case = pipes()[name]
    pipe = case.build(0)
    with diffcache.wrapped(pipe, "seacache", threshold=0.8, warmup=2) as handle:
        seen, outs = watched(pipe, case)
        expected = {call.index: call.computed for call in handle.last.calls}
    given = list(seen.values())
    with diffcache.wrapped(pipe.transformer, "seacache", threshold=0.8, warmup=2) as handle:
        with diffcache.run(pipe.transformer, steps=NOISE_LEVELS_STEPS):
            found = [pipe.transformer(**{**each, "return_dict": False})[0] for each in given]
        assert {call.index: call.computed for call in handle.last.calls} == expected
    assert set(expected.values()) == {True, False}
    assert all(torch.allclose(a, b) for a, b in zip(found, outs.values(), strict=True))


def test_a_denoiser_that_takes_over_has_the_levels_of_its_own_steps(monkeypatch):
    case, seen, levels = pipes()["WanPipeline-two"], [], NoiseLevels.open

    def keep(self, call):
        call = levels(self, call)
        seen.append((call.record.denoiser, call.step.timestep, call.step.scene.noise))
        return call

    monkeypatch.setattr(NoiseLevels, "open", keep)
    case.run(diffcache.wrap(case.build(0), "seacache"), 0, NOISE_LEVELS_STEPS)
    assert {name for name, _, _ in seen} == set(case.denoisers)
    assert [noise for _, _, noise in seen] == pytest.approx([time / 1000 for _, time, _ in seen], abs=2e-3)


def test_levels_that_are_not_known_are_not_guessed():
    assert level_at("FluxTransformer2DModel", 0.25) == 0.25
    assert level_at("Lumina2Transformer2DModel", 0.25) == 0.75
    assert level_at("FluxTransformer2DModel", 250.0) is None  # of a thousand, which it is not given
    assert level_at("PixArtTransformer2DModel", 250.0) is None
    assert level_at("FluxTransformer2DModel", None) is None
    case = pipes()["PixArtAlphaPipeline"]
    pipe = case.build(0)
    seen, _ = watched(pipe, case)
    with (
        diffcache.wrapped(pipe.transformer, "seacache"),
        pytest.raises(AttachError, match=r"noise level of step 0 is not known.*sigmas="),
    ):
        pipe.transformer(**next(iter(seen.values())))


def test_frames_at_levels_of_their_own_have_none_together():
    case = pipes()["WanPipeline"]
    pipe = case.build(0)
    seen, _ = watched(pipe, case)
    given = dict(next(iter(seen.values())))
    frames = given["hidden_states"].shape[2:].numel() // 4
    given["timestep"] = torch.linspace(900, 100, frames).expand(len(given["hidden_states"]), -1)
    with (
        diffcache.wrapped(pipe.transformer, "seacache"),
        pytest.raises(AttachError, match="noise level of step 0 is not known"),
    ):
        pipe.transformer(**given)


def test_scenes_find_the_grid_of_so_many_tokens():
    assert grid_of(Scene(1, 0, ((6, 4), (1, 5, 4))), 20) == (1, 5, 4)
    assert grid_of(Scene(1, 0, (), (8, 12)), 24) == (4, 6)
    assert grid_of(Scene(1, 0, (), (5, 8, 12)), 120) == (5, 4, 6)
    assert grid_of(Scene(1, 0, (), (9, 8, 12)), 120) == (5, 4, 6)  # patches of 2 frames, padded
