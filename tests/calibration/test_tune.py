"""tune on the shipped model: the best of what it saw, and a log of trials that goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import diffcache
from diffcache import Combine, FittedForecast, Listed, Tables, Taylor
from diffcache.errors import AttachError, TablesError
from diffcache.offline.tune.search import Goal, front_of
from diffcache.offline.tune.space import moves, schedules
from diffcache.offline.tune.trial import Bench, Trial, psnr
from diffcache.pipelines.small.flux import CALL
from tests.calibration.shapes_flux import PROMPTS, SETTINGS, STEPS, draw


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
    for other in ({"seed": 1}, {"batch_size": 1}, {"steps": STEPS + 1}):
        with pytest.raises(TablesError, match="of another search"):
            diffcache.tune(pipe, PROMPTS, **{**settings, **other})
    best = diffcache.tune(pipe, PROMPTS, progress=stop, **settings)
    assert not (tmp_path / "b.safetensors.trials").exists()
    front = best.front
    assert [t["cost"] for t in front] == sorted(t["cost"] for t in front)
    assert [t["psnr_db"] for t in front] == sorted(t["psnr_db"] for t in front)
    assert best.tables.header["seed"] == 0
    chosen = next(t for t in front if t["validation_psnr_db"] is not None)
    assert chosen["cost"] <= 1 / 1.5
    again = diffcache.features.tuned.Tuned(out)
    assert again.method == best.method
    with diffcache.wrapped(pipe, "tuned", tables=str(out)):
        draw(pipe)
        done = diffcache.report(pipe)
    listed = sorted({0, *best.parts().when.steps})
    assert [call.index for call in done.calls if call.computed] == listed


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


def test_a_log_of_trials_that_was_cut_off(tmp_path, monkeypatch):
    log = tmp_path / "a.trials"
    measured = []

    def measure(self, method, batches):
        measured.append(batches)
        return Trial(repr(method), 0.5, 30.0, 1.0, len(batches))

    monkeypatch.setattr(Bench, "_measure", measure)

    def bench(about="x"):
        opened = Bench(None, [["a"], ["b"]], 0, {}, log)
        opened.open_log(about)
        return opened

    method = Combine(Listed((0, 2), STEPS), Taylor(0), site="stack")
    first = bench()
    for batches in ([0], [1], [0, 1]):
        first.measure(method, batches)
    log.write_bytes(log.read_bytes()[:-20])
    again = bench()
    trial = again.measure(method, [0])
    again.measure(method, [1])
    assert measured == [[0], [1], [0, 1]]
    again.measure(method, [0, 1])  # its line was cut off
    assert len(measured) == 4 and bench().measure(method, [0, 1]) == replace(trial, batches=2)
    assert len(measured) == 4
    with pytest.raises(TablesError, match="of another search"):
        bench("y")
    for held in (b"", b'{"search'):
        log.write_bytes(held)
        bench("y").measure(method, [0])
        bench("y").measure(method, [0])
    assert len(measured) == 6


def test_trials_count_by_the_tables_in_a_file(calibrated, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(Bench, "_measure", lambda *given: measured.append(given))
    bench, path = Bench(None, [["a"]], 0, {}), tmp_path / "a.safetensors"
    for factor in (1.0, 1.0, 2.0):
        tensors = {name: factor * calibrated.tables[name] for name in calibrated.tables.names()}
        tables = Tables(calibrated.tables.header, tensors).save(path)
        bench.measure(FittedForecast(computed=3, tables=tables), [0])
    assert len(measured) == 2
