"""Find options of launches that are faster than the defaults: entries of `configs.json`.

    python -m diffcache.eval.workshop.kernels.tune --device cuda --out FILE
    python -m diffcache.eval.workshop.kernels.tune --device cpu --operators rotate   # only compiles

Every candidate is compiled first, at the sizes of the kernels' benchmark: one that spills registers
or needs more shared memory than there is costs no time of the device. Those that remain are
compared with plain PyTorch and timed in turn with the defaults.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from diffcache.command import Device, device_of, script
from diffcache.eval.workshop.bench import kernels as bench
from diffcache.eval.workshop.bench.runner import tables
from diffcache.eval.workshop.kernels.case import KernelCase
from diffcache.eval.workshop.kernels.page import families
from diffcache.files import read_json, write_json
from diffcache.kernels import dispatch
from diffcache.kernels.configs import RATIO, trying
from diffcache.kernels.dispatch import OPERATORS, kernel_module

ARCH = 90  # what is compiled for where there is no GPU
LEAST = 1.03  # times as fast as the defaults that an entry has to be
DEFAULT = "default"
Options = dict[str, int]
Timed = tuple[str, str, Options, float]  # operator, bucket, options, times as fast as the defaults


class Launched(TorchDispatchMode):
    """Launch one operator on tensors without memory; others return empty results."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = OPERATORS[name]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not self.operator.op:
            return func(*args, **(kwargs or {}))
        module, _, name = self.operator.kernel.partition(":")
        return getattr(kernel_module(module), name)(*args)


@dataclass(frozen=True)
class Built:
    """One candidate, compiled.

    Attributes:
        tried: Options in the place of defaults; none of them for the defaults.
        bucket: Bucket of the launch.
        options: All options of the launch; none of them if it did not compile.
        used: Registers of a thread, KiB of shared memory of a block and bytes of a thread that
            spill: the most of all kernels that are launched.
        dropped: Why it is not timed; empty if it is.
    """

    tried: Options
    bucket: str
    options: Options
    used: tuple[float, ...]
    dropped: str

    @property
    def name(self) -> str:
        """Name in tables."""
        return ", ".join(f"{key}={value}" for key, value in self.tried.items()) or DEFAULT


def tune(
    operators: Annotated[str, typer.Option(help="With commas (all that have candidates).")] = "",
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(min=2, help="Timed turns of each.")] = bench.ROUNDS,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="What is written.")] = None,
) -> None:
    """Find options of kernels' launches that are faster than the defaults on a CUDA device.

    On a CPU candidates are compiled for sm_90 and listed; nothing is measured or written. FILE has
    the form of kernels/configs.json, and DIFFCACHE_KERNELS_CONFIGS=FILE uses it; its entries of
    other devices and operators stay.
    """
    here = device_of(device)
    if here.type not in ("cuda", "cpu"):
        raise ValueError(f"--device {device!r}: kernels are for CUDA devices; cpu only compiles")
    if here.type == "cuda" and out is None:
        raise ValueError("--out is missing: the file that entries are written to")
    if not dispatch.has_triton() or dispatch.INTERPRETED or dispatch.chosen() == "torch":
        raise RuntimeError(
            "no kernel can be compiled: pip install 'diffcache[gpu]', and unset TRITON_INTERPRET "
            "and DIFFCACHE_KERNELS"
        )
    cases, arch = asked_for(operators), arch_of(here)
    console = Console(width=None if sys.stdout.isatty() else 160)
    limits = bench.ceilings(here, tiny=False) if here.type == "cuda" else {}
    timed: list[Timed] = []
    for case in cases:
        found = candidates(case, arch)
        console.print(table(case, found))
        if limits:
            kept = [one for one in found if not one.dropped]
            measured = bench.row(trial(case, kept), here, rounds, limits)
            console.print(*tables({"benchmark": case.operator, "rows": [measured]}))
            timed += ratios(case, kept, measured["ways"])
    if limits and out is not None:
        name, entries, before = dispatch.device_name(here.index or 0), faster(timed), read_json(out)
        old = {op: had for op, had in (before or {}).get(name, {}).items()
               if op not in {case.operator for case in cases}}  # fmt: skip
        write_json(out, {**(before or {}), name: old | entries})
        console.print(f"{sum(map(len, entries.values()))} entries are faster; wrote {out}")


def asked_for(names: str) -> list[KernelCase]:
    """Return the rows of the benchmark of operators that have candidates; of all without a name.

    Raises:
        ValueError: If an operator has no candidates.
    """
    cases = [case for module in families() for case in module.cases()]
    known = sorted({case.operator for case in cases if choices_of(case.operator)})
    wanted = [name.strip() for name in names.split(",")] if names else known
    if unknown := set(wanted) - set(known):
        raise ValueError(f"--operators {unknown.pop()!r}: must be of {', '.join(known)}")
    return [case for case in cases if case.operator in wanted]


def choices_of(name: str) -> list[Options]:
    """Return the candidates of an operator; none if it has no options, or no kernel of ours."""
    if name not in OPERATORS:
        return []
    module = kernel_module(OPERATORS[name].kernel.partition(":")[0])
    found: list[Options] = getattr(module, "CANDIDATES", {}).get(name, [])
    return found


def arch_of(device: torch.device) -> int:
    """Return the architecture to compile for, such as 90.

    Raises:
        ValueError: If the shared memory of the device is not known.
    """
    if device.type != "cuda":
        return ARCH
    major, minor = torch.cuda.get_device_capability(device)
    known = kernel_module("machine").SHARED
    if 10 * major + minor not in known:
        raise ValueError(
            f"sm_{major}{minor}: not tuned for; there are {', '.join(map(str, known))}"
        )
    return 10 * major + minor


def candidates(case: KernelCase, arch: int) -> list[Built]:
    """Compile the defaults and the candidates of one row; those that are the same stand once."""
    found: list[Built] = []
    for options in ({}, *choices_of(case.operator)):
        one = built(case, options, arch)
        if not any(one.options and one.options == other.options for other in found):
            found.append(one)
    return found


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
    ((bucket, whole),) = asked.items()
    return Built(options, bucket, whole, used, "spills" if spilled and options else "")


def table(case: KernelCase, found: Iterable[Built]) -> Table:
    """Return the candidates of one row as a table."""
    title = f"{case.operator}, {case.model}: {case.shapes}"
    shown = Table("candidate", "registers", "shared KiB", "spilled bytes", "", title=title)
    for one in found:
        numbers = [f"{number:.4g}" for number in one.used] or [""] * 3
        shown.add_row(one.name, *numbers, f"dropped: {one.dropped}" if one.dropped else "kept")
    return shown


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


main = script(tune)

if __name__ == "__main__":
    sys.exit(main())
