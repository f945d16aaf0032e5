"""Benchmark records: measurements with their scatter, versions, device and settings."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import diffcache
from diffcache.files import write_json

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
CODE = ("diffcache", "kernels", "pipelines", "eval")  # records and pages may change meanwhile
FOLDER = ROOT / "assets" / "bench"
_FIELDS: dict[str, Any] = {
    "schema": int, "benchmark": str, "versions": dict, "device": str, "threads": int, "dtype": str,
    "shapes": dict, "rounds": int, "command": str, "seed": int, "date": str,
    "commit": (str, type(None)), "seconds": (int, float), "rows": list,
}  # fmt: skip


def untold(done: int, total: int, name: str) -> None:
    """Tell nobody of the progress."""


@dataclass(frozen=True)
class Setting:
    """Device and precision of a measurement, and where its progress is told."""

    device: torch.device
    dtype: torch.dtype = torch.float32  # dtype of the models
    # Callback for the progress, given (turns done, turns in all, name of the next)
    progress: Progress = field(default=untold, compare=False, repr=False)

    @property
    def clock(self) -> str:
        """Clock of the work: CPU time where one thread does it and no accelerator, else wall time.

        Other work on the machine does not lengthen CPU time, which knows nothing of an accelerator.
        """
        is_alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        return "process_time" if is_alone else "perf_counter"

    def wait(self) -> None:
        """Let an accelerator finish."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device_name(self) -> str:
        """Name of the accelerator or of the processor."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return _processor()


def stats(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, quartiles, 10th percentile and number of samples, times `scale`."""
    places = {"median": 0.5, "q1": 0.25, "q3": 0.75, "p10": 0.1}
    found = np.quantile([value * scale for value in samples], list(places.values()))
    return dict(zip(places, found.tolist(), strict=True)) | {"n": len(samples)}


def some(count: int, share: float, seed: int) -> list[int]:
    """Draw a share, 0 to 1, of the numbers below `count`, at least one, in increasing order."""
    number = min(max(math.ceil(count * share), 1), count)
    return sorted(np.random.default_rng(seed).permutation(count)[:number].tolist())


def values(column: Tensor) -> list[Any] | str:
    """Return the values of samples, as a record keeps them: outcomes as 0 and 1, others rounded.

    Args:
        column: Outcome or value of every sample, [N], or of every question of each, [N, Q].
    """
    if column.ndim > 1:
        return [values(row) for row in column]
    if column.dtype == torch.bool:
        return "".join("01"[int(flag)] for flag in column)
    return [round(value, 3) for value in column.double().tolist()]


def envelope(benchmark: str, setting: Setting, command: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a record: the result of a benchmark, with the machine that measured it.

    `body` holds the measured values; `seed` is 0, that of every bench, where it names no other.
    """
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": command,
        "seed": 0,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": importlib.metadata.version("diffusers"),
            "transformers": importlib.metadata.version("transformers"),
            "diffcache": diffcache.__version__,
        },
        "device": setting.device_name,
        "threads": torch.get_num_threads(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        **body,
    }


def check(record: dict[str, Any]) -> None:
    """Check that a record is whole and can be written as JSON.

    Raises ValueError if a field is missing or of another type than it should be, or a number is not finite.
    """
    for name, kind in _FIELDS.items():
        if name not in record:
            raise ValueError(f"the record has no {name!r}")
        if not isinstance(record[name], kind):
            raise ValueError(f"{name}={record[name]!r}: must be of type {kind}")
    if not record["rows"] or not all("name" in row for row in record["rows"]):
        raise ValueError("rows: there must be some, each with a name")
    json.dumps(record, allow_nan=False)


def write(record: dict[str, Any], folder: Path) -> Path:
    """Check a record and write it to a file in a folder; a record of an accelerator does not replace one of a CPU."""
    check(record)
    on_cpu = record["shapes"].get("device", "cpu") == "cpu"
    file = folder / f"{record['benchmark']}{'' if on_cpu else '-cuda'}.json"
    write_json(file, record)
    return file


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout, with a plus sign where the code was changed since.

    None where the code is not a checkout of its own, such as an installed package.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return None
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", *CODE)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changed else commit
