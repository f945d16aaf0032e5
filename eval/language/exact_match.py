"""Exact match of generated answers: extraction, normalisation, accuracy with its interval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STRICT = r"#### (-?[0-9.,]+)"  # GSM8K: the number behind the four hashes
FLEXIBLE = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"  # GSM8K: any number in the text
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # what GSM8K's comparison leaves out

_NORMAL_95 = 1.959963984540054  # standard normal quantile at 0.975


@dataclass(frozen=True)
class Normalise:
    """How a text is turned into the answer that is compared.

    Applied in this order: extraction, removal of ignored patterns, lower case, strip.

    Args:
        extract: Regular expression of the answer; its first group that matched, or the whole
            match without groups. Empty: the whole text is the answer.
        match: Which of several matches is taken: `first` or `last`.
        ignore: Regular expressions whose matches are removed.
        lower: Whether case is ignored.
        strip: Whether white space at both ends is ignored.

    Raises:
        ValueError: If a pattern does not compile, or `match` is neither `first` nor `last`.
    """

    extract: str = ""
    match: str = "first"
    ignore: tuple[str, ...] = ()
    lower: bool = False
    strip: bool = True

    def __post_init__(self) -> None:
        for pattern in (self.extract, *self.ignore):
            try:
                re.compile(pattern)
            except re.error as failure:
                raise ValueError(f"pattern {pattern!r} does not compile: {failure}") from None
        if self.match not in ("first", "last"):
            raise ValueError(f"match={self.match!r}: must be 'first' or 'last'")

    def answer(self, text: str) -> str | None:
        """Return the answer in a text, None where the pattern is not found."""
        if self.extract:
            found = list(re.finditer(self.extract, text))
            if not found:
                return None
            chosen = found[0 if self.match == "first" else -1]
            text = next((group for group in chosen.groups() if group), chosen.group())
        for pattern in self.ignore:
            text = re.sub(pattern, "", text)
        text = text.lower() if self.lower else text
        return text.strip() if self.strip else text


# The two conventions of GSM8K in lm-evaluation-harness: `strict-match` and `flexible-extract`.
STRICT_MATCH = Normalise(STRICT, "first", IGNORED, lower=True)
FLEXIBLE_EXTRACT = Normalise(FLEXIBLE, "last", IGNORED, lower=True)


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers with its uncertainty.

    Attributes:
        value: Right answers over all, 0 to 1.
        low: Lower end of the 95 % Wilson score interval.
        high: Upper end.
        stderr: Standard error of the mean, `sqrt(p (1 - p) / (n - 1))` as lm-evaluation-harness
            reports it; None for one answer.
        n: Number of answers.
        missing: Answers in which the pattern was not found; they count as wrong.
    """

    value: float
    low: float
    high: float
    stderr: float | None
    n: int
    missing: int = 0

    def to_dict(self) -> dict[str, float | int | None]:
        """Return plain data for a record."""
        return dict(vars(self))


def exact_match(
    outputs: Sequence[str],
    targets: Sequence[str],
    normalise: Normalise = STRICT_MATCH,
    target: Normalise | None = None,
) -> Accuracy:
    """Return the share of outputs whose answer equals the target's.

    Args:
        outputs: Generated texts.
        targets: True answers, or texts that hold them.
        normalise: How an answer is read out of an output.
        target: How it is read out of a target; by default as out of an output, but the whole text
            where the pattern is not found (a bare number).

    Raises:
        ValueError: If the lists are empty or differ in length, if an item is no string, or if a
            target has no answer.
    """
    if len(outputs) != len(targets):
        raise ValueError(f"{len(outputs)} outputs for {len(targets)} targets: must be as many")
    _check_texts("outputs", outputs)
    _check_texts("targets", targets)
    truths = [_truth(number, text, normalise, target) for number, text in enumerate(targets)]
    answers = [normalise.answer(text) for text in outputs]
    right = sum(answer == truth for answer, truth in zip(answers, truths, strict=True))
    return accuracy(right, len(truths), missing=answers.count(None))


def _check_texts(name: str, texts: Sequence[Any]) -> None:
    """Raise unless every item is a string."""
    if isinstance(texts, str):
        raise ValueError(f"{name} is one string: pass a list of strings")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{number}]={text!r}: must be a string")


def _truth(number: int, text: str, normalise: Normalise, target: Normalise | None) -> str:
    """Return the answer in a target."""
    rule = target or normalise
    answer = rule.answer(text)
    if answer is None and target is None:
        bare = Normalise("", ignore=rule.ignore, lower=rule.lower, strip=rule.strip)
        answer = bare.answer(text)
    if not answer:
        raise ValueError(f"targets[{number}]={text!r} has no answer; its pattern: {rule.extract!r}")
    return answer


def accuracy(right: int, n: int, missing: int = 0) -> Accuracy:
    """Return a share with the 95 % score interval (Wilson 1927; no continuity correction).

    Args:
        right: Right answers.
        n: All answers, at least 1.
        missing: Answers that were not found.

    Raises:
        ValueError: If `n` is below 1 or `right` is not within 0 to `n`.
    """
    if n < 1:
        raise ValueError("no answers to compare; pass at least one output and target")
    if not 0 <= right <= n:
        raise ValueError(f"right={right}: must be from 0 to n={n}")
    share, square = right / n, _NORMAL_95**2
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == n else middle + half
    stderr = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None
    return Accuracy(share, low, high, stderr, n, missing)
