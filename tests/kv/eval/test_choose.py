"""The recipe that keeps most within the memory is chosen by one half and told by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffcache import cli, kv
from diffcache.eval.kv.choose import candidates, choose, pick
from diffcache.eval.kv.words import parse_recipe
from diffcache.kv.recipes.eviction import snapkv


def row(held: float, answers: str, nats: list[float], **changes: Any) -> dict[str, Any]:
    """Return a row of one question a window."""
    return {
        "share": held,
        "share_16": None,
        "able": ["needle"],
        "hits": {"needle": [*answers]},
        "nats": nats,
        **changes,
    }


FLAT = [2.0] * 6
ROWS = {
    "none": row(1.0, "111111", FLAT),
    "first": row(0.5, "111011", FLAT),  # wrong in a window that is held out
    "second": row(0.5, "111111", [2.1] * 6),
    "third": row(0.4, "110111", FLAT),  # wrong in a window that decides
    "all": row(0.9, "111111", FLAT),
}


def test_of_those_that_fit_the_most_answers_and_then_perplexity_decide() -> None:
    made = pick(ROWS, 0.5)
    assert made.word == "first"  # as many answers as the second where it is chosen, less perplexity
    assert [one.word for one in made.tried] == ["first", "second", "third", "all"]
    first, second, third, everything = made.tried
    assert (first.chosen_by.change.value, first.held_out.change.value) == (0, pytest.approx(-1 / 3))
    assert first.held_out.ratio.value == 1 and second.held_out.ratio.value > 1.1
    assert third.chosen_by.change.value == pytest.approx(-1 / 3) and not everything.fits
    assert made.best.word == "third"  # on what was held out, which the choice does not see
    assert pick(ROWS, 0.45).word == "third" and pick(ROWS, 1.0).word == "first"


def test_without_questions_perplexity_decides() -> None:
    bare = {"able": [], "hits": {}}
    rows = {
        "none": row(1, "", FLAT, **bare),
        "a": row(0.5, "", [2.2] * 6, **bare),
        "b": row(0.5, "", [2.1] * 6, **bare),
    }
    made = pick(rows, 0.5)
    assert made.word == "b" and made.tried[0].held_out.change is None


def test_what_is_tried_fits_by_its_own_words() -> None:
    for memory in (0.25, 0.5):
        for word in candidates(memory):
            parse_recipe(word)
    assert "snapkv:budget=0.47" in candidates(0.5)


@pytest.mark.parametrize(
    ("given", "said"), [({"memory": 0.0}, "memory=0.0: must be a share"), ({"samples": 3}, "samples=3: must be at")]
)
def test_wrong_settings_are_refused(reader: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(reader, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'memroy'"):
        kv.choose(reader, memroy=0.5)


def test_a_choice_on_texts_of_ones_own_is_a_recipe(reader: Path, texts: Path, tmp_path: Path) -> None:
    given = {"recipes": ["snapkv:budget=0.4", "keydiff:budget=0.9"], "context": 48, "samples": 4}
    out = tmp_path / "record.json"
    made = kv.choose(reader, texts, 0.6, out=out, **given)
    assert made.word == "snapkv:budget=0.4" and made.recipe == snapkv(0.4)
    assert [one.fits for one in made.tried] == [True, False] and made.best is made.tried[0]
    found = CliRunner().invoke(cli.app, [
        "kv", "choose", "--model", str(reader), "--texts", str(texts), "--memory", "0.6",
        "--context", "48", "--samples", "4", "--recipe", "snapkv:budget=0.4",
        "--recipe", "keydiff:budget=0.9", "--out", str(out),
    ])  # fmt: skip
    said = " ".join(found.output.split())
    assert found.exit_code == 0 and "held out" in said
    assert "snapkv:budget=0.4 keeps most within 60% of the memory" in said
