"""RegionE's ratios: fitted to the decay of velocities that runs show."""

from __future__ import annotations

import pytest
import torch

from diffcache.features.collect import RunInfo
from diffcache.features.regione import RegionE
from diffcache.step import Step
from tests.features.test_regione import tables


def run_of(collector, number: int, steps: int, curve: torch.Tensor, edited: torch.Tensor) -> None:
    """Drive a collector through a run whose velocity has the norms of `curve` on edited tokens."""
    times = torch.linspace(1000, 1000 / steps, steps)
    sigmas = torch.cat([times / 1000, torch.zeros(1)])
    collector.begin(RunInfo(0, number, times, sigmas, steps))
    generator = torch.Generator().manual_seed(number)
    reference = torch.randn(*edited.shape, 4, generator=generator)
    direction = torch.where(edited[..., None], reference, -reference)
    for i in range(steps):
        step = Step(i, float(times[i]) / 1000, steps)
        velocity = torch.where(edited[..., None], curve[i] * direction, 3.0 ** (i % 2) * direction)
        # where it is not edited the clean estimate is the reference, elsewhere its opposite
        sample = sigmas[i] * velocity + torch.where(edited[..., None], -reference, reference)
        collector.output(step, torch.cat([sample, reference], dim=1), velocity)
        collector.guided(step, sample, velocity)
    collector.end()


@pytest.mark.parametrize("steps", [10, 28])
def test_the_fit_finds_the_ratios_of_a_known_decay(steps: int) -> None:
    collector = RegionE(threshold=0.5).collector()
    lengths = 1 - 1 / steps
    gamma = 1 + 0.1 * torch.rand(steps - 1, dtype=torch.float64)
    curve = torch.cat([torch.ones(1), torch.cumprod(gamma * lengths, 0)]).float()
    edited = torch.zeros(2, 9, dtype=torch.bool)
    edited[0, 2:5], edited[1, 0] = True, True
    run_of(collector, 0, steps, curve, edited)
    again = RegionE(threshold=0.5).collector()
    again.load(collector.state())
    edited[1] = False  # a sample without an edit counts for nothing
    run_of(again, 1, steps, curve, edited)
    assert again.settings() == {"threshold": 0.5, "samples": 3}
    found = again.tables()["gamma"]
    torch.testing.assert_close(found, gamma, rtol=1e-5, atol=0)
    plan = RegionE(tables=tables(steps, found)).plan()
    assert plan.gamma == pytest.approx(gamma.tolist(), rel=1e-5)


def test_the_fit_says_what_it_lacks() -> None:
    collector = RegionE(threshold=0.5).collector()
    assert collector.state() == {}
    run_of(collector, 0, 10, torch.ones(10), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="no token was edited in any run at threshold=0.5"):
        collector.tables()
    collector.begin(RunInfo(0, 0, torch.ones(1), torch.ones(2), 1))
    with pytest.raises(ValueError, match="edits a reference picture"):
        collector.guided(Step(0, 1.0, 1), torch.ones(1, 4, 2), torch.ones(1, 4, 2))
    with pytest.raises(ValueError, match="flow-matching scheduler"):
        collector.begin(RunInfo(0, 0, torch.ones(1), None, 1))
