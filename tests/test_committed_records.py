"""Every committed record says how it is made again: command, commit of clean code, seed, versions.

A training is made again by its command alone, which names the seed: its record goes with the
weights that it made and is not drawn again when the code moves on. Its commits are in the history,
and the quality of its model names the shipped weights, with the record of the training beside them.
Every other record has a stamp that holds (`eval/workshop/records.py`), but for times alone.
"""

import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import diffcache
from diffcache.eval import pages, record
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop import again, reached, records
from diffcache.features.taylorseer import TaylorSeer
from diffcache.pipelines.shipped_models import MODELS
from diffcache.step import Step

FILES = [*sorted(FOLDER.glob("*.json")), ROOT / "docs" / "demo.json"]
MEASURED = [file for file in FILES if not file.stem.endswith("-training")]
LIBRARIES = {"python", "torch", "diffusers", "transformers"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_record_names_command_seed_and_versions(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert re.match(r"(diffcache|python -m diffcache\.\S+) ?", found["command"])
    named = re.search(r"--seed (\d+)", found["command"])
    seed = found.get("seed", None if named is None else int(named[1]))
    assert isinstance(seed, int)
    assert set(found["versions"]) >= LIBRARIES


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_measurement_names_schema_device_and_a_clean_commit(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["schema"] and found["device"] and found["threads"] >= 1
    commit, _, where = found["commit"].partition(", ")
    assert re.fullmatch(r"[0-9a-f]{12}", commit)
    assert records.known(commit) or where == "before the history kept here"
    module = re.match(r"python -m (diffcache\.\S+)", found["command"])
    if module is not None:  # a command that moved cannot be run
        path = ROOT / Path(*module[1].split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("name", records.names())
def test_a_record_of_quality_has_a_stamp_that_holds(name: str) -> None:
    why = records.why_stale(name)
    assert not why, f"{name} {why}; run: make records"


def test_trainings_name_commits_of_the_history_and_weights_are_those_that_were_measured() -> None:
    for file in MODELS.glob("*/training-*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["model"] in file.stem and found["command"].startswith("python -m diffcache.")
        assert all(records.known(commit.rstrip("+")) for commit in found["commits"]), file
    readers = {"sticker-features", "sticker-judge"}  # of pictures
    names = {path.name for path in MODELS.iterdir()} - readers
    files = {FOLDER / f"{name}-quality.json" for name in names}
    assert files == {file for file in FILES if file.stem.endswith("-quality")}
    for name in names:
        found = json.loads((FOLDER / f"{name}-quality.json").read_text(encoding="utf-8"))
        assert found["shapes"]["model"] == name and not records.of_other_weights(found), name


def test_every_record_can_be_made_again_or_is_of_times_of_this_release() -> None:
    made = {file.stem for file in MEASURED}
    assert made == {*records.names(), *again.NOT_MADE}
    for name in again.NOT_MADE:
        found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert found["versions"]["diffcache"] == diffcache.__version__, f"measure {name} again"


# What changes in a file -> whether the picture of the demo, drawn with TaylorSeer, depends on it.
MUTATIONS = {
    ("diffcache/features/parts/instead.py", "distance**power / math", "distance * power / math"): 1,
    ("diffcache/features/taylorseer.py", "start=self.warmup - 1", "start=self.warmup"): 1,
    ("diffcache/features/taylorseer.py", "    order: Order = 1", "    order: Order = 2"): 1,
    ("diffcache/features/taylorseer.py", "Compute one step in", "Run one step in"): 0,
    ("kernels/forecast.py", "total = base + total", "total = base - total"): 1,
    ("kernels/forecast.py", "in plain PyTorch", "by torch"): 0,
    ("kernels/forecast.py", "total = gate * total", "total = gate * total  # of all"): 0,
    ("kernels/forecast.py", "def _sum_like(", "def _sum_as("): 0,  # only compiled models run it
}


def test_arithmetic_makes_a_record_stale_and_words_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = json.loads(records.stamp_of("demo").read_text(encoding="utf-8"))["code"]
    assert not reached.changed({name: code[name] for name, _, _ in MUTATIONS})
    monkeypatch.setattr(reached, "ROOT", tmp_path)
    for (name, before, after), is_stale in MUTATIONS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert before in text
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(before, after), encoding="utf-8")
        forget()
        assert reached.changed({name: code[name]}) == [name] * is_stale, (before, after)
    forget()


def forget() -> None:
    """Read files again."""
    reached.tables.cache_clear()
    reached._hash.cache_clear()


def test_all_definitions_of_a_name_are_hashed_in_all_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "eval" / "one.py"
    file.parent.mkdir()
    lines = ["if A:", "    x = 1", "else:", "    x = 2", "try:", "    import b",
             "except ImportError:", "    b = 3", "else:", "    c = 0; c += 4", "finally:", "    d = 5",
             "class P:", "    @property", "    def s(self): return 6", "    @s.setter",
             "    def s(self, v): self.v = v + 7", "    @overload", "    def o(self): ...",
             "    def o(self): return 8"]  # fmt: skip
    names = ["x", "x", "b", "c", "d", "P.s", "P.s", "P.o"]
    monkeypatch.setattr(reached, "ROOT", tmp_path)
    text = "\n".join(lines)
    for number, name in enumerate(names, 1):
        hashes = []
        for now in (text, text.replace(str(number), "9")):
            file.write_text(now, encoding="utf-8")
            forget()
            hashes.append(reached.digest("eval/one.py", [name]))
        assert hashes[0] != hashes[1], (name, number)
    file.write_text("def made(): return 1\ndef other(): return 2\nX = [made(), other]")
    forget()
    called = {name for _, name in reached._named("eval/one.py", "X")}
    assert called == {"X", "made"}  # which ran with the import
    forget()


def test_a_stamp_names_what_was_not_made_and_is_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.tensor([True, False])
    made = [again.Made("a", "taken", {"value": 0.5, "n": 2}, kept, kept)]
    file, weights = tmp_path / "record.json", tmp_path / "models" / "m" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"1")
    for name in ("STAMPS", "ASSETS", "MODELS"):
        monkeypatch.setattr(records, name, tmp_path / "models" if name == "MODELS" else tmp_path)
    monkeypatch.setattr(records, "file_of", lambda name: file)
    monkeypatch.setattr(records, "again_of", lambda name: lambda *_: iter(made))
    record = {"shapes": {"model": "m"}, "command": "draw", "rows": [{"name": "a"}, {"name": "b"}]}
    file.write_text(json.dumps(record))
    records.folder_digest.cache_clear()
    records.stamp("one")
    assert json.loads((tmp_path / "one.json").read_text())["not_made"] == ["b"]
    assert not records.why_stale("one")
    (weights.parent / "README.md").write_text("words")
    records.folder_digest.cache_clear()
    assert not records.why_stale("one")
    weights.write_bytes(b"2")
    records.folder_digest.cache_clear()
    assert records.why_stale("one") == "depends on files that have changed: assets/models/m"
    records.folder_digest.cache_clear()

    records.stamp("one", keep=True)
    record = json.loads(file.read_text())
    assert record["rows"] == [{"name": "a", "values": "10"}, {"name": "b"}]
    sweep = tmp_path / "one.toml"
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    sweep.write_text("steps = 8")
    assert records.why_stale("one") == "depends on files that have changed: assets/bench/one.toml"
    record["shapes"]["model_sha256"] = "another"
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="one: made with other weights; draw it again: draw"):
        records.stamp("one")
    del record["shapes"]["model_sha256"]
    file.write_text(json.dumps(record))
    made[0] = again.Made("a", "taken", {"value": 0.6}, kept)  # inside the interval, yet not it
    records.stamp("one")
    with pytest.raises(ValueError, match="one: 1 of 1 numbers differ .a, taken.; draw it again"):
        records.stamp("one", keep=True)
    made.clear()
    (tmp_path / "one.json").unlink()
    with pytest.raises(ValueError, match="one: no number was made again"):
        records.stamp("one")
    assert not (tmp_path / "one.json").exists()


def test_where_the_values_of_a_record_are_known_without_being_kept_they_are_compared() -> None:
    low, high = again.Made("a", "psnr_db", {"value": 24.0}, torch.tensor([20.0, 22.0])).interval
    assert (low, high) == pytest.approx((21 - 12.706, 21 + 12.706), abs=1e-3)  # Student's
    now = torch.tensor([True] * 9 + [False])
    assert again.Made("a", "whole", {"value": 0.98}, now).holds  # inside the interval
    assert not again.Made("a", "whole", {"value": 1.0}, now).holds  # all are right
    assert not again.Made("a", "whole", {"value": 0.6, "n": 10}, now).holds  # all were made
    whole = again.Made("a", "whole", {"value": 0.9, "n": 10}, now)
    assert whole.holds and whole.is_whole
    assert not replace(whole, published={"value": 0.9, "n": 20}).is_whole  # half of them


def test_functions_that_run_are_reached_with_what_they_name() -> None:
    found, before = reached.Reached(), (sys.gettrace(), threading.gettrace())
    sys.settrace(outer := lambda *_: None)
    threading.settrace(outer)
    try:
        with reached.Reached():
            pass
        assert sys.gettrace() is outer and threading.gettrace() is outer
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
    with found:
        when = TaylorSeer(every=3).parts().when
        when.should_compute(when.init(), Step(3), None)
    names = {file: said.split()[1:] for file, said in found.definitions().items()}
    assert {"TaylorSeer", "TaylorSeer.parts"} <= set(names["diffcache/features/taylorseer.py"])
    assert "Every.should_compute" in names["diffcache/features/parts/when.py"]
    assert "diffcache/features/teacache.py" not in names


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_cells_of_tables_can_be_read(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    cells: list[str] = []
    for line in lines:
        cells += re.split(pages.BAR, re.sub(pages.LINK, r"\1", line)) if line[:1] == "|" else []
    cells = [cell.strip() for cell in cells]
    assert not [cell for cell in cells if len(cell.replace("\\|", "|")) > pages.LONGEST]


def test_a_commit_is_marked_where_the_code_is_changed_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=one", "-c", "user.email=one@example.org")
        subprocess.run(["git", *who, "-C", str(tmp_path), *words], check=True, capture_output=True)

    monkeypatch.setattr(record, "ROOT", tmp_path.resolve())
    assert record.commit() is None  # no checkout
    for name in ("eval/one.py", "assets/bench/one.json", "docs/one.md"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    clean = record.commit()
    assert clean is not None and re.fullmatch(r"[0-9a-f]{12}", clean)
    (tmp_path / "assets" / "bench" / "one.json").write_text("2\n")
    (tmp_path / "docs" / "two.md").write_text("2\n")
    assert record.commit() == clean
    (tmp_path / "eval" / "two.py").write_text("2\n")
    assert record.commit() == f"{clean}+"  # a new file is code as well
    (tmp_path / "eval" / "two.py").unlink()
    (tmp_path / "eval" / "one.py").write_text("2\n")
    assert record.commit() == f"{clean}+"
    monkeypatch.setattr(record, "ROOT", (tmp_path / "eval").resolve())
    assert record.commit() is None  # a package inside somebody else's checkout
