"""Folders of pictures, without weights and network."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.folder_scripts.pictures import drawn, saved


@pytest.fixture(autouse=True)
def no_weights_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path / "no-weights"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no-torch-home"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a script must not use the network")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shapes")
    real, fake = drawn(80, 0), drawn(80, 1)
    ghost = (0.6 * fake.float() + 0.4 * fake.roll(1, 0).float()).round().to(torch.uint8)
    sides = {"real": real, "fake": fake, "ghost": ghost}
    return {"pictures": sides} | {name: str(saved(root / name, x)) for name, x in sides.items()}
