"""Count what a program of a kernel reads, writes and multiplies, from Triton's own form of it.

Triton's first form of a kernel (TTIR) names the tiles that are loaded, stored and multiplied, and
bounds of loops that follow from numbers of the launch. So a count needs no device: scalars are
computed for some programs of the grid, and each loop counts as often as it turns.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

SAMPLES = 64, 3, 3  # programs along each axis of a grid, for an average
BITS = {"f8": 8, "i1": 8}  # of elements whose name ends in another number
COMPARED = dict(eq=operator.eq, ne=operator.ne, lt=operator.lt, le=operator.le, gt=operator.gt, ge=operator.ge)
AXES = "xyz"


@dataclass
class Tiles:
    """Work of a program, on average over a grid."""

    loaded: float = 0.0  # bytes of tiles that are loaded, from memory or from a cache
    stored: float = 0.0  # bytes of tiles that are stored
    # Dtype of operands -> operations of products of matrices; `f16 in f16` where their sums are in float16, too
    products: dict[str, float] = field(default_factory=dict)
    # Turns of each loop, in the order of the text; of one inside another, all together
    turns: list[float] = field(default_factory=list)
    rows: int = 0  # most rows of a product

    def add(self, other: Tiles, share: float) -> None:
        """Add a share of the work of another program."""
        self.loaded += other.loaded * share
        self.stored += other.stored * share
        self.rows = max(self.rows, other.rows)
        for name, count in other.products.items():
            self.products[name] = self.products.get(name, 0.0) + count * share
        self.turns = self.turns or [0.0] * len(other.turns)
        self.turns = [a + b * share for a, b in zip(self.turns, other.turns, strict=True)]


def tiles(text: str, numbers: Mapping[str, int], grid: tuple[int, ...]) -> Tiles:
    """Count the work of a program.

    Args:
        text: TTIR of one kernel.
        numbers: Whole numbers among the arguments of the launch, by name.
        grid: Programs along each axis.
    """
    grid = (*grid, 1, 1)[:3]
    places = list(product(*map(_sample, grid, SAMPLES)))
    total = Tiles()
    for place in places:
        total.add(_program(text, dict(numbers), place, grid), 1 / len(places))
    return total


def _sample(size: int, most: int) -> list[int]:
    """Return numbers of programs along an axis, all of them or spread over it."""
    return sorted({round(n * (size - 1) / (most - 1)) for n in range(most)})


def _program(text: str, known: dict[str, int], place: tuple[int, ...], grid: tuple[int, ...]) -> Tiles:
    """Count the work of one program of the grid."""
    found, times = Tiles(), [1.0]  # how often the lines of each open block are run
    for line in _lines(text):
        before = times.pop() if line.startswith("}") else 0.0
        if not times:  # the end of the kernel
            break
        if line.endswith("{"):
            times.append(times[-1] * _runs(line, known, before))
            if "scf.for" in line:
                found.turns.append(times[-1])
        elif re.search(r"tt\.(descriptor_)?load\b", line):
            found.loaded += times[-1] * _bytes(line)
        elif re.search(r"tt\.(descriptor_)?store\b", line):
            found.stored += times[-1] * _bytes(line)
        elif shape := re.search(r"tt\.dot .*: tensor<([\dx]+)x(\w+)> \* .* -> tensor<([\dx]+)x(\w+)>", line):
            left, right = (list(map(int, shape[n].split("x"))) for n in (1, 3))
            found.rows = max(found.rows, left[-2])
            count = times[-1] * 2 * math.prod(left) * right[-1]
            name = "f16 in f16" if shape[2] == shape[4] == "f16" else shape[2]
            found.products[name] = found.products.get(name, 0.0) + count
        else:
            _scalar(line, known, place, grid)
    return found


def _runs(line: str, known: dict[str, int], before: float) -> float:
    """Return how often a block is run for each time that it is reached.

    Args:
        line: The line that opens it.
        known: Whole numbers so far; a loop adds its own, at its first turn.
        before: How often the block was run that ends in the same line.
    """
    if loop := re.search(r"scf\.for %(\S+) = %(\S+) to %(\S+) step %(\S+)", line):
        low, high, step = (known.get(name) for name in loop.groups()[1:])
        if low is None or high is None or step is None:
            return 1
        known[loop[1]] = low
        return max(math.ceil((high - low) / step), 0)
    if inside := re.search(r"scf\.if %(\S+)", line):
        return float(bool(known.get(inside[1], 1)))
    return float(not before) if line.startswith("} else") else 1.0


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of the kernel's body without the places in its source."""
    body = text[text.index("tt.func public") :]
    for line in body.splitlines()[1:]:
        yield re.sub(r"\s*loc\(.*\)$", "", line.strip()).strip()


def _bytes(line: str) -> int:
    """Return the bytes of the last tile that a line names; a single number counts as none."""
    tile = re.findall(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)", line)
    if not tile:
        return 0
    shape, element = tile[-1]
    digits = re.search(r"\d+$", element)
    bits = BITS.get(element[:2] if element.startswith("f8") else element) or int(digits[0])  # type: ignore[index]
    return math.prod(map(int, shape.rstrip("x").split("x"))) * bits // 8


def _scalar(line: str, known: dict[str, int], place: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """Compute a whole number, if a line makes one of known ones."""
    made = re.match(r"%(\S+) = (\S+) (.*?)(?: : (\S+).*)?$", line)
    if made is None:
        return
    name, what, rest, kind = made.groups()
    if what in ("tt.get_program_id", "tt.get_num_programs"):
        known[name] = (place if what == "tt.get_program_id" else grid)[AXES.index(rest[0])]
        return
    if (kind or "").startswith("tensor") or not what.startswith("arith."):
        return
    if what == "arith.constant":
        text = rest.split()[0]
        number = {"true": 1, "false": 0}.get(text)
        if number is not None or re.fullmatch(r"-?\d+", text):
            known[name] = int(text) if number is None else number
        return
    words = re.sub(r" overflow<.*?>", "", rest).split(", ")
    given = [known.get(word[1:]) for word in words if word.startswith("%")]
    if None not in given:
        value = _computed(what.removeprefix("arith."), words[0], given)  # type: ignore[arg-type]
        if value is not None:
            known[name] = value


def _computed(what: str, sign: str, given: list[int]) -> int | None:
    """Return the result of one operation on whole numbers; None for operations not known."""
    if what in ("extsi", "extui", "trunci", "index_cast"):
        return given[0]
    if what == "select":
        return given[1] if given[0] else given[2]
    one, other = given[0], given[-1]
    if what == "cmpi":
        return int(COMPARED[sign if sign in COMPARED else sign[1:]](one, other))
    if what[:3] in ("div", "rem"):
        if other == 0:
            return None
        whole = abs(one) // abs(other) * (1 if one * other >= 0 else -1)  # toward zero, as C does
        return whole if what[:3] == "div" else one - whole * other
    simple = {
        "addi": one + other,
        "subi": one - other,
        "muli": one * other,
        "minsi": min(one, other),
        "maxsi": max(one, other),
        "minui": min(one, other),
        "maxui": max(one, other),
        "andi": one & other,
        "ori": one | other,
        "xori": one ^ other,
    }
    return simple.get(what)
