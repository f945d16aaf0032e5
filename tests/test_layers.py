"""The direction of imports: a part imports itself and what stands above it in LAYERS."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("diffcache", "kernels", "pipelines", "eval")
FILES = sorted(file for top in TOPS for file in (ROOT / top).rglob("*.py"))

LAYERS = [
    {"kernels"},
    {"step", "digest", "errors", "names"},
    {"kv"},
    {"quant"},
    {"features", "video", "dllm"},
    {"attach"},
    {"__init__", "api", "catalog", "cite", "command", "memory", "offline", "report", "timeline"}
    | {"testing"},
    {"pipelines"},
    {"eval"},
    {"cli", "__main__"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
HEAVY = {"diffusers", "transformers"}
HEAVY_AT_THE_TOP = {"pipelines", "eval"}
HEAVY_IN_FUNCTIONS = HEAVY_AT_THE_TOP | {"attach", "cli"}
TRANSFORMERS = ROOT / "diffcache" / "kv" / "hf"  # the one part of the core that knows them


def part_of(file: Path) -> str:
    """Name the part a file belongs to: the first name under `diffcache.`."""
    names = file.relative_to(ROOT).with_suffix("").parts
    return names[1] if names[0] == "diffcache" else names[0]


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted name, line, whether inside a function) of every import of a file."""
    tree = ast.parse(file.read_text())
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno, id(node) in inner) for name in names)


def complaint(part: str, name: str, in_function: bool) -> str | None:
    """Say what is wrong with `part` importing `name`, or return None."""
    package, _, rest = name.partition(".")
    if package == "diffcache":
        target = rest.split(".")[0]
        target = target if target in RANK else "__init__"
        folders = {part, target} & {"features", "quant", "video", "dllm"}
        if RANK[target] > RANK[part] or (RANK[target] == RANK[part] and folders and target != part):
            return f"{part} must not import {target}"
    if package == "triton" and part != "kernels":
        return "only kernels imports triton"
    if package in HEAVY and part not in (HEAVY_IN_FUNCTIONS if in_function else HEAVY_AT_THE_TOP):
        return f"{part} must not import {package} {'at all' if in_function else 'at the top'}"
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file_keeps_to_its_layer(file: Path) -> None:
    part = part_of(file)
    assert part in RANK, f"give {part!r} a place in LAYERS"
    found = [
        (line, complaint(part, name, inner))
        for name, line, inner in imports(file)
        if TRANSFORMERS not in file.parents or name.partition(".")[0] != "transformers"
    ]
    assert not [f"{file}:{line}: {text}" for line, text in found if text]
    length = len(file.read_text().splitlines())
    assert length <= 400


@pytest.mark.parametrize(
    ("part", "name", "in_function", "allowed"),
    [
        ("features", "diffcache.kernels.taylor", False, True),
        ("features", "diffcache.attach.tap", True, False),
        ("features", "diffcache.video.session", False, False),
        ("features", "diffcache.offline.calibrate", True, False),
        ("api", "diffcache.report.Report", False, True),
        ("attach", "diffcache.wrap", False, False),
        ("attach", "diffusers.FluxPipeline", True, True),
        ("attach", "diffusers.FluxPipeline", False, False),
        ("features", "transformers", True, False),
        ("step", "triton.language", False, False),
    ],
)
def test_the_rules_fire(part: str, name: str, in_function: bool, allowed: bool) -> None:
    assert (complaint(part, name, in_function) is None) is allowed
