"""Runs: what is drawn is kept, what was killed goes on, and nothing is ever mixed."""

import itertools
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from safetensors.torch import load_file

from diffcache.catalog import make_method
from diffcache.cli import app
from diffcache.eval.cost.peak_memory import Place
from diffcache.eval.methods import parse_method, rows_of
from diffcache.eval.report.record_files import load
from diffcache.eval.runs import folder, measure, score
from diffcache.eval.runs.draw import Drawer, relative_errors, samples_of
from diffcache.eval.runs.evaluate import Plan, RunError
from diffcache.eval.runs.folder import CaseFolder, ManifestError, batches, evaluations, remember
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Case, Task, directory_sha256
from diffcache.eval.samples.prompts import load_prompts
from tests import shipped as flux

pytestmark = pytest.mark.usefixtures("no_report")

METHODS = ("taylorseer:every=3,warmup=2,site='stack'", "first-block:threshold=0.1")
# The task and the plan below, as words of the command line.
CALL = {"height": 32, "width": 32, "true_cfg_scale": 1.0}
SETTINGS = ["--samples", "5", "--batch-size", "2", "--steps", "7", "--rounds", "0"]
SETTINGS += [word for key, value in CALL.items() for word in ("--call", f"{key}={value}")]
TASK = Task(model="sticker-flux", samples=5, batch_size=2, steps=7, call=CALL)


def plan(out: Path, task: Task = TASK, methods: tuple[str, ...] = METHODS) -> Plan:
    return Plan(task, {name: parse_method(name) for name in methods}, out, rounds=0)


def evaluate(out: Path, **changes: object) -> dict:
    task = replace(TASK, **{k: v for k, v in changes.items() if k != "methods"})
    methods = changes.get("methods", METHODS)
    return measure.evaluate(plan(out, task, methods), Progress())


def without_timing(record: dict) -> dict:
    """Leave out what depends on the time or the machine."""
    times = {"timing", "env", "command", "date", "commit", "versions", "device", "threads"}
    return {key: value for key, value in record.items() if key not in times}


WORDS = ["eval", "--model", "sticker-flux", "--method", METHODS[0], "--method", METHODS[1], *SETTINGS]
WORDS += ["--device", "cpu", "--quiet", "--out"]


def start(work: Callable[[], object], **environment: str) -> int:
    """Have a copy of this process do some work, which saves it the imports; return its number."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.environ.update(environment)
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(number: int) -> int:
    """Wait for a process; return its exit code, or less than 0 if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def command(out: Path, killed_at: Callable[[Path], bool] = lambda path: False) -> None:
    """Run the command line, in a process that is killed before it writes a certain picture."""
    write = folder.write_file

    def write_file(path: Path, data: bytes) -> None:
        if path.suffix == ".png" and killed_at(path):
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)

    folder.write_file = write_file
    app([*WORDS, str(out)])


def pictures(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("samples/*.png"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "write_report", lambda *given: [])
        evaluate(out)
    return out


def test_saved_flops_are_counted_in_full_steps_or_computed_steps_where_they_are_unknown() -> None:
    def line(saved: float | None, computed: list[int]) -> dict:
        return {"ids": [0, 0], "cache": {"steps": [[0.0, c] for c in computed], "flops_saved": saved}}

    lines = [line(2 * 100.0 * 4, [1] * 6 + [0] * 4), {"ids": [0, 1]}]
    assert (evaluations(lines[:1], 10, 100.0), evaluations(lines, 10, 100.0)) == (6, 8)
    assert evaluations([line(None, [1, 0, 0, 1])], 4, 100.0) == evaluations([line(5.0, [1, 0, 0, 1])], 4, None) == 2


class TestRun:
    def test_record_is_whole(self, run: Path) -> None:
        record = load(run)
        names = [row["name"] for row in record["rows"]]
        assert names[:3] == ["uncached", *METHODS]
        assert all(row["kind"] == "fewer steps" for row in record["rows"][3:])
        for row in record["rows"][1:]:
            assert {"psnr_db", "ssim", "lpips_lite"} <= set(row["fidelity"])
            assert row["fidelity"]["psnr_db"]["n"] == 5
        assert record["task"]["samples"] == 5

    def test_fewer_steps_have_at_least_the_evaluations_of_their_method(self, run: Path) -> None:
        rows = {row["name"]: row for row in load(run)["rows"]}
        matched = {name: row for row in rows.values() for name in row["matches"]}
        assert set(matched) == {n for n in METHODS if rows[n]["evaluations"] <= 6}
        assert matched
        for name, control in matched.items():
            gap = control["evaluations"] - rows[name]["evaluations"]
            assert 0 <= gap < 1

    def test_evaluations_follow_from_the_blocks_that_ran(self, run: Path) -> None:
        # Stack: a skipped step costs embedders and head, which are less than a tenth of a step.
        row = load(run)["rows"][1]
        computed = sum(step["computed"] for step in row["timeline"])
        assert row["computed_steps"] == computed < 7
        assert computed < row["evaluations"] < computed + 0.1 * (7 - computed)
        assert row["flops_ratio"] == pytest.approx(7 / row["evaluations"])

    def test_values_follow_from_the_files(self, run: Path) -> None:
        record = load(run)
        base, cached = (
            torch.stack(CaseFolder(run / row["folder"]).read(range(5))).double() for row in record["rows"][:2]
        )
        errors = ((base - cached) ** 2).mean(dim=(1, 2, 3))
        expected = (10 * torch.log10(255**2 / errors)).clamp(max=100).mean()
        assert record["rows"][1]["fidelity"]["psnr_db"]["value"] == pytest.approx(float(expected))

    def test_pictures_are_those_of_the_pipeline(self, run: Path) -> None:
        pipe = flux.load()
        drawer = Drawer(TASK)
        noise = [torch.Generator().manual_seed(seed) for seed in (2, 3)]
        prompts = list(drawer.prompts.texts[2:4])
        made = samples_of(pipe(prompts, num_inference_steps=7, generator=noise, **{**flux.CALL, **CALL}))
        stored = CaseFolder(run / load(run)["rows"][0]["folder"]).read([2, 3])
        assert all(map(torch.equal, made, stored))

    def test_latent_error_starts_at_zero_and_grows(self, run: Path) -> None:
        errors = load(run)["rows"][1]["latent_error"]
        assert len(errors) == 7
        assert errors[:2] == [0.0, 0.0]
        assert errors[-1] > 0

    def test_again_draws_and_scores_nothing(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {p: p.stat().st_mtime_ns for p in run.rglob("cases/**/*") if p.is_file()}
        monkeypatch.setattr(Drawer, "pipe", property(lambda self: pytest.fail("loaded")))
        torch.set_num_threads(2)
        again = evaluate(run)
        assert torch.get_num_threads() == 2  # those of the run are its own
        torch.set_num_threads(1)
        assert without_timing(again)["rows"] == without_timing(load(run))["rows"]
        assert before == {p: p.stat().st_mtime_ns for p in run.rglob("cases/**/*") if p.is_file()}

    def test_more_samples_keep_what_is_there(self, run: Path, tmp_path: Path) -> None:
        few = tmp_path / "few"
        before = evaluate(few, samples=3, methods=METHODS[:1])
        evaluate(few, samples=5, methods=METHODS[:1])
        ours = pictures(few)
        assert ours == {name: data for name, data in pictures(run).items() if name in ours}
        again = evaluate(few, samples=3, methods=METHODS[:1])
        assert without_timing(again) == without_timing(before)

    def test_a_folder_of_other_settings_is_refused(self, run: Path) -> None:
        with pytest.raises(RunError, match="another steps"):
            evaluate(run, steps=5)
        with pytest.raises(RunError, match="another batch_size"):
            evaluate(run, batch_size=4)
        with pytest.raises(RunError, match="another call"):
            evaluate(run, call={**CALL, "height": 32.0})  # equal to 32 but for the digest
        with pytest.raises(RunError, match="is a file"):
            evaluate(run / "run.json")

    def test_killed_and_drawn_and_scored_by_jobs_of_their_own_is_the_same(self, run: Path, tmp_path: Path) -> None:
        out, written = tmp_path / "killed", itertools.count()
        killed = start(lambda: command(out, lambda path: next(written) == 3))
        assert ended(killed) == -signal.SIGKILL
        assert len(pictures(out)) == 3 and not (out / "record.json").exists()
        score = replace(plan(out), stages=("score", "time"))
        with pytest.raises(RunError, match="2 batches of uncached are not drawn .*the first is 1; .*--stages draw"):
            measure.evaluate(score, Progress())
        assert measure.evaluate(replace(plan(out), stages=("draw",)), Progress()) is None
        assert pictures(out) == pictures(run) and not list(out.rglob("values"))
        assert measure.evaluate(score, Progress()) is not None
        assert without_timing(load(out)) == without_timing(load(run))


def rank(place: Path, kill: bool) -> None:
    """Run the command line as one of several processes, which notes what it scores."""
    PartialState._reset_state()
    compute, notes = score._alone, place / f"scored.{os.environ['RANK']}"

    def noted(samples: object, prompts: list[str], networks: object) -> object:
        with notes.open("a") as file:
            file.write(prompts[0] + "\n")
        return compute(samples, prompts, networks)

    score._alone = noted
    command(place / "two", lambda path: kill and path.name == "00003.png")


@pytest.mark.slow
def test_two_processes_killed_once_give_the_same_record(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    for kill in (True, False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as `accelerate launch` sets them
        first, second = (start(partial(rank, tmp_path, kill), RANK=text, LOCAL_RANK=text, **place) for text in "01")
        try:
            assert ended(second) == (-signal.SIGKILL if kill else 0)
        finally:
            if kill:  # as a launcher does
                os.kill(first, signal.SIGKILL)
        assert ended(first) == (-signal.SIGKILL if kill else 0)
        assert (out / "record.json").exists() != kill
    record = load(out)
    assert pictures(out) == pictures(run)
    assert without_timing(record) == without_timing(load(run))
    assert record["env"]["processes"] == 2
    texts = load_prompts("stickers", TASK.samples).texts
    for number, shared in ((0, (0, 2)), (1, (1,))):  # three batches, two of two
        scored = (tmp_path / f"scored.{number}").read_text().splitlines()
        assert sorted(scored) == sorted([texts[2 * n] for n in shared] * len(record["rows"]))
    one, two = (
        {p.relative_to(place).as_posix(): load_file(p) for p in place.rglob("values/*")} for place in (run, out)
    )
    assert one.keys() == two.keys() and len(one) == 3 * len(record["rows"])
    for name, columns in one.items():
        assert all(torch.equal(column, two[name][key]) for key, column in columns.items())


def test_latents_of_the_first_samples_are_compared_whatever_the_size_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffcache.eval.runs.evaluate.LATENT_SAMPLES", 1)
    record = evaluate(tmp_path, samples=2, batch_size=2, steps=3, methods=("interval:every=2",))
    (file,) = tmp_path.rglob("latents/*.safetensors")
    assert load_file(file)["latents"].shape[:2] == (3, 1)
    assert record["rows"][1]["latent_error"][1] > 0


def test_peak_memory_is_that_of_a_process_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(TASK, samples=2, batch_size=2, steps=3)
    methods = rows_of(["interval:every=2", "even:computed=2,steps=3"])  # the other is in no catalogue
    watched = Plan(task, methods, tmp_path / "memory", rounds=0, memory=True)
    asked = []

    def peak_bytes(model: str, method: str | None, call: dict, place: Place) -> int:
        assert (Path(model).name, place.dtype, place.threads) == ("sticker-flux", "float32", 1)
        json.dumps(call)  # a fresh process is told everything in words
        asked.append((method and parse_method(method), call["num_inference_steps"]))
        return len(asked)

    monkeypatch.setattr(measure, "peak_bytes", peak_bytes)  # tests/cost/test_measured.py runs one
    record = measure.evaluate(watched, Progress())
    assert record is not None
    assert asked == [(None, 3), (methods["interval:every=2"], 3)]
    rows = record["timing"]["rows"]
    assert {name: row["peak_bytes"] for name, row in rows.items()} == {"uncached": 1, "interval:every=2": 2}
    measure.evaluate(watched, Progress())
    assert len(asked) == 2
    measure.evaluate(replace(watched, task=replace(task, samples=1)), Progress())
    assert len(asked) == 4  # calls of other sizes
    assert measure._spelled(make_method("temporal-table", method=make_method("interval"))) is None
    assert measure._spelled(make_method("temporal-table")) is not None


class TestCaseFolder:
    def sample(self) -> torch.Tensor:
        return torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)

    def test_samples_and_films_come_back_as_they_were(self, tmp_path: Path) -> None:
        film = torch.randint(0, 256, (5, 3, 32, 48), dtype=torch.uint8)
        for fps, drawn in ((None, [self.sample() for _ in range(3)]), (12, [film])):
            folder = CaseFolder(tmp_path / str(fps), fps=fps)
            folder.write(batches(["a"], len(drawn), 4, 0)[0], drawn, {"seconds": 1.0})
            assert all(map(torch.equal, folder.read(range(len(drawn))), drawn))

    def test_a_cut_off_line_is_no_line(self, tmp_path: Path) -> None:
        folder, made = CaseFolder(tmp_path), batches(["a"], 3, 1, 0)
        for batch in made[:2]:
            folder.write(batch, [self.sample()], {})
        text = folder.manifest.read_bytes()
        folder.manifest.write_bytes(text[:-20])
        assert set(folder.done(made)) == {0}
        folder.write(made[2], [self.sample()], {})
        assert set(folder.done(made)) == {0, 2}

    @pytest.mark.parametrize("damage", ["missing", "short"])
    def test_a_damaged_sample_is_drawn_again(self, tmp_path: Path, damage: str) -> None:
        folder, made = CaseFolder(tmp_path), batches(["a"], 2, 1, 0)
        for batch in made:
            folder.write(batch, [self.sample()], {})
        file = tmp_path / "samples" / "00001.png"
        file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:100])
        assert set(folder.done(made)) == {0}
        with pytest.raises(ManifestError, match=r"00001\.png"):
            folder.read([1])

    def test_a_changed_sample_is_seen_when_it_is_read(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 1, 1, 0)
        folder.write(batch, [self.sample()], {})
        sums = {0: folder.done([batch])[0]["files"][0]["sha256"]}
        file = tmp_path / "samples" / "00000.png"
        folder.read([0], sums)
        picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
        picture.save(file)  # still a picture, so that only its digest tells
        folder.read([0])
        with pytest.raises(ManifestError, match=r"00000\.png: it is not the file that was drawn"):
            folder.read([0], sums)

    def test_a_last_batch_drawn_shorter_or_longer_is_told_by_its_files(self, tmp_path: Path) -> None:
        folder = CaseFolder(tmp_path)
        (long,), (short,) = batches(["a"], 2, 2, 0), batches(["a"], 1, 2, 0)
        first, second = self.sample(), self.sample()
        folder.write(long, [first, second], {})
        assert not folder.done([short])
        folder.write(short, [self.sample()], {})
        assert len(folder.done([short])[0]["ids"]) == 1
        assert not folder.done([long])
        folder.write(long, [first, second], {})
        assert len(folder.done([long])[0]["ids"]) == 2
        assert not folder.done([short])

    @pytest.mark.parametrize("text", ["", "[]", '{"key": "k"}', '{"key": "other", "value": 1}'])
    def test_what_cannot_be_read_is_computed_again(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "kept.json"
        file.write_text(text)
        assert remember(file, "k", lambda: 2) == 2
        assert remember(file, "k", lambda: 3) == 2
        columns = tmp_path / "kept.safetensors"
        columns.write_text(text)
        for _ in range(2):
            found = score.kept(columns, "k", lambda: {"a": torch.ones(2)})
            assert torch.equal(found["a"], torch.ones(2))

    def test_other_prompts_are_refused(self, tmp_path: Path) -> None:
        folder = CaseFolder(tmp_path)
        folder.write(batches(["a"], 1, 1, 0)[0], [self.sample()], {})
        for other in (batches(["b"], 1, 1, 0), batches(["a"], 1, 1, 9)):
            with pytest.raises(ManifestError, match="other prompts or seeds"):
                folder.done(other)
        folder.manifest.write_text("{" + folder.manifest.read_text() + "\n")
        with pytest.raises(ManifestError, match=r"manifest\.0\.jsonl is damaged: delete"):
            folder.done(batches(["a"], 1, 1, 0))

    def test_lines_of_all_processes_count(self, tmp_path: Path) -> None:
        made = batches(["a"], 4, 2, 0)
        for rank, batch in enumerate(made):
            CaseFolder(tmp_path, rank).write(batch, [self.sample(), self.sample()], {})
        assert set(CaseFolder(tmp_path).done(made)) == {0, 1}


class TestHashes:
    ABOUT: ClassVar[dict] = {"model": "m", "seed": 0}

    def test_anything_that_changes_samples_changes_the_folder(self) -> None:
        cases = [Case("x", "uncached", 7), Case("x", "uncached", 8)]
        cases += [Case("x", "method", 7, parse_method(f"interval:every={every}")) for every in (3, 4)]
        folders = {case.folder(self.ABOUT) for case in cases}
        folders |= {case.folder({**self.ABOUT, "seed": 1}) for case in cases}
        assert len(folders) == 8

    def test_fewer_steps_share_the_samples_of_an_uncached_run_of_that_length(self) -> None:
        one = Case("a", "fewer steps", 7, None, ("m",))
        assert one.digest(self.ABOUT) == Case("b", "uncached", 7).digest(self.ABOUT)

    def test_weights_change_the_hash_of_a_model(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.bin"
        file.write_bytes(bytes(3 << 20))
        before = directory_sha256(tmp_path)
        file.write_bytes(bytes((3 << 20) - 1) + b"1")
        assert directory_sha256(tmp_path) != before
        (tmp_path / "README.md").write_text("words")
        assert directory_sha256(tmp_path) == directory_sha256(tmp_path)


def test_relative_errors_are_per_sample_and_step() -> None:
    base = torch.ones(2, 3, 4)
    other = base.clone()
    other[1, 2] *= 1.5
    assert relative_errors(base, other) == [[0, 0, 0], [0, 0, pytest.approx(0.5)]]
