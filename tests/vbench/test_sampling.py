"""VBench's suite drawn: names, numbers, frame rate and folder that VBench's own code accepts."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.eval.runs.folder import CaseFolder, RunError
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.ranks import Ranks
from diffcache.eval.runs.task import Task
from diffcache.eval.samples.clips import read_clip, read_fps
from diffcache.eval.vbench import sampling, suite
from diffcache.eval.vbench.command import app
from diffcache.eval.vbench.sampling import Suite, draw_suite

EXCERPT = Path(__file__).with_name("excerpt.json")
CALL = {"num_frames": 1, "height": 32, "width": 32, "guidance_scale": 1.0}
TASK = Task("shapes-wan", str(EXCERPT), 1, batch_size=1, steps=1, call=CALL, device="cpu")
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


@pytest.mark.parametrize("dimension", suite.DIMENSIONS)
def test_vbench_finds_five_films_of_every_prompt(drawn: Suite, dimension: str) -> None:
    found = found_by_vbench(drawn.films, dimension)
    assert found and all(len(names) == 5 for names in found)


def test_vbench_s_own_loader_takes_the_folder(
    drawn: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vbench = pytest.importorskip("vbench", exc_type=ImportError)
    bench = vbench.VBench(torch.device("cpu"), str(EXCERPT), str(tmp_path))
    names = bench.build_full_dimension_list()
    entries = json.loads(
        Path(bench.build_full_info_json(str(drawn.films), "all", names)).read_text()
    )
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


def test_processes_share_the_films_out(
    drawn: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert {json.loads(line)["prompts"][0] for line in lines} == {
        "a long story of a cross",
        "a long story of a ring",
    }
    assert not same_films(job, drawn)
    file.write_text("\n".join(texts[:-1]) + "\n")
    with pytest.raises(ValueError, match=r"longer.txt: has 19 prompts .* each of the 20"):
        draw_suite(job, QUIET)


def test_films_of_other_settings_do_not_mix(drawn: Suite, tmp_path: Path) -> None:
    for change, words in (
        ({"fps": 8}, "another fps"),
        ({"seed": 3}, "another seed"),
        ({"steps": 2}, "another steps"),
    ):
        with pytest.raises(RunError, match=words):
            draw_suite(replace(drawn, task=replace(TASK, **change)), QUIET)
    with pytest.raises(RunError, match="another method"):
        draw_suite(replace(drawn, method="interval"), QUIET)
    job = some(drawn, tmp_path / "films")
    job.films.mkdir(parents=True)
    (job.films / "notes.txt").touch()
    with pytest.raises(ValueError, match="nothing but .mp4 films, but has 'notes.txt'"):
        draw_suite(job, QUIET)
    with pytest.raises(ValueError, match="--model shapes-flux: FluxPipeline draws no films"):
        draw_suite(some(drawn, tmp_path, task=replace(TASK, model="shapes-flux", call={})), QUIET)


def test_the_command_draws_under_a_method(drawn: Suite, tmp_path: Path, run: Any) -> None:
    out = tmp_path / "cached"
    call = [word for key, value in CALL.items() for word in ("--call", f"{key}={value}")]
    line = ["draw", "--model", "shapes-wan", "--info", str(EXCERPT), "--out", str(out), *call]
    line += ["--samples-per-prompt", "1", "--dimension", DIMENSION, "--device", "cpu"]
    done = run(app, [*line, "--steps", "2", "--method", "interval:every=2"])
    assert done.exit_code == 0, done.output
    assert f"2 films of 16 frames a second in {out}/films" in done.output
    lines = [json.loads(text) for text in (out / "manifest.0.jsonl").read_text().splitlines()]
    assert [line["cache"]["skipped"] > 0 for line in lines] == [True, True]
