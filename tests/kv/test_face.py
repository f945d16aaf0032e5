"""The face of `diffcache.kv`, the one catalogue, and settings that go together or not."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import diffcache
from diffcache import kv
from diffcache.cli import app
from diffcache.kv.codec.remat import Projections
from diffcache.registry import rows_of
from tests.kv import examples


def test_every_recipe_and_door_is_there_and_nothing_else() -> None:
    doors = {"Recipe", "make_recipe", "recipe_names", "ask", "cache_for", "caching", "detach"}
    doors |= {"static_cache_for", "load", "save", "Documents", "PrefixTree"}
    doors |= {"time_to_live", "rapid", "to_mla", "triforce"}
    doors |= {"choose", "Piece", "chunks_of", "cut", "joined", "lay_out", *rows_of("reuse")}
    assert set(dir(kv)) == set(kv.__all__) == doors | set(kv.recipe_names())
    for name in kv.__all__:
        assert getattr(kv, name) is not None
    for name, row in {**rows_of("recipe"), **rows_of("reuse")}.items():
        assert getattr(kv, name).__module__ == row.place.partition(":")[0]
    assert kv.cache_for is sys.modules["diffcache.kv.hf.cache"].cache_for
    with pytest.raises(AttributeError, match="'diffcache.kv' has no .* 'snapkw'; did you mean 'sn"):
        kv.snapkw  # noqa: B018


def test_type_checkers_see_every_module_of_recipes() -> None:
    source = open(kv.__file__, encoding="utf-8").read()  # noqa: SIM115
    for row in rows_of("recipe").values():
        assert f"    from {row.place.partition(':')[0]} import *" in source


@pytest.mark.parametrize("name", [*list(rows_of("method"))[::20], *kv.recipe_names()[::20]])
def test_dashes_and_underscores_mean_the_same(name: str) -> None:
    for other in (name.replace("-", "_"), name.replace("_", "-")):
        if name in rows_of("method"):
            assert diffcache.catalog.method_class(other).name == name
        else:
            assert kv.recipes.by_name.recipe_function(other).__name__ == name  # type: ignore[attr-defined]


def test_recipes_are_cited() -> None:
    assert "eprint={2404.14469}" in diffcache.cite("snapkv") and "2024" in diffcache.cite("snapkv")
    ours = {"random", "value_norm", "staircase", "probe_query"}
    for name in set(kv.recipe_names()) - ours:
        assert f"@misc{{{name}20" in diffcache.cite(name)
    both = kv.adakv(base=kv.keydiff(0.5)) | kv.kivi()
    assert diffcache.cite(both).count("@misc{") == 3


def test_the_command_line_lists_recipes_with_a_sentence() -> None:
    called = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "200"})
    listed = CliRunner().invoke(app, ["kv", "--list"], env={"COLUMNS": "200"})
    for name in kv.recipe_names():
        sentence = getattr(kv, name).__doc__.split("\n")[0]
        row = next(x for x in listed.output.splitlines() if x.split()[:1] == [name])
        assert sentence in row
        assert any(x.split()[:1] == [name] for x in called.output.splitlines())
    assert CliRunner().invoke(app, ["cite", "streaming-llm"]).output.count("2309.17453") == 2


TABLES: dict[str, Any] = {
    **examples.TABLES,
    "compresskv": {},
    "scalekv": {"scales": ((1, 1), (2, 2))},
    "rematerialised": {"projections": (Projections(torch.eye(8), torch.eye(8), 1),)},
    "xquant_latent": {"bases": examples.BASES},
}


def test_numbers_of_numpy_are_numbers() -> None:
    assert kv.snapkv(np.int64(64)) == kv.snapkv(64)
    assert kv.snapkv(np.float64(0.5), window=np.int32(8)) == kv.snapkv(0.5, window=8)
