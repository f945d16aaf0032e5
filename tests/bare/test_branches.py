"""Guidance branches of bare denoisers that nobody names: told apart and skipped, or computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.targets import handle_of
from tests.bare.toys import COND, EVERY, PLAIN, STEPS, Toy, alone, is_own, said, sample, track
from tests.internals import marks

# what must go on being skipped -------------------------------------------------------------------


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


# what nothing tells apart is computed, and said ----------------------------------------------------


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
