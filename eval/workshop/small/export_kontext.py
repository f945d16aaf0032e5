"""Write the trained small FluxKontextPipeline to its directory, and the record of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import FluxKontextPipeline
from safetensors.torch import load_file
from torch import nn

from diffcache.eval.workshop.small.export import TRAINED, save_pipeline, versions
from diffcache.eval.workshop.small.loop import Log
from diffcache.files import write_json
from diffcache.pipelines.small.kontext import CALL, DIRECTORY, build_pipeline

RECORD = DIRECTORY.parents[1] / "bench" / "shapes-kontext-training.json"


def export(out: Path, directory: Path = DIRECTORY) -> int:
    """Save the pipeline with averaged weights, as `save_pipeline` does.

    Args:
        out: The training folder.
        directory: Directory for `FluxKontextPipeline.from_pretrained`.

    Returns:
        The size of the directory in bytes.
    """
    return save_pipeline(assemble(out), directory, CALL)


def assemble(out: Path) -> FluxKontextPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    pipe = build_pipeline()
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    weights.load_state_dict(load_file(out / "kontext.safetensors"))
    return pipe


def record(out: Path, settings: dict[str, Any], path: Path = RECORD) -> dict[str, Any]:
    """Write the training record: settings, versions, steps, seconds and the curves."""
    logs = {name: Log(out / f"{name}.jsonl", resume=True).rows() for name in ("text", "kontext")}
    last = logs["kontext"][-1]
    done = {
        "model": "shapes-kontext",
        "from": "shapes-flux",
        **settings,
        "versions": versions(),
        "steps": last["step"],
        "seconds": last["seconds"],
        "seconds_per_step": round(last["seconds"] / max(last["step"], 1), 3),
        "curves": logs,
    }
    write_json(path, done)
    return done
