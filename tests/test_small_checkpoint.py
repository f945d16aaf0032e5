"""Checkpoints, averaged weights and the course that every small denoiser is trained by."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diffcache.eval.workshop.small import checkpoint, course, loop
from diffcache.eval.workshop.small.export import thin
from diffcache.eval.workshop.small.loop import Average
from diffcache.files import write_json


class Masked(nn.Module):
    """A weight, a mask with infinities and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, math.inf]))
        self.register_buffer("seen", torch.tensor(2**24 + 1))

    def forward(self, given):
        return (self.weight * given).sum()


def moved(model):
    """Change all that a model holds, the mask's second value apart."""
    with torch.no_grad():
        model.weight.add_(1.0)
        model.mask.copy_(torch.tensor([math.inf, -math.inf, 0.0]))
        model.seen.add_(2)


class TestAverage:
    def test_infinities_that_stay_do_not_become_nan(self):
        model = Masked()
        average = Average(model)
        for _ in range(3):
            average.update(model)
        assert torch.equal(average.weights["mask"], model.mask)
        assert torch.equal(average.weights["weight"], model.weight)

    def test_an_infinity_on_either_side_is_copied(self):
        model = Masked()
        average = Average(model)
        moved(model)
        average.update(model)
        assert torch.equal(average.weights["mask"], model.mask)
        share = 1 - 2 / 11
        wanted = torch.tensor([1.0 + share, 2.0 + share])
        torch.testing.assert_close(average.weights["weight"], wanted)

    def test_integers_are_copied(self):
        model = Masked()
        average = Average(model)
        assert average.weights["seen"].item() == 2**24 + 1
        moved(model)
        average.update(model)
        assert average.weights["seen"].item() == 2**24 + 3
        other = Masked()
        average.copy_to(other)
        assert other.seen.item() == 2**24 + 3


def trained(steps=0):
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = Average(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2)).backward()
        optimizer.step()
        average.update(model)
    return model, optimizer, average


class TestCheckpoint:
    def test_goes_on_as_if_never_stopped(self, tmp_path):
        path = tmp_path / "some.state"
        checkpoint.save(path, (7, 9), *trained(3), weights_file=True)
        model, optimizer, average = trained()
        assert checkpoint.restore(path, model, optimizer, average, 9) == 7
        assert average.steps == 3
        for one, other in zip((model, optimizer), trained(3)[:2], strict=True):
            assert str(one.state_dict()) == str(other.state_dict())
        kept = load_file(tmp_path / "some.safetensors")
        assert set(kept) == set(average.weights)
        assert all(torch.equal(value, average.weights[name]) for name, value in kept.items())
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "some.safetensors",
            "some.state",
        ]

    def test_holds_what_it_always_held(self, tmp_path):
        checkpoint.save(tmp_path / "some.state", (7, 9), *trained(1), weights_file=False)
        state = torch.load(tmp_path / "some.state", weights_only=True)
        assert set(state) == {
            "step",
            "total",
            "weights",
            "optimizer",
            "average",
            "average_steps",
            "random",
        }
        assert [file.name for file in tmp_path.iterdir()] == ["some.state"]

    def test_averages_that_were_nan_are_mended(self, tmp_path):
        model, optimizer, average = trained(2)
        average.weights["mask"][1:] = math.nan
        checkpoint.save(
            tmp_path / "some.state", (2, 9), model, optimizer, average, weights_file=False
        )
        checkpoint.restore(tmp_path / "some.state", model, optimizer, average, 9)
        assert torch.equal(average.weights["mask"], model.mask)

    def test_a_save_that_fails_leaves_the_last_one(self, tmp_path, monkeypatch):
        path = tmp_path / "some.state"
        checkpoint.save(path, (1, 9), *trained(), weights_file=True)
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}

        def broken(tensors, path, metadata=None):
            path.write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint, "save_file", broken)
        monkeypatch.setattr(torch, "save", lambda state, path: broken(state, path))
        for call in (
            lambda: checkpoint.save(path, (2, 9), *trained(1), weights_file=True),
            lambda: checkpoint.write_tensors(tmp_path / "some.safetensors", {}),
        ):
            with pytest.raises(OSError, match="disk full"):
                call()
        assert all(file.read_bytes() == kept for file, kept in before.items())


class TestCourse:
    def test_the_steps_set_the_course_and_the_clock_only_breaks_it_off(self, tmp_path, stops_after):
        """A seed gives the same weights, whole or in parts; losses draw torch's own numbers too."""
        seen = []

        def loss(chosen, index, progress):
            seen.append((index, progress))
            disturbed = torch.ones(2) + 0.1 * torch.randn(2)
            return sum(module(disturbed) for module in weights.values()).square()

        def run(name, **settings):
            torch.manual_seed(settings.get("seed", 0))
            weights.update({"moving": Masked(), "still": Masked()})
            course.train(
                tmp_path / name, weights, loss, some, course.Plan(compiled=False, **settings)
            )
            return load_file(tmp_path / name / "some.safetensors")

        some = course.Course(
            "some", examples=8, steps=10, batch=2, save_every=4, factors={"still": 0.0}
        )
        weights = nn.ModuleDict()
        first = run("first")
        assert seen == [(index, index / 10) for index in range(10)]
        assert torch.equal(weights["still"].weight, Masked().weight)
        assert weights["moving"].weight.lt(Masked().weight).all()
        assert all(torch.equal(first[name], value) for name, value in weights.state_dict().items())
        again, other = run("second"), run("third", seed=1)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["moving.weight"], other["moving.weight"])
        seen.clear()
        for parts in (3, 3):
            stops_after(parts)
            with pytest.raises(loop.Stopped, match="some: stopped after . of 10 updates"):
                run("parts", minutes=1, resume=bool(seen))
        parts = run("parts", resume=True)
        assert seen == [(index, index / 10) for index in range(10)]
        assert all(torch.equal(first[name], parts[name]) for name in first)
        rates = [
            [row["lr"] for row in loop.Log(tmp_path / name / "some.jsonl", resume=True).rows()]
            for name in ("first", "parts")
        ]
        assert rates[0][-1] == rates[1][-1] == pytest.approx(1e-3 * loop.rate(0.9), rel=1e-4)
        with pytest.raises(ValueError, match="updates=9: .*some.state is of a run of 10"):
            run("parts", resume=True, steps=9)


class TestRecords:
    def test_json_is_written_whole(self, tmp_path):
        path = tmp_path / "new" / "some.json"
        write_json(path, {"one": 1})
        assert json.loads(path.read_text()) == {"one": 1}
        with pytest.raises(TypeError, match="not JSON serializable"):
            write_json(path, {"one": path})
        assert json.loads(path.read_text()) == {"one": 1}
        assert [file.name for file in path.parent.iterdir()] == ["some.json"]

    def test_thinned_logs_keep_the_last_row_and_measurements(self):
        rows = [{"step": step} for step in range(1000)]
        rows[13]["psnr"] = 30.0
        kept = thin(rows, most=10)
        assert [row["step"] for row in kept] == [0, 13, *range(100, 1000, 100), 999]
