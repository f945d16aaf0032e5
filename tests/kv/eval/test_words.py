"""Recipes in one word, the tables they name, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffcache.errors import TablesError
from diffcache.eval.kv import tables, words
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes import catalog, merging
from diffcache.kv.recipes.eviction import adakv, keydiff, snapkv
from diffcache.kv.recipes.streaming import streaming_llm
from diffcache.kv.score.learned import RetainingHeads


def test_words_are_recipes() -> None:
    assert words.parse_recipe("none") == Recipe()
    assert words.parse_recipe("snapkv:budget=0.25,window=8") == snapkv(0.25, window=8)
    assert words.parse_recipe(" streaming-llm:budget=64 ") == streaming_llm(64)
    assert words.parse_recipe("none|keydiff:budget=7") == keydiff(7)
    based = words.parse_recipe("adakv:floor=0.1,base='snapkv:budget=0.5,window=8'")
    assert based == adakv(floor=0.1, base=snapkv(0.5, window=8))


def test_recipes_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"half": Recipe("half", layout="padded"), "pre": Recipe("pre", space="pre")}
    monkeypatch.setattr(catalog, "make_recipe", lambda name, **settings: parts[name])
    assert words.parse_recipe("half|pre") == parts["half"] | parts["pre"]


def test_a_table_is_read_by_the_name_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    heads = torch.tensor([[True, False], [False, True]])
    tables.write_table(tmp_path / "two.safetensors", {"heads": heads}, {"kind": "table"})
    expected = ((True, False), (False, True))
    assert tables.read_table("@two", "heads") == expected
    assert tables.read_table("@two#heads", "other") == expected
    assert tables.read_table(f"@{tmp_path}/two.safetensors", "heads") == expected
    with pytest.raises(TablesError, match="two.safetensors has heads"):
        tables.read_table("@two", "weights")
    with pytest.raises(TablesError, match=r"are: two; `diffcache kv calibrate .*another model"):
        words.parse_recipe("snapkv:budget=@three")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(TablesError, match="is no file of tables"):
        tables.read_table("@bad", "heads")


def test_weights_come_back_as_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    heads = RetainingHeads(torch.randn(2, 6, 4), torch.randn(2, 4, 2))
    tables.write_table(tmp_path / "locret.safetensors", vars(heads), {"kind": "RetainingHeads"})
    found = words.parse_recipe("locret:budget=0.5,heads=@locret,stabilizers=2").score
    wanted = merging.locret(heads, 0.5, stabilizers=2).score
    assert torch.equal(found.heads.first, wanted.heads.first)  # type: ignore[union-attr]
    bases = [Bases(*(torch.randn(4, 2).half().float() for _ in range(4))) for _ in range(3)]
    given = tables.basis_tensors("2", bases) | tables.basis_tensors("1", bases[:1])
    tables.write_table(tmp_path / "bases.safetensors", given, {"kind": "Bases"})
    back = tables.read_table("@bases#2", "bases")
    assert len(back) == 3 and torch.equal(back[2].value_up, bases[2].value_up)
    with pytest.raises(TablesError, match="bases.safetensors has 1, 2; say #entry"):
        tables.read_table("@bases", "bases")
