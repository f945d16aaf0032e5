"""Spans: blocks of a model that are skipped together."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter

from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site

Place = tuple[str, int]  # a list of blocks and an index in it


def spans_of(
    parts: Combine, order: list[Place], kept: set[Place], is_unet: bool
) -> list[list[Place]]:
    """Return the runs of blocks that are skipped together."""
    if parts.site is Site.MODEL:
        return []
    if parts.site is Site.BLOCK:
        return [[place] for place in order if place not in kept]
    groups = _groups(order, is_unet)
    if parts.site is Site.STACK:
        whole = [[place for place in group if place not in kept] for group in groups]
        return [span for span in whole if span]
    # Adjacent blocks are one run, unless they are entries that decide for themselves.
    owner: dict[Place, str] = {}
    for name in parts.blocks:
        entry = name if parts.when.sites else ""
        owner.update(dict.fromkeys(named_blocks((name,), order), entry))
    spans: list[list[Place]] = []
    for group in groups:
        inside = [(owner.get(place) if place not in kept else None, place) for place in group]
        for entry, run in groupby(inside, key=itemgetter(0)):
            if entry is not None:
                spans.append([place for _, place in run])
    return spans


def sites_of(parts: Combine, spans: list[list[Place]], order: list[Place]) -> dict[str, set[Place]]:
    """Return the blocks of every site that decides apart, by its name."""
    if not parts.when.sites:
        return {}
    skipped = {place for span in spans for place in span}
    if parts.site is Site.BLOCK:
        return {f"{key}.{index}": {(key, index)} for key, index in skipped}
    return {name: named_blocks((name,), order) & skipped for name in parts.blocks}


def _groups(order: list[Place], is_unet: bool) -> list[list[Place]]:
    """Return the calls of each list; lists whose calls alternate are one group, a UNet is one."""
    if is_unet:
        return [order]
    groups: list[list[Place]] = []
    reach = -1
    last = {key: i for i, (key, _) in enumerate(order)}
    for number, place in enumerate(order):
        if number > reach:
            groups.append([])
        reach = max(reach, last[place[0]])
        groups[-1].append(place)
    return groups


def named_blocks(names: tuple[str, ...], order: list[Place]) -> set[Place]:
    """Return the blocks that names such as `blocks.3` or `blocks.2-9` mean.

    Raises:
        AttachError: If a name means no block that ran.
    """
    wanted: set[Place] = set()
    for name in names:
        match = re.fullmatch(r"(.+)\.(\d+)(?:-(\d+))?", name)
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, -1)
        found = {(key, i) for key, i in order if match and key == match[1] and first <= i <= last}
        if not found:
            lists = {key: sum(k == key for k, _ in order) for key, _ in order}
            known = ", ".join(f"{key}.0-{count - 1}" for key, count in lists.items())
            raise AttachError(f"blocks={name!r}: no such block ran; there are {known}")
        wanted |= found
    return wanted
