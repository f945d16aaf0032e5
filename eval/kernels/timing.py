"""Check and time the ways of one row of kernels, in turn, and the limits of the device.

Every way to a result is compared with plain PyTorch before it is timed; one that differs, or that
fails, has an error in the place of a time. Ways take turns, in rounds of a few calls, and inputs
are as many as the caches of the device cannot hold.

A way has two times: `us` is the device's own, taken while the host is ahead; `called_us` is what
passes from call to call where the device waits for the host, as in a skipped step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product, starmap
from typing import Any

import torch

from diffcache.eval.kernels.cases import KernelCase, all_cases
from diffcache.eval.record import Setting
from diffcache.foreign import cuda_sleep
from diffcache.kernels.dispatch import tensors_of

CALLS = 10
FEWEST = 3  # rounds, however long they take
CYCLES = 2e9  # of the device in a second, or somewhat less
# Seconds that the device is kept busy while the host launches a turn: at least; and at most, as
# longer turns are slow on the device.
LEAST_AHEAD, MOST_AHEAD = 1e-3, 2e-2
SPREAD = 180 * 2**20  # bytes of inputs, three times what the caches of an H200 hold
COPIED, SQUARE = 2**31, 8192  # bytes, and rows of the matrices, that tell the device's limits


def ceilings(device: torch.device, tiny: bool) -> dict[str, float]:
    """Return bytes a second of a copy, read and written, and operations a second of a product."""
    here = torch.empty((2**20 if tiny else COPIED) // 2, device=device, dtype=torch.bfloat16)
    there = torch.empty_like(here)
    size = 64 if tiny else SQUARE
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    copied = min(turn(device, lambda: there.copy_(here), 3) for _ in range(5))
    multiplied = min(turn(device, lambda: left @ right, 3) for _ in range(5))
    return {"bytes": 2 * here.nbytes / copied, "operations": 2 * size**3 / multiplied}


def row(
    case: KernelCase, device: torch.device, rounds: int, limits: Mapping[str, float], longest: float = math.inf
) -> dict[str, Any]:
    """Check and time all ways of one case.

    Args:
        case: The ways; `plain` must run.
        device: Where they run; sizes are tiny on a CPU.
        rounds: Timed turns of each way, at most.
        limits: Bytes and operations a second that the device can do, see `ceilings`.
        longest: Seconds after which no further round begins, except for the first few.
    """
    tiny = device.type == "cpu"
    errors = errors_of(case, device)
    good = {
        name: way
        for name, way in case.ways.items()
        if not isinstance(wrong := errors[name], str) and wrong <= case.tolerance
    }
    seconds = timed(case, good, device, rounds, longest)
    seconds_of = case.moved / limits["bytes"], case.flops / limits["operations"]
    limit = None if tiny else 1e6 * max(seconds_of)
    ways: dict[str, dict[str, Any]] = {name: {"error": errors[name]} for name in case.ways}
    for name, times in seconds.items():
        for key, values in times.items():
            ways[name][key] = [1e6 * q for q in quartiles(values)]
    return {
        "name": f"{case.operator}, {case.model}",
        "operator": case.operator,
        "model": case.model,
        "shapes": case.shapes,
        "moved": case.moved,
        "flops": case.flops,
        "limit_us": limit,
        "ways": ways,
        "instead": case.instead,
        "targets": [] if limit is None else targets(case, ways, limit),
    }


def errors_of(case: KernelCase, device: torch.device) -> dict[str, float | str]:
    """Return the error of every way relative to `plain`, on the same numbers, or why it failed."""
    tiny = device.type == "cpu"
    seed = torch.Generator().initial_seed()
    torch.manual_seed(seed)
    expected = [t.clone() for t in tensors_of(case.ways["plain"](*case.make(device, tiny)))]
    errors: dict[str, float | str] = {}
    for name, way in case.ways.items():
        torch.manual_seed(seed)
        errors[name] = error_of(way, case.make(device, tiny), expected)
    return errors


def timed(
    case: KernelCase, ways: Mapping[str, Callable[..., Any]], device: torch.device, rounds: int, longest: float
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a call of each way in every round, by kind of time; see `row`."""
    tiny = device.type == "cpu"
    many = 1 if tiny else max(2, math.ceil(SPREAD / max(case.moved, 1)))
    sets = [case.make(device, tiny) for _ in range(min(many, 64))]
    for way in ways.values():
        turn(device, lambda: [way(*given) for given in sets], 1)  # noqa: B023 - called at once
    kinds = ("us",) if tiny else ("called_us", "us")
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in ways}
    at, started = 0, time.monotonic()
    for number in range(rounds):
        if number >= FEWEST and time.monotonic() - started > longest:
            break
        for (name, way), kind in product(ways.items(), kinds):
            calls = [sets[(at + n) % len(sets)] for n in range(CALLS)]
            at += CALLS
            ahead = 0.0
            if kind == "us":  # the host needs no longer than a turn that it was waited for
                called = max(seconds[name].get("called_us", [0.0])) * CALLS
                ahead = min(max(1.5 * called, LEAST_AHEAD), MOST_AHEAD)
            took = turn(device, lambda: [way(*g) for g in calls], 1, ahead)  # noqa: B023
            seconds[name][kind].append(took / CALLS)
    return seconds


def error_of(way: Callable[..., Any], given: tuple[Any, ...], expected: list[torch.Tensor]) -> float | str:
    """Return the largest error of a way relative to the reference, or why there is none."""
    try:
        found = tensors_of(way(*given))
        if [t.shape for t in found] != [t.shape for t in expected]:
            return f"shapes {[list(t.shape) for t in found]}"
        error = max(starmap(distance, zip(found, expected, strict=True)))
        return error if math.isfinite(error) else "numbers that are not finite, unlike those expected"
    except Exception as error:  # a rival that cannot run is told, not hidden
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference."""
    one, other = found.double(), expected.double()
    error = (one - other).where(one != other, 0.0).norm()
    return float(error / other.where(other.isfinite(), 0.0).norm().clamp_min(1e-300))


def turn(device: torch.device, run: Callable[[], Any], calls: int, ahead: float = 0.0) -> float:
    """Return the seconds of a call, by the device's clock on CUDA.

    Args:
        device: Where it runs.
        run: What is called.
        calls: How often.
        ahead: Seconds that a CUDA device is kept busy before the first call, so that it never waits for the host.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        cuda_sleep(int(ahead * CYCLES))
    first.record()
    for _ in range(calls):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / calls


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [values[0]] * 3 if len(values) < 2 else statistics.quantiles(values, n=4, method="inclusive")


def targets(case: KernelCase, ways: Mapping[str, Mapping[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Return the target of the kernel and its result."""
    ours = ways.get("kernel", {}).get("us")  # a trial of options has no way of this name
    found = []
    for against, wanted in case.target.items():
        other = [0, limit] if against == "limit" else ways[against].get("us")
        got = None if ours is None or other is None else other[1] / ours[1]
        found.append({"against": against, "wanted": wanted, "got": got, "met": got is not None and got >= wanted})
    return found


def choices(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the speedup of each kernel over its rival, in the worst of rows and times."""
    found: dict[str, float] = {}
    for each in rows:
        kernel, other = each["ways"]["kernel"], each["ways"][each.get("instead", "plain")]
        kinds = [kind for kind in ("us", "called_us") if kind in kernel and kind in other]
        ratio = min((other[kind][1] / kernel[kind][1] for kind in kinds), default=0.0)
        found[each["operator"]] = round(min(found.get(each["operator"], ratio), ratio), 2)
    return found


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = 30) -> dict[str, Any]:
    """Measure all kernels for `bench kernels`; on a CPU sizes are tiny.

    `rounds` is the number of timed turns of each way.
    """
    tiny = setting.device.type == "cpu"
    limits = ceilings(setting.device, tiny)
    rows, cases = [], all_cases()
    for number, case in enumerate(cases):
        setting.progress(number, len(cases), f"{case.operator}, {case.model}")
        rows.append(row(case, setting.device, rounds, limits))
    return {
        "shapes": {"calls": CALLS},
        "rounds": rounds,
        "tiny": tiny,
        "limits": limits,
        "rows": rows,
        "choices": {} if tiny else {torch.cuda.get_device_name(setting.device): choices(rows)},
    }
