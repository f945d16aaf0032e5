"""`docs/kernels.md` behind its introduction, and the table that chooses kernels: from records."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcache.eval.cost.expected import CHIPS, Expected, expect
from diffcache.eval.cost.roofline import START
from diffcache.eval.kernels.case import KernelCase, all_cases
from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.kernels.published import published
from diffcache.files import read_json
from diffcache.kernels.dispatch import SHIPPED_FOR
from diffcache.registry import rows_of

CODE = Path(__file__).with_name("code.json")  # facts of machine code, see targets.py
# Architectures of the record, and GPUs that have them.
TARGETS = {
    "80": "A100",
    "86": "RTX 30",
    "89": "RTX 40, L40S",
    "90": "H100, H200",
    "100": "B200",
    "120": "RTX 50",
    "gfx942": "MI300X",
    "gfx1100": "RX 7900",
}
PAGE, RECORD, CHOICES = Path("docs/kernels.md"), "kernels.json", Path("kernels/choices.json")
HEAD = "## Operators\n"  # what stands before is written by hand
REWRITTEN = ("attn_mass",)  # operators that are others since the record was measured
DEVICE = "h200"  # of the measured record, and of expected times
STREAM = 2**20  # bytes that a launch loads, from which its loads have to be wide
UNKNOWN = "not measured yet"
EXPLAINED = """\
*Bytes* are the least that have to be read and written, in millions. Times are medians in
microseconds: the device's own, and in brackets what passes from call to call where the device waits
for the host. *Limit* is the time of a copy of as many bytes, or of the products of matrices where
these take longer. *Expected* is computed for an H200, **not measured**, with what holds: bytes of
memory, its cache, the code of the kernel, or the launch (see below). *Aim* is what a kernel was to
reach and did not: times as fast as another way, or a share of the limit, and what it reached. A
dash was not timed. *Used by* says who calls the operator; `auto` takes the kernel where its ratio
is above 1.
"""


CODE_EXPLAINED = """\
## Machine code

What Triton {triton} compiles for GPUs that are not here, at the sizes of the table above, by
`python -m diffcache.eval.workshop.kernels.targets`: registers of a thread (r), KiB of shared memory
(K), and the instruction that multiplies matrices; the most of all rows of an operator. Nothing
spills and no local memory is used where nothing is said. *Narrow*: no load of 16 bytes, nor an
asynchronous one, in a launch that reads a MiB or more. *Too large*: a block needs more memory than
it may have, so that the launch fails. *No*: the kernel has PTX in it, which AMD's assembler does
not take: plain PyTorch runs there in its place, as it does on gfx11 in that of attention, which
spills, and `diffcache kernels` says so. An operator that fails elsewhere is left out by
`diffcache kernels measure`.
"""
EXPECTED_EXPLAINED = """\
## Expected times

*Expected* is the slowest of three needs, and {start} µs for each launch: the bytes at what a copy
reaches; the tiles that products read again at {cached} bytes a cycle of the second-level cache; and
the products at what dense products reach, or loads for them, together with the other instructions
of the machine code, of which a multiprocessor begins four a cycle and fewer of some kinds. How
often a loop turns follows from Triton's own form of the kernel. The {start} µs are the one number
that was fitted, to the same record as the measured times.

Of the {rows} rows that were measured, {near} are expected within 30 % of the measured time. Not so:
"""
PUBLISHED = """\
Against times of others, microseconds; *Expected* is that of `attn_forward`, and of `attn_int8` for
SageAttention, which stand for their kernels of the same attention. KIVI's paper gives no time of a
kernel, but 2.35 to 3.47 times the tokens a second with four times the batch, which these times do
not tell. FlashAttention-2 on an A100 is a third faster than our kernel is expected to be: its
softmax runs beside the products of other warps, where in code of Triton it is taken to follow them;
its paper finds it 1.3 to 2.5 times as fast as FlashAttention in Triton. On an RTX 4090 it reaches
99.9 % of the rated products of the card, of which 79 % are expected here, as one H200 reached.
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: The project, for its record and the introduction of the page.
    """
    introduction, _, _ = (directory / PAGE).read_text(encoding="utf-8").partition(HEAD)
    record = read_json(directory / "assets" / "bench" / RECORD) or {"rows": []}
    timed = {(row["operator"], row["model"], row["shapes"]): row for row in record["rows"]}
    titles = ("Operator", "Model and shapes", "Bytes", "Limit", "Expected", "Kernel", "Others", "Used by")
    code = read_json(CODE) or {}
    codes = {(row["operator"], row["model"], row["shapes"]): row for row in code["rows"]}
    lines, apart = [], []
    used = {name: row.cells["used"] for name, row in rows_of("kernel").items()}
    for case in all_cases():
        key = case.operator, case.model, case.shapes
        said = expect(codes[key], DEVICE) if key in codes else None
        lines.append(_line(case, timed.get(key), used[case.operator], said))
        if said is not None and key in timed:
            apart.append((case, timed[key]["ways"]["kernel"]["us"][1], said))
    far = [(case, us, said) for case, us, said in apart if not 0.7 <= said.us / us <= 1.3]
    told = EXPECTED_EXPLAINED.format(
        start=START, cached=CHIPS[DEVICE].cached, rows=len(apart), near=len(apart) - len(far)
    )
    distances = [
        [f"`{case.operator}`", f"{case.model}: {case.shapes}", f"{said.us:.1f}", f"{us:.1f}", f"{said.us / us:.2f}"]
        for case, us, said in far
    ]
    operators: dict[str, list[Mapping[str, Any]]] = {}
    for one in code["rows"]:
        operators.setdefault(one["operator"], []).append(one)
    shown = [[f"`{name}`", *(_code(rows, arch) for arch in TARGETS)] for name, rows in operators.items()]
    heads = [f"{name if name[0] == 'g' else f'sm_{name}'} ({gpu})" for name, gpu in TARGETS.items()]
    far_heads = "Operator", "Row", "Expected", "Measured", "Ratio"
    return "\n".join([
        introduction + HEAD, EXPLAINED, *table(titles, lines), "",
        told, *table(far_heads, distances), "", PUBLISHED, *_published(code), "",
        CODE_EXPLAINED.format(**code), *table(("Operator", *heads), shown), "",
    ])  # fmt: skip


def _published(code: Mapping[str, Any]) -> list[str]:
    """Return the table of published times beside what our own kernel is expected to take."""
    rows = []
    for one, row in zip(published(), code["published"], strict=True):
        said = expect(row, one.device)
        assert said is not None, one.name
        rows.append(
            [
                one.name,
                one.device,
                f"{said.us:.1f} {said.bound}",
                f"{one.us:.1f}",
                f"{said.us / one.us:.2f}",
                one.source,
            ]
        )
    return table(("Published", "Device", "Expected", "Published", "Ratio", "Source"), rows)


def _code(rows: Sequence[Mapping[str, Any]], arch: str) -> str:
    """Return the cell of an operator and an architecture: the most of its rows and launches."""
    found = [row["targets"].get(arch, "not compiled") for row in rows]
    failed = [code for code in found if isinstance(code, str)]
    if failed:
        return "too large" if "OutOfResources" in failed[0] else "no"
    pairs = [pair for row, codes in zip(rows, found, strict=True) for pair in zip(row["launches"], codes, strict=True)]
    codes = [code for _, code in pairs]
    told = [f"{max(code['registers'] for code in codes)} r"]
    told += [f"{most:.3g} K"] if (most := max(code["shared"] for code in codes)) >= 1 else []
    told += sorted({name for code in codes for name in code["matrix"]})
    worst = sorted(pairs, key=lambda pair: -pair[1]["spilled"])
    marks = {what.lstrip("0123456789 "): what for pair in worst[::-1] for what in wrong(*pair)}
    return ", ".join([*told, *marks.values()])


def wrong(launch: Mapping[str, Any], code: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the code of a launch.

    Args:
        launch: What it does.
        code: Facts of its code.
    """
    loaded = math.prod(launch["grid"]) * launch["loaded"]
    found = [f"{code['spilled']} bytes of a thread spill"] if code["spilled"] else []
    found += ["no matrix instructions"] if code["wanted"] and not code["matrix"] else []
    return found + (["narrow"] if loaded >= STREAM and not code["wide"] else [])


def _line(case: KernelCase, row: Mapping[str, Any] | None, used: str, said: Expected | None = None) -> list[str]:
    expected = f"{said.us:.1f} {said.bound}" if said else "-"
    head = [f"`{case.operator}`", f"{case.model}: {case.shapes}", f"{case.moved / 1e6:.3g}"]
    others = [name for name in case.ways if name != "kernel"]
    if row is None:
        return [*head, UNKNOWN, expected, UNKNOWN, ", ".join(others), used]
    ways = row["ways"]
    shown = [f"{name} {_times(ways[name])}" if name in ways else f"{name} -" for name in others]
    missed = [target for target in row["targets"] if not target["met"]]
    ours = _times(ways["kernel"])
    for target in missed:
        ours += f"; aim {target['wanted']:.3g} of {target['against']}, {target['got'] or 0:.3g}"
    limit = f"{row['limit_us']:.1f}" if row["limit_us"] >= 0.1 else "below 0.1"
    return [*head, limit, expected, ours, ", ".join(shown), used]


def _times(way: Mapping[str, Any]) -> str:
    """Return the medians of a way: the device's own, and in brackets that from call to call."""
    if "us" not in way:
        return "failed"
    called = f" ({way['called_us'][1]:.1f})" if "called_us" in way else ""
    return f"{way['us'][1]:.1f}{called}"


def chosen(directory: Path = ROOT) -> str:
    """Return `{device: {"choices": {operator: ratio}, "versions": {name: version}}}` as JSON."""
    record = read_json(directory / "assets" / "bench" / RECORD) or {"choices": {}}
    found = {
        device: {
            "choices": {k: ratio for k, ratio in ratios.items() if k not in REWRITTEN},
            "versions": {name: record["versions"][name] for name in SHIPPED_FOR},
        }
        for device, ratios in record["choices"].items()
    }
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def made(before: str) -> str:
    """Return the page or the table of ratios, whichever the text that is there is."""
    return chosen() if before.startswith("{") else page()


main = keep_pages(made, ROOT / PAGE, ROOT / CHOICES)

if __name__ == "__main__":
    sys.exit(main())
