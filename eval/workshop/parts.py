"""Long work that goes on where it ended: results that are kept as they come, commands in turn."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from diffcache.eval.record import commit
from diffcache.files import read_json, write_json

Value = TypeVar("Value")
Budget = Annotated[float, typer.Option(min=0.0, help="Hours; what would take longer than is left is not begun.")]


class Parts:
    """Named results in a file, each with the commit that it was made at.

    Only what does not depend on time belongs here: what is timed takes turns in one process.

    Args:
        file: File that keeps them, None to keep nothing.
        key: Settings that decide the results, as JSON has them; a file of others is not read.
    """

    def __init__(self, file: Path | None, key: Mapping[str, Any]) -> None:
        self.file, self.key = file, dict(key)
        found = (None if file is None else read_json(file)) or {}
        self.found: dict[str, dict[str, Any]] = {}
        if found.get("key") == self.key:
            self.found = found["parts"]

    def take(self, name: str, make: Callable[[], Value]) -> Value:
        """Return a part, made now unless it was kept.

        Args:
            name: Name of the part.
            make: Returns what JSON holds.
        """
        if name not in self.found:
            self.found[name] = {"value": make(), "commit": commit()}
            if self.file is not None:
                write_json(self.file, {"key": self.key, "parts": self.found})
        value: Value = self.found[name]["value"]
        return value

    def end(self) -> dict[str, str]:
        """Remove the file, and return the commit of every part."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        return {name: part["commit"] for name, part in self.found.items()}


def run_each(
    jobs: Mapping[str, Callable[[], bool]], hours: float, seconds: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Run jobs one after the other while their time lasts, and tell the progress.

    An interrupt ends the job under way and all others; those before it are done.

    Args:
        jobs: Name -> function that says whether it succeeded, in their order.
        hours: Hours that they may take together.
        seconds: Name -> seconds that a job took the last time, where that is known.

    Returns:
        Names of jobs that failed, and of those that were not begun.
    """
    begun, failed, left = time.monotonic(), [], []
    for number, (name, job) in enumerate(jobs.items(), 1):
        started = time.monotonic()
        rest = 3600 * hours - (started - begun)
        if rest <= 0 or seconds.get(name, 0.0) > rest:
            left.append(name)
            continue
        last = f", {seconds[name] / 60:.1f} minutes the last time" if name in seconds else ""
        print(f"[{number} of {len(jobs)}] {name}{last}", flush=True)
        if not job():
            failed.append(name)
        took = (time.monotonic() - started) / 60
        print(f"[{number} of {len(jobs)}] {name}: {took:.1f} minutes", flush=True)
    if left:
        print(f"left for another run: {', '.join(left)}", flush=True)
    return failed, left


def in_fork(work: Callable[[], int]) -> bool:
    """Run a function in a fork of this process, which has all imports; say whether it gave 0.

    An interrupt of this process alone ends the other one, too.
    """
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work()))
    process.start()
    try:
        process.join()
    except BaseException:
        process.terminate()
        raise
    return process.exitcode == 0
