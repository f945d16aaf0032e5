"""Run the installed `vbench` package over a folder of films, one dimension after another.

The package pins old versions of numpy and transformers, so it runs in an interpreter of its own
(`VBENCH_PYTHON`); its Python API is used, since its command line needs a GPU and NCCL. A dimension
that was finished over the same films is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from diffcache.errors import DiffcacheError
from diffcache.eval.metrics.weight_files import MissingWeightsError, check
from diffcache.eval.vbench import film_names, suite

PYTHON = "VBENCH_PYTHON"
CACHE = "VBENCH_CACHE_DIR"
_DINO_CODE = "dino_model/facebookresearch_dino_main"
_DINO_AGAIN = "dino_vitbase16_pretrain.pth"
_TAIL_LINES = 8
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Runs in the other interpreter, which may have any version of Python that VBench supports.
_PROGRAM = """
import json, sys
import torch
from vbench import VBench
job = json.load(sys.stdin)
options = {"imaging_quality_preprocessing_mode": "longer"}
if job["prompts"]:
    options["prompt_list"] = job["prompts"]
VBench(torch.device(job["device"]), job["info"], job["out"]).evaluate(
    videos_path=job["films"], name=job["dimension"], dimension_list=[job["dimension"]],
    local=True, mode=job["mode"], **options)
"""


class VBenchError(DiffcacheError, RuntimeError):
    """The `vbench` package failed; the message has the end of its output."""


@dataclass(frozen=True)
class DriverJob:
    """Films and settings to run the package on."""

    films: Path  # folder of `.mp4` films
    out: Path  # folder for `<dimension>_eval_results.json` and `<dimension>_full_info.json`
    # VBench's list of prompts, which makes it the standard suite; None for films of any prompts (mode
    # `custom_input`)
    info: Path | None = None
    prompts: Mapping[str, str] | None = None  # `{file name: prompt}` for films of any prompts; None to take the names
    filtered: Path | None = None  # films that VBench's static filter kept, for temporal_flickering of the suite
    device: str = "cuda"  # torch device in the other interpreter
    # CUDA devices, each of which runs one dimension at a time. VBench's own way to share one dimension out needs
    # NCCL, and takes the last frame for appearance_style.
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.gpus > 1 and self.device != "cuda":
            raise ValueError(f"--gpus {self.gpus}: --device must be cuda, not {self.device!r}")
        named = os.environ.get(_VISIBLE)
        if named is not None and len(named.split(",")) < self.gpus:
            raise ValueError(f"--gpus {self.gpus}: ${_VISIBLE} names fewer devices: {named!r}")

    @property
    def visible(self) -> list[str]:
        """`CUDA_VISIBLE_DEVICES` of each process that runs at a time; "" leaves it as it is."""
        named = os.environ.get(_VISIBLE) or ",".join(map(str, range(self.gpus)))
        return named.split(",")[: self.gpus] if self.gpus > 1 else [""]

    @property
    def mode(self) -> str:
        """VBench's name of the mode."""
        return "custom_input" if self.info is None else "vbench_standard"

    @property
    def interpreter(self) -> str:
        """The interpreter that runs the package."""
        return os.environ.get(PYTHON) or sys.executable

    def folder(self, dimension: str) -> Path:
        """Folder of the films that a dimension is measured on."""
        return self.filtered if self.filtered and dimension == suite.FLICKER else self.films


def run(job: DriverJob, dimensions: Sequence[str] | None = None) -> dict[str, float]:
    """Measure the dimensions that are not measured yet, and return the scores of all.

    `dimensions` of None are all that the mode allows. Scores are raw, by dimension.

    Raises:
        MissingWeightsError: Weight files are missing; names all of them, before anything runs.
        ValueError: The folder, the films or the names are not what VBench takes.
        VBenchError: The package failed.
    """
    names = suite.choose(dimensions, custom=job.info is None)
    _check(job, names)
    stamps = {name: stamp(job, name) for name in names}
    todo = [name for name in names if not _done(job, name, stamps[name])]
    preflight(todo)
    _measure_all(job, {name: stamps[name] for name in todo})
    found = [suite.read_results(job.out / f"{name}{suite.ENDING}") for name in names]
    return {name: result[name] for name, result in zip(names, found, strict=True)}


def preflight(dimensions: Sequence[str]) -> None:
    """Check every weight file of these dimensions where VBench will look for it.

    VBench would start downloads in the middle of a run; this says everything at once instead.

    Raises:
        MissingWeightsError: Files are missing; each with its source and place.
        WrongWeightsError: A file is another one than VBench's.
    """
    cache = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "vbench")
    lacking: dict[Path, str] = {}
    for name in dimensions:
        for weight in suite.DIMENSIONS[name].files:
            place = cache / weight.folder / weight.file
            if place.is_file():
                check(weight, place)
            else:
                users = ", ".join(key.removeprefix("vbench_") for key in weight.used_by)
                digest = f"sha256 {weight.sha256}" if weight.sha256 else "no published hash"
                lacking[place] = f"{weight.url} ({digest}), for {users}"
    if "subject_consistency" in dimensions:
        code = cache / _DINO_CODE
        # The code of DINO ignores the path that VBench hands it and asks the cache of torch.hub.
        again = Path(torch.hub.get_dir()) / "checkpoints" / _DINO_AGAIN
        if not code.is_dir():
            lacking[code] = "a clone of https://github.com/facebookresearch/dino"
        if not again.is_file():
            lacking[again] = f"a copy of {_DINO_AGAIN}, which its own code looks for there"
    if lacking:
        lines = "".join(f"\n  {place}: {what}" for place, what in lacking.items())
        raise MissingWeightsError(
            f"VBench needs {len(lacking)} more file(s) under ${CACHE} and the cache of torch.hub; "
            f"put them there by hand, or choose other dimensions:{lines}"
        )


def stamp(job: DriverJob, dimension: str) -> str:
    """Return a hash of a dimension's inputs: films, sizes, times, prompts and mode."""
    films = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in film_names.check_folder(job.folder(dimension))]
    info = job.info.read_text(encoding="utf-8") if job.info else None
    prompts = dict(job.prompts) if job.prompts else None
    text = json.dumps([films, info, prompts, job.mode], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check(job: DriverJob, names: Sequence[str]) -> None:
    """Check films and prompts before anything runs."""
    if job.info is not None:
        prompts = film_names.read_info(job.info)
        film_names.require_complete(job.films, prompts, names)
        if suite.FLICKER in names and job.filtered is None:
            raise ValueError(
                f"VBench measures {suite.FLICKER} on films that its static filter kept: run "
                f"`vbench static_filter --videos_path {job.films}` and give the filtered_videos "
                "folder it makes, or leave the dimension out"
            )
    for name in names:
        film_names.check_folder(job.folder(name))
    if job.prompts is not None:
        absent = [f.name for f in film_names.check_folder(job.films) if f.name not in job.prompts]
        if absent:
            raise ValueError(f"no prompt is given for {absent[0]} ({len(absent)} films without)")


def _stamp_file(job: DriverJob, dimension: str) -> Path:
    """Return the file of the hash, hidden and no JSON, since VBench reads every JSON there."""
    return job.out / ".films" / f"{dimension}.sha256"


def _done(job: DriverJob, dimension: str, films: str) -> bool:
    kept = _stamp_file(job, dimension)
    result = job.out / f"{dimension}{suite.ENDING}"
    return result.is_file() and kept.is_file() and kept.read_text() == films


def _measure_all(job: DriverJob, stamps: Mapping[str, str]) -> None:
    """Run dimensions, as many at a time as there are devices; after a failure none is begun."""
    free: SimpleQueue[str] = SimpleQueue()
    for device in job.visible:
        free.put(device)

    def run_one(name: str) -> None:
        device = free.get()
        try:
            _measure(job, name, device)
            _stamp_file(job, name).write_text(stamps[name])
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(job.visible)) as pool:
        runs = [pool.submit(run_one, name) for name in stamps]
        try:
            for pending in runs:
                pending.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _measure(job: DriverJob, dimension: str, visible: str) -> None:
    """Run one dimension in the other interpreter and move its two files into place."""
    work = job.out / ".work" / dimension
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _stamp_file(job, dimension).parent.mkdir(exist_ok=True)
    message: dict[str, Any] = {
        "dimension": dimension,
        "films": str(job.folder(dimension).resolve()),
        "out": str(work.resolve()),
        "info": str(job.info.resolve()) if job.info else "",
        "mode": job.mode,
        "device": job.device,
        "prompts": dict(job.prompts) if job.prompts else None,
    }
    command = [job.interpreter, "-c", _PROGRAM]
    # No network, and old checkpoints may be loaded. Parts of VBench ask for `cuda` without a number, so each process
    # is shown its own device only.
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    shown = {**os.environ, **ours, **({_VISIBLE: visible} if visible else {})}
    text = json.dumps(message)
    try:
        done = subprocess.run(command, input=text, env=shown, capture_output=True, text=True)
    except OSError as error:
        raise VBenchError(f"cannot start {job.interpreter} ({PYTHON}): {error}") from error
    result = work / f"{dimension}{suite.ENDING}"
    if done.returncode or not result.is_file():
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL_LINES:])
        raise VBenchError(
            f"VBench failed on {dimension} in {job.interpreter} (exit {done.returncode}); set "
            f"${PYTHON} to an interpreter that has the package vbench. It said:\n{said}"
        )
    suite.read_results(result)
    for file in work.glob("*.json"):
        os.replace(file, job.out / file.name)
    shutil.rmtree(work)
