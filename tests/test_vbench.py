"""VBench interop: score arithmetic on published numbers, layout, driver, command line."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.eval.clips import read_clip, read_fps
from diffcache.eval.vbench import driver, layout, sampling, scores, suite
from diffcache.eval.vbench.__main__ import main
from diffcache.eval.weights import MissingWeightsError, WrongWeightsError

# Percent, as published: total, quality, semantic, then the 16 raw scores in the order of
# suite.DIMENSIONS. Table 8 of Show-o2 (arXiv 2506.15564), which takes them from VBench's
# leaderboard; T2V-Turbo-v2 from table 11 of its paper (arXiv 2410.05677), which has them in another
# order.
PUBLISHED = {
    "ModelScope": "75.75 78.05 66.54 89.87 95.29 98.28 95.79 66.39 52.06 58.57 82.25 38.98 92.40 81.72 33.68 39.26 23.39 25.37 25.67",
    "Show-1": "78.93 80.42 72.98 95.53 98.02 99.12 98.24 44.44 57.35 58.66 93.07 45.47 95.60 86.35 53.50 47.03 23.06 25.28 27.46",
    "Gen-2": "80.58 82.47 73.03 97.61 97.61 99.56 99.58 18.89 66.96 67.42 90.92 55.47 89.20 89.49 66.91 48.91 19.34 24.12 26.17",
    "VideoCrafter-2.0": "80.44 82.20 73.42 96.85 98.22 98.41 97.73 42.50 63.13 67.22 92.55 40.66 95.00 92.92 35.86 55.29 25.13 25.84 28.23",
    "CogVideoX": "81.61 82.75 77.04 96.23 96.52 98.66 96.92 70.97 61.98 62.90 85.23 62.11 99.40 82.81 66.35 53.20 24.91 25.38 27.59",
    "Kling": "81.85 83.39 75.68 98.33 97.60 99.30 99.40 46.94 61.21 65.62 87.24 68.05 93.40 89.90 73.03 50.86 19.62 24.17 26.42",
    "Gen-3": "82.32 84.11 75.17 97.10 96.62 98.61 99.23 60.14 63.34 66.82 87.81 53.64 96.40 80.90 65.09 54.57 24.31 24.71 26.69",
    "Show-o2": "81.34 82.10 78.31 97.28 96.78 97.68 98.25 40.83 65.15 67.06 94.81 76.01 95.20 80.89 62.61 57.67 23.29 25.27 27.00",
    "T2V-Turbo-v2": "82.93 84.08 78.33 97.03 98.32 97.54 97.00 61.39 66.73 70.92 96.42 64.76 94.40 94.85 48.08 56.41 24.29 26.85 28.76",
}


def published(model: str) -> tuple[list[float], dict[str, float]]:
    numbers = [float(text) / 100 for text in PUBLISHED[model].split()]
    return numbers[:3], dict(zip(suite.DIMENSIONS, numbers[3:], strict=True))


@pytest.mark.parametrize("model", PUBLISHED)
def test_scores_are_those_published(model: str) -> None:
    (total, quality, semantic), raw = published(model)
    found = scores.summarise(raw)
    # Raw scores are rounded to 0.01 points, so a mean of them is off by less than that.
    assert found.quality == pytest.approx(quality, abs=1e-4)
    assert found.semantic == pytest.approx(semantic, abs=1e-4)
    assert found.total == pytest.approx(total, abs=1e-4)
    assert scores.total_score(raw) == found.total
    assert found.missing == ()


def test_the_best_and_worst_raw_scores_count_one_and_nothing() -> None:
    best = {name: d.high for name, d in suite.DIMENSIONS.items()}
    worst = {name: d.low for name, d in suite.DIMENSIONS.items()}
    assert scores.total_score(best) == pytest.approx(1)
    assert scores.total_score(worst) == pytest.approx(0)
    halved = {**best, "dynamic_degree": 0.0}
    assert scores.summarise(halved).quality == pytest.approx(6 / 6.5)


def test_no_score_is_made_from_a_part() -> None:
    _, raw = published("Kling")
    del raw["scene"], raw["color"]
    found = scores.summarise(raw)
    assert (found.semantic, found.total) == (None, None)
    assert found.quality == scores.summarise(published("Kling")[1]).quality
    assert found.missing == ("color", "scene")
    with pytest.raises(ValueError, match="all 16 dimensions; missing: color, scene"):
        scores.total_score(raw)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["total"] is None
    assert "| **total score** |  | n/a |" in found.markdown()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"scene": 55.29}, "share from 0 to 1, but is 55.29: divide percentages by 100"),
        ({"scene": float("nan")}, "share from 0 to 1, but is nan"),
        ({"scenery": 0.5}, "unknown VBench dimension scenery: must be of subject_consistency"),
    ],
)
def test_what_is_no_raw_score_is_an_error(raw: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scores.summarise(raw)


def test_results_are_read_in_both_forms(tmp_path: Path) -> None:
    _, raw = published("Gen-3")
    folder, flat = tmp_path / "results", tmp_path / "flat"
    folder.mkdir()
    flat.mkdir()
    for name, value in raw.items():
        scores.write_results(
            folder / f"{name}_eval_results.json", {name: (value, [("a-0.mp4", 0.25)])}
        )
        # Beside every result stands what VBench was given, which is no result.
        layout.write_json(folder / f"{name}_full_info.json", [{"prompt_en": "a"}])
    layout.write_json(flat / "all_results.json", {k.replace("_", " "): v for k, v in raw.items()})
    assert scores.read_results(folder) == scores.read_results(flat) == raw
    assert scores.read_results(folder / "scene_eval_results.json") == {"scene": raw["scene"]}


def test_a_result_has_the_bytes_that_vbench_writes(tmp_path: Path) -> None:
    path = tmp_path / "x_eval_results.json"
    films: list[tuple[str, float | bool]] = [("videos/a \u00e9-0.mp4", True)]
    scores.write_results(path, {"dynamic_degree": (0.5, films)})
    assert path.read_text() == (
        '{\n    "dynamic_degree": [\n        0.5,\n        [\n            {\n'
        '                "video_path": "videos/a \\u00e9-0.mp4",\n'
        '                "video_results": true\n            }\n        ]\n    ]\n}'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must map dimensions to scores"),
        ('{"i2v_subject": [0.5, []]}', "'i2v_subject' is not one of VBench's 16"),
        ('{"scene": ["high", []]}', "must be a number, but is 'high'"),
        ('{"scene": [50.0, []]}', "must be a share from 0 to 1, but is 50.0"),
    ],
)
def test_what_is_no_result_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad_eval_results.json").write_text(text)
    with pytest.raises(ValueError, match=f"bad_eval_results.json.*{message}"):
        scores.read_results(tmp_path)


def test_results_that_disagree_and_folders_without_any_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no VBench result"):
        scores.read_results(tmp_path)
    for name, value in (("a", 0.5), ("b", 0.25)):
        scores.write_results(tmp_path / f"{name}_eval_results.json", {"scene": (value, [])})
    with pytest.raises(ValueError, match=r"a_eval.*b_eval.*disagree on scene: 0.5 and 0.25"):
        scores.read_results(tmp_path)


# ----------------------------------------------------------------------------------------- layout


def film(seed: int = 0, frames: int = 3, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, side, side), generator=generator, dtype=torch.uint8)


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
                "temporal_flickering", "object_class", "multiple_objects", "human_action", "color",
                "spatial_relationship", "temporal_style", "appearance_style",
            )
        ],
    ]  # fmt: skip
    for names, count in groups:
        for number in range(count):
            entry: dict[str, Any] = {
                "prompt_en": f"{names[0]} {number}.",
                "dimension": list(names),
            }
            if names[0] == "object_class":
                entry["auxiliary_info"] = {"object_class": {"object": f"thing {number}"}}
            if names[0] == "appearance_style" and number < 2:
                entry["prompt_en"] = f"aesthetic_quality {number}."
            entries.append(entry)
    path = tmp_path_factory.mktemp("info") / layout.INFO
    layout.write_json(path, entries)
    return path


def test_the_suite_has_as_many_films_as_vbench_counts(info: Path) -> None:
    prompts = layout.read_info(info)
    assert len(prompts) == 946
    assert len({prompt.text for prompt in prompts}) == 944
    for name, dimension in suite.DIMENSIONS.items():
        names = layout.expected(prompts, [name])
        assert len(names) == dimension.prompts * (25 if name == "temporal_flickering" else 5)
    everything = layout.expected(prompts)
    # 4720 of five a prompt (VBench's own count), and twenty more for the 75 of flickering.
    assert len(everything) == len(set(everything)) == 4720 + 20 * 75
    assert "subject_consistency 0.-4.mp4" in everything


def test_missing_films_are_counted_and_a_part_is_refused(tmp_path: Path, info: Path) -> None:
    prompts = layout.read_info(info)
    folder = tmp_path / "films"
    folder.mkdir()
    for name in layout.expected(prompts, ["scene", "color"]):
        (folder / name).touch()
    layout.require_complete(folder, prompts, ["scene", "color"])
    (folder / "scene 3.-4.mp4").touch()
    (folder / "background_consistency 3.-4.mp4").unlink()
    (folder / "color 9.-0.mp4").unlink()
    lacking = layout.missing(folder, prompts, ["scene", "color"])
    assert lacking == {
        "color": ["color 9.-0.mp4"],
        "scene": ["background_consistency 3.-4.mp4"],
    }
    with pytest.raises(ValueError, match=r"not VBench: color 1, scene 1; the first is 'color 9"):
        layout.require_complete(folder, prompts, ["scene", "color"])
    with pytest.raises(ValueError, match="85 of the 86 prompts of scene"):
        layout.require_complete(
            folder, [p for p in prompts if p.text != "background_consistency 8."], ["scene"]
        )
    entries = layout.full_info(folder, prompts, ["color"])
    assert len(entries) == 85
    assert list(entries[9]) == ["prompt_en", "dimension", "video_list"]
    assert entries[9]["video_list"] == [str(folder / f"color 9.-{i}.mp4") for i in range(1, 5)]


def test_nothing_but_films_may_lie_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        layout.check_folder(tmp_path / "films")
    folder = tmp_path / "films"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no film"):
        layout.check_folder(folder)
    (folder / "a-0.mp4").touch()
    assert [file.name for file in layout.check_folder(folder)] == ["a-0.mp4"]
    (folder / "manifest.jsonl").touch()
    with pytest.raises(ValueError, match="nothing but .mp4 films, but has 'manifest.jsonl'"):
        layout.check_folder(folder)


def test_films_are_written_for_vbench_and_come_back_frame_by_frame(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    for index in range(2):
        name = layout.film_name("A house, 100% old.", index)
        layout.write_film(folder, name, film(index))
        layout.record_film(folder, name, seed=40 + index)
    assert [file.name for file in layout.check_folder(folder)] == [
        "A house, 100% old.-0.mp4",
        "A house, 100% old.-1.mp4",
    ]
    assert torch.equal(read_clip(folder / "A house, 100% old.-1.mp4"), film(1))
    assert read_fps(folder / "A house, 100% old.-1.mp4") == 8
    lines = (tmp_path / "films.manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [40, 41]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["films", "films.manifest.jsonl"]


def test_the_suite_is_drawn_once_with_a_seed_for_each_film(tmp_path: Path, info: Path) -> None:
    prompts = layout.read_info(info)[-12:]
    seen: list[tuple[str, int]] = []

    def draw(prompt: str, seed: int) -> torch.Tensor:
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.append((prompt, seed))
        return film(seed)

    folder = tmp_path / "films"
    with pytest.raises(KeyboardInterrupt):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100)
    assert len(layout.check_folder(folder)) == 7
    # Killed while a line was written: the next one must not be lost with it.
    with layout.manifest(folder).open("a") as manifest:
        manifest.write('{"file": "appearance_st')
    seen.append(("", 0))
    assert sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100) == 53
    del seen[7]
    assert [seed for _, seed in seen] == list(range(100, 160))
    assert seen[5] == ("appearance_style 79.", 105)
    assert layout.missing(folder, prompts, ["appearance_style"]) == {}
    assert torch.equal(read_clip(folder / "appearance_style 79.-1.mp4"), film(106))
    facts = sampling.read_manifest(folder)
    assert len(facts) == 60
    assert facts["appearance_style 79.-1.mp4"] == {
        "prompt": "appearance_style 79.",
        "seed": 106,
        "fps": 8.0,
        "frames": 3,
    }
    assert sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100) == 0
    with pytest.raises(ValueError, match="appearance_style 78.-0.mp4 was drawn with seed 100, not"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=7)
    with pytest.raises(ValueError, match="drawn with fps 8.0, not 24"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], fps=24, seed=100)
    layout.manifest(folder).unlink()
    with pytest.raises(ValueError, match="not in the manifest"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100)


def test_films_of_any_prompts_have_them_in_a_json(tmp_path: Path) -> None:
    films = [("what / why?", film(0)), ("x" * 500, film(1))]
    path = layout.write_custom(tmp_path / "mine", films, fps=12)
    assert path == tmp_path / "prompts" / "mine.json"
    prompts = json.loads(path.read_text())
    assert prompts == {"00000.mp4": "what / why?", "00001.mp4": "x" * 500}
    assert torch.equal(read_clip(tmp_path / "mine" / "00001.mp4"), film(1))
    assert read_fps(tmp_path / "mine" / "00000.mp4") == 12


@pytest.mark.parametrize("mark", [*'/\\:*?"<>|', "\n", "\0"])
def test_a_prompt_that_is_no_file_name_is_an_error(mark: str) -> None:
    with pytest.raises(ValueError, match=r"prompt 'a.+b' cannot be a file name.*write_custom"):
        layout.film_name(f"a{mark}b", 0)


def test_names_are_limited_in_bytes(tmp_path: Path) -> None:
    assert layout.film_name("x" * 210, 24) == "x" * 210 + "-24.mp4"
    assert len(layout.film_name("x" * 249, 0)) == 255
    layout.write_film(tmp_path / "films", layout.film_name("x" * 249, 0), film())
    for prompt, size in (("x" * 250, 256), ("\u00e9" * 125, 256)):
        with pytest.raises(ValueError, match=f"prompt '{prompt[0]}+' makes a file name of {size}"):
            layout.film_name(prompt, 0)
    with pytest.raises(ValueError, match="no text"):
        layout.film_name(" ", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "must be a list of entries"),
        ('[{"prompt": "a"}]', "entry 0 needs prompt_en"),
        ('[{"prompt_en": "a", "dimension": ["sound"]}]', r"unknown dimensions \['sound'\]"),
        ('[{"prompt_en": "a/b", "dimension": ["scene"]}]', "'a/b' cannot be a file name"),
    ],
)
def test_what_is_no_list_of_prompts_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        layout.read_info(tmp_path / "info.json")


def test_the_list_of_prompts_is_found_in_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match=r"VBench_full_info.json.*github.com/Vchitect"):
            layout.find_info()
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text("raise ImportError('not to be imported')")
    (tmp_path / "vbench" / layout.INFO).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert layout.find_info() == tmp_path / "vbench" / layout.INFO
    with pytest.raises(FileNotFoundError, match="no file elsewhere.json"):
        layout.find_info("elsewhere.json")


# ----------------------------------------------------------------------------------------- driver

# Stands for the package: writes the files VBench writes, and a log of how it was called.
PACKAGE = """
import json, os
class VBench:
    def __init__(self, device, info, out):
        self.device, self.info, self.out = str(device), info, out
    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False,
                 read_frame=False, mode="vbench_standard", **options):
        films = sorted(os.listdir(videos_path))
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps([dimension_list, self.device, mode, local, len(films),
                                  prompt_list, options, os.environ["HF_HUB_OFFLINE"]]) + "\\n")
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
    weights(tmp_path, monkeypatch, "imaging_quality")
    job = driver.Job(some_films(tmp_path / "films"), tmp_path / "out", device="cuda:1")
    names = ["imaging_quality", "temporal_flickering"]
    assert driver.run(job, names) == {"temporal_flickering": 0.5, "imaging_quality": 0.5}
    options = {"imaging_quality_preprocessing_mode": "longer"}
    assert calls(other) == [
        [[name], "cuda:1", "custom_input", True, 2, [], options, "1"]
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


# ----------------------------------------------------------------------------------- command line


def test_the_command_scores_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (total, _, _), raw = published("Gen-2")
    for name, value in raw.items():
        scores.write_results(tmp_path / f"{name}_eval_results.json", {name: (value, [])})
    assert main(["--score", str(tmp_path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == pytest.approx(total, abs=1e-4)
    (tmp_path / "scene_eval_results.json").unlink()
    target = tmp_path / "out" / "scores.json"
    assert main(["--score", str(tmp_path), "--json", str(target)]) == 0
    assert "no total score, missing: scene" in capsys.readouterr().out
    assert json.loads(target.read_text())["total"] is None


def test_the_command_runs_vbench(
    tmp_path: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    films = some_films(tmp_path / "films")
    command = [str(films), "--backend", "official", "--device", "cpu", "--json", "-"]
    assert main([*command, "--dimensions", "temporal_flickering"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["raw"], report["mode"]) == ({"temporal_flickering": 0.5}, "custom_input")
    # The three scores are defined on the prompts of the suite only.
    assert (report["quality"], report["semantic"], report["total"]) == (None, None, None)
    assert (tmp_path / "films-vbench" / "temporal_flickering_eval_results.json").is_file()
    prompts = tmp_path / "prompts.json"
    for text in ("{", "[]", '{"a cat-0.mp4": 1}'):
        prompts.write_text(text)
        assert main([*command, "--prompts", str(prompts)]) == 2
        assert f"error: {prompts} " in capsys.readouterr().err
    assert main(command) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: VBench needs ")
    assert "RAFT" not in said and "raft-things.pth" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a folder of films, or --score"),
        (["x", "--score", "y"], "one of them"),
        (["nowhere"], "no folder nowhere"),
        (["x", "--device", "cpu"], "--device has no effect with --backend own"),
        (["x", "--fps", "0"], "--fps 0.0: must be frames per second, above 0"),
        (["x", "--backend", "official", "--fps", "8"], "--fps has no effect"),
        (["--score", "nowhere"], "no VBench result in nowhere"),
        (["--score", "x", "--info"], "--info has no effect with --score"),
        (["x", "--info", "nowhere.json"], "no file nowhere.json"),
        (["x", "--backend", "unknown"], "invalid choice: 'unknown'"),
    ],
)
def test_a_wrong_request_is_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "error: " in shown.err
    assert shown.out == ""
