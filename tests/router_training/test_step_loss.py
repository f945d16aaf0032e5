"""The loss of a step: its value and gradient against differences, and its ends."""

import pytest
import torch

from diffcache.offline.harmonica.mixing import image_errors, step_loss
from tests.router_training.dit_loop import SITES, STEPS, Loop, causes_of


def first_step(track, mixer):
    mixer.forget()
    with torch.no_grad(), mixer.mixing(torch.ones(len(SITES))):
        track.advance(track.predict(mixer))


def track_at_start(replay, track):
    track.restart()
    return track


def test_scores_of_1_are_the_teacher_and_only_the_penalty_is_left(replay, mixer):
    track = replay.begin([3, 8], seed=11)
    first_step(track, mixer)
    weights = torch.ones(len(SITES), requires_grad=True)
    with mixer.mixing(weights):
        student = track.predict(mixer)
    teacher = track.predict()
    assert torch.equal(student, teacher)
    mse = (teacher - student).square().mean()
    assert float(mse.detach()) == 0
    (gradient,) = torch.autograd.grad(mse, weights)
    assert torch.equal(gradient, torch.zeros(len(SITES)))
    first_step(track_at_start(replay, track), mixer)
    high = torch.full((len(SITES),), 40.0)  # whose sigmoid is 1
    loss, _, parts = step_loss(track, mixer, high, weight=3.0, beta=0.25)
    assert float(loss) == 0.25 * len(SITES)
    assert parts == {"loss": 0.25 * 8, "error": 0.0, "penalty": 0.25 * 8, "mse": 0.0}


def test_the_loss_and_its_gradient_agree_with_differences(pipe, replay, mixer, logits):
    track, loop = replay.begin([3, 8], seed=2), Loop(pipe, [3, 8], 2)
    first_step(track, mixer)
    with torch.no_grad():
        loop.advance(0, loop.predict(0, torch.ones(len(SITES))))
    kept = dict(loop.kept)
    row = logits[1].clone().requires_grad_(True)
    loss, student, parts = step_loss(track, mixer, row, weight=2.0, beta=0.01)
    (gradient,) = torch.autograd.grad(loss, row)

    @torch.no_grad()
    def independent(row):
        loop.kept = dict(kept)
        scores = torch.sigmoid(row)
        out = loop.predict(1, scores)
        mse = (loop.predict(1) - out).double().square().mean()
        return float(2.0 * mse + 0.01 * scores.double().sum()), out

    wanted, out = independent(logits[1])
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)
    assert parts["error"] + parts["penalty"] == pytest.approx(parts["loss"])
    torch.testing.assert_close(student.detach(), out, atol=1e-5, rtol=1e-5)
    for site in range(len(SITES)):
        shift = torch.zeros(len(SITES))
        shift[site] = 0.02
        slope = (independent(logits[1] + shift)[0] - independent(logits[1] - shift)[0]) / 0.04
        assert float(gradient[site]) == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_without_image_error_a_step_only_shrinks_scores(replay, mixer, logits):
    track = replay.begin([3, 8], seed=2)
    first_step(track, mixer)
    row = logits[1].clone().requires_grad_(True)
    loss, _, _ = step_loss(track, mixer, row, weight=0.0, beta=0.5)
    (gradient,) = torch.autograd.grad(loss, row)
    scores = torch.sigmoid(logits[1])
    torch.testing.assert_close(gradient, 0.5 * scores * (1 - scores))


def test_where_kept_equals_fresh_logits_only_fall(replay, mixer, logits):
    track = replay.begin([3, 8], seed=2)
    row = logits[1].clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([row], lr=0.05, weight_decay=0)
    before = row.detach().clone()
    for _ in range(5):  # the same step again and again, kept from itself
        mixer.forget()
        with torch.no_grad(), mixer.mixing(torch.ones(len(SITES))):
            track.predict(mixer)
        loss, _, parts = step_loss(track, mixer, row, weight=1.0, beta=1e-3)
        assert parts["mse"] < 1e-9
        (row.grad,) = torch.autograd.grad(loss, row)
        optimizer.step()
        assert (row < before).all()
        before = row.detach().clone()


def test_the_teacher_neither_reads_nor_keeps(replay, mixer):
    track = replay.begin([3, 8], seed=2)
    first_step(track, mixer)
    kept = {key: [t.clone() for t in held] for key, held in mixer.kept().items()}
    assert len(kept) == len(SITES)
    with torch.no_grad():
        track.predict(mixer)
    assert all(torch.equal(a, b) for key, held in mixer.kept().items() for a, b in zip(held, kept[key], strict=True))  # fmt: skip


@pytest.mark.parametrize("proxy", ["paper", "official"])
def test_image_errors_equal_runs_of_their_own(pipe, replay, mixer, logits, proxy):
    errors, causes = image_errors(replay.begin([3, 8], seed=2), mixer, logits, proxy)
    loop, scores, on = Loop(pipe, [3, 8], 2), torch.sigmoid(logits), torch.ones_like(logits)
    wanted, before = [0.0], loop.run(on)
    for step in range(1, STEPS):
        if proxy == "paper":
            used = on.clone()
            used[step] = scores[step]
            wanted.append(float((loop.run(used) - before).square().sum() / len(before)))
        else:
            used = torch.cat([on[:1], scores[1 : step + 1], on[step + 1 :]])
            now = loop.run(used)
            wanted.append(float((now - before).square().mean()))
            before = now
    assert errors.tolist() == pytest.approx(wanted, rel=1e-3)
    assert min(wanted[1:]) > 0
    assert causes.tolist() == pytest.approx(causes_of(loop, scores, proxy), rel=1e-3)


def test_typical_errors_are_geometric_means_of_the_papers(pipe, replay, mixer, logits):
    errors, causes = image_errors(replay.begin([3, 8], seed=2), mixer, logits, "typical")
    loop, scores, on = Loop(pipe, [3, 8], 2), torch.sigmoid(logits), torch.ones_like(logits)
    before, wanted = loop.run(on), []
    for step in range(1, STEPS):
        used = on.clone()
        used[step] = scores[step]
        squares = (loop.run(used) - before).double().square().flatten(1).sum(1)
        wanted.append(float(squares.log().mean().exp()))
    assert errors[1:].tolist() == pytest.approx(wanted, rel=1e-3)
    plain = image_errors(replay.begin([3, 8], seed=2), mixer, logits, "paper")
    assert bool((errors <= plain[0] * (1 + 1e-9))[1:].all())
    assert bool((causes <= plain[1] * (1 + 1e-9))[1:].all())


@pytest.mark.parametrize("proxy", ["paper", "official"])
def test_a_router_that_computes_everything_has_no_image_error(replay, mixer, proxy):
    high = torch.full((STEPS, len(SITES)), 40.0)
    errors, causes = image_errors(replay.begin([3, 8], 2), mixer, high, proxy)
    assert errors.tolist() == causes.tolist() == [0.0] * STEPS
