"""Train and export the small shapes models with one command.

    python -m diffcache.eval.workshop.small.train --out out/shapes

On one CPU core it takes about an hour and a half. A seed and a number
of updates give the same weights, however fast the machine is.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from diffcache.eval.workshop.small import (
    train_autoencoder,
    train_classifier,
    train_flux,
    train_text,
)
from diffcache.eval.workshop.small.course import Plan
from diffcache.eval.workshop.small.export import export, record
from diffcache.eval.workshop.small.loop import training_parser
from diffcache.pipelines.small.classifier import DIRECTORY as CLASSIFIER

STAGES = ("classifier", "autoencoder", "text", "flux", "decoder", "export")
STEPS = train_flux.COURSE.steps
UPDATES = {"classifier": 817, "autoencoder": 2524, "text": 1415, "flux": STEPS, "decoder": 2839}


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = training_parser(
        "train",
        "Train the shapes pipeline and the classifier that judges it, on a CPU; updates are the "
        "denoiser's, others in proportion.",
        out="out/shapes",
        updates=STEPS,
        stages=STAGES,
    )
    made.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    steps = {name: -(-count * chosen.updates // STEPS) for name, count in UPDATES.items()}
    for stage in [name for name in STAGES if name in chosen.stages]:
        print(f"== {stage}", flush=True)
        if stage == "classifier":
            train_classifier.train(out / stage, seed=chosen.seed, steps=steps[stage])
        elif stage == "autoencoder":
            train_autoencoder.train(out, seed=chosen.seed, steps=steps[stage])
        elif stage == "text":
            train_text.train(out, seed=chosen.seed, steps=steps[stage])
        elif stage == "flux":
            settings = (chosen.seed, steps[stage], chosen.resume, not chosen.eager)
            plan = Plan(*settings, minutes=chosen.minutes)
            train_flux.train(out, AutoencoderKL.from_pretrained(out / "autoencoder"), plan)
        elif stage == "decoder":
            train_autoencoder.refine(out, seed=chosen.seed, steps=steps[stage])
        else:
            _export(out, chosen.seed, chosen.updates)


def _export(out: Path, seed: int, updates: int) -> None:
    if (out / "classifier").exists():
        CLASSIFIER.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            shutil.copyfile(out / "classifier" / name, CLASSIFIER / name)
    size = export(out)
    command = f"python -m diffcache.eval.workshop.small.train --seed {seed} --updates {updates}"
    done = record(out, seed=seed, command=command)
    print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
