"""Mutate seeded lines of a folder one by one, and count the mutants that its tests notice.

    python tests/mutate.py diffcache/kv tests/kv --count 25 --seed 0

A mutant changes one operator, comparison, constant or returned value inside a function. The tests
run once on code that notes which test reaches which mutant; after that every mutant is run in a
process of its own, on the files of tests that reach it, until the first of them fails.
"""

import argparse
import ast
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Add,
    ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

# Of the code that notes what reaches a mutant; pytest names the running test in the environment.
PROBE = """
import os

seen = set()


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(os.environ["REACHED"], "a") as file:
            file.write(f"{number}\\t{test}\\n")
"""


@dataclass(frozen=True)
class Mutant:
    """One changed expression of one file.

    Args:
        path: File, relative to the root.
        line: Line of the expression.
        start: First byte of the expression in the file.
        stop: Byte after its last.
        before: Its source.
        after: The source that takes its place.
    """

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def put(self, tree: Path, text: str) -> None:
        """Write the file of a tree with other text for the expression."""
        source = (ROOT / self.path).read_bytes()
        target = tree / self.path
        target.write_bytes(source[: self.start] + text.encode() + source[self.stop :])
        os.utime(target, (time.time() + 1000, time.time() + 1000))  # no cached bytecode fits it

    def take_back(self, tree: Path) -> None:
        """Write the file of a tree as it is in the root."""
        shutil.copy2(ROOT / self.path, tree / self.path)


def changed(node: ast.AST) -> ast.AST | None:
    """Return what takes the place of an expression, or None if nothing does."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        return None if is_text else ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.Compare):
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        return ast.Constant(not value if isinstance(value, bool) else value + 1)
    return None


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Walk what a function computes: no annotations, defaults, messages or texts."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.ClassDef)):
        return
    if isinstance(node, ast.expr):
        yield node
    skipped = ("annotation", "returns", "decorator_list", "args")
    for name, value in ast.iter_fields(node):
        if name in skipped and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from expressions(child)


def pairs_of(function: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Find expressions of a function with what takes their places."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
            yield node.value, ast.Constant(None)
    for statement in function.body:  # type: ignore[attr-defined]
        for node in expressions(statement):
            other = changed(node)
            if other is not None:
                yield node, other


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant of a file."""
    source = path.read_bytes()
    starts = [0]
    for row in source.split(b"\n"):
        starts.append(starts[-1] + len(row) + 1)
    seen: set[tuple[int, int]] = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node, other in pairs_of(function):
            assert node.end_lineno is not None and node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            key = (start, stop) if not isinstance(other, ast.Constant) else (start, -stop)
            if key not in seen:
                seen.add(key)
                before, after = source[start:stop].decode(), f"({ast.unparse(other)})"
                relative = str(path.relative_to(ROOT))
                yield Mutant(relative, node.lineno, start, stop, before, after)


def left_out(folder: str, names: list[str]) -> set[str]:
    """Name what no test needs: caches, and at the root what was built or trained."""
    built = {".git", ".venv", "build", "dist", "runs"} if Path(folder) == ROOT else set()
    return {"__pycache__", *built} & set(names)


def draw(folders: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw lines of folders by seed, and one mutant of each."""
    rows: dict[tuple[str, int], list[Mutant]] = {}
    for folder in folders:
        path = ROOT / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for mutant in mutants_of(file):
                rows.setdefault((mutant.path, mutant.line), []).append(mutant)
    lots = random.Random(seed)
    return [lots.choice(rows[row]) for row in lots.sample(sorted(rows), min(count, len(rows)))]


class Reaching:
    """A pytest plugin: run the files that reach a mutant only, and what reaches it first."""

    def __init__(self, tests: set[str]) -> None:
        self.tests = tests
        self.files = {test.split("::")[0] for test in tests}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid.split("::")[0] in self.files]
        items.sort(key=lambda item: item.nodeid not in self.tests)


def run(tree: Path, tests: list[str], seconds: float, plugin: Any, log: Path, *more: str) -> int | None:
    """Run tests in a forked process; return its exit status, or None where time ran out."""
    process = os.fork()
    if not process:
        import pytest

        os.chdir(tree)
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            plugins = [plugin] if plugin else []
            status = pytest.main([*tests, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *more], plugins=plugins)
        os._exit(int(status))
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return None


def reached(tree: Path, mutants: list[Mutant], tests: list[str], log: Path) -> Path:
    """Run all tests and return a file that says which of them evaluate which mutated expression."""
    by_file: dict[str, list[tuple[int, Mutant]]] = {}
    for number, mutant in enumerate(mutants):
        by_file.setdefault(mutant.path, []).append((number, mutant))
    for path, group in by_file.items():
        source = (ROOT / path).read_bytes()
        edges = [(m.start, f"(__import__('probe').hit({n}) or (") for n, m in group]
        edges += [(m.stop, "))") for _, m in group]
        for place, text in sorted(edges, reverse=True):
            source = source[:place] + text.encode() + source[place:]
        (tree / path).write_bytes(source)
        os.utime(tree / path, (time.time() + 1000, time.time() + 1000))
    (tree / "probe.py").write_text(PROBE)
    notes = log.with_suffix(".reached")
    notes.write_text("")
    os.environ["REACHED"] = str(notes)
    run(tree, tests, 3600, None, log, "--durations=0", "--durations-min=0.02")
    for group in by_file.values():
        group[0][1].take_back(tree)
    return notes


def read(notes: Path, count: int) -> list[set[str]]:
    """Return the tests that reach each mutant, from the notes of a run."""
    found: list[set[str]] = [set() for _ in range(count)]
    for row in notes.read_text().splitlines():
        number, test = row.split("\t")
        if test:
            found[int(number)].add(test)
    return found


def killed_by(tree: Path, mutant: Mutant, tests: set[str], seconds: float, log: Path) -> tuple[str, str]:
    """Run the tests that reach a mutant; return what became of it and the test that noticed it."""
    if not tests:
        return "survived", "no test reaches it"
    mutant.put(tree, mutant.after)
    files = sorted({test.split("::")[0] for test in tests})
    files = [file for file in files if (tree / file).exists()]
    status = run(tree, files, seconds, Reaching(tests), log, "-x", "--timeout=60")
    mutant.take_back(tree)
    if status == 0:
        return "survived", f"{len(tests)} tests reach it"
    noticed = [row for row in log.read_text().splitlines() if row.startswith(("FAILED", "ERROR"))]
    if status is None and not noticed:
        return "survived", f"{seconds:.0f} s were not enough for {len(tests)} tests"
    return "killed", noticed[0].split()[1] if noticed else f"exit status {status}"


def main() -> None:
    """Draw mutants, run them, and print which were killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("code", help="folders or files to mutate, with commas")
    parser.add_argument("tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180, help="time limit of one mutant")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "mutate.log")
    asked = parser.parse_args()
    mutants = draw(asked.code.split(","), asked.count, asked.seed)
    import diffusers  # noqa: F401  (a forked process does not pay for these imports again)
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    words = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
        began = os.times().children_user
        tests_of = read(reached(tree, mutants, asked.tests, asked.log), len(mutants))
        print(f"one run of all tests: {os.times().children_user - began:.0f} CPU s")
        log = asked.log.with_suffix(".one")
        for number, (mutant, tests) in enumerate(zip(mutants, tests_of, strict=True)):
            word, why = killed_by(tree, mutant, tests, asked.seconds, log)
            words.append(word)
            place = f"{mutant.path}:{mutant.line}"
            print(f"{number} {word} {place} {mutant.before!r} -> {mutant.after!r}: {why}", flush=True)
    print(f"{words.count('killed')} of {len(words)} killed")


if __name__ == "__main__":
    main()
