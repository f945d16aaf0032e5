"""Write the trained small FluxKontextPipeline to its directory, and the record of its training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from safetensors.torch import load_file
from torch import nn

from diffcache.pipelines.small.export import _tidy, versions
from diffcache.pipelines.small.kontext import DIRECTORY, build_pipeline
from diffcache.pipelines.small.loop import Log

TRAINED = ("transformer", "text_encoder", "text_encoder_2")
RECORD = DIRECTORY.parents[1] / "bench" / "shapes-kontext-training.json"


def export(out: Path, directory: Path = DIRECTORY) -> int:
    """Save the pipeline with averaged weights in bfloat16; files are replaced one by one.

    Args:
        out: the training folder.
        directory: where `FluxKontextPipeline.from_pretrained` will look.

    Returns:
        The size of the directory in bytes.
    """
    pipe = assemble(out)
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    pipe.to(torch.bfloat16).save_pretrained(part)
    for config in part.glob("*/config.json"):
        _tidy(config)
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        target = directory / file.relative_to(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.chmod(0o644)
        os.replace(file, target)
    shutil.rmtree(part)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


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
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    return done
