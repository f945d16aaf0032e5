"""VBench: films laid out and drawn, the driver and its command line, and the scores."""

import json
import os
import stat
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffcache.eval.metrics.weight_files import MissingWeightsError, WrongWeightsError
from diffcache.eval.runs.folder import CaseFolder, RunError
from diffcache.eval.runs.ranks import Progress, Ranks
from diffcache.eval.runs.task import Task
from diffcache.eval.samples.clips import read_clip, read_fps, write_clip, write_preview
from diffcache.eval.vbench import driver, film_names, sampling, suite
from diffcache.eval.vbench.command import app
from diffcache.eval.vbench.sampling import Suite, draw_suite


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
    ]
    alone = "temporal_flickering object_class multiple_objects human_action color spatial_relationship "
    alone += "temporal_style appearance_style"
    groups += [((name,), suite.DIMENSIONS[name].prompts) for name in alone.split()]
    for names, count in groups:
        for number in range(count):
            entry: dict[str, Any] = {"prompt_en": f"{names[0]} {number}.", "dimension": list(names)}
            if names[0] == "object_class":
                entry["auxiliary_info"] = {"object_class": {"object": f"thing {number}"}}
            if names[0] == "appearance_style" and number < 2:
                entry["prompt_en"] = f"aesthetic_quality {number}."
            entries.append(entry)
    path = tmp_path_factory.mktemp("info") / film_names.INFO
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


def test_the_suite_has_as_many_films_as_vbench_counts(info: Path) -> None:
    prompts = film_names.read_info(info)
    assert len(prompts) == 946
    assert len({prompt.text for prompt in prompts}) == 944
    for name, dimension in suite.DIMENSIONS.items():
        names = film_names.expected(prompts, [name])
        assert len(names) == dimension.prompts * (25 if name == "temporal_flickering" else 5)
    everything = film_names.expected(prompts)
    # 4720 of five a prompt (VBench's own count), and twenty more for the 75 of flickering.
    assert len(everything) == len(set(everything)) == 4720 + 20 * 75
    assert "subject_consistency 0.-4.mp4" in everything


def test_missing_films_are_counted_and_a_part_is_refused(tmp_path: Path, info: Path) -> None:
    prompts = film_names.read_info(info)
    folder = tmp_path / "films"
    folder.mkdir()
    for name in film_names.expected(prompts, ["scene", "color"]):
        (folder / name).touch()
    film_names.require_complete(folder, prompts, ["scene", "color"])
    (folder / "scene 3.-4.mp4").touch()
    (folder / "background_consistency 3.-4.mp4").unlink()
    (folder / "color 9.-0.mp4").unlink()
    lacking = film_names.missing(folder, prompts, ["scene", "color"])
    assert lacking == {"color": ["color 9.-0.mp4"], "scene": ["background_consistency 3.-4.mp4"]}
    with pytest.raises(ValueError, match=r"not VBench: color 1, scene 1; the first is 'color 9"):
        film_names.require_complete(folder, prompts, ["scene", "color"])
    with pytest.raises(ValueError, match="85 of the 86 prompts of scene"):
        film_names.require_complete(folder, [p for p in prompts if p.text != "background_consistency 8."], ["scene"])


def test_a_film_is_called_as_its_prompt_as_far_as_names_go() -> None:
    assert film_names.film_name("x" * 210, 24) == "x" * 210 + "-24.mp4"
    assert len(film_names.film_name("x" * 249, 0)) == 255


def test_the_list_of_prompts_is_found_in_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text("raise ImportError('not to be imported')")
    (tmp_path / "vbench" / film_names.INFO).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert film_names.find_info() == tmp_path / "vbench" / film_names.INFO


EXCERPT = Path(__file__).with_name("excerpt.json")
CALL = {"num_frames": 1, "height": 32, "width": 32, "guidance_scale": 1.0}
TASK = Task("sticker-wan", str(EXCERPT), 1, batch_size=1, steps=1, call=CALL, device="cpu")
DIMENSION = "object_class"  # two prompts, ten films
QUIET = Progress()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    job = Suite(TASK, tmp_path_factory.mktemp("suite") / "wan")
    # 17 prompts five times and two of flickering 25 times; one of the twenty stands there twice.
    assert draw_suite(job, QUIET) == (17 * 5 + 2 * 25, 16)
    return job


def found_by_vbench(films: Path, dimension: str) -> list[list[str]]:
    """The films of each prompt as `VBench.build_full_info_json` looks for them."""
    names = os.listdir(films)
    ending = Path(names[0]).suffix
    found = []
    for entry in json.loads(EXCERPT.read_text()):
        if dimension in entry["dimension"]:
            looked_for = [f"{entry['prompt_en']}-{i}{ending}" for i in range(5)]
            found.append([name for name in looked_for if name in names])
    return found


def test_vbench_finds_five_films_of_every_prompt(drawn: Suite) -> None:
    for dimension in suite.DIMENSIONS:
        found = found_by_vbench(drawn.films, dimension)
        assert found and all(len(names) == 5 for names in found)


def test_vbench_s_own_loader_takes_the_folder(
    drawn: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vbench = pytest.importorskip("vbench", exc_type=ImportError)
    bench = vbench.VBench(torch.device("cpu"), str(EXCERPT), str(tmp_path))
    names = bench.build_full_dimension_list()
    entries = json.loads(Path(bench.build_full_info_json(str(drawn.films), "all", names)).read_text())
    assert "not found" not in capsys.readouterr().out
    assert [len(entry["video_list"]) for entry in entries] == [5] * 20
    film = vbench.utils.load_video(entries[0]["video_list"][0])
    assert torch.equal(film.byte(), read_clip(entries[0]["video_list"][0]))


def test_films_have_the_pipeline_s_frame_rate_and_nothing_lies_beside_them(drawn: Suite) -> None:
    films = list(drawn.films.iterdir())
    # VBench looks at every round(fps / 8)-th frame for its dynamic degree: at 8 none is left out.
    assert {read_fps(film) for film in films} == {16}
    assert sum("still frame" in film.name for film in films) == 25
    assert len({film.read_bytes() for film in films}) == len(films)  # each from a seed of its own
    assert {file.name for file in drawn.out.iterdir()} == {"films", "manifest.0.jsonl", "run.json"}


def some(drawn: Suite, out: Path, **changes: Any) -> Suite:
    return replace(drawn, out=out, dimensions=[DIMENSION], **changes)


def same_films(one: Suite, other: Suite) -> bool:
    names = sorted(film.name for film in one.films.iterdir())
    return all((other.films / n).read_bytes() == (one.films / n).read_bytes() for n in names)


def test_a_stopped_run_goes_on_and_a_part_has_the_films_of_the_whole(
    drawn: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, written, write = some(drawn, tmp_path / "part"), [], CaseFolder.write

    def stopped(folder: CaseFolder, batch: Any, *rest: Any) -> None:
        if len(written) == 4:
            # A kill leaves part of a line, and a film that no line tells of.
            (job.films / f"{batch.prompts[0]}-4.mp4").write_bytes(b"half")
            with folder.manifest.open("a") as manifest:
                manifest.write('{"batch": 1')
            written.append(-1)
            raise KeyboardInterrupt
        written.append(batch.number)
        write(folder, batch, *rest)

    monkeypatch.setattr(CaseFolder, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        draw_suite(job, QUIET)
    assert draw_suite(job, QUIET) == (10, 16)
    assert len(written) == 11 and len(set(written)) == 11  # none was drawn twice
    assert len(list(job.films.iterdir())) == 10 and same_films(job, drawn)


def test_processes_share_the_films_out(drawn: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "wait", lambda self: None)
    monkeypatch.setattr(Ranks, "close", lambda self: None)
    job = some(drawn, tmp_path / "shared", samples=1)
    for index, expected in ((1, None), (0, (2, 16))):
        monkeypatch.setattr(sampling, "join", lambda device, index=index: Ranks(index, 2))
        assert draw_suite(job, QUIET) == expected
        assert len(list(job.films.iterdir())) == 2 - index
    assert same_films(job, drawn)


def test_rewritten_prompts_go_under_the_names_of_vbench_s(drawn: Suite, tmp_path: Path) -> None:
    entries = json.loads(EXCERPT.read_text())
    texts = [f"a long story of {entry['prompt_en']}" for entry in entries]
    file = tmp_path / "longer.txt"
    file.write_text("\r\n".join(texts))  # as VBench ships them: without an end of the last line
    job = some(drawn, tmp_path / "longer", samples=1, rewritten=file)
    draw_suite(job, QUIET)
    assert {film.name for film in job.films.iterdir()} == {"a cross-0.mp4", "a ring-0.mp4"}
    lines = (job.out / "manifest.0.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompts"][0] for line in lines} == {"a long story of a cross", "a long story of a ring"}
    assert not same_films(job, drawn)
    file.write_text("\n".join(texts[:-1]) + "\n")
    with pytest.raises(ValueError, match=r"longer.txt: has 19 prompts .* each of the 20"):
        draw_suite(job, QUIET)


def test_films_of_other_settings_do_not_mix(drawn: Suite, tmp_path: Path) -> None:
    for change, words in (({"fps": 8}, "another fps"), ({"seed": 3}, "another seed"), ({"steps": 2}, "another steps")):
        with pytest.raises(RunError, match=words):
            draw_suite(replace(drawn, task=replace(TASK, **change)), QUIET)
    with pytest.raises(RunError, match="another method"):
        draw_suite(replace(drawn, method="interval"), QUIET)
    job = some(drawn, tmp_path / "films")
    job.films.mkdir(parents=True)
    (job.films / "notes.txt").touch()
    with pytest.raises(ValueError, match="nothing but .mp4 films, but has 'notes.txt'"):
        draw_suite(job, QUIET)
    with pytest.raises(ValueError, match="--model sticker-flux: FluxPipeline draws no films"):
        draw_suite(some(drawn, tmp_path, task=replace(TASK, model="sticker-flux", call={})), QUIET)


def test_the_command_draws_under_a_method(drawn: Suite, tmp_path: Path, run: Any) -> None:
    out = tmp_path / "cached"
    call = [word for key, value in CALL.items() for word in ("--call", f"{key}={value}")]
    line = ["draw", "--model", "sticker-wan", "--info", str(EXCERPT), "--out", str(out), *call]
    line += ["--samples-per-prompt", "1", "--dimension", DIMENSION, "--device", "cpu"]
    done = run(app, [*line, "--steps", "2", "--method", "interval:every=2"])
    assert done.exit_code == 0, done.output
    assert f"2 films of 16 frames a second in {out}/films" in done.output
    lines = [json.loads(text) for text in (out / "manifest.0.jsonl").read_text().splitlines()]
    assert [line["cache"]["skipped"] > 0 for line in lines] == [True, True]


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
    job = driver.DriverJob(some_films(tmp_path / "films"), tmp_path / "out", device="cuda:1")
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
    driver.run(driver.DriverJob(films, tmp_path / "out", prompts=prompts), ["temporal_flickering"])
    assert calls(other)[0][5] == prompts
    with pytest.raises(ValueError, match=r"no prompt is given for a cat-1.mp4 \(1 films without\)"):
        driver.run(driver.DriverJob(films, tmp_path / "out", prompts={"a cat-0.mp4": "a"}), ["temporal_flickering"])


def test_all_missing_weights_are_named_at_once_before_anything_runs(tmp_path: Path, other: Path) -> None:
    job = driver.DriverJob(some_films(tmp_path / "films"), tmp_path / "out")
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


def test_every_dimension_but_flickering_has_weights_and_wrong_ones_are_refused(tmp_path: Path, other: Path) -> None:
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
    job = driver.DriverJob(some_films(tmp_path / "films"), tmp_path / "out")
    names = ["temporal_flickering", "imaging_quality"]
    monkeypatch.setenv("FAKE_FAILS", "imaging_quality")
    with pytest.raises(driver.VBenchError, match=r"(?s)imaging_quality in .*out of memory on the"):
        driver.run(job, names)
    assert [f.name for f in sorted(job.out.glob("*_eval_results.json"))] == ["temporal_flickering_eval_results.json"]
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
    names = film_names.expected(film_names.read_info(info), ["color", "temporal_flickering"])
    for name in names[1:]:
        (films / name).touch()
    job = driver.DriverJob(films, tmp_path / "out", info=info)
    with pytest.raises(ValueError, match="a part of the suite is not VBench"):
        driver.run(job, ["temporal_flickering"])
    (films / names[0]).touch()
    with pytest.raises(ValueError, match="vbench static_filter --videos_path"):
        driver.run(job, ["temporal_flickering"])
    some_films(kept)
    job = driver.DriverJob(films, tmp_path / "out", info=info, filtered=kept)
    assert driver.run(job, ["temporal_flickering", "color"]) == {"temporal_flickering": 0.5, "color": 0.5}
    assert [(call[0][0], call[2], call[4]) for call in calls(other)] == [
        ("temporal_flickering", "vbench_standard", 2),
        ("color", "vbench_standard", len(names)),
    ]
    with pytest.raises(ValueError, match="color on its standard prompts only"):
        driver.run(driver.DriverJob(films, tmp_path / "out"), ["color"])


@pytest.mark.parametrize(("visible", "devices"), [(None, {"0", "1"}), ("6,2,3", {"6", "2"})])
def test_dimensions_are_shared_out_over_gpus(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: set[str]
) -> None:
    weights(tmp_path, monkeypatch, "imaging_quality")
    monkeypatch.setenv("FAKE_MEETS", "2")  # each of the two waits for the other
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    job = driver.DriverJob(some_films(tmp_path / "films"), tmp_path / "out", gpus=2)
    names = ["temporal_flickering", "imaging_quality"]
    assert driver.run(job, names) == dict.fromkeys(names, 0.5)
    assert {(call[0][0], call[1]) for call in calls(other)} == {(name, "cuda") for name in names}
    assert {call[8] for call in calls(other)} == devices


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
    assert [film["video_results"] for film in films] == [as_vbench_reads(folder / f"{name}.mp4") for name in "abc"]
    assert films[2]["video_results"] == 1
    row = report["summary"]["temporal_flickering"]
    assert row["low"] < row["value"] < row["high"] and row["value"] == pytest.approx(mean)
    assert not {"quality", "semantic", "total"} & set(report)
    done = run(app, ["measure", str(folder / "b.mp4"), "--json", "-"])
    assert set(json.loads(done.stdout)["summary"]["temporal_flickering"]) == {"value", "n"}
    write_clip(folder / "d.mp4", some_film(3)[:1], 8)
    done = run(app, [str(folder)])
    assert done.exit_code == 2 and "d.mp4 has a single frame" in done.stderr


# Percent, as published: total, quality, semantic, then the 16 raw scores in the order of
# suite.DIMENSIONS. Table 8 of Show-o2 (arXiv 2506.15564), which takes them from VBench's
# leaderboard; T2V-Turbo-v2 from table 11 of its paper (arXiv 2410.05677), which has them in another
# order.
PUBLISHED = {
    "Gen-2": "80.58 82.47 73.03 97.61 97.61 99.56 99.58 18.89 66.96 67.42 90.92 55.47 89.20 89.49 66.91 48.91 19.34 24.12 26.17",
    "Kling": "81.85 83.39 75.68 98.33 97.60 99.30 99.40 46.94 61.21 65.62 87.24 68.05 93.40 89.90 73.03 50.86 19.62 24.17 26.42",
    "Gen-3": "82.32 84.11 75.17 97.10 96.62 98.61 99.23 60.14 63.34 66.82 87.81 53.64 96.40 80.90 65.09 54.57 24.31 24.71 26.69",
    "T2V-Turbo-v2": "82.93 84.08 78.33 97.03 98.32 97.54 97.00 61.39 66.73 70.92 96.42 64.76 94.40 94.85 48.08 56.41 24.29 26.85 28.76",
}


def published(model: str) -> tuple[list[float], dict[str, float]]:
    numbers = [float(text) / 100 for text in PUBLISHED[model].split()]
    return numbers[:3], dict(zip(suite.DIMENSIONS, numbers[3:], strict=True))


def write(folder: Path, name: str, value: float) -> None:
    """Write a result as VBench does."""
    films = [{"video_path": "a-0.mp4", "video_results": 0.25}]
    (folder / f"{name}_eval_results.json").write_text(json.dumps({name: [value, films]}, indent=4))


@pytest.mark.parametrize("model", PUBLISHED)
def test_scores_are_those_published(model: str) -> None:
    (total, quality, semantic), raw = published(model)
    found = suite.summarize(raw)
    # Raw scores are rounded to 0.01 points, so a mean of them is off by less than that.
    assert found.quality == pytest.approx(quality, abs=1e-4)
    assert found.semantic == pytest.approx(semantic, abs=1e-4)
    assert found.total == pytest.approx(total, abs=1e-4)
    assert found.missing == ()


def test_the_best_and_worst_raw_scores_count_one_and_nothing() -> None:
    best = {name: d.high for name, d in suite.DIMENSIONS.items()}
    worst = {name: d.low for name, d in suite.DIMENSIONS.items()}
    assert suite.summarize(best).total == pytest.approx(1)
    assert suite.summarize(worst).total == pytest.approx(0)
    halved = {**best, "dynamic_degree": 0.0}
    assert suite.summarize(halved).quality == pytest.approx(6 / 6.5)


def test_no_score_is_made_from_a_part() -> None:
    _, raw = published("Kling")
    del raw["scene"], raw["color"]
    found = suite.summarize(raw)
    assert (found.semantic, found.total) == (None, None)
    assert found.quality == suite.summarize(published("Kling")[1]).quality
    assert found.missing == ("color", "scene")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["total"] is None
    assert "| **total score** |  | n/a |" in found.markdown()


def test_results_are_read_in_both_forms(tmp_path: Path) -> None:
    _, raw = published("Gen-3")
    folder, flat = tmp_path / "results", tmp_path / "flat"
    folder.mkdir()
    flat.mkdir()
    for name, value in raw.items():
        write(folder, name, value)
        # Beside every result stands what VBench was given, which is no result.
        (folder / f"{name}_full_info.json").write_text('[{"prompt_en": "a"}]')
    named = {name.replace("_", " "): value for name, value in raw.items()}
    (flat / "all_results.json").write_text(json.dumps(named))
    assert suite.read_results(folder) == suite.read_results(flat) == raw
    assert suite.read_results(folder / "scene_eval_results.json") == {"scene": raw["scene"]}


def test_the_command_scores_results(tmp_path: Path, run: Any) -> None:
    (total, _, _), raw = published("Gen-2")
    for name, value in raw.items():
        write(tmp_path, name, value)
    done = run(app, ["score", str(tmp_path), "--json", "-"])
    assert json.loads(done.stdout)["total"] == pytest.approx(total, abs=1e-4)
    (tmp_path / "scene_eval_results.json").unlink()
    target = tmp_path / "out" / "scores.json"
    done = run(app, ["score", str(tmp_path), "--json", str(target)])
    assert "no total score, missing: scene" in done.stdout
    assert json.loads(target.read_text())["total"] is None
