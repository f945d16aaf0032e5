"""What caches do in every class of transformers that generates text: `docs/kv_coverage.md`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from diffcache.errors import AttachError
from diffcache.eval.kv import oracle
from diffcache.kv import Recipe, kivi, snapkv, streaming_llm
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.pipelines.zoo.language import build, kinds

NEAR = 2e-4  # of the largest logit: float32 of models whose attention is peaked
GREEDY = {
    "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True,
    "output_logits": True, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """How a cache did in one model.

    Attributes:
        word: `"bit"`, `"exact"`, `"runs"`, `"refused"`, `"wrong"` or `"crash"`.
        why: What was said, or by how much it is off.
    """

    word: str
    why: str = ""


@dataclass(frozen=True)
class Row:
    """What was found of one class.

    Attributes:
        name: Of the class.
        verdicts: One for each of `COLUMNS`; empty where nothing could be tried.
        why: Why nothing could be tried.
    """

    name: str
    verdicts: tuple[Verdict, ...] = ()
    why: str = ""


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
    one, other = (torch.stack([x.double() for x in out.logits]) for out in (ours, theirs))
    if not bool(one.isfinite().all()):
        return Verdict("wrong", "logits are not finite")
    off = float((one - other).abs().max() / other.abs().max())
    if off == 0:
        return Verdict("bit")
    return Verdict("exact") if off < NEAR else Verdict("wrong", f"logits differ by {off:.0e}")


def _keeps(recipe: Recipe, rows: int) -> Callable[[Any], Verdict]:
    """Compare a recipe that loses nothing with stock."""

    def look(model: Any) -> Verdict:
        inputs = prompts(rows)
        ours = _generate(model, inputs, past_key_values=cache_for(model, recipe))
        detach(model)
        return _compare(ours, _generate(model, inputs))

    return look


def _drops(recipe: Recipe, rows: int) -> Callable[[Any], Verdict]:
    """Compare a recipe that drops slots with a full cache in which these are hidden."""

    def look(model: Any) -> Verdict:
        inputs = prompts(rows)
        ours, cache, log = oracle.run(model, recipe, inputs, **GREEDY)
        if cache.store.layers[0].held >= cache.get_seq_length():
            return Verdict("wrong", "nothing was dropped")
        return _compare(ours, oracle.expected(model, cache, log, inputs, **GREEDY))

    return look


COLUMNS: dict[str, Callable[[Any], Verdict]] = {
    "keeps all": _keeps(snapkv(1.0, window=4), 1),
    "padded": _keeps(snapkv(1.0, window=4), 2),
    "drops": _drops(snapkv(0.4, window=4), 1),
    "drops, padded": _drops(snapkv(0.4, window=4), 2),
    "unrotated": _keeps(streaming_llm(4096), 1),
    "coded": _keeps(kivi(2, group=8, residual=4096), 2),
}


def judge(model: Any, look: Callable[[Any], Verdict]) -> Verdict:
    """Return how a cache did in a model, whatever came of it."""
    try:
        return look(model)
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
            for rows in (1, 2):
                _generate(model, prompts(rows))
                full = DynamicCache(config=model.config)
                _generate(model, prompts(rows), past_key_values=full)
        except Exception as error:
            return Row(name, why=f"stock generate fails: {_line(error)}")
        return Row(name, tuple(judge(model, look) for look in COLUMNS.values()))


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    import time

    want = sys.argv[1:]
    for kind, name in kinds():
        if want and name not in want and kind not in want:
            continue
        t = time.process_time()
        row = row_of(name, kind)
        print(
            name, " ".join(v.word for v in row.verdicts), row.why, f"{time.process_time() - t:.1f}s"
        )
        for w in sorted({(v.word, v.why[:400]) for v in row.verdicts if v.why}):
            print("     ", *w, flush=True)
