"""Find options of launches that are faster than the defaults: entries of `configs.json`.

    python -m diffcache.eval.workshop.kernels.tune --device cuda --out FILE
    python -m diffcache.eval.workshop.kernels.tune --device cpu --operators rotate   # only compiles

Every candidate is compiled first, at the sizes of the kernels' benchmark: one that spills registers
or needs more shared memory than there is costs no time of the device. Those that remain are
compared with plain PyTorch and timed in turn with the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from diffcache.command import Device, device_of, script
from diffcache.eval.kernels.case import KernelCase, all_cases
from diffcache.eval.kernels.options import (
    Built,
    Timed,
    arch_of,
    candidates,
    choices_of,
    faster,
    ratios,
    trial,
)
from diffcache.eval.kernels.timing import ceilings, row
from diffcache.eval.workshop.bench.kernels import ROUNDS
from diffcache.eval.workshop.bench.runner import tables
from diffcache.files import read_json, write_json
from diffcache.kernels import dispatch


def tune(
    operators: Annotated[str, typer.Option(help="With commas (all that have candidates).")] = "",
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(min=2, help="Timed turns of each.")] = ROUNDS,
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
    limits = ceilings(here, tiny=False) if here.type == "cuda" else {}
    timed: list[Timed] = []
    for case in cases:
        found = candidates(case, arch)
        console.print(table(case, found))
        if limits:
            kept = [one for one in found if not one.dropped]
            measured = row(trial(case, kept), here, rounds, limits)
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
    cases = all_cases()
    known = sorted({case.operator for case in cases if choices_of(case.operator)})
    wanted = [name.strip() for name in names.split(",")] if names else known
    if unknown := set(wanted) - set(known):
        raise ValueError(f"--operators {unknown.pop()!r}: must be of {', '.join(known)}")
    return [case for case in cases if case.operator in wanted]


def table(case: KernelCase, found: Iterable[Built]) -> Table:
    """Return the candidates of one row as a table."""
    title = f"{case.operator}, {case.model}: {case.shapes}"
    shown = Table("candidate", "registers", "shared KiB", "spilled bytes", "", title=title)
    for one in found:
        numbers = [f"{number:.4g}" for number in one.used] or [""] * 3
        shown.add_row(one.name, *numbers, f"dropped: {one.dropped}" if one.dropped else "kept")
    return shown


main = script(tune)

if __name__ == "__main__":
    sys.exit(main())
