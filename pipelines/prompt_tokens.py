"""Turn prompts, texts or token ids in any form, into lists of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from numbers import Integral
from typing import Any

from torch import Tensor

Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Tensor


def tokens_of(prompts: Prompts, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Return the tokens of each prompt.

    Args:
        prompts: A text, texts, or token ids of one sequence or several.
        tokenizer: Makes tokens of texts; None where there are no texts.
        vocabulary: Number of tokens that the model knows.

    Raises:
        ValueError: If there are no prompts, texts come without a tokenizer, are empty or have words that it does not
            know, or they are neither texts nor tokens of the model.
    """
    is_one = not getattr(prompts, "ndim", 1)  # a tensor of one number
    if is_one or isinstance(prompts, (Mapping, Set, bytes)) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts={prompts!r}: must be a text, texts or token ids; of what a tokenizer returns, give the input_ids"
        )
    if isinstance(prompts, Tensor):
        rows: Any = prompts.tolist()
    else:
        rows = [prompts] if isinstance(prompts, str) else list(prompts)
    if rows and not isinstance(rows[0], Iterable):
        rows = [rows]
    for row in rows:
        if isinstance(row, bytes) or not isinstance(row, Iterable) or not getattr(row, "ndim", 1):
            raise ValueError(f"prompts: hold {row!r} for a prompt; give each as a text, or a list of its tokens")
    if any(isinstance(row, str) for row in rows) and tokenizer is None:
        raise ValueError(f"prompts={rows[0]!r}: is text, and there is no tokenizer; give one, or token ids")
    rows = [_tokens(row, tokenizer) if isinstance(row, str) else row for row in rows]
    ids = [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]
    if not ids or not all(ids):
        raise ValueError("prompts: each must have at least one token; begin with a start token")
    for token in chain.from_iterable(ids):
        is_number = isinstance(token, Integral) and not isinstance(token, bool)
        if not is_number or not 0 <= token < vocabulary:
            raise ValueError(
                f"prompts: hold {token!r}, which is no token of the model; tokens are whole "
                f"numbers from 0 to {vocabulary - 1}"
            )
    return ids


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text."""
    if not text.strip():
        raise ValueError(f"prompts: hold the empty text {text!r}; ask something")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"prompts: hold half a character, in {text[:60]!r}; leave it out")
    ids: list[int] = tokenizer(text)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    usual = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "cls")]
    if unknown is not None and unknown in ids and unknown not in usual:
        raise ValueError(
            f"prompts: the tokenizer has no token for {ids.count(unknown)} of the words of "
            f"{text[:60]!r}; the model was made for prompts of another kind"
        )
    return ids
