"""Folders of pictures without weights and network, and calls of the scripts on them.

Tests cannot import one another, so each function is handed out by a fixture of its name.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.pipelines.small import scenes


@pytest.fixture(autouse=True)
def no_weights_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path / "no-weights"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no-torch-home"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a script must not use the network")

    monkeypatch.setattr(socket, "socket", refuse)


def drawn(count: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    made = [scenes.render(scenes.sample_scene(rng), rng) for _ in range(count)]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).contiguous()


def saved(folder: Path, pictures: Tensor, ending: str = "png") -> Path:
    folder.mkdir(parents=True)
    for index, picture in enumerate(pictures):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / f"{index}.{ending}")
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shapes")
    real, fake = drawn(160, 0), drawn(160, 1)
    ghost = (0.6 * fake.float() + 0.4 * fake.roll(1, 0).float()).round().to(torch.uint8)
    sides = {"real": real, "fake": fake, "ghost": ghost}
    return {"pictures": sides} | {name: str(saved(root / name, x)) for name, x in sides.items()}


def report(capsys: pytest.CaptureFixture[str], main: Any, *arguments: str) -> dict[str, Any]:
    """Run with `--json -`; nothing but JSON may be on standard output."""
    assert main([*arguments, "--json", "-"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error(capsys: pytest.CaptureFixture[str], code: int, main: Any, *arguments: str) -> str:
    """Run what must fail with a code and one line on standard error behind warnings; return it."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert out == "" and lines[-1].startswith("error: "), err
    assert all(line.startswith("warning: ") for line in lines[:-1]), err
    return lines[-1]


@pytest.fixture(name="drawn")
def give_drawn() -> Any:
    return drawn


@pytest.fixture(name="saved")
def give_saved() -> Any:
    return saved


@pytest.fixture(name="report")
def give_report() -> Any:
    return report


@pytest.fixture(name="error")
def give_error() -> Any:
    return error
