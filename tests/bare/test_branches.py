"""Branches and trajectories of bare denoisers that nobody names: told apart and skipped, or computed."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler
from torch import Tensor

import diffcache
from diffcache import CacheWarning
from diffcache.eval.workshop.small import sticker_dit
from diffcache.targets import handle_of
from tests.bare.toys import COND, EVERY, PLAIN, STEPS, Toy, alone, is_own, noise, said, sample, track
from tests.internals import marks


@pytest.mark.parametrize("fresh", [False, True], ids=["same tensors", "equal tensors"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_with_guidance_skips_and_keeps_its_branches_apart(
    model, caught: Any, mode: Callable[[], Any], fresh: bool
):
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
def test_a_model_without_conditions_skips(model, caught: Any, up: bool):
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


class TwoSamples(Toy):
    """Takes a second noisy sample, as models of film and sound do."""

    def forward(self, hidden_states: Tensor, timestep: Any, sound: Tensor, cond: Any) -> Tensor:
        return super().forward(hidden_states, timestep, cond) + sound


@pytest.mark.parametrize("branches", [1, 2])
def test_in_a_run_what_moves_with_the_timestep_is_a_sample(caught: Any, branches: int):
    model = diffcache.wrap(TwoSamples(), EVERY)
    with diffcache.run(model, steps=STEPS):
        for x, t, _ in track(0):
            for which in range(branches):
                model(x, t, 2 * x, COND[which].clone())
    assert [marks(model, which) for which in range(branches)] == ["CCssCs"] * branches
    assert not caught


@pytest.mark.parametrize("start", [1, 2])
def test_guidance_that_sets_in_within_a_run_is_no_sample(model, caught: Any, start: int):
    """At the second step the first branch was called once, so its condition may be moving."""
    with diffcache.run(model):
        for step, (x, t, _) in enumerate(track(0)):
            for which in (0,) if step < start else (1, 0):
                out = model(x, t, COND[which].clone())
                assert start > 1 or torch.equal(out, PLAIN(x, t, COND[which]))
    assert said(caught, "calls at one timestep are given the same conditions") == (start == 1)
    if start == 2:
        assert (marks(model, 0), marks(model, 1)) == ("CsCssC", "CssC")


def test_a_branch_that_is_left_out_is_not_taken_for_the_other(model, caught: Any):
    own = [alone(track(0, cond=COND[which])) for which in (0, 1)]
    for step, (x, t, _) in enumerate(track(0)):
        for which in (0, 1) if step in (0, 3) else (1,):
            out = model(x, t, COND[which].clone())
            assert torch.equal(out, own[which][step])
    assert marks(model, 1) == "CssCss" and not caught


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_is_written_over_is_not_taken_for_what_it_held(model, caught: Any, mode: Callable[[], Any]):
    own = [alone(track(0, cond=COND[which])) for which in (0, 1)]
    with mode():
        buffer = torch.empty(1, 8, 8)
        for step, (x, t, _) in enumerate(track(0)):
            for which in (0, 1):
                buffer.copy_(COND[which])
                out, exact = model(x, t, buffer), PLAIN(x, t, COND[which])
                assert torch.equal(out, exact) or torch.equal(out, own[which][step])
    assert said(caught, "not those of any branch so far") == (mode is torch.no_grad)


def test_conditions_that_change_at_every_step_are_computed_and_said_once(model, caught: Any):
    calls = [(x, t, COND[0] + t) for x, t, _ in track(0)]
    for call in calls:
        assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "its conditions are not those of any branch so far") == 1
    assert len(handle_of(model).run().timelines[handle_of(model).denoisers[0]].branches) <= 2
    diffcache.reset(model)
    for call in calls:
        with diffcache.branch("only"):
            model(*call)
    assert marks(model) == "CssCss"


@pytest.mark.parametrize("many", [2, 8, 10])
@pytest.mark.parametrize("cond", [None, COND[0]], ids=["unconditional", "same condition"])
def test_samples_at_one_timestep_are_no_branches(model, caught: Any, many: int, cond: Any):
    tracks = [track(k, cond=cond) for k in range(many)]
    for together in zip(*tracks, strict=True):
        for call in together:
            assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "calls at one timestep are given the same conditions") == 1
    assert handle_of(model).held_bytes() == 0


def test_samples_at_one_timestep_that_differ_in_their_conditions_are_told_apart(model, caught: Any):
    tracks = [track(k, cond=torch.full((1, 8, 8), float(k))) for k in range(10)]
    own = [alone(calls) for calls in tracks]
    for step, together in enumerate(zip(*tracks, strict=True)):
        for number, call in enumerate(together):
            assert torch.equal(model(*call), own[number][step])
    assert marks(model, 9) == "CssCss" and not caught


def test_a_step_that_is_said_goes_before_the_timestep(model, caught: Any):
    """As of a solver that comes to one timestep twice, and back to another."""
    with diffcache.run(model):
        for step, time in enumerate((9.0, 8.0, 8.0, 7.0, 9.0, 6.0)):
            with diffcache.branch("only", step):
                model(sample(step), time)
    assert marks(model) == "CssCss" and not caught
    for number in (1, 2):  # without a run, one starts where the numbers turn back
        calls = track(number, steps=5)
        for step, (call, own) in enumerate(zip(calls, alone(calls), strict=True)):
            with diffcache.branch("only", step):
                assert torch.equal(model(*call), own)
        assert marks(model) == "CssCs" and not caught
    for number, step in ((1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (1, 3)):  # in turns: none is mixed up
        with diffcache.branch("only", step):
            out = model(*track(number)[step])
        assert is_own(out, track(number)[: step + 1])


def test_two_calls_that_look_alike_are_computed_and_said_once(model, caught: Any):
    """Something outside the arguments may differ, such as a layer that is switched off."""
    for x, t, _ in track(0):
        for _ in range(2):
            assert torch.equal(model(x, t), PLAIN(x, t))
    assert said(caught, "calls at one timestep are given the same conditions") == 1


def test_a_name_that_is_used_twice_at_a_timestep_is_computed_and_said_once(model, caught: Any):
    for together in zip(track(0), track(1), strict=True):
        for call in together:
            with diffcache.branch("cond"):
                assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, "in the same diffcache.branch") == 1


@pytest.mark.parametrize("order", ["ABAABBABABAB", "AABBAABBAABB", "AAABABBBAABB", "ABBBBBABAAAA", "AAAABBBBAABB"])
def test_runs_that_take_turns_are_not_mixed(model, caught: Any, order: str):
    tracks = {"A": track(0), "B": track(1)}
    at = {"A": 0, "B": 0}
    for name in order:
        at[name] += 1
        calls = tracks[name][: at[name]]
        assert is_own(model(*calls[-1]), calls), at
    assert said(caught, "diffcache.run(model)")


def test_a_run_that_starts_again_lower_is_doubted_until_the_next(model, caught: Any):
    """Of two runs that were cut short and ran on, nobody knows which goes on."""
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


def test_inversion_and_then_sampling(model, caught: Any):
    for step in range(5):
        model(sample(step), float(step))
    first = sample(50), 9.0
    assert torch.equal(model(*first), PLAIN(*first))
    assert said(caught, "moved much further than at any step before") == 1
    for step in range(1, 5):
        model(sample(50 + step), 9.0 - step)
    assert marks(model) == "CssC"  # a run of its own from where the timestep turns


AGAIN = "again and again the sample is no next step of the one before"
SMALL = "too few to tell whether a call is the next step"


def both(cond: Any = None) -> dict[str, list[Any]]:
    """Return two trajectories of the same conditions, one of which begins lower."""
    return {"A": track(0, start=10, cond=cond), "B": track(1, start=8, cond=cond)}


@pytest.mark.parametrize("cond", [None, COND[0]], ids=["unconditional", "same condition"])
@pytest.mark.parametrize("order", ["ABABABABABAB", "ABBAABBABA", "AABBBBBB", "ABBBBBB", "ABABBBBB"])
def test_a_trajectory_that_is_first_seen_lower_is_not_taken_for_the_next_step(model, order: str, cond: Any):
    tracks, at = both(cond), {"A": 0, "B": 0}
    scale = 1.0 if cond is None else cond
    for name in order:
        at[name] += 1
        calls = tracks[name][: at[name]]
        out = model(*calls[-1])
        bare = [(x, t, None) for x, t, _ in calls]
        assert is_own(out if cond is None else (out - cond) / scale, bare), at


def test_trajectories_that_take_turns_at_ever_lower_timesteps_are_computed_and_said_once(model, caught: Any):
    high, low = track(0), [(x, t - 0.5, None) for x, t, _ in track(1)]
    for together in zip(high, low, strict=True):
        for call in together:
            assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, AGAIN) == 1 and handle_of(model).held_bytes() == 0
    for number, expected in ((2, "CCCCCC"), (3, "CssCss")):  # a whole run passed by itself
        for call in track(number):
            model(*call)
        assert marks(model)[-6:] == expected
    assert said(caught, AGAIN) == 1


@pytest.mark.parametrize("cond", [None, COND[0]], ids=["unconditional", "same condition"])
def test_runs_that_start_one_after_another_are_computed_once_it_was_said(model, caught: Any, cond: Any):
    """Continuous batching: requests of one prompt join at every step."""
    tracks = [track(number, cond=cond) for number in range(4)]
    for time in range(9):
        for number in range(4):
            if 0 <= time - number < 6:
                call = tracks[number][time - number]
                out = model(*call)
                assert not said(caught, "runs may be taking turns") or torch.equal(out, PLAIN(*call))
    assert said(caught, "runs may be taking turns") == 1 and marks(model).count("s") <= 1


def test_a_run_that_takes_over_lower_skips_from_its_own_features(model, caught: Any):
    for call in track(0, start=20, steps=3):
        model(*call)
    own = alone(track(1, start=17))
    assert all(map(torch.equal, (model(*call) for call in track(1, start=17)), own))
    assert marks(model) == "CssCss" and not caught


@pytest.mark.parametrize("has_moved", [False, True])
def test_inversion_and_then_sampling_from_its_own_end(model, caught: Any, has_moved: bool):
    """The first step of the sampling cannot be told, unless it starts at the last one's sample."""
    x = [sample(number) for number in range(10)]
    for step in range(5):
        model(x[step], float(step))
    first = x[4 + has_moved], 5.0
    assert torch.equal(model(*first), PLAIN(*first)) != has_moved
    for step in range(1, 4):
        model(x[5 + step], 5.0 - step)
    assert said(caught, "turned back after a step that was skipped") == has_moved
    assert marks(model) == "Css" and len(caught) == has_moved


def test_a_sample_that_never_moves_skips(model, caught: Any):
    for step in range(6):
        model(noise(0), 9.0 - step)
    assert marks(model) == "CssCss" and not caught


def test_a_sample_that_is_written_in_place_is_known_by_what_it_held(model):
    buffer = torch.empty(1, 8, 8)
    for call in track(0, steps=3):
        model(buffer.copy_(call[0]), call[1])
    assert marks(model) == "Css"
    x, t, _ = track(1)[3]
    assert torch.equal(model(buffer.copy_(x), t), PLAIN(x, t))
    for step in range(4, 6):
        model(buffer.copy_(track(1)[step][0]), track(1)[step][1])
    assert marks(model) == "Css"


def test_a_sampler_that_draws_new_noise_is_computed_and_said_once_until_a_run_tells(model, caught: Any):
    calls = [(noise(step), float(9 - step)) for step in range(6)]
    for call in calls:
        assert torch.equal(model(*call), PLAIN(*call))
    assert said(caught, AGAIN) == 1
    with diffcache.run(model, steps=6):
        for call in calls:
            model(*call)
    assert marks(model) == "CssCss"


@pytest.mark.parametrize("sample", ["few", "whole numbers"])
def test_samples_that_cannot_be_told_are_computed_and_said_once(caught: Any, sample: str):
    class Embedded(Toy):
        def forward(self, hidden_states: Tensor, timestep: Any) -> Tensor:
            return super().forward(hidden_states.float(), timestep)

    plain, model = Embedded(), diffcache.wrap(Embedded(), EVERY)
    calls = [(x[:, :7] if sample == "few" else (9 * x).long(), t) for x, t, _ in track(0)]
    for call in calls:
        assert torch.equal(model(*call), plain(*call))
    assert said(caught, SMALL) == 1
    with diffcache.run(model):
        for call in calls:
            model(*call)
    assert marks(model) == "CssCss"


def test_conditions_tell_where_a_sample_is_too_small(model, caught: Any):
    """Two policies' observations: their actions are few numbers."""
    tracks = [[(x[:, :7], t, torch.full((1, 1, 8), cond)) for x, t, _ in track(n)] for n, cond in ((0, 0.5), (1, 2.0))]
    for number, calls in enumerate(tracks):
        outs = [model(*call) for call in calls]
        assert marks(model) == "CssCss"
        fresh = diffcache.wrap(Toy(), EVERY)
        with diffcache.run(fresh):
            assert all(torch.equal(fresh(*c), out) for c, out in zip(calls, outs, strict=True)), number
    assert caught == []


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("guided", [False, True], ids=["alone", "guidance in one batch"])
def test_an_edit_at_low_noise_after_a_run_that_was_cut_short_is_computed(model, caught: Any, order: int, guided: bool):
    """No sum of the steps before makes its sample, though it is very much like the last one."""
    cond = torch.tensor([1.0, -1.0])[:, None, None]

    def given(x: Tensor, step: int) -> tuple[Any, ...]:
        return (torch.cat([x, x]), 20.0 - step, cond) if guided else (x, 20.0 - step, None)

    for steps in (10, 8):  # the second one is cut short before a step that would be skipped
        x, outs = noise(steps), []
        for step in range(steps):
            out = model(*given(x, step))
            outs.append(2 * out[:1] - out[1:] if guided else out)
            x = x + sum(0.02 / (back + 1) * o for back, o in enumerate(outs[::-1][:order]))
        assert marks(model) == "CssCssCssC"[:steps]
    edit = given(x + 0.03 * x.norm() / 8 * noise(5), 8)
    assert torch.equal(model(*edit), PLAIN(*edit)) and not caught


def test_only_a_run_tells_trajectories_whose_samples_are_alike(model):
    """The limit: a second edit of one picture, at low noise, right after a first step."""
    picture = noise(7)
    first, second = ((picture + 0.1 * noise(k), 9.0 - k) for k in (0, 1))
    model(*first)
    assert not torch.equal(model(*second), PLAIN(*second))
    for call in (first, second):
        with diffcache.run(model):
            assert torch.equal(model(*call), PLAIN(*call))


def test_what_is_kept_of_a_sample_is_small_and_goes_with_its_run(model):
    x = torch.randn(64, 64, 8)
    model(x, 9.0)
    (branch,) = handle_of(model).run().timelines[handle_of(model).denoisers[0]].branches
    kept = branch.glance
    assert kept.untyped_storage().nbytes() <= 4 * 8192
    assert all(seen.untyped_storage().nbytes() <= 4 * 8192 for seen in branch.samples)
    left = weakref.ref(kept)
    del kept, branch
    diffcache.reset(model)
    assert left() is None


SAMPLERS = [
    (DDIMScheduler, {}),
    (EulerAncestralDiscreteScheduler, {}),
    (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
]


@pytest.mark.parametrize(("kind", "options"), SAMPLERS)
def test_a_real_trajectory_of_20_steps_is_one_run(kind: Any, options: dict[str, Any]):
    pipe = sticker_dit.load()
    model, scheduler = pipe.transformer, kind.from_config(pipe.scheduler.config, **options)
    scheduler.set_timesteps(20)
    diffcache.wrap(model, EVERY)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(1, *sticker_dit.LATENT, generator=generator)
        latents = latents * scheduler.init_noise_sigma  # which DiTPipeline leaves out
        for time in scheduler.timesteps:
            given = scheduler.scale_model_input(latents, time)
            answer = model(given, timestep=time[None], class_labels=torch.tensor([4])).sample
            latents = scheduler.step(answer, time, latents, generator=generator).prev_sample
    assert marks(model) == ("Css" * 7)[:20]
