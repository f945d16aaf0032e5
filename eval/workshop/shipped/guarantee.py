"""Check the certificate of `tune(psnr=, confidence=)` on sticker-flux by drawing it many times.

    python -m diffcache.eval.workshop.shipped.guarantee

Every prompt is drawn once with each setting of a ladder. Then prompts to certify on are drawn at
random many times, and the others tell how often a new prompt strays from what was certified.
Prompts of two objects are certified, and prompts of one; each is also tried on the other kind, for
which nothing is certified.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from diffcache.command import Threads, script
from diffcache.eval.record import FOLDER, ROOT, Setting, envelope, write
from diffcache.eval.workshop.small import sticker_flux
from diffcache.eval.workshop.small.stickers import caption, sample_scene
from diffcache.features.taylorseer import TaylorSeer
from diffcache.offline.tune.guarantee import certify
from diffcache.offline.tune.trial import Trials
from diffcache.pipelines.demo.console import progress

LADDER = tuple(TaylorSeer(every=every) for every in (2, 3, 4, 5, 6, 8))  # the dearest first
DRAWS = 200
SEEN = {"two objects": 60, "one object": 29}  # prompts of a draw


def captions(count: int, objects: int, seed: int) -> list[str]:
    """Return different sentences that name one object or two."""
    rng = np.random.default_rng([seed, objects])
    said: dict[str, None] = {}
    while len(said) < count:
        said.setdefault(caption(sample_scene(rng, single=float(objects == 1))))
    return list(said)


def closeness(
    texts: list[str], steps: int, seed: int, numbers: Sequence[int] | None = None
) -> tuple[NDArray[np.float64], list[float]]:
    """Return the PSNR in dB of prompts with every setting [N, K], and costs of settings.

    Args:
        texts: The prompts.
        steps: Sampling steps.
        seed: Seed of the first prompt's noise.
        numbers: Numbers of the prompts that are drawn; all where none are given.
    """
    pipe = sticker_flux.load()
    call = {**sticker_flux.CALL, "num_inference_steps": steps}
    bench = Trials(pipe, [[text] for text in texts], seed, call)
    rows, costs = [], []
    with progress("settings") as show:
        for number, method in enumerate(LADDER):
            show(number, len(LADDER), repr(method))
            trial = bench.measure(method, range(len(texts)) if numbers is None else numbers)
            rows.append(trial.each)
            costs.append(trial.cost)
    return np.array(rows).T, costs


def redrawn(values: dict[str, NDArray[np.float64]], kind: str, psnr: float, confidence: float) -> dict[str, Any]:
    """Certify on prompts drawn at random, many times, and count how often others stray.

    Args:
        values: PSNR in dB of every prompt with every setting, [N, K], by kind.
        kind: Kind of prompts that is certified.
        psnr: PSNR that a sample has to reach.
        confidence: Least probability with which a new prompt reaches it.
    """
    rng, mine = np.random.default_rng(0), values[kind]
    (others,) = (each for name, each in values.items() if name != kind)
    strayed, strayed_of_other, chosen_of = [], [], []
    for _ in range(DRAWS):
        order = rng.permutation(len(mine))
        seen, new = mine[order[: SEEN[kind]]], mine[order[SEEN[kind] :]]
        rungs = list(range(mine.shape[1]))
        chosen, _, _ = certify(rungs, seen.T.tolist().__getitem__, psnr, confidence)
        chosen_of.append(-1 if chosen is None else chosen)
        strayed.append(0.0 if chosen is None else float((new[:, chosen] < psnr).mean()))
        if chosen is not None:
            strayed_of_other.append(float((others[:, chosen] < psnr).mean()))
    mean, error = float(np.mean(strayed)), 1.96 * float(np.std(strayed)) / DRAWS**0.5
    return {
        "name": f"{kind}, {psnr:g} dB, {confidence:.0%}",
        "kind": kind,
        "psnr": psnr,
        "confidence": confidence,
        "seen": SEEN[kind],
        "draws": DRAWS,
        "strayed": mean,
        "low": mean - error,
        "high": mean + error,
        "strayed_of_other": float(np.mean(strayed_of_other)) if strayed_of_other else None,
        "chosen": {str(k): chosen_of.count(k) for k in sorted(set(chosen_of))},
    }


def rows_of(values: dict[str, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Return what is certified of each kind at two bars and two confidences."""
    rows = []
    for kind, each in values.items():
        for setting in (1, 3):
            bar = float(np.floor(np.quantile(each[:, setting], 0.05)))
            rows += [redrawn(values, kind, bar, share) for share in (0.9, 0.95)]
    return rows


def measure(
    prompts: Annotated[int, typer.Option(min=90)] = 150,
    other: Annotated[int, typer.Option(min=39)] = 40,
    steps: int = 28,
    seed: int = 0,
    threads: Threads = 1,
) -> None:
    """Measure, draw again, and write the record."""
    torch.set_num_threads(threads)
    begun = time.monotonic()
    values, costs = closeness(captions(prompts, 2, seed), steps, seed)
    single, _ = closeness(captions(other, 1, seed), steps, seed)
    found = {"two objects": values, "one object": single}
    rows = rows_of(found)
    shapes = {"device": "cpu", "model": "sticker-flux", "steps": steps}
    body = {
        "seed": seed,
        "rounds": 1,
        "seconds": round(time.monotonic() - begun, 1),
        "rows": rows,
        "shapes": shapes,
        "settings": [repr(method) for method in LADDER],
        "costs": costs,
        "psnr": {kind: np.round(each, 3).tolist() for kind, each in found.items()},
    }
    command = f"python -m diffcache.eval.workshop.shipped.guarantee --prompts {prompts} --seed {seed}"
    file = write(envelope("guarantee", Setting(torch.device("cpu")), command, body), FOLDER)
    for row in rows:
        print(
            f"{row['kind']}, {row['psnr']:g} dB at {row['confidence']:.0%}: {row['strayed']:.1%} "
            f"of new prompts strayed ({row['low']:.1%} to {row['high']:.1%}), "
            f"{row['strayed_of_other'] or 0:.1%} of the other kind; chosen {row['chosen']}"
        )
    print(f"wrote {file.relative_to(ROOT)}")


main = script(measure)

if __name__ == "__main__":
    sys.exit(main())
