"""Write the trained small WanPipeline to its directory, and the record of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, WanPipeline
from safetensors.torch import load_file
from torch import nn

from diffcache.eval.workshop.small.export import save_pipeline, thin, versions
from diffcache.eval.workshop.small.loop import Log
from diffcache.files import write_json
from diffcache.pipelines.small.wan import CALL, DIRECTORY, SHIFT, build_pipeline

TRAINED = ("transformer", "text_encoder")
RECORD = DIRECTORY.parents[1] / "bench" / "shapes-wan-training.json"


def assemble(out: Path, shift: float = SHIFT) -> WanPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    refined = out / "autoencoder-refined"
    autoencoder = refined if refined.exists() else out / "autoencoder"
    pipe = build_pipeline(AutoencoderKLWan.from_pretrained(autoencoder), shift)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    weights.load_state_dict(load_file(out / "denoiser.safetensors"))
    return pipe


def export(out: Path, directory: Path = DIRECTORY, *, shift: float = SHIFT) -> int:
    """Save the pipeline with averaged weights, as `save_pipeline` does.

    Args:
        out: The training folder.
        directory: Directory for `WanPipeline.from_pretrained`.
        shift: Shift of the sampling sigmas.

    Returns:
        The size of the directory in bytes.
    """
    return save_pipeline(assemble(out, shift), directory, CALL)


def record(out: Path, *, seed: int, updates: int, path: Path = RECORD) -> dict[str, Any]:
    """Write the training record: seed, versions, steps, seconds and thinned curves.

    Args:
        out: The training folder.
        seed: Seed that was used.
        updates: The command's `--updates`.
        path: Path of the JSON file.

    Returns:
        Record that was written.
    """
    stages: dict[str, Any] = {}
    for name in ("autoencoder", "text", "denoiser", "decoder"):
        if not (out / f"{name}.jsonl").exists():
            continue
        rows = Log(out / f"{name}.jsonl", resume=True).rows()
        steps, seconds = rows[-1]["step"], rows[-1]["seconds"]
        stages[name] = {"steps": steps, "seconds": seconds, "curve": thin(rows)}
    command = f"python -m diffcache.eval.workshop.small.train_wan --seed {seed} --updates {updates}"
    done: dict[str, Any] = {"model": "shapes-wan", "seed": seed, "command": command}
    done |= {"versions": versions(), "stages": stages}
    write_json(path, done)
    return done
