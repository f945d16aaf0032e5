"""Check the tables of methods: tensors by name and entries of the header."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

Kind = Literal["text", "count", "number", "names"]
MOST_STEPS = 100_000  # of a run; a header that says more would make schedules without end
SHOWN = 80  # characters of a value in an error
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = torch.finfo(torch.float32).max
KINDS: dict[Kind, str] = {
    "text": "text",
    "count": "a whole number of at least 0",
    "number": "a number of at least 0",
    "names": "a list of different names, at least one",
}
_AXIS = re.compile(r"(\w+)([+-]\d+)?")


@dataclass(frozen=True)
class Entry:
    """The requirements on one tensor of a method's tables."""

    # its axes. `steps` and the names of `Schema.header` stand for that number, or for the length of that list, with
    # `+1` or `-1` after it where it differs; any other name is a free length, the same in all tensors of one feature,
    # layer or site
    shape: tuple[int | str, ...]
    whole: bool = False  # whether its numbers are whole
    low: float = -LARGEST  # least number
    high: float | str = LARGEST  # greatest number, or its name as in `shape`
    positive: bool = False  # whether all numbers are above 0
    ascending: bool = False  # whether every number is above the one before
    first: int | None = None  # required first number, None for any
    # whether it is a matrix of inner products: symmetric, its diagonal above 0, and no eigenvalue below 0 by more than
    # rounding, without which a least-squares fit has no bound
    inner: bool = False
    gaps: bool = False  # whether some numbers, though not all, may be NaN: nothing was measured there
    optional: bool = False  # whether it may be missing, with all other optional tensors of its feature


@dataclass(frozen=True)
class Schema:
    """The tensors and header entries of a method's tables; others are refused."""

    # tensors by name. `{sites}` in a name stands for each name of that list in the header, `*` for whatever the file
    # has there, at least one
    tensors: Mapping[str, Entry]
    # entries that the header needs besides `method` and `steps`
    header: Mapping[str, Kind] = field(default_factory=dict)
    may_lack: tuple[str, ...] = ()  # starts of names, up to the `*`, of tensors of which there may be none


def header_fault(header: Any, schema: Schema | None = None) -> str:
    """Describe the fault of a header, empty if there is none; of a method's own entries where its schema is known."""
    if not isinstance(header, Mapping):
        return f"its header is {shown(header)}; must be entries by name"
    steps = header.get("steps")
    if not _is_count(steps) or not 1 <= steps <= MOST_STEPS:
        return f"its header has steps={shown(steps)}; must be a whole number, 1 to {MOST_STEPS}"
    if not isinstance(header.get("method"), str):
        return f"its header has method={shown(header.get('method'))}; must be text"
    if not isinstance(header.get("guidance"), (Mapping, type(None))):
        return f"its header has guidance={shown(header['guidance'])}; must be numbers by name"
    shape = header.get("shape")
    if shape is not None and not (isinstance(shape, (list, tuple)) and all(map(_is_count, shape))):
        return f"its header has shape={shown(shape)}; must be a list of lengths"
    hashes = header.get("prompt_hashes", [])
    if not (isinstance(hashes, list) and all(isinstance(one, str) for one in hashes)):
        return f"its header has prompt_hashes={shown(hashes)}; must be a list of texts"
    for name, kind in () if schema is None else schema.header.items():
        if not _is_of_kind(header.get(name), kind):
            return f"its header has {name}={shown(header.get(name))}; must be {KINDS[kind]}"
    return ""


def tensors_fault(header: Mapping[str, Any], tensors: Mapping[str, Tensor], schema: Schema) -> str:
    """Describe the fault of a method's tensors under a header without fault, empty if there is none."""
    wanted = {name: (entry, owner) for name, entry, owner in _wanted(header, tensors, schema)}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        return f"it lacks {missing[0]!r}; it has {shown(sorted(tensors))}"
    extra = [name for name in tensors if name not in wanted]
    if extra:
        return f"it has {shown(extra[0])}, which is no table of this method"
    sizes = {name: header[name] for name in ("steps", *schema.header)}
    lengths = {k: len(v) if isinstance(v, (list, tuple)) else v for k, v in sizes.items()}
    free: dict[tuple[str, str], int] = {}
    for name, (entry, owner) in wanted.items():
        shape = tuple(_length(axis, lengths) for axis in entry.shape)
        known = [
            free.get((owner, str(axis))) if length is None else length
            for axis, length in zip(entry.shape, shape, strict=True)
        ]
        high = _length(entry.high, lengths)
        wrong = _wrong(tensors[name], entry, known, high)
        if wrong is not None:
            return f"{shown(name)} is {wrong}; must be {_words(entry, known, high)}"
        for axis, length in zip(entry.shape, tensors[name].shape, strict=True):
            free[owner, str(axis)] = length
    return ""


def shown(value: object) -> str:
    """Return a value as an error shows it: its `repr`, cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} nested without end"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _wanted(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], schema: Schema
) -> Iterator[tuple[str, Entry, str]]:
    """Yield name, schema and owner of every tensor that there should be."""
    owners: dict[str, list[str]] = {}
    for pattern in schema.tensors:
        front, star, back = pattern.partition("*")
        if star:
            known = owners.setdefault(front, [])
            ends = [n.removeprefix(front) for n in tensors if n.startswith(front)]
            known += [end.removesuffix(back) for end in ends if end.endswith(back)]
    for pattern, entry in schema.tensors.items():
        front, star, back = pattern.partition("*")
        listed = re.search(r"{(\w+)}", pattern)
        if listed is not None:
            for owner in header[listed[1]]:
                yield pattern.replace(listed[0], owner), entry, owner
        elif not star:
            if not entry.optional or pattern in tensors:
                yield pattern, entry, ""
        else:
            none = [] if front in schema.may_lack else ["*"]
            for owner in dict.fromkeys(owners[front] or none):
                if not entry.optional or _has_optional(front + owner, schema, tensors):
                    yield front + owner + back, entry, owner


def _has_optional(start: str, schema: Schema, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a feature has any of its optional tensors, and so needs all of them."""
    backs = [name.partition("*")[2] for name, entry in schema.tensors.items() if entry.optional]
    return any(start + back in tensors for back in backs)


def _length(axis: float | str, lengths: Mapping[str, float]) -> Any:
    """Return a length or bound as a number, None where it is free."""
    if not isinstance(axis, str):
        return axis
    match = _AXIS.fullmatch(axis)
    assert match is not None
    return None if match[1] not in lengths else lengths[match[1]] + int(match[2] or 0)


def _wrong(tensor: Tensor, entry: Entry, shape: list[int | None], high: float) -> str | None:
    """Describe the departure of a tensor from its schema, None if there is none."""
    given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.dtype not in (WHOLE if entry.whole else REAL) or tensor.ndim != len(shape):
        return given
    pairs = zip(tensor.shape, shape, strict=True)
    if any(length not in (mine, None) for mine, length in pairs):
        return given
    values = tensor.reshape(-1).double()
    fine = (values >= entry.low) & (values <= high) & ((values > 0) | (not entry.positive))
    if entry.gaps:
        if not bool(fine.any()):
            return f"{given} without a number that may be"
        fine |= values.isnan()
    if entry.ascending:
        fine[1:] &= values[1:] > values[:-1]
    if entry.first is not None and (not len(values) or values[0] != entry.first):
        return f"{given} that begins with {values[0].item():g}" if len(values) else given
    if entry.inner and bool(fine.all()) and not _is_inner(values.reshape(tensor.shape)):
        return f"{given} of something else"
    bad = (~fine).nonzero().flatten().tolist()
    return f"{given} with {values[bad[0]].item():g} in it" if bad else None


def _is_inner(matrix: Tensor) -> bool:
    rounding = 1e-6 * float(matrix.abs().max())
    even = float((matrix - matrix.T).abs().max()) <= rounding and float(matrix.diagonal().min()) > 0
    return even and float(torch.linalg.eigvalsh(matrix)[0]) >= -rounding


def _words(entry: Entry, shape: list[int | None], high: float) -> str:
    """Return the schema of a tensor in words."""
    axes = [str(axis) if length is None else str(length) for axis, length in zip(entry.shape, shape, strict=True)]
    words = f"[{', '.join(axes)}] {'whole' if entry.whole else 'real'} numbers"
    if entry.positive:
        words += " above 0" + (f" up to {high:g}" if high < LARGEST else "")
    elif entry.low > -LARGEST or high < LARGEST:
        words += f" from {entry.low:g} to {high:g}"
    else:
        words += " that are finite in float32"
    words += ", ascending" if entry.ascending else ""
    products = ", inner products (symmetric, diagonal above 0, no eigenvalue below 0)"
    words += products if entry.inner else ""
    words += "" if entry.first is None else f" from {entry.first}"
    return words + (", NaN for some" if entry.gaps else "")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_of_kind(value: Any, kind: Kind) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "count":
        return _is_count(value)
    if kind == "number":
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and not math.isnan(value) and value >= 0
    names = value if isinstance(value, (list, tuple)) else []
    texts = [name for name in names if isinstance(name, str) and name]
    return 0 < len(names) == len(texts) == len(set(texts))
