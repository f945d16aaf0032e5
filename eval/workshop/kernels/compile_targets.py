"""Compile the kernels of every row for every GPU that Triton knows, and keep what their code is.

    python -m diffcache.eval.workshop.kernels.compile_targets [OPERATOR ...]

compiles all rows of all operators, or those of some, writes the record, and
says what is wrong with them. No GPU is needed; it takes about four minutes of one core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from diffcache.eval.cost.expected import CHIPS, dynamic
from diffcache.eval.kernels.cases import KernelCase, all_cases
from diffcache.eval.kernels.launch_options import Launched
from diffcache.eval.kernels.tiles import Tiles, tiles
from diffcache.eval.record import commit
from diffcache.eval.workshop.kernels.page import CODE, _key, published, wrong
from diffcache.files import read_json, write_json
from diffcache.kernels.dispatch import OPERATORS
from diffcache.kernels.gpu import machine

ARCHS: tuple[int | str, ...] = (80, 86, 89, 90, 100, 120, "gfx942", "gfx1100")
# Instructions that multiply matrices: with less than 64 rows, and with 64 or more.
MATRIX = {
    90: ("HMMA IMMA", "HGMMA IGMMA"),
    100: ("HMMA IMMA", "UTC"),
    "gfx942": ("v_mfma", "v_mfma"),
    "gfx1100": ("v_wmma", "v_wmma"),
}
USUAL = ("HMMA IMMA", "HMMA IMMA")
# Loads of 16 bytes of a thread, asynchronous ones, and those of whole tiles.
WIDE = (
    "LDG.E.128",
    "LDGSTS",
    "UTMALDG",
    "buffer_load_dwordx4",
    "buffer_load_b128",
    "global_load_dwordx4",
    "global_load_b128",
)


def row(case: KernelCase, archs: Sequence[int | str] = ARCHS) -> dict[str, Any]:
    """Compile the kernels of a row for some architectures, and return its row of the record.

    It has `launches`, what a program of each does, and `targets`, architecture -> facts of the code of each
    launch, or why there is none.
    """
    targets: dict[str, Any] = {}
    launches: list[dict[str, Any]] = []
    for arch in archs:
        try:
            made = compiled(case, arch)
        except Exception as error:  # of a compiler: it says what it cannot do
            targets[str(arch)] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        launches = launches or [
            {
                "kernel": kernel,
                "grid": list(grid),
                "loaded": round(work.loaded),
                "stored": round(work.stored),
                "products": work.products,
                "turns": work.turns,
            }
            for kernel, grid, work, _ in made
        ]
        targets[str(arch)] = [code for *_, code in made]
    return {
        "operator": case.operator,
        "model": case.model,
        "shapes": case.shapes,
        "moved": case.moved,
        "launches": launches,
        "targets": targets,
    }


def compiled(case: KernelCase, arch: int | str) -> list[tuple[str, tuple[int, ...], Tiles, dict[str, Any]]]:
    """Compile what a row launches: names, grids, work of a program, and facts of the code."""
    given = case.make(torch.device("meta"), False)
    with machine.noted() as noted, Launched(*OPERATORS), _muted(isinstance(arch, str)):
        machine.launched(lambda: case.ways["kernel"](*given), arch)
    whole = [made for _, made, _, _ in noted]
    if isinstance(arch, int):
        codes = machine.read(whole, arch)
    else:
        codes = [machine.read_amd(made.asm["amdgcn"], made.metadata.shared) for made in whole]
    found = []
    for (kernel, made, grid, numbers), code in zip(noted, codes, strict=True):
        work = _tiles(made.asm["ttir"], tuple(sorted(numbers.items())), grid)
        found.append((kernel, grid, work, facts(code, made.metadata.num_warps, work, arch)))
    return found


def facts(code: machine.Machine, warps: int, work: Tiles, arch: int | str) -> dict[str, Any]:
    """Return what the record keeps of a kernel's machine code."""
    many = work.rows >= 64 and warps >= 4  # rows and warps of an instruction of a warp group
    expected = MATRIX.get(arch, USUAL)[many].split() if work.products else []
    counts = {name: code.count(name) for name in expected}
    # Float32 is multiplied exactly, without instructions for matrices.
    wanted = bool(expected) and not set(work.products) <= {"f32"}
    return {
        "warps": warps,
        "registers": code.registers,
        "spilled": code.stack + code.local,
        "shared": code.shared,
        "matrix": {k: v for k, v in counts.items() if v},
        "wanted": wanted,
        "large": many or arch not in (90, 100),
        "wide": sum(code.count(name) for name in WIDE),
        "issue": {k: round(v, 1) for k, v in dynamic(code.instructions, code.spans, work.turns).items()},
    }


@cache
def _tiles(text: str, numbers: tuple[tuple[str, int], ...], grid: tuple[int, ...]) -> Tiles:
    return tiles(text, dict(numbers), grid)


@contextmanager
def _muted(really: bool) -> Iterator[None]:
    """Hide what AMD's assembler prints, past Python, of each line that it does not take."""
    kept = os.dup(2)
    try:
        if really:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def main(arguments: Sequence[str]) -> int:
    """Compile, write the record, and say what is wrong."""
    cases = [case for case in all_cases() if case.operator in OPERATORS]
    asked = [case for case in cases if not arguments or case.operator in arguments]
    before = {_key(old): old for old in (read_json(CODE) or {"rows": []})["rows"]}
    made = {_key(one): one for one in map(row, asked)}
    rows = [found for case in cases if (found := (before | made).get(_key(vars(case))))]
    others = [row(one.case(), (CHIPS[one.device].arch,)) for one in published()]
    write_json(CODE, {"triton": machine.VERSION, "commit": commit(), "rows": rows, "published": others})
    for one in rows:
        for arch, codes in one["targets"].items():
            name = f"{one['operator']}, {one['model']}, {arch}"
            if isinstance(codes, str):
                print(f"{name}: {codes}")
                continue
            for launch, code in zip(one["launches"], codes, strict=True):
                for what in wrong(launch, code):
                    print(f"{name}, {launch['kernel']}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
