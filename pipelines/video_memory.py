"""Compute the bytes that a stream of causal video will hold, before its first chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm

import psutil
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.run_report import human
from diffcache.video import VideoPolicy

HORIZON = 36  # latent frames in which every policy with a bound has reached it, by default
MORE = "most_bytes, on a command line --most-mb or --cache-mb"
_ROOM = 64  # slots that are made room for at the end of long layers


@lru_cache(maxsize=64)  # a page asks for each of its films
def rehearsed(
    policy: VideoPolicy,
    rotary: RotaryND,
    *,
    chunk: int,
    frames: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    read_once: bool,
) -> int:
    """Return the most bytes of keys and values that are held between two chunks.

    A policy is carried out on random keys with few layers, heads and tokens, and the bytes are extrapolated, since
    they grow linearly in each of these. So it takes a second instead of the time of a film.

    Args:
        policy: Policy that chooses the frames to hold.
        rotary: Rotary embedding, whose grid is that of a frame.
        chunk: Latent frames of a chunk.
        frames: Latent frames of the film.
        shape: Rows, layers, heads and channels of a head.
        dtype: Dtype of keys and values.
        read_once: Whether rotated keys are kept from step to step.
    """
    rows, layers, heads, channels = shape
    # Codes come in groups of tokens, so a smaller frame has to leave the same remainder.
    group = lcm(_ROOM, getattr(policy, "group", 1))
    unit = rotary.unit % group + 4 * group
    recipe = policy.recipe(rotary.unit)
    deep = _corners(layers, 1, 2) if recipe.retrieve is not None else {1: float(layers)}
    if recipe.budget is not None and recipe.budget.looks_across:
        deep = {layers: 1.0}  # layers share one budget, so their bytes do not grow evenly
    axes = [_corners(rotary.unit, unit, unit + group), deep, _corners(heads, 1, 2)]
    most = [0.0] * -(-frames // chunk)
    for (tokens, by_unit), (count, by_layer), (wide, by_head) in product(*(x.items() for x in axes)):
        small = replace(rotary, grid=(1, tokens))
        turns = [small] * count
        store = KVStore(count, policy.recipe(tokens), rotary=turns, read_once=read_once)
        held = _filmed(store, policy, chunk * tokens, len(most), (rows, wide, channels), dtype)
        weight = by_unit * by_layer * by_head
        most = [sum_ + weight * bytes_ for sum_, bytes_ in zip(most, held, strict=True)]
    return round(max(most))


def _corners(value: int, low: int, high: int) -> dict[int, float]:
    """Return measuring points and their weights, by which measurements extrapolate linearly to a value."""
    if value <= high:
        return {value: 1.0}
    return {low: (high - value) / (high - low), high: (value - low) / (high - low)}


@torch.no_grad()
def _filmed(
    store: KVStore, policy: VideoPolicy, count: int, chunks: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> list[int]:
    """Return the bytes that a store holds after each chunk of a film, as in `Session`."""
    rows, heads, channels = shape
    recipe, rotary = store.recipe, store.layers[0].rotary
    assert rotary is not None  # frames are numbered when they are read
    # A policy that needs no queries is spared rotating them, which takes most of the time.
    is_asked = policy.by_query or recipe.observes or recipe.retrieve is not None or store.read_once
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(chunks):
        store.begin(count)
        policy.begin(store, rotary.unit)
        start = store.seen
        k = torch.randn(rows, heads, count, channels, generator=generator).to(dtype)
        for layer in store.layers:
            layer.write(k, k)
        for is_clean in (False, True) if is_asked else ():
            for number in range(len(store.layers)):
                _ask(store, policy, number, k, start, is_clean)
        found.append(store.nbytes)
    return found


def _ask(store: KVStore, policy: VideoPolicy, number: int, k: Tensor, start: int, is_clean: bool) -> None:
    """Let a policy and a layer take note of the queries of a chunk, in a step or the clean pass."""
    layer, count, scale = store.layers[number], k.shape[2], k.shape[3] ** -0.5
    at = torch.arange(start, start + count)
    query = Query(layer.rotate(k, at), start, scale, causal=False)
    if not is_clean:
        policy.first_step(store, number, query)
    elif store.recipe.retrieve is not None and not store.recipe.observes:
        store.views(number, query)
    else:
        # A bank keeps the most tokens where all are attended to alike. Elsewhere, random queries make
        # heads choose different tokens, as in a film.
        evenly = store.recipe.retrieve is not None
        noted = replace(query, q=torch.zeros_like(query.q)) if evenly else query
        last = Query(query.q[:, :, -1:], start + count - 1, scale, causal=False)
        store.attend(number, last, noted=noted)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that are free on a device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def check_fits(name: str, needed: int, most: int | None, others: dict[str, int]) -> None:
    """Raise ValueError if a stream will hold more bytes than there are.

    Args:
        name: Policy as the user wrote it.
        needed: Bytes that the stream will hold.
        most: Bytes that there are; None where that is not known, which passes.
        others: Bytes under other policies, by their names, which the error suggests if they fit.
    """
    if most is None or needed <= most:
        return
    fits = [f"policy={each!r} ({human(size, 'B')})" for each, size in others.items() if size <= most]
    raise ValueError(
        f"policy={name!r}: would hold {human(needed, 'B')} of keys and values, and there are "
        f"{human(most, 'B')} for it; take {', '.join([*fits, 'a smaller size'])}, or allow "
        f"more by {MORE}"
    )


def check_grown(policy: object, held: int, most: int | None, frames: int) -> None:
    """Raise ValueError if a stream holds more than the `most` bytes that there are; None, not known, passes."""
    if most is not None and held > most:
        raise ValueError(
            f"policy={policy!r}: the film is over, as its cache grew to {human(held, 'B')} in "
            f"{frames} latent frames, and there are {human(most, 'B')} for it; take a policy with "
            f"a bound, such as 'window', or allow more by {MORE}"
        )
