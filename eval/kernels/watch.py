"""Have kernels measured in a process of their own, and keep the results in a file.

The process is ended where a task crashes, hangs, or time is up. What broke is left out, and a new
process goes on with the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from diffcache.eval.kernels.measure import BROKEN, Task
from diffcache.eval.kernels.timing import choices
from diffcache.files import read_json, write_json
from diffcache.kernels.configs import RATIO

HANGS = 60.0  # seconds after which a task counts as hung
OPTIONS = ", options"  # of what failed while options were tried: the kernel itself is right


@dataclass
class Found:
    """Measurements so far, and the file that keeps them."""

    file: Callable[[str], Path]  # where it is written after every result
    # What is in it: a record of the benchmark of kernels, with `choices`, `configs`, `failed`, and `finished`
    body: dict[str, Any] = field(default_factory=dict)
    done: list[Task] = field(default_factory=list)  # tasks that have a result
    running: Task | None = None  # the task that was begun last, if it has no result yet
    begun: float = field(default_factory=time.monotonic)  # when it was begun, by the clock that only goes on

    def take(self, line: dict[str, Any]) -> None:
        """Take one result, and write the file."""
        if "started" in line:
            self.running = tuple(line["started"])
            return
        if "device" in line:
            self._begin(line)
            return
        kind, operator = task = tuple(line["task"])
        self.running = None
        self.done.append(task)
        if kind == "check":
            others = [row for row in self.body["rows"] if row["operator"] != operator]
            self.body["rows"] = others + line.get("rows", [])
            self.body["configs"][self.body["device"]].pop(operator, None)
        entries = line.get("configs")
        if entries:
            self.body["configs"][self.body["device"]][operator] = entries
        self.body["buckets"].update({operator: line["buckets"]} if "buckets" in line else {})
        key = operator if kind == "check" else operator + OPTIONS
        self.body["failed"].pop(key, None)
        if line.get("failed"):
            self.body["failed"][key] = line["failed"]
        self._choose()
        self.write()

    def _begin(self, line: dict[str, Any]) -> None:
        """Take the known results of the device; those of the same versions stay."""
        if self.body:  # a second process
            return
        empty: dict[str, Any] = {
            "choices": {line["device"]: {}},
            "configs": {line["device"]: {}},
            "failed": {},
            "buckets": {},
            "rows": [],
        }
        before = read_json(self.file(line["device"])) or {}
        same = all(before.get(key) == line[key] for key in ("device", "versions"))
        self.body = {**empty, **(before if same else {}), **line}
        self.body |= {"finished": False, "seconds": 0.0}

    def _choose(self) -> None:
        """Choose by the worst row of each operator, launched with its best options."""
        name = self.body["device"]
        failed = self.body["failed"]
        found = {key: 0.0 for key in failed if not key.endswith(OPTIONS)}
        for row in self.body["rows"]:
            if row["operator"] in failed:
                continue
            entries = self.body["configs"][name].get(row["operator"], {})
            buckets = self.body["buckets"].get(row["operator"], {})
            bucket = buckets.get(f"{row['model']}: {row['shapes']}", "")
            gained = entries.get(bucket, {}).get(RATIO, 1.0)
            worst = choices([row])[row["operator"]] * gained
            found[row["operator"]] = round(min(found.get(row["operator"], worst), worst), 2)
        self.body["choices"] = {name: found}

    def write(self) -> None:
        """Write the file."""
        self.body["seconds"] = round(time.monotonic() - self.begun, 1)
        write_json(self.file(self.body["device"]), self.body)


def measure(
    command: Sequence[str], wanted: Sequence[Task], found: Found, seconds: float, show: Callable[[int, int, str], None]
) -> None:
    """Have tasks done in other processes, until all are done or time is up.

    Args:
        command: Starts a process that takes a file for its results and the tasks as JSON.
        wanted: Tasks, in order.
        found: Takes the results.
        seconds: Time limit.
        show: Takes how many tasks are done, how many there are, and the next.

    Raises:
        RuntimeError: If a process ends before it begins a task; the message has its last words.
    """
    until = time.monotonic() + seconds
    left = list(wanted)
    with TemporaryDirectory() as folder:
        for number in range(len(left) + 1):
            lines, log = Path(folder) / f"{number}.jsonl", Path(folder) / f"{number}.log"
            lines.touch()
            with log.open("w") as words:
                call = [*command, str(lines), json.dumps(left)]
                process = subprocess.Popen(
                    call, stdout=words, stderr=words, start_new_session=True, env=_environment()
                )
                try:
                    why = watched(
                        process,
                        lines,
                        left,
                        found,
                        until,
                        lambda: show(len(found.done), len(wanted), (found.running or ("", ""))[1]),
                    )
                finally:
                    _end(process)
            if why == "time":
                return
            broken, found.running = found.running, None
            left = [task for task in left if task not in found.done and task != broken]
            if broken is not None:
                last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]
                found.take({"task": list(broken), "failed": why or f"crashed: {last}"})
            if not left:
                found.body["finished"] = True
                found.write()
                return
            if broken is None and process.returncode != BROKEN:
                raise RuntimeError(f"the rest could not be measured: {log.read_text()[-600:]}")


def watched(
    process: subprocess.Popen[bytes],
    lines: Path,
    wanted: Sequence[Task],
    found: Found,
    until: float,
    show: Callable[[], None],
) -> str:
    """Take results of a process until all are there; return why it is cut short, if it is."""
    begun, running = time.monotonic(), None
    with lines.open() as file:
        while True:
            ended = process.poll() is not None
            for line in _whole_lines(file):
                found.take(line)
                show()
            now = time.monotonic()
            if ended or all(task in found.done for task in wanted):
                return ""
            if running != found.running:
                begun, running = now, found.running
            if now > until:
                return "time"
            if running is not None and now - begun > HANGS:
                return f"took longer than {HANGS:g} seconds"
            time.sleep(0.05)


def _whole_lines(file: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the lines that were written to the end since the last time."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


def _environment() -> dict[str, str]:
    """Return the environment of a process that measures: no setting of kernels but the default."""
    left_out = ("DIFFCACHE_KERNELS", "DIFFCACHE_CHECK", "TRITON_INTERPRET")
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
