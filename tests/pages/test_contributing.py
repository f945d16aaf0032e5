"""Steps of CONTRIBUTING.md for something new, taken to the letter in a copy of the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks

PAGE = "CONTRIBUTING.md"
COPIED = ("diffcache", "docs", "eval", "kernels", "pipelines", "tests")
WRITERS = (
    "workshop.method_page",
    "workshop.video.page",
    "workshop.dllm.page",
    "workshop.kv.page",
    "metrics.definitions",
)
# File -> tests of the contract of what the page adds, and those that hold lists and pages to it.
TESTS = {
    "tests/test_contract.py": "alternate and FluxTransformer2DModel",
    "tests/test_families.py": "alternate and DiTPipeline or three_kinds",
    "tests/test_features.py": "repr_is_python and alternate or catalogue",
    "tests/test_face.py": "row",
    "tests/test_shipped_methods.py": "up_to_date or every_method",
    "tests/test_unchanged.py": "changes_nothing and UniDiffuserModel",
    "tests/video/test_policies.py": "latest or every_policy",
    "tests/dllm/test_invariants.py": "open or every_policy_has",
    "tests/kv/test_contract.py": "unlike_keys",
    "tests/kv/test_face.py": "there or unlike",
    "tests/weights/test_weights.py": "metric or page or says_what_each",
    "tests/kernels/test_operators.py": "halve or every_operator",
}
FOLDERS = ("# diffcache/", "# eval/", "# kernels/", "# tests/")


@pytest.mark.timeout(900)  # half a minute of a core of its own
def test_what_it_adds_keeps_every_contract(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    follow(tmp_path)
    run(tmp_path)


def copy_tree(place: Path) -> None:
    """Copy what the page changes, and what tests read; compiled files with it, which saves time."""
    for name in COPIED:
        shutil.copytree(ROOT / name, place / name, symlinks=True)
    (place / "assets").symlink_to(ROOT / "assets")
    for name in ("README.md", PAGE, "pyproject.toml"):
        shutil.copy2(ROOT / name, place)


def follow(place: Path) -> None:
    """Write the files and lines of the page."""
    for block in blocks(PAGE):
        if block.language == "python" and block.text.startswith(FOLDERS):
            head, _, text = block.text.partition("\n")
            name, _, at_its_end = head.removeprefix("# ").partition(", ")
            file = place / name
            assert file.exists() == bool(at_its_end)
            before = file.read_text() + "\n\n" if at_its_end else ""
            file.write_text(before + text)
        if block.language == "diff":
            for change in block.text.split("@@ ")[1:]:
                where, *added = change.splitlines()
                name, _, begin = where.partition(": ")
                insert(place / name, begin, [line.removeprefix("+") for line in added])


def insert(file: Path, begin: str, added: list[str]) -> None:
    """Put lines behind the one that begins so."""
    lines = file.read_text(encoding="utf-8").splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith(begin)]
    lines[at + 1 : at + 1] = added
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(place: Path) -> None:
    """Write the pages anew and run the tests, in one process."""
    chosen = " or ".join(f"{Path(file).name} and ({some})" for file, some in TESTS.items())
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "-k", chosen, *TESTS]
    program = f"""
import importlib, sys, pytest
for name in {WRITERS}:
    assert importlib.import_module("diffcache.eval." + name).main(["--write"]) == 0, name
sys.exit(pytest.main({words}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deselected" in done.stdout and "skipped" not in done.stdout
