"""Cache, then quantize, each for itself: what the joint mode of CacheQuant is compared with.

    python -m diffcache.eval.separate --model shapes-unet --every 4 --bits w4a8 --out FILE

The schedule and the corrections of features come from float runs, as if nothing were quantized; the
layers are quantized without corrections, as if nothing were reused. The file holds the tables of
`cachequant:every=N,bits=...,corrected=()`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from diffcache.eval.offline import Inputs, inputs_of
from diffcache.eval.runs.task import Task
from diffcache.features.cachequant import CacheQuant
from diffcache.features.tables import Tables
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.demo.console import quiet
from diffcache.quant.plan import Bits

_LAYERS = "quant/"


def separate(inputs: Inputs, every: int, bits: Bits, steps: int | None) -> Tables:
    """Return tables whose schedule knows nothing of the quantization, and the other way round.

    Args:
        inputs: Pipeline, prompts, call and seed.
        every: Mean length of a segment.
        bits: Of the layers.
        steps: Sampling steps; None is the pipeline's default.
    """
    dense = CacheQuant(every=every)
    rounded = CacheQuant(every=every, bits=bits, corrected=())
    parts = [
        calibrate(inputs.pipe, method, inputs.prompts, steps=steps, seed=inputs.seed, **inputs.call)
        for method in (dense, rounded)
    ]
    cached, quantized = (method.measured() for method in parts)
    tensors = {n: cached[n] for n in cached.names() if not n.startswith(_LAYERS)}
    tensors |= {n: quantized[n] for n in quantized.names() if n.startswith(_LAYERS)}
    return Tables(quantized.header, tensors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate both and write one file."""
    parser = argparse.ArgumentParser(prog="python -m diffcache.eval.separate")
    parser.add_argument("--model", required=True, help="directory or shipped name")
    parser.add_argument("--every", type=int, default=4, help="mean length of a segment in steps")
    parser.add_argument("--bits", choices=("w8a8", "w4a8"), default="w4a8")
    parser.add_argument("--samples", type=int, default=32, help="prompts")
    parser.add_argument("--steps", type=int, help="sampling steps (the pipeline's)")
    parser.add_argument("--out", type=Path, required=True, help="file of the tables")
    given = parser.parse_args(arguments)
    quiet()
    torch.set_num_threads(1)
    task = Task(model=given.model, samples=given.samples, steps=given.steps)
    tables = separate(inputs_of(task), given.every, cast(Bits, given.bits), given.steps)
    tables.save(given.out)
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
