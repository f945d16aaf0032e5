"""Noise levels without a scheduler: timesteps of denoisers, against diffusers' own pipelines."""

import pytest
import torch

import diffcache
from diffcache.attach.extensions.noise_level import OF_NOISE, OF_SIGNAL, NoiseLevels, level_at, weights_of
from diffcache.errors import AttachError
from tests.zoo.pipes import pipes

STEPS = 4
FAMILIES = " ".join([*OF_NOISE.values(), *OF_SIGNAL.values()]).split()
# Family -> a pipeline that calls it.
PIPELINES = {family: f"{family}Pipeline" for family in FAMILIES} | {
    "SD3": "StableDiffusion3Pipeline",
    "LTXVideo": "LTXPipeline",
    "LTX2Video": "LTX2Pipeline",
    "Kandinsky5": "Kandinsky5T2VPipeline",
    "SkyReelsV2": "SkyReelsV2DiffusionForcingPipeline",
}

pytestmark = pytest.mark.usefixtures("quiet")


def watched(pipe, case):
    """Run a pipeline; return the arguments of its denoiser's calls, one a step, and its outputs."""
    seen, outs = {}, {}
    names = diffcache.inspect(pipe.transformer)

    def keep(module, args, kwargs, out):
        timestep = float(kwargs[names.timestep].flatten()[-1])
        seen.setdefault(timestep, dict(kwargs))
        outs.setdefault(timestep, out[0].clone())

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    case.run(pipe, 0, STEPS)
    hook.remove()
    return seen, outs


@pytest.mark.parametrize("family", FAMILIES)
def test_timesteps_tell_what_the_scheduler_does(family):
    case = pipes().get(PIPELINES[family])
    if case is None:
        pytest.skip("not in this diffusers")
    pipe = case.build(0)
    pipe.set_progress_bar_config(disable=True)
    timesteps, name = [], diffcache.inspect(pipe.transformer).timestep

    def keep(module, args, kwargs):
        value = kwargs[name] if name in kwargs else args[1]
        timesteps.append(float(torch.as_tensor(value).flatten()[-1]))

    pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    case.run(pipe, 0, STEPS)
    levels = [level_at(type(pipe.transformer).__name__, t) for t in dict.fromkeys(timesteps)]
    expected = [noise for _, noise in weights_of(pipe.scheduler)]
    assert levels == pytest.approx(expected, abs=2e-3)  # some round timesteps to whole numbers


@pytest.mark.parametrize("name", ["FluxPipeline", "LTXPipeline"])
def test_seacache_decides_in_a_bare_loop_as_in_a_pipeline(name):
    case = pipes()[name]
    pipe = case.build(0)
    pipe.set_progress_bar_config(disable=True)
    with diffcache.wrapped(pipe, "seacache", threshold=0.8, warmup=2) as handle:
        seen, outs = watched(pipe, case)
        expected = {call.index: call.computed for call in handle.last.calls}
    given = list(seen.values())
    with diffcache.wrapped(pipe.transformer, "seacache", threshold=0.8, warmup=2) as handle:
        with diffcache.run(pipe.transformer, steps=STEPS):
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
    case.run(diffcache.wrap(case.build(0), "seacache"), 0, STEPS)
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
