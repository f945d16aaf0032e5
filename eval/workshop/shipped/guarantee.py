"""Check the certificate of `tune(psnr=, confidence=)` on sticker-flux by drawing it many times.

    python -m diffcache.eval.workshop.shipped.guarantee --prompts 240

Every prompt is drawn once with each setting of a ladder. Then prompts to certify on are drawn at
random many times, and the others tell how often a new prompt strays from what was certified.
Prompts of another kind are drawn too: one object where two were certified.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from diffcache.command import Threads, script
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.record import commit as commit_of_code
from diffcache.eval.workshop.small import sticker_flux
from diffcache.eval.workshop.small.stickers import caption, sample_scene
from diffcache.features.taylorseer import TaylorSeer
from diffcache.files import write_json
from diffcache.offline.tune.guarantee import certify
from diffcache.offline.tune.trial import Bench
from diffcache.pipelines.demo.console import progress

LADDER = tuple(TaylorSeer(every=every) for every in (2, 3, 4, 5, 6, 8))  # the dearest first
DRAWS = 200
SEEN = 60  # prompts of a draw


def captions(count: int, objects: int, seed: int) -> list[str]:
    """Return different sentences that name one object or two."""
    rng = np.random.default_rng([seed, objects])
    said: dict[str, None] = {}
    while len(said) < count:
        said.setdefault(caption(sample_scene(rng, single=float(objects == 1))))
    return list(said)


def closeness(texts: list[str], steps: int, seed: int) -> tuple[NDArray[np.float64], list[float]]:
    """Return the PSNR in dB of every prompt with every setting [N, K], and costs of settings."""
    pipe = sticker_flux.load()
    call = {**sticker_flux.CALL, "num_inference_steps": steps}
    bench = Bench(pipe, [[text] for text in texts], seed, call)
    rows, costs = [], []
    with progress("settings") as show:
        for number, method in enumerate(LADDER):
            show(number, len(LADDER), repr(method))
            trial = bench.measure(method, list(range(len(texts))))
            rows.append(trial.each)
            costs.append(trial.cost)
    return np.array(rows).T, costs


def redrawn(
    values: NDArray[np.float64], other: NDArray[np.float64], psnr: float, confidence: float
) -> dict[str, Any]:
    """Certify on prompts drawn at random, many times, and count how often others stray.

    Args:
        values: PSNR in dB of every prompt with every setting, [N, K].
        other: The same of prompts of another kind, [M, K].
        psnr: PSNR that a sample has to reach.
        confidence: Least probability with which a new prompt reaches it.
    """
    rng = np.random.default_rng(0)
    strayed, strayed_of_other, chosen_of = [], [], []
    for _ in range(DRAWS):
        order = rng.permutation(len(values))
        seen, new = values[order[:SEEN]], values[order[SEEN:]]
        rungs = list(range(values.shape[1]))
        chosen, _, _ = certify(rungs, seen.T.tolist().__getitem__, psnr, confidence)
        chosen_of.append(-1 if chosen is None else chosen)
        strayed.append(0.0 if chosen is None else float((new[:, chosen] < psnr).mean()))
        if chosen is not None:
            strayed_of_other.append(float((other[:, chosen] < psnr).mean()))
    mean, error = float(np.mean(strayed)), 1.96 * float(np.std(strayed)) / DRAWS**0.5
    return {
        "psnr": psnr, "confidence": confidence, "seen": SEEN, "draws": DRAWS,
        "strayed": mean, "low": mean - error, "high": mean + error,
        "strayed_of_other": float(np.mean(strayed_of_other)) if strayed_of_other else None,
        "chosen": {str(k): chosen_of.count(k) for k in sorted(set(chosen_of))},
    }  # fmt: skip


def measure(
    prompts: Annotated[int, typer.Option(min=2 * SEEN)] = 240,
    other: Annotated[int, typer.Option(min=10)] = 60,
    steps: int = 28,
    seed: int = 0,
    threads: Threads = 1,
) -> None:
    """Measure, draw again, and write the record."""
    torch.set_num_threads(threads)
    values, costs = closeness(captions(prompts, 2, seed), steps, seed)
    single, _ = closeness(captions(other, 1, seed), steps, seed)
    bars = [float(np.floor(np.quantile(values[:, k], 0.05))) for k in (1, 3)]
    rows = [redrawn(values, single, bar, share) for bar in bars for share in (0.9, 0.95)]
    record = {
        "model": "sticker-flux", "steps": steps, "seed": seed, "commit": commit_of_code(),
        "settings": [repr(method) for method in LADDER], "costs": costs, "rows": rows,
        "psnr_of_two": np.round(values, 3).tolist(), "psnr_of_one": np.round(single, 3).tolist(),
    }  # fmt: skip
    write_json(FOLDER / "guarantee.json", record)
    for row in rows:
        print(
            f"{row['psnr']:g} dB at {row['confidence']:.0%}: {row['strayed']:.1%} of new prompts "
            f"strayed ({row['low']:.1%} to {row['high']:.1%}, {DRAWS} draws of {SEEN}), "
            f"{row['strayed_of_other'] or 0:.1%} of one object; chosen {row['chosen']}"
        )
    print(f"wrote {(FOLDER / 'guarantee.json').relative_to(ROOT)}")


main = script(measure)

if __name__ == "__main__":
    sys.exit(main())
