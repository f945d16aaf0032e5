"""Fidelity and right pictures of caches on sticker-flux, at 2 to 8 times, beside fewer steps.

A shipped model can tell a good cache from a bad one where pictures of a bad one are seen to be
wrong and methods stand in the published order. Prompts, noise and judge are the same in all rows.
`eval/workshop/shipped/telling_page.py` makes `docs/telling_power.md` of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import diffcache
from diffcache.eval.metrics.intervals import metric_interval, share_change, share_interval
from diffcache.eval.record import ROOT, Setting, values
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.shipped.drawing import draw_grid, draw_stickers
from diffcache.eval.workshop.small import sticker_flux
from diffcache.eval.workshop.small.sticker_judge import read_faults
from diffcache.eval.workshop.small.stickers import held_out_captions
from diffcache.features.base import Method
from diffcache.features.interval import Interval
from diffcache.features.magcache import MagCache
from diffcache.features.parts.when import steps_of
from diffcache.features.taylorseer import TaylorSeer
from diffcache.psnr import psnr

STEPS, SEED = 28, 4
FACTORS = (2, 3, 4, 6, 8)
SHOWN = 8  # pictures of a column of the grid
PICTURE = ROOT / "docs" / "telling_power.png"
UNCACHED, FEWER = "uncached", "fewer steps"


def methods(ratios: Sequence[float]) -> dict[str, Callable[[int], Method]]:
    """Return functions that make the method for a factor, by name, given ratios of neighboring residuals.

    The ratios are magnitudes on this model, from step 1 on.
    """
    return {
        "reuse": lambda n: Interval(every=n),
        "TaylorSeer, order 1": lambda n: TaylorSeer(every=n, warmup=1),
        "TaylorSeer, order 2": lambda n: TaylorSeer(every=n, order=2, warmup=1),
        "MagCache": lambda n: magcache(ratios, n),
    }


def magcache(ratios: Sequence[float], factor: int) -> MagCache:
    """Return MagCache with the least threshold that computes at most one step in `factor`; ValueError if none does."""
    for threshold in np.geomspace(1e-3, 30, 400):
        method = MagCache(threshold=float(f"{threshold:.3g}"), longest=STEPS, retention=0.0, ratios=(1.0, *ratios))
        if len(steps_of(method.parts().when, STEPS)) <= -(-STEPS // factor):
            return method
    raise ValueError(f"factor={factor}: no threshold skips as much with these ratios")


@torch.no_grad()
def residuals(pipe: FluxPipeline, texts: list[str]) -> dict[str, list[float]]:
    """Measure how the residual of all blocks changes from step to step, of the picture's tokens.

    Of steps 1 on, each a mean over tokens: `ratio` of norms, `cosine`, and `change`, the mean absolute
    change over the mean absolute value.
    """
    model = pipe.transformer
    entered: list[Tensor] = []
    left: list[Tensor] = []
    hooks = [
        model.transformer_blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: entered.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        model.single_transformer_blocks[-1].register_forward_hook(lambda _, args, output: left.append(output[1])),
    ]
    try:
        _draw(pipe, texts)
    finally:
        for hook in hooks:
            hook.remove()
    calls = len(entered) // STEPS  # the guided one first
    kept = [after - before for before, after in zip(entered[::calls], left[::calls], strict=True)]
    found: dict[str, list[float]] = {"ratio": [], "cosine": [], "change": []}
    for before, after in pairwise(kept):
        found["ratio"].append(float((after.norm(dim=-1) / before.norm(dim=-1)).mean()))
        found["cosine"].append(float(torch.cosine_similarity(after, before, dim=-1).mean()))
        found["change"].append(float((after - before).abs().mean() / before.abs().mean()))
    first, last = kept[0], kept[-1]
    found["first_to_last"] = [float(torch.cosine_similarity(first, last, dim=-1).mean())]
    return found


def measure(
    setting: Setting,
    *,
    samples: int = 64,
    factors: Sequence[int] = FACTORS,
    picture: Path | None = PICTURE,
    unfinished: Path | None = None,
) -> dict[str, Any]:
    """Measure every method at every factor on at least 2 pictures, and draw the picture of `docs/telling_power.md`."""
    pipe = sticker_flux.load(dtype=setting.dtype).to(setting.device)
    texts = held_out_captions(samples, SEED)
    key = {"samples": samples, "dtype": str(setting.dtype), "model": directory_sha256(sticker_flux.DIRECTORY)}
    kept = Parts(unfinished, key)
    path = kept.take("residuals", lambda: residuals(pipe, texts[:8]))
    base = np.array(kept.take(UNCACHED, lambda: _draw(pipe, texts).tolist()), np.uint8)
    right = kept.take("right", lambda: _right(texts, base))
    wanted: list[tuple[str, int, Method | None]] = [(FEWER, n, None) for n in factors]
    wanted += [(name, n, make(n)) for name, make in methods(path["ratio"]).items() for n in factors]
    rows, shown = [], {UNCACHED: base[:SHOWN]}
    for number, (name, factor, method) in enumerate(wanted):
        title = f"{name}, {factor} times"
        setting.progress(number, len(wanted), title)

        def make_row(factor: int = factor, method: Method | None = method) -> dict[str, Any]:
            if method is None:
                steps, pictures = -(-STEPS // factor), _draw(pipe, texts, -(-STEPS // factor))
            else:
                with diffcache.wrapped(pipe, method):
                    pictures = _draw(pipe, texts)
                    done = diffcache.report(pipe)
                steps = round(STEPS * done.computed / (done.computed + done.skipped))
            return {"steps": steps, "shown": pictures[:SHOWN].tolist(), **_compared(texts, pictures, base, right)}

        found = dict(kept.take(title, make_row))
        shown[title] = np.array(found.pop("shown"), np.uint8)
        about = {"method": name, "factor": factor, "setting": repr(method) if method else ""}
        rows.append({"name": title, **about, **found})
    if picture is not None:
        _picture(texts, shown).save(picture, optimize=True)
    uncached = {
        "name": UNCACHED,
        "method": UNCACHED,
        "factor": 1,
        "steps": STEPS,
        "whole_right": share_interval(torch.tensor(right)).to_dict(),
    }
    return {
        "shapes": dict(device=setting.device.type, model="sticker-flux", samples=samples, model_sha256=key["model"]),
        "rounds": 1,
        "seed": SEED,
        "rows": [uncached, *rows],
        "residuals": path,
        "parts": kept.end(),
    }


def again(record: Mapping[str, Any], row: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Tensor]:
    """Draw some pictures of a row of a record again; return right ones and PSNR of each."""
    pipe, texts, base = _uncached(record["shapes"]["samples"], tuple(numbers))
    pictures = base
    if row["method"] == FEWER:
        pictures = _draw(pipe, texts, row["steps"], numbers)
    elif row["method"] != UNCACHED:
        ratios = record["residuals"]["ratio"]
        with diffcache.wrapped(pipe, methods(ratios)[row["method"]](row["factor"])):
            pictures = _draw(pipe, texts, numbers=numbers)
    right = {"whole_right": torch.tensor(_right(texts, pictures))}
    return right if row["method"] == UNCACHED else {"psnr_db": _psnr(pictures, base), **right}


@cache
def _uncached(samples: int, numbers: tuple[int, ...]) -> tuple[FluxPipeline, list[str], NDArray[np.uint8]]:
    """Return the pipeline, some of the sentences, and their uncached pictures."""
    pipe, every = sticker_flux.load(), held_out_captions(samples, SEED)
    texts = [every[number] for number in numbers]
    return pipe, texts, _draw(pipe, texts, numbers=numbers)


def _draw(
    pipe: FluxPipeline, texts: list[str], steps: int = STEPS, numbers: Sequence[int] | None = None
) -> NDArray[np.uint8]:
    chosen = range(len(texts)) if numbers is None else numbers
    seeds = [1000 * SEED + number for number in chosen]
    return draw_stickers(pipe, texts, steps=steps, seeds=seeds)


def _psnr(pictures: NDArray[np.uint8], base: NDArray[np.uint8]) -> Tensor:
    mine, theirs = (torch.from_numpy(each).permute(0, 3, 1, 2) for each in (pictures, base))
    return psnr(mine, theirs)


def _right(texts: list[str], pictures: NDArray[np.uint8]) -> list[bool]:
    return [not faults for faults in read_faults(texts, pictures)]


def _compared(
    texts: list[str], pictures: NDArray[np.uint8], base: NDArray[np.uint8], right: list[bool]
) -> dict[str, Any]:
    """Return the PSNR to uncached pictures, the share of right ones, and how much it changed."""
    whole, close = torch.tensor(_right(texts, pictures)), _psnr(pictures, base)
    return {
        "psnr_db": metric_interval("psnr_db", close).to_dict(),
        "whole_right": share_interval(whole).to_dict(),
        "values": {"psnr_db": values(close), "whole_right": values(whole)},
        "whole_right_change": share_change(torch.tensor(right), whole).to_dict(),
    }


def _picture(texts: list[str], shown: dict[str, NDArray[np.uint8]]) -> Image.Image:
    """Draw a row for each method at the largest factor, below the uncached one."""
    last = max(int(title.rsplit(" ", 2)[1]) for title in shown if title != UNCACHED)
    rows = {name: each for name, each in shown.items() if name == UNCACHED or f" {last} t" in name}
    return draw_grid(np.stack(list(rows.values())), list(rows), scale=2, columns=1)
