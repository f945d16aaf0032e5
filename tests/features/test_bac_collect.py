"""Measurements of BAC: pairs of steps of every site, against formulas and hooks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from diffcache.features.bac import BAC, METRICS
from diffcache.features.collect import RunInfo
from diffcache.offline.bac_collect import THIN, PairCollector, compare
from diffcache.offline.calibrate import calibrate
from diffcache.step import Step
from tests.features.bac_policy import SITES, STEPS, observations, tiny_policy


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_are_what_they_say(metric):
    """Against the formulas, one pair at a time."""
    rows = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0)).double()
    made = compare(rows, metric)
    for b, i, j in itertools.product(range(2), range(5), range(5)):
        x, y = rows[b, i], rows[b, j]
        expected = {
            "cosine": x @ y / (x.norm() * y.norm()),
            "mse": (x - y).square().mean(),
            "l1": (x - y).abs().mean(),
            "l2": (x - y).square().sum().sqrt(),
            "wasserstein": (x.sort().values - y.sort().values).abs().mean(),
        }[metric]
        assert float(made[b, i, j]) == pytest.approx(float(expected), abs=1e-12)


def test_calibration_measures_every_site():
    """The tables equal what hooks on an unwrapped policy see, averaged over runs and samples."""
    pipe = tiny_policy()
    method = calibrate(pipe, BAC(4, union=2), observations(), steps=STEPS, seed=7)
    assert method.tables.header["sites"] == SITES
    seen = {site: [] for site in SITES}
    hooks = [
        pipe.transformer.get_submodule(site).register_forward_hook(
            lambda module, args, out, site=site: seen[site].append(out)
        )
        for site in SITES
    ]
    for number, given in enumerate(observations()):
        pipe(
            **given, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(7 + number)
        )
    for hook in hooks:
        hook.remove()
    for site in SITES:
        rows = torch.stack(seen[site]).reshape(3, STEPS, 2, -1).transpose(1, 2).flatten(0, 1)
        alike = functional.cosine_similarity(rows[:, :, None], rows[:, None], dim=-1).mean(0)
        torch.testing.assert_close(method.tables[f"pairs.{site}"], alike, atol=1e-5, rtol=1e-5)
        shift = (rows[:, :, None] - rows[:, None]).abs().mean((0, 3))
        torch.testing.assert_close(method.tables[f"shift.{site}"], shift, atol=1e-5, rtol=1e-5)
    # one calibration serves every count, objective and union
    other = BAC(6, objective="adjacent", union=0, tables=method.tables)
    assert all(len(steps) == 6 for steps in other.schedules().values())


def test_tables_survive_a_file(tmp_path):
    """The method read back is the same and valid Python."""
    path = tmp_path / "bac.safetensors"
    made = calibrate(tiny_policy(), BAC(4, union=2), observations(1), steps=STEPS, out=path)
    again = BAC(4, union=2, tables=str(path))
    assert again == made and again.schedules() == made.schedules()
    assert eval(repr(again)) == made


def test_collector_goes_on_from_its_state():
    """Stopped after any run, the tables are the same to the last bit."""
    runs = torch.randn(3, 4, 2, 2, 6, generator=torch.Generator().manual_seed(0))

    def feed(collector, run):
        collector.begin(RunInfo(0, 0, torch.arange(4.0), None, 4))
        for step, branch in itertools.product(range(4), range(2)):
            for index, site in itertools.product(range(2), ("b.0.ff", "b.0.attn")):
                part = run[step][:, index] + branch + len(site)
                collector.feature(Step(step, float(step), 4, branch, 0), site, index, part)
        collector.end()

    whole = PairCollector("mse")
    for run in runs:
        feed(whole, run)
    part = PairCollector("mse")
    feed(part, runs[0])
    again = PairCollector("mse")
    again.load(dict(reversed(part.state().items())))
    for run in runs[1:]:
        feed(again, run)
    assert again.settings() == whole.settings() == {"sites": ["b.0.ff", "b.0.attn"],
                                                    "metric": "mse"}  # fmt: skip
    assert all(torch.equal(t, again.tables()[name]) for name, t in whole.tables().items())
    rows = runs.flatten(3)  # two tensors of one site are compared as one
    mse = (rows[:, :, None] - rows[:, None]).square().mean((0, 3, 4))
    torch.testing.assert_close(whole.tables()["pairs.b.0.ff"], mse)


def test_large_activations_are_thinned():
    """Evenly, so that a constant difference stays what it is."""
    collector = PairCollector("l1")
    collector.begin(RunInfo(0, 0, torch.arange(2.0), None, 2))
    for step in range(2):
        value = torch.full((1, 3 * THIN + 5), float(step))
        collector.feature(Step(step, 0.0, 2, 0, 0), "b.0.ff", 0, value)
    kept = [t for steps in collector._seen.values() for part in steps.values() for t in part]
    assert [tuple(t.shape) for t in kept] == [(1, THIN)] * 2
    collector.end()
    assert collector.tables()["pairs.b.0.ff"].tolist() == [[0, 1], [1, 0]]


def test_odd_runs_are_refused():
    """A module that is left out at a step, and runs of two lengths."""
    collector = PairCollector("cosine")
    collector.begin(RunInfo(0, 0, torch.arange(3.0), None, 3))
    for step in range(2):
        collector.feature(Step(step, 0.0, 3, 0, 0), "b.0.ff", 0, torch.ones(1, 4))
    with pytest.raises(ValueError, match="b.0.ff ran at 2 of 3 steps"):
        collector.end()
    with pytest.raises(ValueError, match="no module was seen"):
        collector.tables()
    collector.begin(RunInfo(0, 0, torch.arange(1.0), None, 1))
    collector.feature(Step(0, 0.0, 1, 0, 0), "b.0.ff", 0, torch.ones(1, 4))
    collector.end()
    with pytest.raises(ValueError, match="a run of 2 steps after one of 1"):
        collector.begin(RunInfo(0, 0, torch.arange(2.0), None, 2))
