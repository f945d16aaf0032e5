"""Exact match, against numbers worked out by hand."""

import json
import math

import pytest

from diffcache.eval.language.exact_match import (
    FLEXIBLE_EXTRACT,
    STRICT_MATCH,
    Normalise,
    accuracy,
    exact_match,
)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 2 + 3 = 5.\n#### 5", "5", "5"),
        ("#### 1,234", "1234", "1234"),
        ("it costs $18.", None, "18"),
        ("#### -7 and then 9", "-7", "9"),
        ("no number", None, None),
    ],
)
def test_the_two_conventions_of_gsm8k(text, strict, flexible):
    assert STRICT_MATCH.answer(text) == strict
    assert FLEXIBLE_EXTRACT.answer(text) == flexible


def test_exact_match_counts_and_normalises():
    outputs = ["a #### 5", "b #### 6", "c 7", "#### 1,000."]
    targets = ["x #### 5", "#### 7", "7", "1000"]
    strict = exact_match(outputs, targets)
    assert (strict.value, strict.n, strict.missing) == (0.5, 4, 1)
    assert exact_match(outputs, targets, FLEXIBLE_EXTRACT).value == 0.75
    assert exact_match([" Paris "], ["paris"], Normalise(lower=True)).value == 1
    assert exact_match([" Paris "], ["Paris"], Normalise(strip=False)).value == 0
    assert exact_match(["p: a, p: b"], ["b"], Normalise("p: (.)", "last"), Normalise()).value == 1


def test_wilson_interval_solves_its_own_equation():
    """Its ends are the shares p at which |observed - p| is 1.96 standard errors of p."""
    for right, n in ((3, 10), (50, 100), (1, 7)):
        result = accuracy(right, n)
        for end in (result.low, result.high):
            z = abs(right / n - end) / math.sqrt(end * (1 - end) / n)
            assert z == pytest.approx(1.959964, rel=1e-6)
        assert result.low < result.value < result.high
    nothing, all_right = accuracy(0, 5), accuracy(5, 5)
    assert nothing.low == 0 and all_right.high == 1
    assert nothing.high == pytest.approx(1 - all_right.low)
    assert accuracy(1, 1).stderr is None
    assert accuracy(3, 10).stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 9))
    json.dumps(accuracy(0, 1).to_dict(), allow_nan=False)


def test_exact_match_refuses_what_cannot_be_compared():
    with pytest.raises(ValueError, match="2 outputs for 1 targets"):
        exact_match(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="no answers to compare"):
        exact_match([], [])
    with pytest.raises(ValueError, match="outputs is one string"):
        exact_match("a", "a")
    with pytest.raises(ValueError, match=r"outputs\[1\]=None: must be a string"):
        exact_match(["#### 1", None], ["1", "2"])
    with pytest.raises(ValueError, match=r"targets\[0\]=' ' has no answer"):
        exact_match(["a"], [" "], Normalise())
    with pytest.raises(ValueError, match="does not compile"):
        Normalise("(")
    with pytest.raises(ValueError, match="match='all'"):
        Normalise(match="all")
