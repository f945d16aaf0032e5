"""Coverage of caches in every class of transformers that generates text: `docs/kv_coverage.md`."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from diffcache.errors import AttachError
from diffcache.eval.pages import entries, keep_pages, rendered, table
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.kv import oracle
from diffcache.foreign import with_cache
from diffcache.kv import Recipe, kivi, snapkv, streaming_llm
from diffcache.kv.hf.cache import cache_for, detach
from tests.zoo.language import build, kinds

NEAR = 2e-4  # of the largest logit: float32 of models whose attention is peaked
GREEDY = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
Inputs = dict[str, Tensor]
Stock = dict[int, Any]  # rows -> what the model generates from `prompts` of so many without a cache of ours


@dataclass(frozen=True)
class Verdict:
    """Verdict on a cache in one model."""

    word: str  # `"exact"`, `"refused"`, `"wrong"` or `"crash"`
    why: str = ""  # message of the error, or number by which the cache is off


@dataclass(frozen=True)
class Row:
    """Verdicts on one class."""

    name: str
    verdicts: tuple[Verdict, ...] = ()  # verdict for each of `COLUMNS`; empty where nothing could be tried
    why: str = ""  # reason why nothing could be tried


def prompts(rows: int) -> Inputs:
    """Return text for a model of the zoo: one row, or two of which the second is padded."""
    ids = torch.randint(3, 120, (rows, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :7] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _generate(model: Any, inputs: Inputs, **more: Any) -> Any:
    return model.generate(**inputs, **GREEDY, **more)


def _compare(ours: Any, theirs: Any) -> Verdict:
    """Return whether two outputs have the same logits."""
    one, other = (torch.stack([x.float() for x in out.logits]) for out in (ours, theirs))
    if not bool(one.isfinite().all()):
        return Verdict("wrong", "logits are not finite")
    off = float((one - other).abs().max() / other.abs().max())
    if off < NEAR and torch.equal(ours.sequences, theirs.sequences):
        return Verdict("exact")
    return Verdict("wrong", f"logits differ by {off:.0e}")


def _keeps(recipe: Recipe, rows: int) -> Callable[[Any, Stock], Verdict]:
    """Compare a recipe that loses nothing with stock."""

    def look(model: Any, stock: Stock) -> Verdict:
        return _compare(_generate(model, prompts(rows), **with_cache(model, cache_for(model, recipe))), stock[rows])

    return look


def _drops(recipe: Recipe, rows: int) -> Callable[[Any, Stock], Verdict]:
    """Compare a recipe that drops slots with a full cache in which these are hidden."""

    def look(model: Any, stock: Stock) -> Verdict:
        inputs = prompts(rows)
        ours, cache, log = oracle.run(model, recipe, inputs, **GREEDY)
        if cache.store.layers[0].held >= cache.get_seq_length():
            return Verdict("wrong", "nothing was dropped")
        return _compare(ours, oracle.expected(model, cache, log, inputs, **GREEDY))

    return look


COLUMNS: dict[str, Callable[[Any, Stock], Verdict]] = {
    "keeps, one": _keeps(snapkv(1.0, window=4), 1),
    "keeps, padded": _keeps(snapkv(1.0, window=4), 2),
    "drops, one": _drops(snapkv(0.4, window=4), 1),
    "drops, padded": _drops(snapkv(0.4, window=4), 2),
    "unrotated": _keeps(streaming_llm(4096), 1),
    "coded": _keeps(kivi(2, group=8, residual=4096), 2),
}


def judge(model: Any, stock: Stock, look: Callable[[Any, Stock], Verdict]) -> Verdict:
    """Return how a cache did in a model, whatever came of it."""
    try:
        return look(model, stock)
    except AttachError as error:
        return Verdict("refused", str(error))
    except Exception as error:  # a crash is a finding
        return Verdict("crash", f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(AttachError):
            detach(model)


def row_of(name: str, kind: str) -> Row:
    """Return what caches do in one class."""
    try:
        with _quiet():
            model = build(name, kind)
    except Exception as error:
        return Row(name, why=f"no tiny model of it: {_line(error)}")
    with _quiet(), torch.no_grad():
        try:
            stock = {rows: _generate(model, prompts(rows)) for rows in (1, 2)}
            for rows in stock:
                full = DynamicCache(config=model.config)
                _generate(model, prompts(rows), **with_cache(model, full))
        except Exception as error:
            return Row(name, why=f"stock generate fails: {_line(error)}")
        return Row(name, tuple(judge(model, stock, look) for look in COLUMNS.values()))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


# the page --------------------------------------------------------------------------------------

PAGE = Path("docs/kv_coverage.md")


def page() -> str:
    """Return the whole page; it takes two minutes."""
    torch.set_num_threads(1)
    return text_of([row_of(name, kind) for kind, name in kinds()])


def text_of(rows: Sequence[Row]) -> str:
    """Return the page for what was found."""
    tried = [row for row in rows if row.verdicts]
    untried = [[row.name, _cell(row.why)] for row in rows if not row.verdicts]
    notes: dict[str, int] = {}
    judged = [[row.name, *_words(row, notes)] for row in tried]
    return rendered(
        "workshop/kv/coverage.md.jinja",
        version=transformers.__version__,
        tokens=prompts(1)["input_ids"].shape[1],
        near=NEAR,
        tried=len(tried),
        all=len(rows),
        judged="\n".join(table(["class", *COLUMNS], judged)),
        notes=notes,
        untried="\n".join(entries(["not tried", "why"], untried)),
    )


def _words(row: Row, notes: dict[str, int]) -> list[str]:
    """Return the cell of each verdict; what it says goes into the notes."""
    cells = []
    for verdict in row.verdicts:
        why = _note(verdict.why, row.name)
        number = f" {notes.setdefault(why, len(notes) + 1)}" if why else ""
        cells.append(verdict.word + number)
    return cells


def _note(why: str, name: str) -> str:
    """Return why something was refused, the same for all models it is said of."""
    why = re.sub(rf"\b{name}\b", "the model", why)
    why = re.sub(r"\b[A-Z]\w*Attention\b", "its attention", why)
    why = re.sub(r"\[[\d, ]+\]|T=\d+", "...", why)
    return _cell(why)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "").replace(">", "")


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
