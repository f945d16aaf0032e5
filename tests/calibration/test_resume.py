"""A calibration that was interrupted: it goes on, with the same inputs only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import diffcache
from diffcache import FittedForecast, Tables
from diffcache.digest import bits_of, content
from diffcache.errors import TablesError
from diffcache.offline.calibrate import Plan
from tests.calibration.shapes_flux import PROMPTS, SETTINGS


def interrupted(pipe, prompts, out, done=1):
    def stop(number, total, word):
        if number == done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diffcache.calibrate(pipe, FittedForecast(), prompts, out=out, progress=stop, **SETTINGS)


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


def test_inputs_count_by_their_content():
    def noise(seed):
        return torch.Generator().manual_seed(seed)

    def inputs():
        big = torch.zeros(1, 64, 24, dtype=torch.bfloat16)  # its print leaves the middle out
        return {
            "embeds": big, "array": np.arange(4), "noise": [noise(1), "a", 1],
            "picture": Image.new("RGB", (8, 8)),
        }  # fmt: skip

    first = inputs()
    assert content(first) == content(inputs())
    middle = first["embeds"].clone()
    middle[0, 30, 12] = 1
    assert repr(middle) == repr(first["embeds"])
    others = [
        {"embeds": middle},
        {"embeds": first["embeds"].float()},
        {"embeds": first["embeds"].reshape(64, 24)},
        {"array": np.arange(4)[::-1]},
        {"array": np.arange(4, dtype=np.int16)},
        {"noise": [noise(2), "a", 1]},
        {"noise": [noise(1), "a", "1"]},
        {"picture": Image.new("RGB", (8, 8), (1, 0, 0))},
        {"picture": Image.new("RGB", (4, 16))},
    ]
    for other in others:
        assert content({**first, **other}) != content(first), other
        assert Plan([{**first, **other}]).about() != Plan([first]).about()
        assert Plan(["a"], call={**first, **other}).about() != Plan(["a"], call=first).about()
    assert Plan([inputs()], call=inputs()).about() == Plan([first], call=first).about()


def test_prompts_with_generators_go_on(pipe, tmp_path):
    def prompts():
        return [
            {"prompt": PROMPTS[:1], "generator": torch.Generator().manual_seed(n)} for n in (1, 2)
        ]

    interrupted(pipe, prompts(), tmp_path / "a.st")
    done = []
    diffcache.calibrate(
        pipe, FittedForecast(), prompts(), out=tmp_path / "a.st",
        progress=lambda *a: done.append(a[0]), **SETTINGS,
    )  # fmt: skip
    assert done == [1, 2]


def test_a_damaged_state_says_to_delete_it(pipe, tmp_path):
    out, state = tmp_path / "a.st", tmp_path / "a.st.part"
    interrupted(pipe, PROMPTS, out)
    for held in (b"", state.read_bytes()[:100], b"nonsense"):
        state.write_bytes(held)
        with pytest.raises(TablesError, match="a.st.part: .*damaged.*; delete it"):
            diffcache.calibrate(pipe, FittedForecast(), PROMPTS, out=out, **SETTINGS)
    Tables({"method": "x"}, {}).save(state)
    with pytest.raises(TablesError, match="has no 'about'.*; delete it"):
        diffcache.calibrate(pipe, FittedForecast(), PROMPTS, out=out, **SETTINGS)


def test_tables_that_cannot_be_written_leave_the_state(pipe, calibrated, tmp_path, monkeypatch):
    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    out = tmp_path / "a.safetensors"
    method, done = FittedForecast(computed=3), []
    with monkeypatch.context() as patch:
        patch.setattr("diffcache.features.tables.save_file", full)
        with pytest.raises(OSError, match="No space"):
            diffcache.calibrate(pipe, method, PROMPTS, out=out, **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.part"]
    made = diffcache.calibrate(
        pipe, method, PROMPTS, out=out, progress=lambda *a: done.append(a[0]), **SETTINGS
    )
    assert done == [2] and made.tables == calibrated.tables  # no batch was run again
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    "view",
    [torch.tensor(3.0).expand(1), torch.tensor([[1, 2], [3, 4]]).t(), torch.arange(8)[::3],
     torch.zeros(0)],
    ids=["repeated", "transposed", "strided", "empty"],
)  # fmt: skip
def test_a_view_counts_as_what_it_shows(view: torch.Tensor) -> None:
    plain = torch.tensor(view.tolist(), dtype=view.dtype)
    assert content(view) == content(plain) != content(plain.new_ones(9))
    assert torch.equal(bits_of(view), bits_of(plain))
    assert Tables({}, {"a": view}).digest == Tables({}, {"a": plain}).digest
