"""Peak memory of a pipeline's call, uncached or under a method, in a process of its own.

The resident memory of a process starts with what earlier work left behind, so that a fresh process
loads the pipeline and makes one call. `ru_maxrss` will not do: on Linux a new process inherits the
value of the one that started it. The kernel's `VmHWM` is used, which is reset once the pipeline is
loaded; on other systems the resident memory is sampled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import diffcache
from diffcache.errors import DiffcacheError
from diffcache.pipelines.load import Loading, load

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.002


class MeasureError(DiffcacheError):
    """The process that was to be measured failed."""


@dataclass(frozen=True)
class Place:
    """Place where a measured process runs."""

    device: str = "cpu"  # name of the device, as torch has it
    dtype: str = "float32"  # dtype of the models: `float32`, `float16` or `bfloat16`
    threads: int = 1  # CPU threads of torch
    loading: Loading = field(default_factory=Loading)  # options for loading the pipeline


def peak_bytes(model: str | Path, method: str | None, call: Mapping[str, Any], place: Place | None = None) -> int:
    """Return the most memory in use during one call, in a fresh process, in bytes.

    Allocated by torch on an accelerator, resident memory of the process on the CPU.

    Args:
        model: Directory of a saved pipeline, or the name of a shipped one.
        method: Method such as `taylorseer:every=4` (`diffcache.eval.methods`); None is uncached.
        call: Arguments of the call, plain data; `seed` sets the noise.
        place: Device, dtype and threads.

    Raises:
        FileNotFoundError: If there is no such pipeline.
        UnknownMethodError: If the catalogue has no such method.
        ValueError: If a setting of the method is wrong, or the call is no plain data.
        MeasureError: If the process fails.
    """
    from diffcache.eval.methods import parse_method
    from diffcache.pipelines.demo.saved import DTYPES, locate

    place = place or Place()
    directory = locate(str(model))
    if method is not None:
        parse_method(method)
    if place.dtype not in DTYPES:
        raise ValueError(f"dtype={place.dtype!r}: must be one of {', '.join(DTYPES)}")
    order = {"model": str(directory), "method": method, "call": dict(call), **asdict(place)}
    try:
        text = json.dumps(order)
    except TypeError as error:
        raise ValueError(f"call={dict(call)!r}: must be plain data ({error})") from error
    command = [sys.executable, "-m", "diffcache.eval.cost.peak_memory"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MeasureError(f"measuring {directory.name} failed: {last}")
    return int(done.stdout.strip().splitlines()[-1])


def peak(call: Callable[[], object], device: torch.device | str) -> int:
    """Return the most memory that torch allocates on a CUDA device during a call, in bytes.

    Raises ValueError for another device: on a CPU only a fresh process can tell (`peak_bytes`).
    """
    place = torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device={str(device)!r}: memory of a CPU is measured by peak_bytes")
    torch.cuda.synchronize(place)
    torch.cuda.reset_peak_memory_stats(place)
    call()
    torch.cuda.synchronize(place)
    return torch.cuda.max_memory_allocated(place)


def measure(order: Mapping[str, Any]) -> int:
    """Load a pipeline and return the peak of a call, in bytes.

    `peak_bytes` runs this in a fresh process, and passes the order to it as JSON.
    """
    from diffcache.eval.methods import parse_method

    torch.set_num_threads(order["threads"])
    loading = Loading(**order.get("loading", {}))
    pipe, defaults = load(order["model"], order["dtype"], order["device"], loading)
    pipe.set_progress_bar_config(disable=True)
    call = {**defaults, **order["call"]}
    if "seed" in call:
        call["generator"] = torch.Generator("cpu").manual_seed(call.pop("seed"))
    if order["method"] is not None:
        diffcache.wrap(pipe, parse_method(order["method"]))
    device = torch.device(order["device"])

    def draw() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            pipe(**call)

    if device.type == "cuda":
        return peak(draw, device)
    with _resident() as most:
        draw()
        return most()


@contextmanager
def _resident() -> Iterator[Callable[[], int]]:
    """Watch the resident memory; the yielded function returns the peak so far, in bytes."""
    if _can_reset():
        _RESET.write_text("5", encoding="ascii")  # 5: the high-water mark becomes what is in use
        yield _high_water
        return
    stop, seen = threading.Event(), [_now()]

    def watch() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            seen[0] = max(seen[0], _now())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(seen[0], _now())
    finally:
        stop.set()
        thread.join()


def _can_reset() -> bool:
    return os.access(_RESET, os.W_OK) and "VmHWM" in _STATUS.read_text(encoding="ascii")


def _high_water() -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _now() -> int:
    try:
        import psutil
    except ImportError as error:
        raise ValueError("psutil is missing, which measures memory here: pip install 'diffcache[eval]'") from error
    return int(psutil.Process().memory_info().rss)


def main() -> int:
    """Measure the job that standard input gives as JSON, and print the result."""
    from diffcache.pipelines.demo.console import quiet

    quiet()
    try:
        found = measure(json.load(sys.stdin))
    except (DiffcacheError, ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
