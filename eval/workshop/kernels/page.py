"""`docs/kernels.md` behind its introduction, and the table that chooses kernels: from records."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.eval.cost.expected import CHIPS, ExpectedTime, expect
from diffcache.eval.cost.roofline import START
from diffcache.eval.kernels.cases import KernelCase, Sizes, all_cases, drawn, given
from diffcache.eval.pages import keep_pages, rendered, table
from diffcache.eval.record import FOLDER, ROOT
from diffcache.files import read_json
from diffcache.kernels.attention import FORWARD
from diffcache.kernels.dispatch import SHIPPED_FOR, Operator
from diffcache.kernels.int8 import INT8
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
TITLES = ("Operator", "Model and shapes", "Bytes", "Limit", "Expected", "Kernel", "Others", "Used by")


def page() -> str:
    """Return the whole page."""
    introduction = (ROOT / PAGE).read_text(encoding="utf-8").partition(HEAD)[0]
    timed, code = {_key(row): row for row in read_json(FOLDER / RECORD)["rows"]}, read_json(CODE)
    codes = {_key(row): row for row in code["rows"]}
    lines, apart = [], []
    used = {name: row.cells["used"] for name, row in rows_of("kernel").items()}
    for case in all_cases():
        key = _key(about := vars(case))
        said = expect(codes[key], DEVICE) if key in codes else None
        lines.append(_line(case, timed.get(key), used[case.operator], said))
        if said is not None and key in timed:
            us = timed[key]["ways"]["kernel"]["us"][1]
            apart.append({**about, "expected": said.us, "measured": us, "ratio": said.us / us})
    far = [row for row in apart if not 0.7 <= row["ratio"] <= 1.3]
    others = []
    for one, row in zip(published(), code["published"], strict=True):
        said = expect(row, one.device)
        assert said is not None, one.name
        others.append({**vars(one), "expected": said.us, "bound": said.bound, "ratio": said.us / one.us})
    operators: dict[str, list[Mapping[str, Any]]] = {}
    for row in code["rows"]:
        operators.setdefault(row["operator"], []).append(row)
    shown = [[f"`{name}`", *(_code(rows, arch) for arch in TARGETS)] for name, rows in operators.items()]
    heads = [f"{name if name[0] == 'g' else f'sm_{name}'} ({gpu})" for name, gpu in TARGETS.items()]
    return introduction + rendered(
        "workshop/kernels/page.md.jinja",
        operators="\n".join(table(TITLES, lines)),
        start=START,
        cached=CHIPS[DEVICE].cached,
        rows=len(apart),
        near=len(apart) - len(far),
        far=far,
        published=others,
        triton=code["triton"],
        machine_code="\n".join(table(("Operator", *heads), shown)),
    )


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["operator"], row["model"], row["shapes"]


@dataclass(frozen=True)
class Published:
    """A published time of a kernel, to compare with the expected time of our own kernel for the same attention."""

    name: str  # whose kernel, and of what
    device: str  # one of `diffcache.eval.cost.expected.CHIPS`
    us: float
    source: str  # paper or page, and the number in it
    sizes: Sizes  # query heads, key heads, queries, keys, channels
    operator: Operator = FORWARD  # our kernel of the same attention

    def case(self) -> KernelCase:
        """Return the row of our kernel at these sizes."""
        asking, heads, count, width, size = self.sizes
        asked = given if self.operator is FORWARD else lambda *qkv: (*qkv, size**-0.5)
        ways = {"kernel": lambda q, k, v: self.operator(*asked(q, k, v))}
        moved = 2 * 2 * size * (asking * count + heads * width)
        return KernelCase(self.operator.name, self.name, f"{list(self.sizes)}", drawn(self.sizes), ways, moved)


def published() -> Iterator[Published]:
    """Yield the times that are compared."""
    long: Sizes = (16, 16, 16384, 16384, 128)
    flux: Sizes = (24, 24, 4608, 4608, 128)
    wide: Sizes = (128, 128, 8192, 8192, 128)  # a batch of 4
    for name, device, tera, source, sizes, operator in (
        ("FlashAttention-2, 16k", "a100", 230, "arXiv 2307.08691: up to 230 TFLOPs/s, forward", long, FORWARD),
        ("FlashAttention-2 in torch, FLUX.1", "h100", 329, "pytorch issue 142132: 329 TFLOP/s", flux, FORWARD),
        ("FlashAttention-2, 8k", "4090", 165, "SageAttention, arXiv 2410.02367: 165 TOPS", wide, FORWARD),
        ("SageAttention, 8k", "4090", 340, "arXiv 2410.02367: 340 TOPS", wide, INT8),
    ):
        asking, _, count, width, size = sizes
        us = 4 * asking * count * width * size / tera / 1e6  # at a rate of 10^12 operations a second
        yield Published(name, device, us, source, sizes, operator)
    for width, us in ((65536, 64.4), (131072, 106.6)):
        source, sizes = f"pytorch.org/blog/flash-decoding: {us} µs", (16, 2, 1, width, 128)
        yield Published(f"Flash-Decoding, {width} keys", "a100", us, source, sizes)


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
    """Return what is wrong with the code of a launch, by what it does and the facts of its code."""
    loaded = math.prod(launch["grid"]) * launch["loaded"]
    found = [f"{code['spilled']} bytes of a thread spill"] if code["spilled"] else []
    found += ["no matrix instructions"] if code["wanted"] and not code["matrix"] else []
    return found + (["narrow"] if loaded >= STREAM and not code["wide"] else [])


def _line(case: KernelCase, row: Mapping[str, Any] | None, used: str, said: ExpectedTime | None = None) -> list[str]:
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


def chosen() -> str:
    """Return `{device: {"choices": {operator: ratio}, "versions": {name: version}}}` as JSON."""
    record = read_json(FOLDER / RECORD)
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
