"""calibrate and tune on the shipped model: files that work again, resume, and refuse."""

from pathlib import Path

import pytest
import torch

import diffcache
from diffcache import Combine, FittedForecast, Listed, Tables, Taylor
from diffcache.errors import AttachError, TablesError
from diffcache.features.collect import Collector
from diffcache.pipelines.small.flux import CALL, load
from diffcache.tuning.search import Goal, front_of
from diffcache.tuning.space import moves, schedules
from diffcache.tuning.trial import Trial, psnr

STEPS = 5
PROMPTS = ["a small red ring on the left, on a yellow background"] * 3
SETTINGS = {"steps": STEPS, "batch_size": 2, **CALL}


@pytest.fixture(scope="module")
def pipe():
    return load()


@pytest.fixture(scope="module")
def calibrated(pipe):
    return diffcache.calibrate(pipe, FittedForecast(computed=3), PROMPTS, **SETTINGS)


def draw(pipe):
    generator = torch.Generator().manual_seed(7)
    return pipe(
        PROMPTS[:1], generator=generator, num_inference_steps=STEPS, output_type="pt", **CALL
    ).images


def test_the_tables_are_inner_products_of_the_features(pipe, calibrated):
    seen = {}

    class Spy(Collector):
        def site(self):
            return Combine(Listed([0]), site="stack")

        def feature(self, step, site, index, value):
            seen.setdefault((site, index), []).append(value.reshape(-1).double())

        def state(self):
            return {}

        def load(self, state):
            pass

        def tables(self):
            return {}

    from diffcache.watching import Watch, call_pipeline

    expected = 0
    for number, batch in enumerate((PROMPTS[:2], PROMPTS[2:])):
        seen.clear()
        given = {"num_inference_steps": STEPS, **CALL}
        Watch().run(pipe, {"transformer": pipe.transformer}, [Spy()], (0, number),
                    lambda b=batch, n=number, g=given: call_pipeline(pipe, b, n, g))  # fmt: skip
        for features in seen.values():
            stacked = torch.stack(features)
            expected = expected + stacked @ stacked.T
    found = calibrated.tables["products"]
    assert torch.allclose(found, expected, rtol=1e-9)
    assert calibrated.tables.steps == STEPS
    assert calibrated.tables.header["shape"] == [64, 16]


def test_calibrating_leaves_the_pipeline_as_it_was(pipe, calibrated):
    plain = draw(pipe)
    diffcache.calibrate(pipe, FittedForecast(), PROMPTS[:1], **SETTINGS)
    assert torch.equal(draw(pipe), plain)


def test_an_interrupted_calibration_goes_on(pipe, calibrated, tmp_path):
    out = tmp_path / "a.safetensors"

    def stop(done, total, word):
        if done == 1:
            raise KeyboardInterrupt

    method = FittedForecast(computed=3)
    with pytest.raises(KeyboardInterrupt):
        diffcache.calibrate(pipe, method, PROMPTS, out=out, progress=stop, **SETTINGS)
    assert not out.exists() and (tmp_path / "a.safetensors.part").exists()
    with pytest.raises(TablesError, match="of another calibration"):
        diffcache.calibrate(pipe, method, PROMPTS, out=out, seed=1, **SETTINGS)
    done = []
    made = diffcache.calibrate(
        pipe, method, PROMPTS, out=out, progress=lambda *a: done.append(a[0]), **SETTINGS
    )
    assert done == [1, 2]  # the first batch was not run again
    assert made.tables == calibrated.tables
    assert Tables.load(out) == calibrated.tables
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]


def test_several_methods_share_a_pass(pipe, calibrated):
    runs = []
    both = diffcache.calibrate(
        pipe, [FittedForecast(computed=2), FittedForecast(computed=3)], PROMPTS,
        progress=lambda *a: runs.append(a), **SETTINGS,
    )  # fmt: skip
    assert runs[-1][1] == 2  # two batches in all, not four
    assert [m.computed for m in both] == [2, 3]
    assert torch.equal(both[0].tables["products"], both[1].tables["products"])


def test_tables_of_another_run_or_model_are_refused(pipe, calibrated):
    with diffcache.wrapped(pipe, calibrated):
        with pytest.raises(AttachError, match="runs of 5 steps, this one has 6"):
            pipe(PROMPTS[:1], num_inference_steps=6, output_type="latent", **CALL)
        assert len(draw(pipe)) == 1  # and nothing is left behind
    header = {**calibrated.tables.header, "config": "0" * 16}
    other = Tables(header, {n: calibrated.tables[n] for n in calibrated.tables.names()})
    with pytest.raises(TablesError, match="measured with config"):
        diffcache.wrap(pipe, FittedForecast(computed=3, tables=other))
    from diffusers import FlowMatchHeunDiscreteScheduler

    mine = pipe.scheduler
    try:
        pipe.scheduler = FlowMatchHeunDiscreteScheduler()
        with pytest.raises(TablesError, match="measured with scheduler="):
            diffcache.wrap(pipe, calibrated)
    finally:
        pipe.scheduler = mine


def test_bad_requests_are_refused(pipe):
    with pytest.raises(ValueError, match="takes no tables"):
        diffcache.calibrate(pipe, "taylorseer", PROMPTS, **SETTINGS)
    with pytest.raises(ValueError, match="at least one prompt"):
        diffcache.calibrate(pipe, FittedForecast(), [], **SETTINGS)
    with pytest.raises(ValueError, match="give one of speedup"):
        diffcache.tune(pipe, PROMPTS, **SETTINGS)
    with pytest.raises(ValueError, match="speedup=1: must be above 1"):
        diffcache.tune(pipe, PROMPTS, speedup=1, **SETTINGS)
    with pytest.raises(ValueError, match="at least two batches"):
        diffcache.tune(pipe, PROMPTS[:1], speedup=2, **SETTINGS)


def test_the_shipped_tuning_runs_on_the_shipped_model(pipe):
    path = (
        Path(diffcache.__file__).parent
        / "assets"
        / "tables"
        / "shapes-flux"
        / "tuned-4x.safetensors"
    )
    with diffcache.wrapped(pipe, "tuned", tables=str(path)):
        pipe(PROMPTS[:1], num_inference_steps=28, output_type="latent", **CALL)
        assert diffcache.report(pipe).steps_computed == 6


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
def test_tune_returns_the_best_of_what_it_saw_and_goes_on(pipe, tmp_path):
    out = tmp_path / "b.safetensors"
    methods = [
        Combine(Listed(steps, STEPS), Taylor(order), site="stack")
        for steps in ((0, 2), (0, 1), (0, 2, 4))
        for order in (0, 1)
    ]
    settings = {**SETTINGS, "out": out, "speedup": 1.5, "methods": methods, "trials": 12}
    count = []

    def stop(done, total, word):
        count.append(done)
        if done == 4 and len(count) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diffcache.tune(pipe, PROMPTS, progress=stop, **settings)
    assert (tmp_path / "b.safetensors.trials").exists()
    best = diffcache.tune(pipe, PROMPTS, progress=stop, **settings)
    assert not (tmp_path / "b.safetensors.trials").exists()
    front = best.front
    assert [t["cost"] for t in front] == sorted(t["cost"] for t in front)
    assert [t["psnr_db"] for t in front] == sorted(t["psnr_db"] for t in front)
    chosen = next(t for t in front if t["validation_psnr_db"] is not None)
    assert chosen["cost"] <= 1 / 1.5
    again = diffcache.features.tuned.Tuned(out)
    assert again.method == best.method
    with diffcache.wrapped(pipe, "tuned", tables=str(out)):
        draw(pipe)
        done = diffcache.report(pipe)
    listed = sorted({0, *best.parts().when.steps})
    assert [call.index for call in done.steps if call.computed] == listed


def test_a_goal_that_nothing_meets_says_so(pipe):
    methods = [Combine(Listed((0, 2), STEPS), Taylor(0), site="stack")]
    with pytest.raises(AttachError, match=r"none meets Goal\(.*psnr=99"):
        diffcache.tune(pipe, PROMPTS, psnr=99.0, methods=methods, trials=3, **SETTINGS)


def test_ranks_fronts_and_moves():
    cheap, close = Trial("a", 0.2, 30.0, 1.0, 1), Trial("b", 0.5, 50.0, 2.0, 1)
    worse = Trial("c", 0.6, 40.0, 3.0, 1)
    assert front_of([close, worse, cheap]) == [cheap, close]
    assert max((cheap, close, worse), key=Goal(speedup=4.0).rank) is cheap
    assert max((cheap, close, worse), key=Goal(speedup=2.0).rank) is close
    assert max((cheap, close, worse), key=Goal(psnr=35.0).rank) is close
    assert max((cheap, close, worse), key=Goal(seconds=1.5).rank) is cheap
    assert set(moves((0, 2, 3), 5)) == {(0, 1, 3), (0, 2, 4)}
    assert (0, 2, 4) in set(schedules(6, 3)) and (0, 1, 4) in set(schedules(6, 3))
    ones = torch.ones(2, 3)
    assert psnr(ones, ones).tolist() == [100, 100]
    assert psnr(ones * 0.9, ones)[0] == pytest.approx(20.0, abs=1e-4)
    assert psnr(torch.tensor([[11.0, 0.0]]), torch.tensor([[10.0, 0.0]]))[0] == pytest.approx(
        10 * torch.log10(torch.tensor(100 / 0.5)).item()
    )
