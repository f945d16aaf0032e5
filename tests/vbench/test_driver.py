"""The driver that runs VBench, on a package that stands for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffcache.eval.metrics.weights import MissingWeightsError, WrongWeightsError
from diffcache.eval.vbench import driver, layout, suite


def calls(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def some_films(folder: Path, count: int = 2) -> Path:
    folder.mkdir()
    for index in range(count):
        (folder / f"a cat-{index}.mp4").write_bytes(b"film")
    return folder


def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *dimensions: str) -> None:
    """Put files where VBench looks for weights; their contents are not looked at."""
    monkeypatch.setattr(driver, "check", lambda weight, path: None)
    for name in dimensions:
        for weight in suite.DIMENSIONS[name].files:
            place = tmp_path / "cache" / weight.folder / weight.file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()


def test_each_dimension_runs_once_until_the_films_change(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    weights(tmp_path, monkeypatch, "imaging_quality")
    job = driver.Job(some_films(tmp_path / "films"), tmp_path / "out", device="cuda:1")
    names = ["imaging_quality", "temporal_flickering"]
    assert driver.run(job, names) == {"temporal_flickering": 0.5, "imaging_quality": 0.5}
    options = {"imaging_quality_preprocessing_mode": "longer"}
    assert calls(other) == [
        [[name], "cuda:1", "custom_input", True, 2, [], options, "1", None]
        for name in ("temporal_flickering", "imaging_quality")
    ]
    # VBench's own script reads every JSON it finds there: nothing else may lie about.
    assert sorted(file.name for file in (tmp_path / "out").rglob("*.json")) == sorted(
        f"{name}_{kind}.json" for name in names for kind in ("eval_results", "full_info")
    )
    driver.run(job, names)
    assert len(calls(other)) == 2
    (job.out / "imaging_quality_eval_results.json").unlink()
    driver.run(job, names)
    assert [call[0] for call in calls(other)[2:]] == [["imaging_quality"]]
    (job.films / "a cat-2.mp4").write_bytes(b"one more")
    driver.run(job, ["temporal_flickering"])
    assert calls(other)[-1][4] == 3


def test_prompts_of_any_films_reach_vbench(tmp_path: Path, other: Path) -> None:
    films = some_films(tmp_path / "films")
    prompts = {"a cat-0.mp4": "a cat", "a cat-1.mp4": "another"}
    driver.run(driver.Job(films, tmp_path / "out", prompts=prompts), ["temporal_flickering"])
    assert calls(other)[0][5] == prompts
    with pytest.raises(ValueError, match=r"no prompt is given for a cat-1.mp4 \(1 films without\)"):
        driver.run(
            driver.Job(films, tmp_path / "out", prompts={"a cat-0.mp4": "a"}),
            ["temporal_flickering"],
        )


def test_all_missing_weights_are_named_at_once_before_anything_runs(
    tmp_path: Path, other: Path
) -> None:
    job = driver.Job(some_films(tmp_path / "films"), tmp_path / "out")
    with pytest.raises(MissingWeightsError) as caught:
        driver.run(job, ["temporal_flickering", "subject_consistency", "aesthetic_quality"])
    message = str(caught.value)
    cache = tmp_path / "cache"
    for place in (
        cache / "dino_model" / "dino_vitbase16_pretrain.pth",
        cache / "dino_model" / "facebookresearch_dino_main",
        tmp_path / "torch" / "hub" / "checkpoints" / "dino_vitbase16_pretrain.pth",
        cache / "clip_model" / "ViT-L-14.pt",
        cache / "aesthetic_model" / "emb_reader" / "sa_0_4_vit_l_14_linear.pth",
    ):
        assert f"\n  {place}: " in message
    assert "https://dl.fbaipublicfiles.com/dino" in message
    assert "VBench needs 5 more" in message
    assert calls(other) == []


def test_every_dimension_but_flickering_has_weights_and_wrong_ones_are_refused(
    tmp_path: Path, other: Path
) -> None:
    without = [name for name, dimension in suite.DIMENSIONS.items() if not dimension.files]
    assert without == ["temporal_flickering"]
    driver.preflight(["temporal_flickering"])
    (weight,) = suite.DIMENSIONS["imaging_quality"].files
    place = tmp_path / "cache" / weight.folder / weight.file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"half a download")
    with pytest.raises(WrongWeightsError, match="musiq_spaq"):
        driver.preflight(["imaging_quality"])


def test_a_failure_shows_what_vbench_said_and_keeps_what_was_done(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(tmp_path, monkeypatch, "imaging_quality")
    job = driver.Job(some_films(tmp_path / "films"), tmp_path / "out")
    names = ["temporal_flickering", "imaging_quality"]
    monkeypatch.setenv("FAKE_FAILS", "imaging_quality")
    with pytest.raises(driver.VBenchError, match=r"(?s)imaging_quality in .*out of memory on the"):
        driver.run(job, names)
    assert [f.name for f in sorted(job.out.glob("*_eval_results.json"))] == [
        "temporal_flickering_eval_results.json"
    ]
    monkeypatch.delenv("FAKE_FAILS")
    driver.run(job, names)
    assert [call[0][0] for call in calls(other)] == [*names, "imaging_quality"]
    monkeypatch.setenv("VBENCH_PYTHON", str(tmp_path / "nowhere"))
    (job.films / "a cat-0.mp4").write_bytes(b"another")
    with pytest.raises(driver.VBenchError, match="cannot start .*nowhere"):
        driver.run(job, names)


def test_the_standard_suite_must_be_whole(
    tmp_path: Path, other: Path, info: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(tmp_path, monkeypatch, "color")
    films, kept = tmp_path / "films", tmp_path / "kept"
    films.mkdir()
    names = layout.expected(layout.read_info(info), ["color", "temporal_flickering"])
    for name in names[1:]:
        (films / name).touch()
    job = driver.Job(films, tmp_path / "out", info=info)
    with pytest.raises(ValueError, match="a part of the suite is not VBench"):
        driver.run(job, ["temporal_flickering"])
    (films / names[0]).touch()
    with pytest.raises(ValueError, match="vbench static_filter --videos_path"):
        driver.run(job, ["temporal_flickering"])
    some_films(kept)
    job = driver.Job(films, tmp_path / "out", info=info, filtered=kept)
    assert driver.run(job, ["temporal_flickering", "color"]) == {
        "temporal_flickering": 0.5,
        "color": 0.5,
    }
    assert [(call[0][0], call[2], call[4]) for call in calls(other)] == [
        ("temporal_flickering", "vbench_standard", 2),
        ("color", "vbench_standard", len(names)),
    ]
    with pytest.raises(ValueError, match="color on its standard prompts only"):
        driver.run(driver.Job(films, tmp_path / "out"), ["color"])


@pytest.mark.parametrize(("visible", "devices"), [(None, {"0", "1"}), ("6,2,3", {"6", "2"})])
def test_dimensions_are_shared_out_over_gpus(
    tmp_path: Path,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    devices: set[str],
) -> None:
    weights(tmp_path, monkeypatch, "imaging_quality")
    monkeypatch.setenv("FAKE_MEETS", "2")  # each of the two waits for the other
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    job = driver.Job(some_films(tmp_path / "films"), tmp_path / "out", gpus=2)
    names = ["temporal_flickering", "imaging_quality"]
    assert driver.run(job, names) == dict.fromkeys(names, 0.5)
    assert {(call[0][0], call[1]) for call in calls(other)} == {(name, "cuda") for name in names}
    assert {call[8] for call in calls(other)} == devices


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--gpus 2: --device must be cuda, not 'cpu'"):
        driver.Job(Path("films"), Path("out"), device="cpu", gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="--gpus 2: .CUDA_VISIBLE_DEVICES names fewer .* '3'"):
        driver.Job(Path("films"), Path("out"), gpus=2)
