"""The proxies of the image error, against runs of their own."""

import pytest
import torch

from diffcache.offline.harmonica.mixing import image_errors
from tests.router_training.dit_loop import SITES, STEPS, Loop, causes_of


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
