"""Write a trained small FluxPipeline to its directory, and the record of its training.

How any small pipeline is saved, and what all records share, is here too.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DiffusionPipeline, FluxPipeline
from safetensors.torch import load_file
from torch import nn

from diffcache.eval.workshop.small.loop import Log
from diffcache.files import write_json
from diffcache.pipelines.small.flux import CALL, DIRECTORY, build_pipeline

TRAINED = ("transformer", "text_encoder", "text_encoder_2")
RECORD = DIRECTORY.parents[1] / "bench" / "shapes-flux-training.json"


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def save_pipeline(
    pipe: DiffusionPipeline, directory: Path, call: Mapping[str, Any] | None = None
) -> int:
    """Save a pipeline in bfloat16; files are replaced one by one, each whole.

    Args:
        pipe: Pipeline with trained weights, which are converted in place.
        directory: Directory for `from_pretrained`; its other files stay.
        call: Arguments that every call needs; the command line reads them from `diffcache.json`.

    Returns:
        The size of the directory in bytes.
    """
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for model in pipe.components.values():
        if isinstance(model, nn.Module):
            nn.Module.to(model, torch.bfloat16)
    pipe.save_pretrained(part)
    for config in part.glob("*/config.json"):
        _tidy(config)
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        target = directory / file.relative_to(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.chmod(0o644)
        file.replace(target)
    shutil.rmtree(part)
    if call is not None:
        write_json(directory / "diffcache.json", {"call": dict(call)})
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _tidy(config: Path) -> None:
    # transformers 5 loads in the dtype of the file, diffusers in float32; a plain
    # `from_pretrained` would mix the two. The folder a part was loaded from is nobody's business.
    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("_name_or_path", None)
    values = {k: "float32" if k in ("dtype", "torch_dtype") else v for k, v in values.items()}
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def thin(rows: list[dict[str, Any]], most: int = 120) -> list[dict[str, Any]]:
    """Keep about so many rows of a log, and among them all that hold a PSNR, and the last."""
    every = max(len(rows) // most, 1)
    return [row for i, row in enumerate(rows) if i % every == 0 or "psnr" in row or row is rows[-1]]


def assemble(out: Path, shift: float = 1.0) -> FluxPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    refined = out / "autoencoder-refined"
    autoencoder = refined if refined.exists() else out / "autoencoder"
    pipe = build_pipeline(AutoencoderKL.from_pretrained(autoencoder), shift)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    weights.load_state_dict(load_file(out / "flux.safetensors"))
    return pipe


def export(out: Path, directory: Path = DIRECTORY, *, shift: float = 1.0) -> int:
    """Save the pipeline with averaged weights, as `save_pipeline` does.

    Args:
        out: The training folder.
        directory: Directory for `FluxPipeline.from_pretrained`.
        shift: Shift of the sampling sigmas.

    Returns:
        The size of the directory in bytes.
    """
    return save_pipeline(assemble(out, shift), directory, CALL)


def record(out: Path, *, seed: int, command: str, path: Path = RECORD) -> dict[str, Any]:
    """Write the training record (JSON) and the loss curve (PNG) beside it.

    Args:
        out: The training folder.
        seed: Seed that was used.
        command: Command that trains the model again.
        path: Path of the JSON file.

    Returns:
        Record that was written.
    """
    logs = {
        name: Log(out / f"{name}.jsonl", resume=True).rows()
        for name in ("autoencoder", "text", "flux", "decoder")
        if (out / f"{name}.jsonl").exists()
    }
    flux = logs["flux"]
    done: dict[str, Any] = {
        "model": "shapes-flux",
        "seed": seed,
        "command": command,
        "versions": versions(),
        "steps": flux[-1]["step"],
        "seconds": flux[-1]["seconds"],
        "seconds_per_step": round(flux[-1]["seconds"] / max(flux[-1]["step"], 1), 3),
        "autoencoder_psnr_db": [r["psnr"] for rows in logs.values() for r in rows if "psnr" in r],
        "curves": {name: thin(rows) for name, rows in logs.items()},
    }
    write_json(path, done)
    _plot(flux, path.with_suffix(".png"))
    return done


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no loss curve drawn: matplotlib is not installed (pip install 'diffcache[plot]')")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    kept = [row for row in rows if row["step"] >= 50]
    steps, losses = [r["step"] for r in kept], [r["loss"] for r in kept]
    smooth = [mean(losses[max(0, i - 19) : i + 1]) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(6, 3.5), dpi=100)
    axes.plot(steps, losses, color="0.8", linewidth=0.7, label="mean of 25 steps")
    axes.plot(steps, smooth, color="tab:blue", label="mean of 500 steps")
    axes.set(xlabel="step", ylabel="velocity error", yscale="log", title="shapes-flux")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
