"""Runs: what is drawn is kept, what was killed goes on, and nothing is ever mixed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from diffcache.eval.methods import parse_method
from diffcache.eval.runs import measure
from diffcache.eval.runs.draw import Drawer, find_model, relative_errors, samples_of
from diffcache.eval.runs.evaluate import Plan, RunError, evaluations
from diffcache.eval.runs.folder import CaseFolder, ManifestError, batches
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.record import RecordError, check, load, without_timing
from diffcache.eval.runs.task import Case, Task, device_of, directory_sha256
from diffcache.pipelines.small import flux

ROOT = Path(__file__).parents[1]
METHODS = ("taylorseer:every=3,warmup=2,site='stack'", "first-block:threshold=0.1")
TASK = Task(model="shapes-flux", samples=10, batch_size=4, steps=7)


def plan(out: Path, task: Task = TASK, methods: tuple[str, ...] = METHODS) -> Plan:
    return Plan(task, {name: parse_method(name) for name in methods}, out, rounds=0)


def evaluate(out: Path, **changes: object) -> dict:
    task = replace(TASK, **{k: v for k, v in changes.items() if k != "methods"})
    methods = changes.get("methods", METHODS)
    return measure.evaluate(plan(out, task, methods), Progress(quiet=True))


def pictures(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("samples/*.png"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "run"
    evaluate(out)
    return out


class TestBatches:
    def test_every_sample_is_in_one_batch_with_its_own_prompt_and_seed(self) -> None:
        made = batches(["a", "b", "c"], samples=10, size=4, seed=5)
        assert [b.ids for b in made] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
        assert [p for b in made for p in b.prompts] == [*"abcabcabca"]
        assert [s for b in made for s in b.seeds] == list(range(5, 15))

    def test_more_samples_leave_full_batches_as_they_are(self) -> None:
        few, many = (batches(["a", "b"], n, 4, 0) for n in (8, 50))
        assert [b.digest for b in few] == [b.digest for b in many[:2]]


class TestCaseFolder:
    def sample(self) -> torch.Tensor:
        return torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)

    def test_samples_come_back_as_they_were(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 3, 4, 0)
        drawn = [self.sample() for _ in range(3)]
        folder.write(batch, drawn, {"seconds": 1.0})
        assert all(map(torch.equal, folder.read([0, 1, 2]), drawn))

    def test_films_come_back_as_they_were(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 1, 4, 0)
        film = torch.randint(0, 256, (5, 3, 32, 48), dtype=torch.uint8)
        folder.write(batch, [film], {})
        assert torch.equal(folder.read([0])[0], film)

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

    def test_other_prompts_are_refused(self, tmp_path: Path) -> None:
        folder = CaseFolder(tmp_path)
        folder.write(batches(["a"], 1, 1, 0)[0], [self.sample()], {})
        for other in (batches(["b"], 1, 1, 0), batches(["a"], 1, 1, 9)):
            with pytest.raises(ManifestError, match="other prompts or seeds"):
                folder.done(other)

    def test_lines_of_all_processes_count(self, tmp_path: Path) -> None:
        made = batches(["a"], 4, 2, 0)
        for rank, batch in enumerate(made):
            CaseFolder(tmp_path, rank).write(batch, [self.sample(), self.sample()], {})
        assert set(CaseFolder(tmp_path).done(made)) == {0, 1}


class TestHashes:
    ABOUT: ClassVar[dict] = {"model": "m", "seed": 0}

    def test_anything_that_changes_samples_changes_the_folder(self) -> None:
        method = parse_method("interval:every=3")
        cases = [
            Case("x", "uncached", 7),
            Case("x", "uncached", 8),
            Case("x", "method", 7, method),
            Case("x", "method", 7, parse_method("interval:every=4")),
        ]
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


class TestEvaluations:
    def line(self, saved: float | None, computed: list[int], count: int = 2) -> dict:
        cache = {"steps": [[0.0, c] for c in computed], "flops_saved": saved}
        return {"ids": [0] * count, "cache": cache}

    def test_saved_flops_are_counted_in_full_steps(self) -> None:
        lines = [self.line(2 * 100.0 * 4, [1] * 6 + [0] * 4), {"ids": [0, 1]}]
        assert evaluations(lines[:1], 10, 100.0) == 6
        assert evaluations(lines, 10, 100.0) == 8

    def test_computed_steps_where_flops_are_unknown(self) -> None:
        assert evaluations([self.line(None, [1, 0, 0, 1])], 4, 100.0) == 2
        assert evaluations([self.line(5.0, [1, 0, 0, 1])], 4, None) == 2


class TestRun:
    def test_record_is_whole(self, run: Path) -> None:
        record = load(run)
        names = [row["name"] for row in record["rows"]]
        assert names[:3] == ["uncached", *METHODS]
        assert all(row["kind"] == "fewer steps" for row in record["rows"][3:])
        for row in record["rows"][1:]:
            assert {"psnr_db", "ssim", "lpips_lite"} <= set(row["fidelity"])
            assert row["fidelity"]["psnr_db"]["n"] == 10
        assert record["task"]["samples"] == 10

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
            torch.stack(CaseFolder(run / row["folder"]).read(range(10))).double()
            for row in record["rows"][:2]
        )
        errors = ((base - cached) ** 2).mean(dim=(1, 2, 3))
        expected = (10 * torch.log10(255**2 / errors)).clamp(max=100).mean()
        assert record["rows"][1]["fidelity"]["psnr_db"]["value"] == pytest.approx(float(expected))

    def test_pictures_are_those_of_the_pipeline(self, run: Path) -> None:
        pipe = flux.load()
        drawer = Drawer(TASK)
        noise = [torch.Generator().manual_seed(seed) for seed in (8, 9)]
        prompts = list(drawer.prompts.texts[8:10])
        made = samples_of(pipe(prompts, num_inference_steps=7, generator=noise, **flux.CALL))
        stored = CaseFolder(run / load(run)["rows"][0]["folder"]).read([8, 9])
        assert all(map(torch.equal, made, stored))

    def test_latent_error_starts_at_zero_and_grows(self, run: Path) -> None:
        errors = load(run)["rows"][1]["latent_error"]
        assert len(errors) == 7
        assert errors[:2] == [0.0, 0.0]
        assert errors[-1] > 0

    def test_site_errors_only_where_the_schedule_skips(self, run: Path) -> None:
        row = load(run)["rows"][1]
        for step, value in zip(row["timeline"], row["site_error"]["values"][0], strict=True):
            assert (value is None) == (step["computed"] == 1)

    def test_again_draws_and_scores_nothing(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = {p: p.stat().st_mtime_ns for p in run.rglob("cases/**/*") if p.is_file()}
        monkeypatch.setattr(Drawer, "pipe", property(lambda self: pytest.fail("loaded")))
        again = evaluate(run)
        assert without_timing(again)["rows"] == without_timing(load(run))["rows"]
        assert before == {p: p.stat().st_mtime_ns for p in run.rglob("cases/**/*") if p.is_file()}

    def test_more_samples_keep_what_is_there(self, run: Path, tmp_path: Path) -> None:
        few = tmp_path / "few"
        evaluate(few, samples=5, methods=METHODS[:1])
        evaluate(few, samples=10, methods=METHODS[:1])
        ours = pictures(few)
        assert ours == {name: data for name, data in pictures(run).items() if name in ours}

    def test_a_folder_of_other_settings_is_refused(self, run: Path) -> None:
        with pytest.raises(RunError, match="another steps"):
            evaluate(run, steps=5)
        with pytest.raises(RunError, match="another batch_size"):
            evaluate(run, batch_size=2)

    def test_killed_and_started_again_is_the_same(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "killed"
        command = [sys.executable, "-m", "diffcache", "eval", "--model", "shapes-flux"]
        command += [word for name in METHODS for word in ("--method", name)]
        command += [
            "--samples",
            "10",
            "--batch-size",
            "4",
            "--steps",
            "7",
            "--rounds",
            "0",
            "--quiet",
            "--out",
        ]
        process = subprocess.Popen([*command, str(out)], cwd=tmp_path, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(pictures(out)) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "record.json").exists()
        evaluate(out)
        assert pictures(out) == pictures(run)
        mine, theirs = without_timing(load(out)), without_timing(load(run))
        assert mine == theirs


@pytest.mark.slow
def test_two_processes_give_the_same_record(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--main_process_port", "0", "-m", "diffcache", "eval"]
    command += ["--model", "shapes-flux", "--out", str(out)]
    command += [word for name in METHODS for word in ("--method", name)]
    command += [
        "--samples",
        "10",
        "--batch-size",
        "4",
        "--steps",
        "7",
        "--rounds",
        "0",
        "--device",
        "cpu",
        "--quiet",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for row in load(out)["rows"]:
        manifests = sorted(p.name for p in (out / row["folder"]).glob("manifest.*"))
        assert manifests == ["manifest.0.jsonl", "manifest.1.jsonl"]
    assert pictures(out) == pictures(run)
    assert without_timing(load(out)) == without_timing(load(run))
    assert load(out)["env"]["processes"] == 2


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"samples": 0}, "samples=0"),
            ({"batch_size": 0}, "batch_size=0"),
            ({"steps": 0}, "steps=0"),
            ({"dtype": "float8"}, "dtype='float8'"),
        ],
    )
    def test_task(self, changes: dict, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            replace(TASK, **changes)

    def test_model(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no pipeline at"):
            find_model(str(tmp_path))
        with pytest.raises(FileNotFoundError, match="the hub did not give one"):
            find_model("nobody/nothing-here")

    def test_call(self) -> None:
        with pytest.raises(ValueError, match="call colour='red': FluxPipeline takes none"):
            Drawer(replace(TASK, call={"colour": "red"}))

    def test_device(self) -> None:
        with pytest.raises(ValueError, match="device='gpu'"):
            device_of("gpu")
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="no CUDA device"):
                device_of("cuda")

    def test_record(self, run: Path, tmp_path: Path) -> None:
        record = load(run)
        with pytest.raises(RecordError, match="this version reads"):
            check({**record, "schema": "diffcache.eval/0"})
        with pytest.raises(RecordError, match="no 'rows'"):
            check({k: v for k, v in record.items() if k != "rows"})
        with pytest.raises(FileNotFoundError, match="no record at"):
            load(tmp_path)
        (tmp_path / "record.json").write_text(json.dumps(record)[:-50])
        with pytest.raises(RecordError, match="is not JSON"):
            load(tmp_path)


def test_relative_errors_are_per_sample_and_step() -> None:
    base = torch.ones(2, 3, 4)
    other = base.clone()
    other[1, 2] *= 1.5
    assert relative_errors(base, other) == [[0, 0, 0], [0, 0, pytest.approx(0.5)]]
