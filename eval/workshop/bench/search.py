"""Compare the choices of `diffcache tune` on sticker-flux with every single method.

The search sees sentences of its own; all are judged on held-out ones, with other noise. A single
method has its defaults but for one setting, its interval, threshold, count or window, which takes
the dearest value that computes no more than the search may. Its tables are calibrated on sentences
of the search. All single methods draw the first sentences, and the best few of them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import diffcache
from diffcache.errors import DiffcacheError
from diffcache.eval.record import ROOT, Setting
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small import sticker_flux
from diffcache.features.base import Method
from diffcache.features.combine import Combine
from diffcache.features.fitted import Weighted
from diffcache.features.parts.when import Listed
from diffcache.offline.tune.trial import Trial, Trials, mean_interval
from diffcache.registry import rows_of

STEPS, BATCH, SEARCHED = 28, 4, 24
LOOK, KEPT = 3, 5  # batches of every single method; methods that draw all
SEED = 1000  # of the noise that all are judged with; the search takes its own
KNOBS: dict[str, Sequence[Any]] = {  # values from the dearest on
    "every": range(2, STEPS),
    "threshold": [round(1.5 * 0.75**k, 3) for k in range(15, -1, -1)],
    "computed": range(STEPS - 1, 1, -1),
    "window": (1.25, 1.5, 2, 3, 4, 5, 7, 9, 12),
}


def singles() -> dict[str, tuple[type[Any], str]]:
    """Return methods that compute fewer steps by one setting, and that setting, by name.

    Methods whose tables are made for a schedule of their own, by training or for edits are no
    single settings and are left out, as are those without such a setting.
    """
    found = {}
    for name, row in rows_of("method").items():
        if name in ("bac", "profilingdit", "cachequant", "ertacache", "harmonica", "regione"):
            continue
        method: type[Any] = row.load()
        settings = [one.name for one in fields(method)]
        if knob := next((knob for knob in KNOBS if knob in settings), None):
            found[name] = method, knob
    return found


def is_calibrated(kind: type[Any]) -> bool:
    """Return whether a method has tables that are measured on the model."""
    return "tables" in [one.name for one in fields(kind)]


def cheap_enough(base: Any, knob: str, cost: float, bench: Trials) -> Method | None:
    """Return a method with the dearest value of a setting that costs no more, None without one."""
    values, low = KNOBS[knob], 0
    high, found = len(values) - 1, None
    while low <= high:
        middle = (low + high) // 2
        try:
            method = replace(base, **{knob: values[middle]})
            found_cost = bench.measure(method, [0]).cost
        except (DiffcacheError, ValueError):  # such as more points than fit into a run
            found_cost = float("inf")
        if found_cost <= cost * 1.0001:
            found, high = method, middle - 1
        else:
            low = middle + 1
    return found


def sentences(name: str) -> list[str]:
    """Return the sentences of a file of the shipped prompts."""
    return (ROOT / "assets" / "prompts" / name).read_text("utf-8").splitlines()


def measure(
    setting: Setting,
    *,
    samples: int = 48,
    factors: Sequence[int] = (3, 4, 6),
    trials: int = 30,
    unfinished: Path | None = None,
) -> dict[str, Any]:
    """Search at every factor, and measure the choice and all single methods on held-out sentences.

    `samples` is the number of held-out sentences, a multiple of 4; the FLOPs must fall by each factor; a search takes
    at most `trials` trials, each on all of its sentences.
    """
    pipe = sticker_flux.load(dtype=setting.dtype).to(setting.device)
    call = {**sticker_flux.CALL, "num_inference_steps": STEPS}
    mine = sentences("stickers-calibration.txt")
    held = Trials(pipe, batches_of(samples), SEED, call)
    first = Trials(pipe, [mine[:1]], 0, call)
    whole = list(range(len(held.batches)))
    digest = directory_sha256(sticker_flux.DIRECTORY)
    kept = Parts(unfinished, {"samples": samples, "trials": trials, "model": digest})
    rows: list[dict[str, Any]] = []
    chosen = singles()

    def told(name: str, method: Method, found: Trial) -> dict[str, Any]:
        return {"name": name, "method": repr(method), "cost": found.cost, "each": found.each}

    def searched(factor: int) -> dict[str, Any]:
        method = diffcache.tune(
            pipe, mine[:SEARCHED], speedup=factor, trials=trials, steps=STEPS, batch_size=BATCH, **sticker_flux.CALL
        )
        return told("tuned", method.method, held.measure(method.method, whole))

    @cache
    def calibrated(name: str) -> Any:
        about: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, **sticker_flux.CALL}
        return diffcache.calibrate(pipe, chosen[name][0](), mine[:8], **about)

    def single(name: str, cost: float, batches: Sequence[int]) -> dict[str, Any]:
        kind, knob = chosen[name]
        base = calibrated(name) if is_calibrated(kind) else kind()
        method = cheap_enough(base, knob, cost, first)
        if method is None:
            return {"name": name, "method": f"no {knob} is cheap enough"}
        row = told(name, method, held.measure(method, batches))
        return {**row, "settings": {knob: getattr(method, knob)}}

    for number, factor in enumerate(factors):
        found: dict[str, dict[str, Any]] = {}
        for place, name in enumerate(chosen):
            setting.progress(number * len(chosen) + place, len(chosen) * len(factors), name)
            make = partial(single, name, 1 / factor, whole[:LOOK])
            found[name] = kept.take(f"{factor} {name}", make)
        measured = [name for name in found if "each" in found[name]]
        for name in sorted(measured, key=lambda name: -mean(found[name]["each"]))[:KEPT]:
            make = partial(single, name, 1 / factor, whole)
            found[name] = kept.take(f"{factor} {name}, all", make)
        found = {"tuned": kept.take(f"{factor} tuned", partial(searched, factor)), **found}
        rows += [{**row, "factor": factor} for row in found.values()]
    return {
        "shapes": {
            "device": setting.device.type,
            "model": "sticker-flux",
            "samples": samples,
            "steps": STEPS,
            "searched": SEARCHED,
            "trials": trials,
            "model_sha256": digest,
        },
        "rounds": 1,
        "seed": SEED,
        "rows": compared(rows),
        "parts": kept.end(),
    }


def again(
    record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]
) -> Iterator[tuple[Mapping[str, Any], list[float]]]:
    """Draw some held-out batches again with the methods of rows, but those that `is_made` refuses.

    Yields a row, and the PSNR in dB of every sample of the batches.
    """
    call = {**sticker_flux.CALL, "num_inference_steps": STEPS}
    held = Trials(sticker_flux.load(), batches_of(record["shapes"]["samples"]), SEED, call)
    kinds = [Combine, Listed, Weighted, *(row.load() for row in rows_of("method").values())]
    classes = {kind.__name__: kind for kind in kinds}
    for row in filter(is_made, rows):
        method = eval(row["method"], classes)  # as `repr` wrote it
        yield row, list(held.measure(method, numbers).each)


def is_made(row: Mapping[str, Any]) -> bool:
    """Say whether a row's method drew all samples and needs no tables, so that it can again."""
    return len(row.get("each", ())) > LOOK * BATCH and "<Tables" not in row["method"]


def batches_of(samples: int) -> list[list[str]]:
    """Return the held-out sentences in batches."""
    texts = sentences("stickers.txt")[:samples]
    return [texts[at : at + BATCH] for at in range(0, samples, BATCH)]


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with their mean PSNR, and the advantage of the search's choice over each in pairs."""
    tuned = {row["factor"]: torch.tensor(row["each"]) for row in rows if row["name"] == "tuned"}
    found = []
    for row in rows:
        if "each" in row:
            each = torch.tensor(row["each"])
            more = mean_interval(tuned[row["factor"]][: len(each)] - each)
            row = {**row, "psnr_db": _interval(mean_interval(each)), "tuned_more": _interval(more)}
            row["each"] = [round(value, 3) for value in row["each"]]
        found.append({**row, "name": f"{row['factor']} times, {row['name']}"})
    return found


def _interval(found: tuple[float, float, float]) -> dict[str, float]:
    value, low, high = (round(each, 2) for each in found)
    return {"value": value, "low": low, "high": high}
