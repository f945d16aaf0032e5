"""Let a model's loop over a list turn for a few of its blocks, where the others only pass on."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from diffcache.attach.reuse.stand_in import PassTap


def turns_of(model: nn.Module, skip: dict[str, list[Any]]) -> dict[str, list[Any]] | None:
    """Return the items of a skipped step that do more than pass streams on; None where all do.

    Lists whose loops may take a part of them keep all items, which tell how many ran.

    Args:
        model: The network.
        skip: List -> items of its blocks.
    """
    forward = inspect.unwrap(model.forward)
    whole = whole_loops(getattr(forward, "__code__", None))
    found = {
        key: [item for item in group if type(item) is not PassTap or item.spec.live]
        if key in whole
        else group
        for key, group in skip.items()
    }
    return None if found == skip else found


@lru_cache(maxsize=256)
def whole_loops(code: CodeType | None) -> frozenset[str]:
    """Return the lists that a forward reads in plain loops from end to end alone.

    Such a loop has as many turns as its list has blocks, whatever the values in a call: it is over
    the list itself or `enumerate` of it, without `break`, `continue` or `return`. Nothing else
    reads the list but `len`.
    """
    if code is None:
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # no source
        return frozenset()
    nodes = list(ast.walk(tree))
    reads = Counter(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 1]
    reads.subtract(ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) == "len")
    loops: Counter[str] = Counter()
    for loop in nodes:
        if isinstance(loop, ast.For):
            over = loop.iter
            if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate":
                over = over.args[0]
            inside = map(type, ast.walk(loop))
            if not {ast.Break, ast.Continue, ast.Return, ast.Yield}.intersection(inside):
                loops[ast.unparse(over)] += 1
    return frozenset(
        name.removeprefix("self.")
        for name, count in loops.items()
        if name.startswith("self.") and reads[name] == count
    )
