"""A list of prompts as VBench's own, and an interpreter with a package that stands for it."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffcache.eval.vbench import layout, suite


@pytest.fixture
def run() -> Any:
    """Runs a command line of typer."""
    return CliRunner().invoke


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of prompts with the counts of VBench's own, two of them under two entries."""
    entries: list[dict[str, Any]] = []
    groups = [
        (("subject_consistency", "dynamic_degree", "motion_smoothness"), 72),
        (("background_consistency", "scene"), 86),
        (("aesthetic_quality", "imaging_quality", "overall_consistency"), 93),
        *[
            ((name,), suite.DIMENSIONS[name].prompts)
            for name in (
                "temporal_flickering",
                "object_class",
                "multiple_objects",
                "human_action",
                "color",
                "spatial_relationship",
                "temporal_style",
                "appearance_style",
            )
        ],
    ]
    for names, count in groups:
        for number in range(count):
            entry: dict[str, Any] = {"prompt_en": f"{names[0]} {number}.", "dimension": list(names)}
            if names[0] == "object_class":
                entry["auxiliary_info"] = {"object_class": {"object": f"thing {number}"}}
            if names[0] == "appearance_style" and number < 2:
                entry["prompt_en"] = f"aesthetic_quality {number}."
            entries.append(entry)
    path = tmp_path_factory.mktemp("info") / layout.INFO
    path.write_text(json.dumps(entries))
    return path


# Stands for the package: writes the files VBench writes, and a log of how it was called.
PACKAGE = """
import json, os, time
class VBench:
    def __init__(self, device, info, out):
        self.device, self.info, self.out = str(device), info, out
    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False,
                 read_frame=False, mode="vbench_standard", **options):
        films = sorted(os.listdir(videos_path))
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps([dimension_list, self.device, mode, local, len(films),
                                  prompt_list, options, os.environ["HF_HUB_OFFLINE"],
                                  os.environ.get("CUDA_VISIBLE_DEVICES")]) + "\\n")
        if "FAKE_MEETS" in os.environ:  # until the other process is here too
            deadline = time.monotonic() + 30
            while len(open(os.environ["FAKE_LOG"]).readlines()) < int(os.environ["FAKE_MEETS"]):
                assert time.monotonic() < deadline, "alone"
                time.sleep(0.01)
        if os.environ.get("FAKE_FAILS") == name:
            raise RuntimeError("out of memory on the device")
        result = {name: [0.5, [{"video_path": f, "video_results": 0.5} for f in films]]}
        with open(f"{self.out}/{name}_full_info.json", "w") as file:
            json.dump([], file, indent=4)
        with open(f"{self.out}/{name}_eval_results.json", "w") as file:
            json.dump(result, file, indent=4)
"""
TORCH = "device = str\n"  # a torch that takes no time to import


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with a package `vbench`, and a log of what that was asked."""
    library = tmp_path / "library"
    (library / "vbench").mkdir(parents=True)
    (library / "vbench" / "__init__.py").write_text(PACKAGE)
    (library / "torch.py").write_text(TORCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{library}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("VBENCH_PYTHON", str(python))
    monkeypatch.setenv("VBENCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return tmp_path / "log"
