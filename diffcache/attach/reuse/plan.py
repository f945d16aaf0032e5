"""Plan which blocks a method skips in one kind of call: spans, and the taps for them."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.layout import Layout, Place, work_of
from diffcache.attach.reuse.span import TapSpec, record
from diffcache.attach.reuse.stand_in import (
    AddTap,
    CloseTap,
    ComputeTap,
    EstimateTap,
    HollowTap,
    LiveTap,
    OpenTap,
    PassTap,
    protect,
)
from diffcache.attach.reuse.trace import BlockCall, Trace, Wiring
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site


def plan(
    parts: Combine, trace: Trace, blocks: dict[str, list[nn.Module]], is_unet: bool, live: str = "mixed"
) -> Layout:
    """Return the layout of a method over the traced calls; raise AttachError if nothing would be skipped.

    Blocks of a UNet change shapes and hand tensors to later blocks on the side. `live` spans leave
    out of their features what the loop adds between their blocks: `all`, `none`, or those whose
    loop was seen to change a stream, `mixed`.
    """
    wirings, calls = trace.wirings(), trace.members(parts)
    order = [(call.list_key, call.index) for call in calls]
    lead = order[: parts.lead]
    tail = order[len(order) - parts.tail :] if parts.tail else []
    specs = {(c.list_key, c.index): _spec_of(c, wirings[c.list_key], is_unet) for c in calls}
    spans = spans_of(parts, order, set(lead) | set(tail), is_unet)
    if not any(spans) and parts.site is not Site.MODEL:
        raise AttachError(
            f"no block left to skip: {len(order)} blocks ran, lead={parts.lead}, "
            f"tail={parts.tail}, blocks={parts.blocks!r}; lower lead and tail or name other blocks"
        )
    by_place = {(c.list_key, c.index): c for c in calls}
    for number, span in enumerate(spans):
        _assign(number, span, specs, by_place, parts, is_last=number == len(spans) - 1, unet=is_unet)
        if live == "all" or (live == "mixed" and wirings[span[0][0]].source != "identity"):
            _enliven(number, span, specs)
    skipped = {place for span in spans for place in span}
    if parts.site is Site.MODEL:
        skipped = set(order)
    if parts.feature == "output" and parts.site is Site.STACK:
        skipped = set(order) - set(lead) - set(tail)
    kinds = {(c.list_key, c.index): c.container for c in calls}
    # A branch that follows another's decision needs no lead blocks if nothing adds to their output;
    # the last blocks of a UNet read what the first return.
    reads_lead = is_unet and bool(tail)
    follow_skipped = skipped
    if parts.feature == "output" and not reads_lead:
        follow_skipped = skipped | set(lead)
    compute = _items(blocks, specs, lambda m, d, p: _compute_tap(m, d) if p in follow_skipped else m)
    skip = _items(blocks, specs, lambda m, d, p: _skip_tap(m, d, kinds[p]) if p in skipped else m)
    follow = skip
    if follow_skipped != skipped:
        follow = _items(blocks, specs, lambda m, d, p: _skip_tap(m, d, kinds[p]) if p in follow_skipped else m)
    foreseen = [place for place in order if place in skipped and _adds(specs[place])]
    for number, (key, index) in enumerate(foreseen):
        skip[key][index].number = number
    costs = [((c.list_key, c.index), c.flops) for c in calls]
    return Layout(
        compute,
        skip,
        follow,
        whole=work_of(costs, set()),
        less=work_of(costs, skipped),
        follow_less=work_of(costs, follow_skipped),
        costs=costs,
        closes=len({d.span for d in specs.values() if d.closes and not _adds(d)}),
        wirings=wirings,
        lead_calls=lead,
        foreseen=foreseen,
        streams={c.list_key: trace.streams(c) for c in reversed(calls)},
        sites=sites_of(parts, spans, order),
    )


def protect_all(layout: Layout) -> None:
    """Copy the tensors of taps: the model's loop writes to its streams in place."""
    follow = [] if layout.follow is layout.skip else [layout.follow]
    for items in (layout.compute, layout.skip, *follow):
        for tap in (tap for group in items.values() for tap in group):
            protect(tap)


def keep(frame: Frame, layout: Layout, calls: list[BlockCall]) -> bool:
    """Keep the features of the traced call; return False if a tensor for them was dropped."""
    for call in calls:
        item = layout.compute[call.list_key][call.index]
        if isinstance(item, LiveTap):
            return False
        if not isinstance(item, ComputeTap):
            continue
        spec = item.spec
        streams = list(spec.carry.values()) if spec.opens else []
        dropped = [n for n, s in enumerate(call.shapes_out) if s and call.outputs[n] is None]
        if any(key not in call.arguments for key in streams) or (spec.records and dropped):
            return False
        if spec.opens:
            frame.bases[spec.span] = tuple(call.arguments[key] for key in streams)
        if spec.records:
            lone = call.container is Tensor
            record(frame, spec, call.outputs[0] if lone else call.container(call.outputs))
    return True


def _spec_of(call: BlockCall, wiring: Wiring, is_unet: bool) -> TapSpec:
    """Return the outputs that a block passes on and those that it hands out on the side."""
    carry, sides = {}, []
    for number, shape in enumerate(call.shapes_out):
        key = wiring.carry.get(number)
        if key is not None and (shape is None or call.shapes_in.get(key) == shape):
            carry[number] = key
        elif shape is not None or isinstance(call.outputs[number], (tuple, list)):
            sides.append(number)
    place = (call.list_key, call.index)
    if is_unet:
        return TapSpec(place, {}, is_hollow=True)
    return TapSpec(place, carry, sides=tuple(sides), bare=None in call.shapes_out)


def _assign(
    number: int,
    span: list[tuple[str, int]],
    specs: dict[tuple[str, int], TapSpec],
    calls: dict[tuple[str, int], BlockCall],
    parts: Combine,
    is_last: bool,
    unet: bool,
) -> None:
    """Give the first and last block of a span the roles of their taps."""
    first, last = specs[span[0]], specs[span[-1]]
    if parts.feature == "output" and parts.site is Site.STACK and not is_last:
        return  # the last list's output stands for the whole stack
    last.closes, last.span, last.is_hollow = True, number, False
    if unet:
        return
    wants_residual = parts.feature == "residual" or parts.site is Site.BLOCK
    shapes_first = [calls[span[0]].shapes_in.get(key) for key in first.carry.values()]
    shapes_last = [calls[span[-1]].shapes_out[n] for n in last.carry]
    matching = list(first.carry) == list(last.carry) and all(
        there is None or here == there for here, there in zip(shapes_first, shapes_last, strict=True)
    )
    if wants_residual and first.carry and matching:
        first.opens, first.span, last.residual = True, number, True
        last.sides = tuple(n for n in last.sides if n not in last.carry)


def _enliven(number: int, span: list[Place], specs: dict[Place, TapSpec]) -> None:
    """Leave the loop's additions between blocks out of the features of a span of one list."""
    first, last = specs[span[0]], specs[span[-1]]
    blocks = [specs[place] for place in span]
    whole = all(list(block.carry) == list(first.carry) for block in blocks)
    if len(span) > 1 and last.residual and whole and len({key for key, _ in span}) == 1:
        for block in blocks:
            block.live, block.span = True, number


def _compute_tap(module: nn.Module, spec: TapSpec) -> Any:
    """Return the item of a block that runs: a tap if the cache needs one."""
    if spec.live:
        return LiveTap(module, spec)
    return ComputeTap(module, spec) if spec.opens or spec.records else module


def _items(blocks: dict[str, list[nn.Module]], specs: Any, make: Any) -> dict[str, list[Any]]:
    """Return the items that `make` gives for the called blocks, for every list."""
    items: dict[str, list[Any]] = {}
    for key, group in blocks.items():
        places = [(key, index) for index in range(len(group))]
        items[key] = [
            make(module, specs[place], place) if place in specs else module
            for place, module in zip(places, group, strict=True)
        ]
    return items


def _skip_tap(module: nn.Module, spec: TapSpec, container: type) -> Any:
    """Return the item of a skipped block."""
    if spec.is_hollow:
        return HollowTap(module, spec)
    if _adds(spec):
        return AddTap(module, spec, container)
    if spec.closes and spec.residual and not spec.opens and not spec.sides and not spec.bare:
        return CloseTap(module, spec, container)
    if spec.closes or spec.sides or not spec.carry:
        return EstimateTap(module, spec)
    if spec.opens and not spec.live:
        return OpenTap(module, spec, container)
    return PassTap(module, spec, container)


def _adds(spec: TapSpec) -> bool:
    """Return whether a block is a span of its own whose outputs are all residuals."""
    return spec.opens and spec.closes and spec.residual and not spec.sides and not spec.bare


# spans: blocks that are skipped together ----------------------------------------------------------


def spans_of(parts: Combine, order: list[Place], kept: set[Place], is_unet: bool) -> list[list[Place]]:
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
    """Return the blocks that names such as `blocks.3` or `blocks.2-9` mean; raise AttachError for none."""
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
