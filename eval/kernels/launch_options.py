"""Candidates for the options of launches: compiled, those that spill dropped, the rest timed.

Every candidate is compiled at the sizes of a row: one that spills registers or needs more shared
memory than there is costs no time of the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffcache.eval.kernels.cases import KernelCase
from diffcache.kernels.configs import RATIO, trying
from diffcache.kernels.dispatch import OPERATORS, kernel_module

ARCH = 90  # what is compiled for where there is no GPU
LEAST = 1.03  # times as fast as the defaults that an entry has to be
DEFAULT = "default"
Options = dict[str, int]
Timed = tuple[str, str, Options, float]  # operator, bucket, options, times as fast as the defaults


class Launched(TorchDispatchMode):
    """Launch some operators on tensors without memory; others return empty results."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.operators = {OPERATORS[name].op: OPERATORS[name] for name in names}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in self.operators:
            return func(*args, **(kwargs or {}))
        module, _, name = self.operators[func].kernel.partition(":")
        return getattr(kernel_module(module), name)(*args)


@dataclass(frozen=True)
class Built:
    """One candidate, compiled."""

    tried: Options  # options in the place of defaults; none of them for the defaults
    bucket: str  # bucket of the launch
    options: Options  # all options of the launch; none of them if it did not compile
    # Registers of a thread, KiB of shared memory of a block and bytes of a thread that spill: the most of all kernels
    # that are launched
    used: tuple[float, ...]
    dropped: str  # why it is not timed; empty if it is

    @property
    def name(self) -> str:
        """Name in tables."""
        return ", ".join(f"{key}={value}" for key, value in self.tried.items()) or DEFAULT


def choices_of(name: str) -> list[Options]:
    """Return the candidates of an operator; none if it has no options, or no kernel of ours."""
    if name not in OPERATORS:
        return []
    module = kernel_module(OPERATORS[name].kernel.partition(":")[0])
    found: list[Options] = getattr(module, "CANDIDATES", {}).get(name, [])
    return found


def arch_of(device: torch.device) -> int:
    """Return the architecture to compile for, such as 90.

    Raises ValueError if the shared memory of the device is not known.
    """
    if device.type != "cuda":
        return ARCH
    major, minor = torch.cuda.get_device_capability(device)
    known = kernel_module("machine").SHARED
    if 10 * major + minor not in known:
        raise ValueError(f"sm_{major}{minor}: not tuned for; there are {', '.join(map(str, known))}")
    return 10 * major + minor


def built(case: KernelCase, options: Options, arch: int) -> Built:
    """Compile the launch of one row with options, and say whether it is worth timing."""
    given = case.make(torch.device("meta"), False)
    try:
        with trying(case.operator, options) as asked, Launched(case.operator):
            codes = kernel_module("machine").launched(lambda: case.ways["kernel"](*given), arch)
    except Exception as error:  # of a compiler: it says what it cannot do
        if not options:
            raise
        return Built(options, "", {}, (), f"{type(error).__name__}: {error}".splitlines()[0][:70])
    spilled = max(code.stack + code.local for code in codes)
    used = max(code.registers for code in codes), max(code.shared for code in codes), spilled
    bucket, whole = next(iter(asked.items()), ("", {}))  # a launch without options asks for none
    return Built(options, bucket, whole, used, "spills" if spilled and options else "")


def trial(case: KernelCase, kept: Iterable[Built]) -> KernelCase:
    """Return a row whose ways are candidates, beside plain PyTorch."""

    def way(options: Options) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with trying(case.operator, options):
                return case.ways["kernel"](*given)

        return run

    ways = {one.name: way(one.tried) for one in kept}
    return replace(case, ways={**ways, "plain": case.ways["plain"]}, target={})


def ratios(case: KernelCase, kept: Iterable[Built], ways: dict[str, Any]) -> list[Timed]:
    """Return how many times as fast as the defaults candidates are; wrong ones have no time."""
    usual = ways[DEFAULT].get("us")
    return [
        (case.operator, one.bucket, one.options, usual[1] / ways[one.name]["us"][1])
        for one in kept
        if one.tried and usual and "us" in ways[one.name]
    ]


def faster(timed: Iterable[Timed]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries: operator -> bucket -> options and ratio, the best of each bucket.

    Options count as fast as in the worst row of their bucket, and only if all of its rows take
    them.
    """
    rows: dict[tuple[str, str], dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, bucket, options, ratio in timed:
        rows[name, bucket][tuple(options.items())].append(ratio)
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (name, bucket), tried in rows.items():
        most = max(map(len, tried.values()))
        worst = {key: min(values) for key, values in tried.items() if len(values) == most}
        best = max(worst, key=worst.__getitem__)
        if worst[best] >= LEAST:
            found[name][bucket] = {**dict(best), RATIO: round(worst[best], 3)}
    return dict(found)
