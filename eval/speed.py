"""Seconds and fidelity of whole sampling runs: uncached, ours and diffusers' own caches.

All run in one process on the same weights and are measured in turn, round after round; every round
has prompts and seeds of its own. Every cache is set to compute as nearly as possible as many steps
as TaylorSeer with `every=6`. A method that skipped for free would be faster by the allowed ratio,
steps / computed steps; `fraction` is how much of that is reached by the denoiser. A gate runs the
first block in every step, so its own allowed ratio is smaller: with `share` the first block's part
of all blocks' operations, steps / (computed + share * skipped steps); `own_fraction` is of that.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from diffusers import FirstBlockCacheConfig, FluxPipeline
from rich.progress import track
from rich.table import Table

import diffcache
from diffcache.eval import split
from diffcache.eval.contender import Contender, Draw, Drawing, psnr, separate
from diffcache.eval.peers import taylor_config, threshold_for
from diffcache.eval.record import Setting, stats
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.flux import CALL
from diffcache.pipelines.small.scenes import held_out_prompts

EVERY = 6
TARGETS = {"TaylorSeer stack": 0.90, "ConfidenceGatedTaylor": 0.85}  # of its own allowed ratio
GATED = ("ConfidenceGatedTaylor", "FirstBlock", "diffusers FirstBlockCache")


class Bench:
    """All contenders for one batch size.

    Args:
        pipe: The pipeline that they copy.
        setting: Device and dtype.
        steps: Sampling steps.
        batch: Prompts in a call.
    """

    def __init__(self, pipe: FluxPipeline, setting: Setting, steps: int, batch: int) -> None:
        self.pipe, self.batch, self.steps = pipe, batch, steps
        self.drawing = Drawing(setting, steps, CALL)
        self.warm_prompts = held_out_prompts(batch, seed=1)
        self.dtype = setting.dtype
        self.share = first_share(pipe, self.drawing)

    def fixed(self) -> dict[str, Any]:
        """Return the caches whose schedule is known beforehand."""
        taylor = TaylorSeer(EVERY, 1, site="stack")
        computed = self.computed(taylor)
        interval = min(range(1, self.steps + 1), key=lambda n: abs(-(-self.steps // n) - computed))
        return {
            "uncached": None,
            "TaylorSeer stack": taylor,
            "TaylorSeer module": TaylorSeer(EVERY, 1, site="module"),
            "TaylorSeer model": TaylorSeer(EVERY, 1, site="model"),
            "Interval stack": Interval(interval),
            "diffusers TaylorSeer": taylor_config(computed, self.steps, False, self.dtype),
            "diffusers TaylorSeer lite": taylor_config(computed, self.steps, True, self.dtype),
        }

    def gated(self) -> dict[str, Any]:
        """Return the caches that decide by a threshold, searched on the warm-up prompts."""
        makers: dict[str, Callable[[float], Any]] = {
            "ConfidenceGatedTaylor": lambda threshold: ConfidenceGatedTaylor(threshold),
            "FirstBlock": lambda threshold: FirstBlock(threshold),
            "diffusers FirstBlockCache": lambda threshold: FirstBlockCacheConfig(threshold),
        }
        wanted = self.computed(TaylorSeer(EVERY, 1, site="stack"))
        return {
            name: make(threshold_for(wanted, lambda at, make=make: self.computed(make(at))))  # type: ignore[misc]
            for name, make in makers.items()
        }

    def computed(self, cache: Any) -> int:
        """Return how many steps a cache computes of the warm-up prompts."""
        contender = Contender("trial", self.pipe, cache).attach()
        try:
            return self.drawing(contender, self.warm_prompts, 10**6).computed
        finally:
            contender.detach()

    def run(self, caches: dict[str, Any], rounds: int, *, bar: bool) -> list[dict[str, Any]]:
        """Measure all caches in turn and return their rows."""
        contenders = [Contender(n, separate(self.pipe), c).attach() for n, c in caches.items()]
        for contender in contenders:
            self.drawing.warm_up(contender, self.warm_prompts, 10**6)
        prompts = held_out_prompts(rounds * self.batch, seed=2)
        label = f"speed, batch {self.batch}"
        for number in track(range(rounds), label, disable=not bar, transient=True):
            start = number * self.batch
            for contender in contenders:
                draw = self.drawing(contender, prompts[start : start + self.batch], start)
                contender.draws.append(draw)
        uncached = contenders[0].draws
        rows = [self._row(contender, uncached, prompts) for contender in contenders]
        for contender in contenders:
            contender.detach()
        return rows

    def _row(
        self, contender: Contender, uncached: Sequence[Draw], prompts: Sequence[str]
    ) -> dict[str, Any]:
        """Sum up the draws of one contender against those of none."""
        draws, name = contender.draws, contender.name
        pairs = list(zip(uncached, draws, strict=True))
        allowed = [self.steps / draw.computed for draw in draws]
        share = self.share if name in GATED else 0.0
        own = [self.steps / (d.computed + share * (self.steps - d.computed)) for d in draws]
        ratio = [a.denoiser_seconds / b.denoiser_seconds for a, b in pairs]
        ratio_cpu = [a.denoiser_cpu_seconds / b.denoiser_cpu_seconds for a, b in pairs]
        closeness = [v for a, b in pairs for v in psnr(b.pictures, a.pictures) if v is not None]
        pictures = [picture for draw in draws for picture in draw.pictures]
        accuracy, parts = prompt_accuracy(pictures, prompts)
        library = "diffcache" if contender.is_ours else "diffusers"
        return {
            "name": name,
            "batch": self.batch,
            "library": library if contender.cache is not None else None,
            "settings": None if contender.cache is None else repr(contender.cache),
            "denoiser_seconds": stats([draw.denoiser_seconds for draw in draws]),
            "denoiser_cpu_seconds": stats([draw.denoiser_cpu_seconds for draw in draws]),
            "call_seconds": stats([draw.call_seconds for draw in draws]),
            "first_denoiser_seconds": contender.first_seconds,
            "ratio": stats(ratio),
            "ratio_cpu": stats(ratio_cpu),
            "call_ratio": stats([a.call_seconds / b.call_seconds for a, b in pairs]),
            "computed_steps": [draw.computed for draw in draws],
            "allowed_ratio": stats(allowed),
            "fraction": stats([r / a for r, a in zip(ratio, allowed, strict=True)]),
            "fraction_cpu": stats([r / a for r, a in zip(ratio_cpu, allowed, strict=True)]),
            "own_allowed_ratio": stats(own),
            "own_fraction": stats([r / a for r, a in zip(ratio, own, strict=True)]),
            "own_fraction_cpu": stats([r / a for r, a in zip(ratio_cpu, own, strict=True)]),
            "fraction_target": TARGETS.get(name),
            "psnr_db": stats(closeness) if closeness else None,
            "prompt_accuracy": accuracy,
            "exact_pictures": parts["exact"],
            "held_bytes": contender.held_bytes,
        }


def first_share(pipe: FluxPipeline, drawing: Drawing) -> float:
    """Return the first block's part of the operations of all blocks."""
    contender = Contender("trial", pipe, FirstBlock(float("inf"))).attach()
    try:
        drawing(contender, held_out_prompts(1, seed=1), 0)
        ran, saved = diffcache.report(pipe).calls[-1].flops or (0.0, 1.0)
    finally:
        contender.detach()
    return ran / (ran + saved)


def measure(
    setting: Setting,
    *,
    pipe: FluxPipeline,
    rounds: int = 5,
    steps: int = 50,
    batches: Sequence[int] = (4, 1),
    bar: bool = False,
) -> dict[str, Any]:
    """Measure whole sampling runs, and what one step is made of.

    Args:
        setting: Device and dtype.
        pipe: The shapes pipeline.
        rounds: Timed calls of every contender and batch size.
        steps: Sampling steps.
        batches: Prompts in a call; thresholds are searched with the first.
        bar: Whether to show a progress bar.
    """
    started = time.monotonic()
    pipe.to(setting.device)
    rows, parts = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        benches = [Bench(pipe, setting, steps, batch) for batch in batches]
        gated = benches[0].gated()
        for bench, batch in zip(benches, batches, strict=True):
            caches = bench.fixed() | gated
            rows += bench.run(caches, rounds, bar=bar)
            parts.append(split.measure(setting, pipe, batch, steps=steps, calls=4 * rounds))
    config = pipe.transformer.config
    return {
        "shapes": {
            "device": setting.device.type, "model": "shapes-flux", "double": config.num_layers,
            "single": config.num_single_layers,
            "width": config.num_attention_heads * config.attention_head_dim,
            "image_tokens": parts[0]["image_tokens"], "text_tokens": CALL["max_sequence_length"],
            "height": CALL["height"], "width_pixels": CALL["width"], "batches": list(batches),
        },
        "rounds": rounds,
        "steps": steps,
        "first_block_share": benches[0].share,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        "split": parts,
    }  # fmt: skip


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the record as tables."""
    found = []
    for batch in record["shapes"]["batches"]:
        rows = [row for row in record["rows"] if row["batch"] == batch]
        title = f"{record['steps']} steps, batch {batch}, median of {record['rounds']} rounds"
        found += [_times(rows, f"{title} (in brackets: by CPU time)"), _costs(rows, title)]
    return found + [table for part in record["split"] for table in split.tables(part)]


def _times(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(
        "", "denoiser s", "quartiles", "call s", "computed", "ratio", "allowed", "reached",
        "own allowed", "reached", "target", title=title,
    )  # fmt: skip
    for row in rows:
        seconds, target = row["denoiser_seconds"], row["fraction_target"]
        ratio, allowed, own = (
            f"{row[key]['median']:.2f}" for key in ("ratio", "allowed_ratio", "own_allowed_ratio")
        )
        reached, of_own = (
            f"{row[key]['median']:.0%} ({row[f'{key}_cpu']['median']:.0%})"
            for key in ("fraction", "own_fraction")
        )
        table.add_row(
            row["name"], f"{seconds['median']:.3f}", f"{seconds['q1']:.3f}-{seconds['q3']:.3f}",
            f"{row['call_seconds']['median']:.3f}", f"{fmean(row['computed_steps']):g}", ratio,
            allowed, reached, own, of_own, "" if target is None else f"{target:.0%}",
        )  # fmt: skip
    return table


def _costs(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table("", "settings", "PSNR dB", "quartiles", "prompt accuracy", "exact pictures",
                  "bytes held", title=title)  # fmt: skip
    for row in rows:
        db = row["psnr_db"]
        table.add_row(
            row["name"], _short(row["settings"]), "" if db is None else f"{db['median']:.1f}",
            "" if db is None else f"{db['q1']:.1f}-{db['q3']:.1f}", f"{row['prompt_accuracy']:.1%}",
            f"{row['exact_pictures']:.1%}", f"{row['held_bytes']:,}",
        )  # fmt: skip
    return table


def _short(settings: str | None) -> str:
    """Return the one number that was chosen to match the computed steps."""
    match = re.search(r"(every|cache_interval|threshold)=[^,)]+", settings or "")
    return match[0] if match else ""
