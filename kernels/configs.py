"""Options of launches, such as the sizes of tiles: defaults, and measured faster ones.

`configs.json` holds the options that a launch takes in the place of its defaults, by device,
operator and bucket of sizes: `{device: {operator: {bucket: {option: value}}}}`, each with the
`ratio` by which it was faster. Entries that `diffcache kernels measure` kept go before those, and
before them the entries of `DIFFCACHE_KERNELS_CONFIGS=FILE`. Nothing is tuned while a program runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from diffcache.kernels.dispatch import device_name, kept, kept_file

CONFIGS = Path(__file__).with_name("configs.json")
RATIO = "ratio"
# Operator -> options that the tuner tries, and the options of each bucket that was asked for.
TRIED: dict[str, tuple[Mapping[str, int], dict[str, dict[str, int]]]] = {}


def tuned(name: str, key: Sequence[Any], default: dict[str, int], device: torch.device) -> dict[str, int]:
    """Return the options of a launch: its defaults, and in their place those known to be faster.

    Args:
        name: Operator.
        key: Dtypes, words, and sizes, which are rounded up to powers of two: the bucket.
        default: Option -> value; the launch knows no other options.
        device: Device of the tensors.

    Raises:
        ValueError: If an entry has an option that the launch does not know, or that is no
            positive whole number.
    """
    if name in TRIED:
        options, asked = TRIED[name]
        return asked.setdefault(bucket_of(key), {**default, **options})
    where = device_name(device.index or 0) if device.type == "cuda" else device.type
    entries = _entries(name, where, tuple(default))
    return default | entries.get(bucket_of(key), {}) if entries else default


def bucket_of(key: Sequence[Any]) -> str:
    """Return the name of a bucket, such as `bfloat16-128-8192`."""
    rounded = (1 << (part - 1).bit_length() if isinstance(part, int) else part for part in key)
    return "-".join(str(part).removeprefix("torch.") for part in rounded)


def combinations(**options: Sequence[int]) -> list[dict[str, int]]:
    """Return all combinations of values of options."""
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


@contextmanager
def trying(name: str, options: Mapping[str, int]) -> Iterator[dict[str, dict[str, int]]]:
    """Launch an operator with other options; yield the buckets that launches ask for -> all of their options."""
    asked: dict[str, dict[str, int]] = {}
    TRIED[name] = options, asked
    try:
        yield asked
    finally:
        del TRIED[name]


@cache
def _entries(name: str, where: str, known: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return bucket -> options of an operator on a device; those of the user's file go first."""
    own = os.environ.get("DIFFCACHE_KERNELS_CONFIGS")
    found = {}
    sources: list[tuple[Any, dict[str, Any]]] = [(CONFIGS, json.loads(CONFIGS.read_text()))]
    sources.append((kept_file(where), kept(where).get("configs", {})))
    if own:
        more = json.loads(Path(own).read_text())
        sources.append((own, more.get("configs", more)))
    for file, entries in sources:
        for bucket, entry in entries.get(where, {}).get(name, {}).items():
            options = {option: value for option, value in entry.items() if option != RATIO}
            for option, value in options.items():
                if option not in known or type(value) is not int or value < 1:
                    raise ValueError(
                        f"{file}: {name}, {bucket}: {option}={value!r}: options are positive "
                        f"whole numbers, of {', '.join(known)}"
                    )
            found[bucket] = options
    return found
