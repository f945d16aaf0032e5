"""Expect how long a kernel takes on a GPU, from its machine code: expected, not measured.

A launch takes as long as the slowest of what it needs of the device: bytes of memory, bytes of the
second-level cache, and instructions with products of matrices, which Triton's loops do one after
the other; but loads from shared memory, which feed products, go on beside them. To that comes a
constant for each launch. What a kernel needs is in a record of its code
(`eval/workshop/kernels/compile_targets.py`); what a device has is in `CHIPS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffcache.eval.cost.roofline import COPIED, DEVICES, MULTIPLIED, START

# Warp instructions that a multiprocessor begins in a cycle, by kind: CUDA C++ Programming Guide,
# throughput of native arithmetic instructions, over 32 lanes.
RATES = {"all": 4.0, "alu": 2.0, "xu": 0.5, "lsu": 1.0}
KINDS = {
    "xu": ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO"),
    "lsu": ("LDG", "STG", "LDS", "STS", "ATOM", "RED", "SHFL", "LDL", "STL", "LDTM", "STTM"),
    "alu": ("IADD", "LOP", "PRMT", "SHF", "ISETP", "SEL", "FMNMX", "IMNMX", "VIADD", "VIMNMX",
            "LEA", "PLOP", "F2FP", "FSETP", "FSEL", "BFE", "IABS", "I2FP", "MOV", "SGXT"),
}  # fmt: skip
IDLE = ("NOP", "BRA.U", "UMOV")  # of no cost, or of another unit


@dataclass(frozen=True)
class Chip:
    """Multiprocessors, clock and memories of a GPU; its peaks are in `DEVICES`."""

    arch: int  # architecture that kernels are compiled for
    sms: int  # multiprocessors
    ghz: float  # clock under load, 10^9 cycles a second
    shared: int  # KiB of shared memory of a multiprocessor
    warps: int  # most warps of a multiprocessor
    cached: int  # bytes that the second-level cache gives in a cycle
    products: Mapping[str, float]  # dtype of operands -> times as many products as of bfloat16, dense
    small: float = 1.0  # share of the peak of products that `mma.sync`, of few rows, can reach


INTEGERS = {"bf16": 1.0, "f16": 1.0, "f16 in f16": 1.0, "i8": 2.0, "f8E4M3FN": 2.0, "f32": 0.07}
# Sums in float32 halve the rate of consumer cards.
CONSUMER = INTEGERS | {"f16 in f16": 2.0, "i8": 4.0, "f32": 0.5}
CHIPS = {
    "h100": Chip(90, 132, 1.755, 228, 64, 3300, INTEGERS, 0.63),
    "h200": Chip(90, 132, 1.755, 228, 64, 3300, INTEGERS, 0.63),
    "a100": Chip(80, 108, 1.41, 164, 64, 3400, INTEGERS | {"f32": 0.062}),
    "l40s": Chip(89, 142, 2.52, 100, 48, 2600, INTEGERS | {"f32": 0.25}),
    "4090": Chip(89, 128, 2.52, 100, 48, 2600, CONSUMER),
    "5090": Chip(120, 170, 2.41, 100, 48, 3000, CONSUMER),
}


@dataclass(frozen=True)
class ExpectedTime:
    """Expected, not measured, time of the launches of a row."""

    us: float  # microseconds
    bound: str  # what holds: `bytes`, `cache`, `code` or `launch`
    parts: Mapping[str, float]  # microseconds of each need alone, all launches together
    blocks: tuple[int, ...]  # blocks that a multiprocessor holds at once, of each launch


def expect(row: Mapping[str, Any], device: str) -> ExpectedTime | None:
    """Expect how long the launches of a row take on a chip.

    Args:
        row: Row of the record of machine code.
        device: One of `CHIPS`.

    Returns:
        None where the row's kernels do not compile for the device.
    """
    chip, peaks = CHIPS[device], DEVICES[device]
    codes = row["targets"].get(str(chip.arch))
    if not isinstance(codes, list):
        return None
    total, whole, blocks = dict.fromkeys(("bytes", "cache", "code", "launch"), 0.0), 0.0, []
    unread = row["moved"] / (peaks.gbps * 1e3 * COPIED)  # of all launches
    for launch, code in zip(row["launches"], codes, strict=True):
        programs = math.prod(launch["grid"])
        held = resident(code, chip)
        blocks.append(held)
        turns = programs / chip.sms  # blocks of one multiprocessor, one after another
        busy = math.ceil(turns) / turns
        # Tiles of products are read by many programs; other tiles are read once, and numbers that
        # stand for a whole row come from where it was read.
        read = programs * launch["loaded"] if launch["products"] else 0.0
        cached = read / (1e3 * chip.cached * chip.ghz)
        issue = {**code["issue"], "all": code["issue"]["all"] - _multiplying(launch, code)}
        each = programs * code["warps"] / (chip.sms * chip.ghz * 1e3)
        issued = {kind: each * issue[kind] / rate for kind, rate in RATES.items()}
        products = sum(
            count / (peaks.tflops * 1e6 * MULTIPLIED * chip.products.get(name, 1.0))
            for name, count in launch["products"].items()
        )
        products *= programs / (1.0 if code["large"] else chip.small)
        if products:
            products = max(products, issued.pop("lsu"))
        parts = {"cache": cached, "code": (max(issued.values()) + products) * busy, "launch": START}
        for name, value in parts.items():
            total[name] += value
        whole += max(cached, parts["code"])
    total["bytes"] = unread
    most = max(("bytes", "cache", "code", "launch"), key=total.__getitem__)
    return ExpectedTime(total["launch"] + max(unread, whole), most, total, tuple(blocks))


def _multiplying(launch: Mapping[str, Any], code: Mapping[str, Any]) -> float:
    """Return how many of a warp's instructions multiply matrices, which counts as products alone.

    Those of `mma.sync` take 16 rows and 8 columns: of 16 channels, or of 32 of a byte. Others are
    few, of a whole warp group.
    """
    if not {"HMMA", "IMMA"} & set(code["matrix"]):
        return 0.0
    total = 0.0
    for name, count in launch["products"].items():
        total += count / (8192 if name.startswith(("i8", "f8")) else 4096)
    return float(min(total / code["warps"], code["issue"]["all"]))


def resident(code: Mapping[str, Any], chip: Chip) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at once."""
    registers: int = 65536 // (-(-code["registers"] // 8) * 8 * 32 * code["warps"])
    shared = int(chip.shared // (code["shared"] + 1)) if code["shared"] else 32  # 1 KiB is CUDA's
    return max(min(registers, shared, chip.warps // int(code["warps"]), 32), 1)


def dynamic(instructions: Sequence[str], spans: Sequence[tuple[int, int]], turns: Sequence[float]) -> dict[str, float]:
    """Count the instructions that a warp begins, by kind.

    The longest loop of the machine code is that of the most turns in Triton's own form, and so on; a loop that
    Triton's form has not, such as one that waits, turns once.

    Args:
        instructions: Names, in the order of the machine code.
        spans: First and last instruction of each loop in the machine code.
        turns: Turns of each loop in Triton's form.
    """
    weights = [1.0] * len(instructions)
    longest = sorted(spans, key=lambda span: span[0] - span[1])
    for (first, last), times in zip(longest, sorted(turns, reverse=True), strict=False):
        for place in range(first, last + 1):
            weights[place] = times
    counts = dict.fromkeys(RATES, 0.0)
    for name, weight in zip(instructions, weights, strict=True):
        if not name.startswith(IDLE):
            counts["all"] += weight
            for kind, starts in KINDS.items():
                if name.startswith(starts):
                    counts[kind] += weight * (_words(name) if kind == "lsu" else 1)
    return counts


def _words(name: str) -> int:
    """Return the cycles that the memory unit needs for one instruction of a warp."""
    return 4 if ".128" in name or name.endswith(".4") else 2 if ".64" in name else 1
