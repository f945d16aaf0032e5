"""The loop that trains the small models: repeatable, broken off or not, and in float32 with Muon."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffcache.eval.workshop.small import job, trainer
from diffcache.eval.workshop.small.job import JOBS, Job, Settings, load_job, read_settings
from diffcache.eval.workshop.small.trainer import orthogonal, record, train

SETTINGS = Settings(
    steps=24, batch=8, examples=40, rate=1e-2, muon=0.02, muon_in="deep", warmup=2, save_every=7, measure_every=12
)


class Line(Job):
    """Fit a small network to a linear map."""

    def build(self) -> nn.ModuleDict:
        return nn.ModuleDict({"deep": nn.Linear(6, 6), "last": nn.Linear(6, 2)})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        chosen = drawn["chosen"]
        inputs = torch.sin(chosen[:, None] * torch.arange(1.0, 7.0))
        noise = 0.01 * torch.randn(len(chosen), 2, generator=generator)
        return (models["last"](models["deep"](inputs)) - inputs[:, :2] - noise).square().mean()

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        return {"held_loss": float(self.loss(models, {"chosen": torch.arange(40)}, torch.Generator()))}


def weights(run: trainer.Training) -> list[Tensor]:
    return [*run.models.state_dict().values(), *run.average.state_dict().values()]


def test_same_seed_and_steps_give_the_same_weights_broken_off_or_not(tmp_path: Path, monkeypatch):
    straight = train(Line(SETTINGS, tmp_path), "straight", precision="float32")
    again = train(Line(SETTINGS, tmp_path), "again", precision="float32")
    job, taken = Line(SETTINGS, tmp_path), []

    def break_off(run: trainer.Training, drawn: Mapping[str, Any]) -> Tensor:
        taken.append(run.step)
        if len(taken) in (10, 20):
            raise KeyboardInterrupt
        return update(run, drawn)

    update = trainer.Training.update
    monkeypatch.setattr(trainer.Training, "update", break_off)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(job, "broken", precision="float32")
    broken = train(job, "broken", precision="float32", workers=2)
    monkeypatch.setattr(trainer.Training, "update", update)
    assert taken == [*range(10), *range(7, 17), *range(14, 24)]
    other = train(Line(replace(SETTINGS, seed=1), tmp_path), "other", precision="float32")
    assert broken.step == straight.step == 24
    for one, two, three in zip(weights(straight), weights(again), weights(broken), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert not torch.equal(weights(straight)[0], weights(other)[0])
    assert [row["loss"] for row in straight.rows] == [row["loss"] for row in again.rows]
    assert straight.rows[-1]["held_loss"] < 0.5 * float(
        Line(SETTINGS, tmp_path).measure(trainer.Training(job, "float32").models)["held_loss"]
    )


def test_a_run_stops_at_its_time_limit_with_a_checkpoint(tmp_path: Path):
    run = train(Line(SETTINGS, tmp_path), "short", precision="float32", minutes=0)
    assert run.step == 1 and (tmp_path / "short.state").exists()
    assert train(Line(SETTINGS, tmp_path), "short", precision="float32").step == 24


def test_a_record_says_how_the_weights_came_about(tmp_path: Path):
    done = json.loads(json.dumps(record(train(Line(SETTINGS, tmp_path), "line"), "line", "run me")))
    assert done["samples"] == 24 * 8 and done["command"] == "run me"
    assert done["settings"]["muon"] == 0.02 and done["weights"] == 42 + 14
    assert done["precision"] == "float32"
    assert done["curve"][-1]["step"] == 24


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
def test_muon_steps_along_a_matrix_whose_singular_values_are_alike(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_settings_are_read_and_a_wrong_name_is_refused(tmp_path: Path, monkeypatch):
    for name in JOBS:
        assert read_settings(name).steps > 0
    (tmp_path / "sticker-flux.toml").write_text("[sticker-text]\nsteps = 1\nbatch = 1\nexamples = 1\nspeed = 2\n")
    monkeypatch.setattr(job, "SETTINGS", tmp_path)
    with pytest.raises(ValueError, match="no setting 'speed'; use steps, batch"):
        read_settings("sticker-text")
    with pytest.raises(ValueError, match="unknown training 'mine'; use one of sticker-autoencoder"):
        load_job("mine", tmp_path)


def test_a_run_starts_from_shipped_weights_and_refuses_those_of_another_model(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(trainer, "MODELS", tmp_path)
    kept = Line(SETTINGS, tmp_path).build()
    for name, module in kept.items():
        (tmp_path / "line" / name).mkdir(parents=True)
        save_file(module.state_dict(), tmp_path / "line" / name / "model.safetensors")
    run = trainer.Training(Line(replace(SETTINGS, start="line", seed=9), tmp_path), "float32")
    for found in (run.models, run.average):
        for one, other in zip(found.parameters(), kept.parameters(), strict=True):
            assert torch.equal(one, other)
    save_file({"weight": torch.zeros(3, 3)}, tmp_path / "line" / "last" / "model.safetensors")
    with pytest.raises(ValueError, match="start='line': last has other shapes"):
        trainer.Training(Line(replace(SETTINGS, start="line"), tmp_path), "float32")
    with pytest.raises(ValueError, match="start='none': it ships no weights of deep"):
        trainer.Training(Line(replace(SETTINGS, start="none"), tmp_path), "float32")
