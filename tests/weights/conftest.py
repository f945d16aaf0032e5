"""A machine without any weights."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without caches, and no variable that names any."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("DIFFCACHE_WEIGHTS", "HF_HOME", "HF_HUB_CACHE", "VBENCH_CACHE_DIR", "VBENCH_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TORCH_HOME", str(home / "torch"))
    return home
