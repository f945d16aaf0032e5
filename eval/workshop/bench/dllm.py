"""Caches of diffusion language models: right answers, rows and seconds, on the shipped models.

Every row decodes the same prompts, one token a step where no threshold is named. The row without a
cache that has the same threshold shows what parallel decoding brings; a cache is judged against the
uncached row that decodes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcache.eval.record import Setting
from diffcache.eval.workshop.dllm.measure import BATCH, measure_model
from diffcache.eval.workshop.dllm.replay import replay
from diffcache.eval.workshop.dllm.rows import Row, rows
from diffcache.eval.workshop.parts import Parts, digest_of
from diffcache.eval.workshop.small.chain_llada import BLOCKS, CAUSAL, load

MODELS = tuple(BLOCKS)
SAMPLES, REPLAYED = 400, 4
FEWER = {"chain-llada": 128}  # its answers are 128 tokens and take ten times as long


def measure(
    setting: Setting,
    *,
    model: str = MODELS[0],
    rounds: int = 16,
    samples: int | None = None,
    named: Sequence[str] | None = None,
    unfinished: Path | None = None,
) -> dict[str, Any]:
    """Measure all rows on a shipped model, and their errors on one trajectory.

    Args:
        setting: Device and dtype.
        model: Name of the model, in `MODELS`.
        rounds: Timed prompts of every row.
        samples: Prompts whose answers are judged; None for 400, of chain-llada 128.
        named: Names of rows, besides those that they are compared with; None for all.
        unfinished: File that keeps judged rows as they come, until all is done.

    Raises:
        ValueError: If the model or a row is unknown.
    """
    if model not in MODELS:
        raise ValueError(f"no model {model!r}; there are {', '.join(MODELS)}")
    samples = samples or FEWER.get(model, SAMPLES)
    chosen = _chosen(model, named)
    kept = Parts(
        unfinished, {"samples": samples, "dtype": str(setting.dtype), "model": digest_of(load(model, setting.dtype))}
    )
    found = measure_model(model, chosen, setting, samples=samples, rounds=rounds, kept=kept)
    return {
        "shapes": {"model": model, "samples": samples, "batch": BATCH, "block": BLOCKS[model]},
        "rounds": rounds,
        "rows": found,
        "replay": {} if model in CAUSAL else replay(model, chosen, setting, min(samples, REPLAYED), kept),
        "parts": kept.end(),
    }


def _chosen(model: str, named: Sequence[str] | None) -> list[Row]:
    """Return the named rows of a model, with those that they are compared with.

    Raises:
        ValueError: If a name is unknown.
    """
    known = {row.name: row for row in rows(model)}
    if named is None:
        return list(known.values())
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    wanted = {"uncached", *named, *(known[name].against for name in named)}
    return [row for name, row in known.items() if name in wanted]
