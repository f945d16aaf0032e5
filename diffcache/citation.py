"""Citation of the papers behind methods, recipes and policies."""

from __future__ import annotations

import re
from typing import Any

from diffcache.method import Method
from diffcache.registry import Kind, Row, find, unknown
from diffcache.targets import method_of

_KINDS: tuple[Kind, ...] = ("method", "dllm", "recipe", "video", "reuse")


def cite(target: Any) -> str:
    """Return the BibTeX entry of the paper of a method, a policy, or a recipe.

    Args:
        target: What was wrapped, a method, policy or recipe, its class, or its name; a recipe made
            of several has an entry for each.

    Raises:
        AttachError: If the target is none of these and is not wrapped.
        UnknownMethodError: If the registry has no such name.
        ValueError: If no paper describes it, such as your own combination.

    Examples:
        >>> print(diffcache.cite("taylorseer"))  # doctest: +SKIP
    """
    if isinstance(target, str):
        row = find(target, *_KINDS)
        if row is None:
            raise unknown(target, *_KINDS)
        return _of_row(row)
    method: Any = target if _is_one(target) else method_of(target)
    entry: str = getattr(method, "bibtex", "")
    if entry:
        return entry
    named = [find(word, "recipe") for word in re.findall(r"\w+", method.name)]
    made_of = [row for row in named if row is not None]
    if hasattr(method, "bibtex") or not made_of:
        raise ValueError(
            f"{method!r} has no paper of its own; cite those of the parts it is made of, such as "
            "diffcache.cite('taylorseer')"
        )
    return "\n".join(map(_of_row, made_of))


def _is_one(target: object) -> bool:
    """Return whether a target is a method, recipe or policy, or a class of them."""
    from diffcache.kv.recipe import Recipe  # here, so that `import diffcache` stays light
    from diffcache.video.policy import VideoPolicy

    known = (Method, Recipe, VideoPolicy)
    return isinstance(target, known) or (isinstance(target, type) and issubclass(target, known))


def _of_row(row: Row) -> str:
    """Return the entry that a class holds, or one under the name that the method goes by."""
    from diffcache.kv.recipes.by_name import reference

    made = row.load()
    if getattr(made, "bibtex", ""):
        return str(made.bibtex)
    match = re.match(r"(.*?),? arXiv ((\d\d)\d\d\.\d{5})", row.paper)
    if match is None:
        why = f": {reference(made).removeprefix('none; ')}" if row.kind == "recipe" else ""
        raise ValueError(f"{row.name!r} has no paper of its own{why}")
    title, number, year = match.groups()
    return "\n".join(
        [
            "% The title is the name the method goes by; its page has the full title and the authors.",
            f"@misc{{{row.name}20{year},",
            f"  title={{{title.strip(chr(34))}}},",
            f"  eprint={{{number}}},",
            "  archivePrefix={arXiv},",
            f"  url={{https://arxiv.org/abs/{number}}},",
            f"  year={{20{year}}}",
            "}",
        ]
    )
