"""The command line on folders of films, with VBench and without."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffcache.eval.samples.clips import write_clip, write_preview
from diffcache.eval.vbench.command import app


def some_films(folder: Path, count: int = 2) -> Path:
    folder.mkdir()
    for index in range(count):
        (folder / f"a cat-{index}.mp4").write_bytes(b"film")
    return folder


def test_the_command_runs_vbench(tmp_path: Path, other: Path, run: Any) -> None:
    films = some_films(tmp_path / "films")
    command = [str(films), "--backend", "official", "--device", "cpu", "--json", "-"]
    done = run(app, [*command, "--dimension", "temporal_flickering"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["raw"], report["mode"]) == ({"temporal_flickering": 0.5}, "custom_input")
    # The three scores are defined on the prompts of the suite only.
    assert (report["quality"], report["semantic"], report["total"]) == (None, None, None)
    assert (tmp_path / "films-vbench" / "temporal_flickering_eval_results.json").is_file()
    prompts = tmp_path / "prompts.json"
    for text in ("{", "[]", '{"a cat-0.mp4": 1}'):
        prompts.write_text(text)
        done = run(app, [*command, "--prompts", str(prompts)])
        assert done.exit_code == 2 and f"error: {prompts} " in done.stderr
    done = run(app, command)
    assert done.exit_code == 3 and done.stderr.startswith("error: VBench needs ")
    assert any("raft-things.pth" in line for line in done.stderr.splitlines()[1:])


def test_a_failure_of_vbench_is_quoted(
    tmp_path: Path, other: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "temporal_flickering")
    films = some_films(tmp_path / "films")
    command = [str(films), "--backend", "official", "--dimension", "temporal_flickering"]
    done = run(app, command)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: out of memory on the device"


def some_film(seed: int, frames: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, 24, 32), generator=generator, dtype=torch.uint8)


def as_vbench_reads(path: Path) -> float:
    """`temporal_flickering` of VBench: a film read by OpenCV, changes in float32."""
    cv2 = pytest.importorskip("cv2")
    video, pictures = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        pictures.append(np.array(read[1], dtype=np.float32))
    changes = [np.mean(cv2.absdiff(a, b)) for a, b in pairwise(pictures)]
    return (255.0 - np.mean(np.array(changes)).item()) / 255.0


def test_flickering_is_vbench_s_to_the_last_bit(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    still = some_film(9)[:1].repeat(4, 1, 1, 1)
    for name, film in {"a": some_film(1), "b": some_film(2) // 16, "c": still}.items():
        write_clip(folder / f"{name}.mp4", film, 8)
    write_preview(folder / "a.preview.mp4", some_film(1), 8)
    target = tmp_path / "report.json"
    done = run(app, [str(folder), "--json", str(target)])
    assert done.exit_code == 0, done.output
    assert "3 films" in done.output and "such as a.preview.mp4" in done.output
    report = json.loads(target.read_text())
    mean, films = report["results"]["temporal_flickering"]
    assert [Path(film["video_path"]).name for film in films] == ["a.mp4", "b.mp4", "c.mp4"]
    assert [film["video_results"] for film in films] == [
        as_vbench_reads(folder / f"{name}.mp4") for name in "abc"
    ]
    assert films[2]["video_results"] == 1
    row = report["summary"]["temporal_flickering"]
    assert row["low"] < row["value"] < row["high"] and row["value"] == pytest.approx(mean)
    assert not {"quality", "semantic", "total"} & set(report)
    done = run(app, ["measure", str(folder / "b.mp4"), "--json", "-"])
    assert set(json.loads(done.stdout)["summary"]["temporal_flickering"]) == {"value", "n"}
    write_clip(folder / "d.mp4", some_film(3)[:1], 8)
    done = run(app, [str(folder)])
    assert done.exit_code == 2 and "d.mp4 has a single frame" in done.stderr
