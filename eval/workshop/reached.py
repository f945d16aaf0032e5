"""Definitions that a computation reaches, and a hash of them: the code that a record depends on.

A number depends on the functions that run while it is made, and on the classes and constants that
they name. All files that a runner imports are far more: every method is imported where one runs,
and a record would be stale after any commit. So the functions are noted while a part of a record
is made again, and each definition is hashed by its syntax tree without docstrings, comments,
annotations and layout: other words make no record stale, another sum does.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from diffcache.eval.record import CODE, ROOT

# Command lines, lists of names, reports, clocks and records: no value depends on them.
LEFT_OUT = (
    "diffcache/attach/provenance.py", "diffcache/catalog.py", "diffcache/cli.py",
    "diffcache/command.py", "diffcache/errors.py", "diffcache/files.py", "diffcache/registry.py",
    "diffcache/run_report.py", "diffcache/settings_file.py", "diffcache/timeline.py", "eval/commands.py",
    "eval/cost/", "eval/methods.py", "eval/pages.py", "eval/record.py", "eval/report/",
    "eval/workshop/again.py", "eval/workshop/parts.py",
    "eval/workshop/reached.py", "eval/workshop/records.py", "pipelines/demo/console.py",
)  # fmt: skip
_UNSAID = ("annotation", "returns", "type_comment", "type_params", "ctx", "kind")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Found = dict[str, str]  # file -> hash of its definitions, and their names


class Reached:
    """Functions of this tree that run while it is entered, in all threads."""

    def __init__(self) -> None:
        if not hasattr(CodeType, "co_qualname"):
            raise RuntimeError("code tells its qualified name from Python 3.11 on")
        self._ran: dict[int, Any] = {}  # a code's own hash reads all of it

    def __enter__(self) -> Reached:
        self._before = threading.gettrace(), sys.gettrace()
        threading.settrace(self._note)
        sys.settrace(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        of_threads, own = self._before
        threading.settrace(of_threads)
        sys.settrace(own)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        self._ran[id(frame.f_code)] = frame.f_code

    def definitions(self) -> Found:
        """Return the definitions that were reached, with those that they name."""
        found: set[tuple[str, str]] = set()
        for code in self._ran.values():
            file = _inside(code.co_filename)
            name = code.co_qualname.partition(".<")[0]
            if file is not None and name in tables(file)[0]:
                found.add((file, name))
        ahead = list(found)
        while ahead:
            file, name = ahead.pop()
            for other in _named(file, name):
                if other not in found:
                    found.add(other)
                    ahead.append(other)
        names: dict[str, list[str]] = {}
        for file, name in sorted(found):
            names.setdefault(file, []).append(name)
        return {file: f"{digest(file, own)} {' '.join(own)}" for file, own in names.items()}


def changed(found: Mapping[str, str]) -> list[str]:
    """Return the files whose definitions are no longer those that were reached."""
    return [file for file, said in found.items() if digest(file, said.split()[1:]) != said.split()[0]]


def digest(file: str, names: list[str]) -> str:
    """Return a short hash of definitions of a file; those that are not there count as such."""
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}={_hash(file, name)}\n".encode())
    return found.hexdigest()[:12]


@cache
def _hash(file: str, name: str) -> str:
    nodes = tables(file)[0].get(name)
    if nodes is None:
        return ""
    return hashlib.sha256("".join(map(said, nodes)).encode()).hexdigest()


def said(node: Any) -> str:
    """Return a syntax tree as text, the same in every version of Python and for every wording."""
    if isinstance(node, list):
        return f"[{','.join(map(said, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [one for one in value if not _is_text(one)]
            if isinstance(node, ast.ClassDef):  # its functions are definitions of their own
                value = [one for one in value if not isinstance(one, _FUNCTIONS)]
        if name not in _UNSAID and value is not None and value != []:
            parts.append(f"{name}={said(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def tables(file: str) -> tuple[dict[str, list[ast.AST]], dict[str, tuple[str, str]]]:
    """Return the definitions of a file by qualified name, and its imports from this tree.

    Args:
        file: File, relative to the project; one that is not there has neither.

    Returns:
        Name -> nodes of a function, class or constant, several where it is overloaded, has a
        setter, or stands in two branches; name -> file and name that it stands for,
        with an empty name for a whole module.
    """
    place = ROOT / file
    if not place.is_file():
        return {}, {}
    tree = ast.parse(place.read_text(encoding="utf-8"))
    known: dict[str, list[ast.AST]] = {}
    for name, node in _definitions(tree.body, ""):
        known.setdefault(name, []).append(node)
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                target = _target(node.module, alias.name)
                if target is not None:
                    imports[alias.asname or alias.name] = target
    return known, imports


def _definitions(body: list[ast.stmt], before: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, _FUNCTIONS):
            yield before + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield before + node.name, node
            yield from _definitions(node.body, f"{before}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)) and not before:
            yield from _definitions(_branches(node), before)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and not before:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        yield one.id, node


def _branches(node: ast.If | ast.Try) -> list[ast.stmt]:
    """Return the statements of all branches."""
    found = node.body + node.orelse
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            found = found + handler.body
        found = found + node.finalbody
    return found


def _target(module: str, name: str) -> tuple[str, str] | None:
    """Return file and name that an import stands for; None outside of this tree."""
    whole = _file(f"{module}.{name}")
    if whole is not None:
        return whole, ""
    file = _file(module)
    return None if file is None else (file, name)


@cache
def _file(module: str) -> str | None:
    place = ROOT / Path(*module.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if module.startswith("diffcache") and file.is_file():
            return _inside(str(file))
    return None


@cache
def _inside(filename: str) -> str | None:
    """Return a file relative to the project, None outside of its code and where it is left out."""
    if not filename.endswith(".py"):
        return None
    place = Path(filename).resolve()
    if not place.is_relative_to(ROOT):
        return None
    name = place.relative_to(ROOT).as_posix()
    return name if name.startswith(CODE) and not name.startswith(LEFT_OUT) else None


@cache
def _named(file: str, name: str) -> list[tuple[str, str]]:
    """Return the classes and constants that a definition names, and the class around it.

    Functions that a class or a constant calls count, too: they ran with an import, before any was
    noted.
    """
    nodes = list(chain.from_iterable(ast.walk(_outside(one)) for one in tables(file)[0][name]))
    called: set[tuple[str, str]] = set()
    if _is_no_function(file, name):
        called = {_place(node.func, file) for node in nodes if isinstance(node, ast.Call)}
    named = [*(_place(node, file) for node in nodes), (file, name.rpartition(".")[0])]
    known = (one for one in named if one[1] in tables(one[0])[0])
    return [one for one in known if one in called or _is_no_function(*one)]


def _place(node: ast.AST, file: str) -> tuple[str, str]:
    """Return file and name of what an expression of a file names; an empty name for nothing."""
    imports = tables(file)[1]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = imports.get(node.value.id)
        if module is not None and not module[1]:
            return module[0], node.attr
    return imports.get(node.id, (file, node.id)) if isinstance(node, ast.Name) else (file, "")


def _outside(node: ast.AST) -> ast.AST:
    """Return a class without its functions, and any other definition as it is."""
    if not isinstance(node, ast.ClassDef):
        return node
    body = [one for one in node.body if not isinstance(one, _FUNCTIONS)]
    return ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)


def _is_no_function(file: str, name: str) -> bool:
    nodes = tables(file)[0].get(name, [])
    return any(not isinstance(node, _FUNCTIONS) for node in nodes)
