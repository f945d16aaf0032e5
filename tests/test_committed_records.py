"""Every committed record says how it is made again: command, commit of clean code, seed, versions.

A training is made again by its command alone, which names the seed: its record goes with the
weights that it made and is not drawn again when the code moves on. Every other record that a part
can be made of again has a stamp that holds (`eval/workshop/records.py`).
"""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import diffcache
from diffcache.eval import record
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop import again, reached, records
from diffcache.features.taylorseer import TaylorSeer
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


def test_records_depend_on_no_code_that_changed_a_week_ago() -> None:
    stale = {name: records.why_stale(name) for name in records.names()}
    late = {name: why for name, why in stale.items() if why and records.is_late(name)}
    assert not late, f"{late}; run: make records"


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
    ("diffcache/features/taylorseer.py", "    order: int = 1", "    order: int = 2"): 1,
    ("diffcache/features/taylorseer.py", "Compute one step in", "Run one step in"): 0,
    ("kernels/forecast.py", "total = base + total", "total = base - total"): 1,
    ("kernels/forecast.py", "in plain PyTorch", "by torch"): 0,
    ("kernels/forecast.py", "total = gate * total", "total = gate * total  # of all"): 0,
    ("kernels/forecast.py", "def _sum_like(", "def _sum_as("): 0,  # only compiled models run it
}


def test_arithmetic_makes_a_record_stale_and_words_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_all_definitions_of_a_name_are_hashed_in_all_branches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "eval" / "one.py"
    file.parent.mkdir()
    lines = ["if A:", "    x = 1", "else:", "    x = 2", "try:", "    import b",
             "except ImportError:", "    b = 3", "else:", "    c = 4", "finally:", "    d = 5",
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
    forget()


def test_a_record_is_stamped_with_what_was_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.zeros(2)
    made = [again.Made("a", "psnr", {"value": 0.0}, value, value)]
    monkeypatch.setattr(records, "STAMPS", tmp_path)
    monkeypatch.setattr(records, "file_of", lambda name: tmp_path / "record.json")
    (tmp_path / "record.json").write_text('{"rows": [{"name": "a"}, {"name": "b"}]}')
    monkeypatch.setattr(records, "again_of", lambda name: lambda *_: iter(made))
    records.stamp("one")
    assert json.loads((tmp_path / "one.json").read_text())["not_made"] == ["b"]
    made.clear()
    (tmp_path / "one.json").unlink()
    with pytest.raises(ValueError, match="one: no number was made again"):
        records.stamp("one")
    assert not (tmp_path / "one.json").exists()


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


@pytest.mark.parametrize("page", ["figures.md", "models.md", "telling_power.md"])
def test_cells_of_generated_tables_can_be_read(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    cells = [re.sub(r"\]\([^)]*\)", "", cell.strip()) for line in lines if line.startswith("|")
             for cell in re.split(r"(?<!\\)\|", line)]  # fmt: skip
    assert len(cells) > 20
    assert not [cell for cell in cells if len(cell) > 80]


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
