"""Every committed record says how it is made again: command, commit of clean code, seed, versions.

A training is made again by its command alone, which names the seed: its record goes with the
weights that it made and is not drawn again when the code moves on.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from diffcache.eval import record
from diffcache.eval.record import FOLDER, ROOT

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
    assert re.fullmatch(r"[0-9a-f]{12}", found["commit"])
    module = re.match(r"python -m (diffcache\.\S+)", found["command"])
    if module is not None:  # a command that moved cannot be run
        path = ROOT / Path(*module[1].split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


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
