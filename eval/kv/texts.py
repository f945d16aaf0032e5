"""Texts of the user's own, and a causal model with its tokenizer to read them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval.kv.recall_cost import SHIPPED
from diffcache.eval.kv.recipe_words import weights_digest
from diffcache.pipelines.fetched import PACKAGES, fetched
from diffcache.pipelines.shipped_models import present
from diffcache.pipelines.small.recall_llama import DIRECTORY

PYTHON = "pydoc_data.topics"
_UNKNOWN = 0.1  # most of the tokens that a tokenizer may not know


def read_texts(place: Path | None) -> list[str]:
    """Return the texts of a file or folder.

    Args:
        place: File with a text on each line, file that ends in .jsonl with `"text"` on each line,
            or folder of .txt files, each of which is one text. None for the reference of the
            language that every Python holds (`pydoc_data.topics`).

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If there are no texts in it, or a line cannot be read.
    """
    if place is None:
        from pydoc_data.topics import topics

        return list(topics.values())
    if place.is_dir():
        files = sorted(place.glob("*.txt"))
        texts = [file.read_text(encoding="utf-8") for file in files]
    elif not place.is_file():
        raise FileNotFoundError(
            f"--texts {place}: no such file; give a file with a text on each line, a .jsonl file "
            'with "text" on each line, or a folder of .txt files'
        )
    else:
        lines = place.read_text(encoding="utf-8").splitlines()
        texts = lines
        if place.suffix == ".jsonl":
            filled = enumerate(lines, 1)
            texts = [_text_of(line, f"{place}:{at}") for at, line in filled if line.strip()]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"--texts {place}: no texts in it; each line is one, or each .txt file")
    return texts


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"--texts {where}: no JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError(f'--texts {where}: must be an object with a string "text"')
    return str(found["text"])


@dataclass(frozen=True)
class TextModel:
    """A causal model of transformers with its tokenizer.

    Raises ValueError if there is no directory, shipped model or model ID of the name, and MissingError if the model
    has to be fetched first.
    """

    name: str  # directory, Hugging Face model ID, `recall-llama`, or a model that `diffcache fetch` installs
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.name in PACKAGES:
            fetched(self.name)
        known = self.name == SHIPPED or self.name in PACKAGES or (Path(self.name) / "config.json").is_file()
        if not known and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.name):
            raise ValueError(f"--model {self.name}: no directory with a config.json, and no model ID of Hugging Face")

    @property
    def place(self) -> str:
        """Name or path that transformers loads."""
        if self.name in PACKAGES:
            return str(fetched(self.name))
        return str(present(DIRECTORY)) if self.name == SHIPPED else self.name

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; raises MissingError if there is none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.place)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise MissingError(
                f"--model {self.name}: no tokenizer could be loaded ({_short(error)}); save one "
                "beside the model: tokenizer.save_pretrained(DIR)"
            ) from error

    def check_length(self, tokens: int, option: str, why: str = "at once") -> None:
        """Raise ValueError if the model takes fewer tokens than an option needs."""
        limit = getattr(self.config, "max_position_embeddings", None)
        if isinstance(limit, int) and tokens > limit:
            raise ValueError(
                f"{option}: {tokens} tokens {why}, and {self.name} takes {limit} "
                "(max_position_embeddings); ask for less"
            )

    def load(self) -> Any:
        """Return the model in the dtype that it was saved in; raises ValueError if it is no causal language model."""
        from transformers import AutoModelForCausalLM

        with self._telling("transformers loads no causal language model from there"):
            model = AutoModelForCausalLM.from_pretrained(self.place, dtype="auto")
        return model.to(self.device).eval()

    @cached_property
    def config(self) -> Any:
        """The configuration of the decoder."""
        from transformers import AutoConfig

        with self._telling("transformers reads no configuration there"):
            return AutoConfig.from_pretrained(self.place).get_text_config(decoder=True)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"--model {self.name}: {what} ({_short(error)})") from error

    @property
    def weights(self) -> str:
        """The digest of its weight files, see `weights_digest`."""
        if Path(self.place).is_dir():
            return weights_digest(Path(self.place))
        from transformers.utils import cached_file

        return weights_digest(Path(cached_file(self.place, "config.json")).parent)


@dataclass(frozen=True)
class TextWindows:
    """Windows of texts, tokenized."""

    ids: tuple[Tensor, ...]  # windows of equal length that do not overlap, each int64 [1, length]
    source: dict[str, Any] = field(default_factory=dict)  # facts about the texts, plain values for a record


def windows(
    model: TextModel, place: Path | None, length: int, most: int, least: int = 1, seed: int = 0
) -> TextWindows:
    """Return windows of `length` tokens of the user's texts, see `read_texts`.

    A long text gives several; each begins with the special tokens that the tokenizer puts first. At most `most`
    windows are drawn from all that there are, and `least` are needed.

    Raises:
        ValueError: If texts are too short or too few, or the tokenizer does not know their words, or windows are
            longer than the model takes.
    """
    model.check_length(length, "--context")
    texts, tokenizer = read_texts(place), model.tokenizer
    where = f"--texts {place}" if place else f"{PYTHON}, read without --texts"
    first = _first_tokens(tokenizer)
    found, longest, counts = [], 0, [0, 0]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        longest = max(longest, len(first) + len(ids))
        counts[0] += len(ids)
        counts[1] += ids.count(tokenizer.unk_token_id)
        room = length - len(first)
        for start in range(0, len(ids) - room + 1, room):
            found.append(torch.tensor([[*first, *ids[start : start + room]]]))
    if counts[1] > _UNKNOWN * counts[0]:
        raise ValueError(
            f"{where}: {counts[1] / counts[0]:.0%} of the tokens are unknown to the "
            f"tokenizer of {model.name}; give texts of its language"
        )
    if len(found) < least:
        raise ValueError(
            f"{where}: {len(found)} windows of {length} tokens, and {least} are needed; "
            f"the longest text has {longest}. Give longer texts (each line, or each .txt file of a "
            "folder, is one), or a shorter --context"
        )
    largest = max(int(ids.max()) for ids in found)
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"--model {model.name}: its tokenizer gives token {largest}, and the model knows "
            f"{model.config.vocab_size}: they do not belong together"
        )
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:most]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    name = PYTHON if place is None else place.name
    source = {"texts": name, "texts_digest": digest}
    chosen = tuple(found[number].to(model.device) for number in order.tolist())
    return TextWindows(chosen, source)


def _first_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return list(whole[:at])
    return []


def _short(error: BaseException) -> str:
    """Return the first sentence of an error of transformers."""
    return " ".join(str(error).split())[:160] or type(error).__name__
