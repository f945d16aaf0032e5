"""Measure kernels on a device: check each against plain PyTorch, time it, try its options.

    python -m diffcache.eval.kernels.measure cuda:0 FILE TASKS

does tasks one after another and tells each result in FILE as soon as it is known; `watch.py` reads
them. Meanwhile processes without the device compile what comes next into Triton's cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from diffcache.eval.kernels.cases import KernelCase, all_cases
from diffcache.eval.kernels.launch_options import Built, Options, arch_of, built, choices_of, faster, ratios, trial
from diffcache.eval.kernels.timing import CALLS, ceilings, row
from diffcache.eval.record import Setting, envelope
from diffcache.kernels.dispatch import OPERATORS, device_name, refused, versions

# What most runs call comes first, so that little time is enough for it.
FIRST = (
    "weighted_sum",
    "finite_differences",
    "l1_sums",
    "sdpa_cudnn",
    "attn_forward",
    "rotate",
    "kv_gather",
    "kv_scatter",
    "attn_decode_kivi",
    "quant_groups",
    "dequant_groups",
)
ROUNDS, LONGEST = 30, 0.6  # timed turns of a row, and seconds of them
TRIALS, SHORT = 12, 0.4  # the same of candidates
BUILDS = 30.0  # seconds that a task waits for what others compile for it
LEFT_OUT = "torch.compile"  # it takes longer to compile than all else does together
BROKEN = 3  # exit code of a process whose device answers nothing any more
COMPILERS = 8  # processes, at most
Task = tuple[str, str]  # "check" or "options", and an operator
Tell = Callable[[dict[str, Any]], None]


def tasks() -> list[Task]:
    """Return all that there is to measure, the most useful first."""
    known = list(dict.fromkeys(case.operator for case in all_cases()))
    order = [*FIRST, *(name for name in known if name not in FIRST)]
    return [("check", name) for name in order] + [
        ("options", name) for name in order if name in OPERATORS and choices_of(name)
    ]


@torch.no_grad()
def work(device: torch.device, wanted: Sequence[Task], tell: Tell) -> bool:
    """Do tasks one after another, and tell each result.

    Args:
        device: Where to measure; on a CPU sizes are tiny.
        wanted: What to do, in order.
        tell: Takes each result, plain data.

    Returns:
        Whether the device still answers; if not, the last task told is the last that was done.
    """
    is_cuda = device.type == "cuda"
    name = device_name(device.index or 0) if is_cuda else device.type
    cases: dict[str, list[tuple[int, KernelCase]]] = {}
    for number, case in enumerate(all_cases()):
        cases.setdefault(case.operator, []).append((number, _without_compiler(case)))
    with compilers(device, wanted, cases) as made:
        limits = ceilings(device, tiny=not is_cuda)
        tell(_record(device) | {"device": name, "limits": limits})
        wrong = set()
        for kind, operator in wanted:
            tell({"started": [kind, operator]})
            do = checked if kind == "check" else best_options
            try:
                if why := refused(operator, device):
                    found = {"failed": why}
                else:
                    found = {} if operator in wrong else do(cases[operator], device, limits, made)
            except Exception as error:  # one operator that fails leaves the others
                found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            if found.get("failed"):
                wrong.add(operator)
            tell({"task": [kind, operator]} | found)
            if is_cuda and not _answers(device):
                return False
    return True


def _record(device: torch.device) -> dict[str, Any]:
    """Return the device, versions and settings for a record."""
    found = envelope("kernels", Setting(device, torch.bfloat16), "diffcache kernels measure", {})
    found["versions"] |= versions()
    return found | {"shapes": {"calls": CALLS}, "rounds": ROUNDS, "tiny": device.type != "cuda"}


def checked(
    cases: list[tuple[int, KernelCase]], device: torch.device, limits: dict[str, float], made: dict[Any, Future[Built]]
) -> dict[str, Any]:
    """Compare an operator with plain PyTorch, and time it in all of its rows.

    Returns `rows`, and `failed`, which is empty where the kernel is right.
    """
    rows, failed = [], ""
    for number, case in cases:
        if (waiting := made.get((number, "{}"))) is not None:
            _built(waiting)
        found = row(case, device, ROUNDS, limits, LONGEST)
        error = found["ways"]["kernel"]["error"]
        if isinstance(error, str):
            failed = failed or f"{case.model}: {error}"
        elif error > case.tolerance:
            failed = failed or f"{case.model}: off by {error:.2g}, at most {case.tolerance:.2g}"
        rows.append(found)
    return {"rows": rows, "failed": failed}


def best_options(
    cases: list[tuple[int, KernelCase]], device: torch.device, limits: dict[str, float], made: dict[Any, Future[Built]]
) -> dict[str, Any]:
    """Time candidates for the options of an operator's launch beside its defaults.

    Returns `configs`, bucket -> options that are faster, and `buckets`, the bucket of each row.
    """
    timed, buckets = [], {}
    for number, case in cases:
        kept: list[Built] = []
        for options in ({}, *choices_of(case.operator)):
            waiting = made.get((number, json.dumps(options)))
            one = _built(waiting) if waiting else None
            same = one is not None and any(one.options == other.options for other in kept)
            if one is not None and not one.dropped and not same:
                kept.append(one)
        if not kept or kept[0].tried:  # there is nothing to compare with
            continue
        buckets[f"{case.model}: {case.shapes}"] = kept[0].bucket
        if len(kept) > 1:
            ways = row(trial(case, kept), device, TRIALS, limits, SHORT)["ways"]
            timed += ratios(case, kept, ways)
    entries = faster(timed)
    return {"configs": entries.get(cases[0][1].operator, {}), "buckets": buckets}


@contextmanager
def compilers(
    device: torch.device, wanted: Sequence[Task], cases: dict[str, list[tuple[int, KernelCase]]]
) -> Iterator[dict[Any, Future[Built]]]:
    """Compile the kernels of the tasks in other processes, in the order of their launches.

    Yields a mapping from the number of a row and its options, as JSON, to what will have been compiled; it is empty on
    a CPU.
    """
    if device.type != "cuda":
        yield {}
        return
    arch = arch_of(device)
    pool = ProcessPoolExecutor(max(min((os.cpu_count() or 2) // 2, COMPILERS), 1), get_context("spawn"), _blind)
    made: dict[Any, Future[Built]] = {}
    for kind, operator in wanted:
        if operator not in OPERATORS:
            continue
        for options in ({}, *(choices_of(operator) if kind == "options" else ())):
            for number, _ in cases[operator]:
                key = number, json.dumps(options)
                if key not in made:
                    made[key] = pool.submit(build, number, options, arch)
    try:
        yield made
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def build(number: int, options: Options, arch: int) -> Built:
    """Compile one row with options, in a process that has no device."""
    return built(all_cases()[number], options, arch)


def _blind() -> None:
    """Hide the devices from a process that compiles."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _built(waiting: Future[Built]) -> Built | None:
    """Return the compiled kernel; None if that failed or takes too long: a launch will tell why."""
    try:
        return waiting.result(BUILDS)
    except Exception:
        return None


def _without_compiler(case: KernelCase) -> KernelCase:
    ways = {name: way for name, way in case.ways.items() if name != LEFT_OUT}
    return replace(case, ways=ways, target={k: v for k, v in case.target.items() if k != LEFT_OUT})


def _answers(device: torch.device) -> bool:
    """Return whether the device still works; after some errors no launch does."""
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).item() == 1)
    except Exception:
        return False


def main(arguments: Sequence[str]) -> int:
    """Measure on a device and tell the results in a file, one JSON object a line."""
    device, file, wanted = arguments
    with Path(file).open("a") as out:

        def tell(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        return 0 if work(place, [(kind, name) for kind, name in json.loads(wanted)], tell) else BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
