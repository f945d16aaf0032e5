"""The direction of imports, and what one file alone may do.

A part imports itself and what stands above it in LAYERS, and attach and features have no cycle.
`foreign.py` alone names private attributes of other libraries. What a call is given reaches a
method by its arguments, never by a context variable.
"""

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("diffcache", "kernels", "pipelines", "eval")
FILES = sorted(file for top in TOPS for file in (ROOT / top).rglob("*.py"))

LAYERS = [
    {"foreign"},
    {"kernels"},
    {"step", "anchor", "digest", "errors", "files", "psnr", "registry", "method", "presets", "ranges", "weights"},
    {"kv"},
    {"quant"},
    {"features", "video", "dllm"},
    {"attach"},
    {
        "__init__",
        "api",
        "catalog",
        "citation",
        "command",
        "memory",
        "offline",
        "run_report",
        "settings_file",
        "targets",
        "timeline",
    },
    {"pipelines"},
    {"eval"},
    {"cli", "__main__"},
    {"workshop"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
HEAVY = {"diffusers", "transformers"}
HEAVY_AT_THE_TOP = {"pipelines", "eval", "workshop"}
HEAVY_IN_FUNCTIONS = HEAVY_AT_THE_TOP | {"attach", "cli"}
TRANSFORMERS = ROOT / "diffcache" / "kv" / "hf"  # the one part of the core that knows them


def part_of(file: Path) -> str:
    """Name the part a file belongs to: the first name under `diffcache.`, or the workshop."""
    names = file.relative_to(ROOT).with_suffix("").parts
    if names[:2] == ("eval", "workshop"):
        return "workshop"
    return names[1] if names[0] == "diffcache" else names[0]


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted name, line, whether inside a function) of every import of a file."""
    tree = ast.parse(file.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
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
        target = "workshop" if rest.startswith("eval.workshop.") else rest.split(".")[0]
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


@pytest.mark.parametrize(
    ("part", "name", "in_function", "allowed"),
    [
        ("features", "diffcache.kernels.taylor", False, True),
        ("features", "diffcache.attach.tap", True, False),
        ("features", "diffcache.video.session", False, False),
        ("attach", "diffusers.FluxPipeline", True, True),
        ("attach", "diffusers.FluxPipeline", False, False),
        ("step", "triton.language", False, False),
        ("eval", "diffcache.eval.workshop.bench.kv", True, False),
    ],
)
def test_the_rules_fire(part: str, name: str, in_function: bool, allowed: bool) -> None:
    assert (complaint(part, name, in_function) is None) is allowed


ACYCLIC = ("attach", "features")


def module_of(file: Path) -> str:
    """Return the dotted name of a file of the library."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph(files: Iterable[Path]) -> dict[str, set[str]]:
    """Return module -> modules among the files that it imports, wherever in its text."""
    modules = {module_of(file): file for file in files}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, file in modules.items():
        for name, _, _ in imports(file):
            while name and name not in modules:  # `a.b.c` may be a name in module `a.b`
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of a graph, its first node once more at the end; empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_attach_and_features_import_in_no_circle() -> None:
    graph = import_graph(file for file in FILES if part_of(file) in ACYCLIC)
    assert sum(map(len, graph.values())) > len(graph) > 50  # it is not empty by mistake
    assert cycle_in(graph) == []


@pytest.mark.parametrize("file", [f for f in FILES if part_of(f) == "attach"], ids=module_of)
def test_attach_imports_nothing_for_types_alone(file: Path) -> None:
    assert "TYPE_CHECKING" not in file.read_text(), "a circle that only runtime does not see"


# (file, label) -> why it is no argument. None of them carries an input to a method.
CONTEXTS = {
    ("diffcache/step.py", "diffcache_call"): "the open call, which taps and layers deep in a "
    "model find and other threads do not",
    ("diffcache/attach/cache_context.py", "diffcache_said"): "what the user says around a call",
    ("diffcache/attach/cache_context.py", "diffcache_context"): "what the pipeline says around a call",
    ("diffcache/attach/runs.py", "diffcache_places"): "the run that a thread is in, between calls",
    ("diffcache/attach/runs.py", "diffcache_methods"): "what a request asks of runs that start",
    ("diffcache/attach/reuse/modulated_probe.py", "diffcache_peeking"): "whether a hook is to end the "
    "forward; a peek runs inside a call, on blocks that other threads may run",
    ("diffcache/command.py", "diffcache_debug"): "an option of the command line",
    (
        "pipelines/causal_video.py",
        "diffcache_video_session",
    ): "the session that calls the transformer, which others call at the same time",
}


def contexts_in(tree: ast.AST) -> Iterator[str]:
    """Yield the label of every context variable that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "ContextVar" in ast.unparse(node.func):
            yield str(ast.literal_eval(node.args[0]))


def test_context_variables_are_few() -> None:
    found = {
        (file.relative_to(ROOT).as_posix(), label)
        for file in FILES
        if part_of(file) != "kv"
        for label in contexts_in(ast.parse(file.read_text()))
    }
    assert found == set(CONTEXTS)


FOREIGN = ROOT / "diffcache" / "foreign.py"
CHECKED = [f for f in FILES if part_of(f) not in {"kv", "eval", "pipelines", "workshop"} and f != FOREIGN]
HANDED_ON = "diffusers sets it on a processor: the stand-in's property hands it on"
CALLED = "torch calls it on our layer"
HEARD = "diffusers' registry looks for it on our listener"
# (file, name) -> why it is there. Names that are ours stand here if another library has them too.
ALLOWED = {
    ("diffcache/attach/attention.py", "_attention_backend"): HANDED_ON,
    ("diffcache/attach/attention.py", "_parallel_config"): HANDED_ON,
    ("diffcache/attach/cache_context.py", "_is_stateful"): HEARD,
    ("diffcache/attach/cache_context.py", "_set_context"): HEARD,
    ("diffcache/quant/layer.py", "_save_to_state_dict"): CALLED,
    ("diffcache/quant/layer.py", "_load_from_state_dict"): CALLED,
    ("diffcache/attach/tap.py", "_getframe"): "Python's: who called a forward directly",
    ("diffcache/attach/tree.py", "_fields"): "Python's: tells named tuples, documented",
    ("diffcache/anchor.py", "_diffcache"): "our own mark on what is wrapped",
}
CUTS = {"endswith", "startswith", "removeprefix", "removesuffix"}  # take parts of names


def is_private(name: str) -> bool:
    """Return whether a name starts with one underscore."""
    return name.isidentifier() and name.startswith("_") and name[1:2] not in {"", "_"}


def texts(tree: ast.AST) -> list[ast.Constant]:
    """Return the texts in a piece of code."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node for node in nodes if isinstance(node.value, str)]


def is_own(node: ast.Attribute) -> bool:
    """Return whether an attribute is one of `self` or `cls`."""
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def defined(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
        elif (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__") or (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__"
        ):
            found |= {str(text.value) for text in texts(node)}
    return found


def members(tree: ast.AST) -> set[str]:
    """Return the names that the classes of a file define in their bodies."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = {n.name for body in bodies for n in body if isinstance(n, ast.FunctionDef)}
    values = [n for body in bodies for n in body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    stored = {n for v in values for n in ast.walk(v) if isinstance(n, ast.Name)}
    return functions | {n.id for n in stored if isinstance(n.ctx, ast.Store)}


def accesses(tree: ast.AST, own: bool) -> set[str]:
    """Return the private names that a file reads or writes on `self`, or on anything else.

    Any text that is such a name counts as one, since `getattr` and `__dict__[...]` take texts.
    """
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    found = {node.attr for node in attributes if is_own(node) == own}
    if not own:
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        cut = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in CUTS]
        skipped = {id(argument) for call in cut for argument in call.args}
        dotted = [str(text.value) for text in texts(tree) if id(text) not in skipped]
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                dotted += [alias.name for alias in node.names]
                dotted.append(getattr(node, "module", None) or "")
        found |= {part for name in dotted for part in name.split(".")}
    return set(filter(is_private, found))


def foreign_uses(trees: dict[str, ast.AST], foreign: ast.AST, shared: set[str]) -> set[tuple[str, str]]:
    """Return (file, name) of every private name of another library outside `foreign.py`.

    A name that no file defines is another library's. So is one that `foreign.py` has, and one of
    `shared`, whoever defines it; a class of ours with a member of that name uses it too.
    """
    ours = set[str]().union(*map(defined, trees.values()))
    named = (accesses(foreign, False) - defined(foreign)) | shared
    uses = set()
    for file, tree in trees.items():
        elsewhere = {n for n in accesses(tree, False) if n in named or n not in ours}
        found = elsewhere | (accesses(tree, True) - ours) | (members(tree) & named)
        uses |= {(file, name) for name in found}
    return uses


def test_one_file_names_what_is_private_to_other_libraries() -> None:
    trees = {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text()) for f in CHECKED}
    uses = foreign_uses(trees, ast.parse(FOREIGN.read_text()), {name for _, name in ALLOWED})
    assert uses - set(ALLOWED) == set(), "give it a function in foreign.py"
    assert set(ALLOWED) - uses == set(), "these are gone: take them off the list"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x._private", {"_private"}),
        ("getattr(x, '_private', None)", {"_private"}),
        ("from torch._dynamo import a", {"_dynamo"}),
        ("class A:\n    def f(self): self._inherited", {"_inherited"}),
        ("class A:\n    def __init__(self): self._own = 1\ndef f(a): a._own", set()),
        ("class A:\n    def __init__(self): self._modules = 1\ndef f(a): a._modules", {"_modules"}),
        ("class A:\n    def _modules(self): ...", {"_modules"}),
        ("name.endswith('_time') or x.__dict__ or _", set()),
    ],
)
def test_private_names_are_found(text: str, found: set[str]) -> None:
    uses = foreign_uses({"file": ast.parse(text)}, ast.parse("m._modules"), set())
    assert uses == {("file", name) for name in found}
