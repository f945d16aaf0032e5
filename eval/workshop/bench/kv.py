"""Host time of a cache a layer and step beside its arithmetic, and bytes and error of codes.

Sizes are so small that little of a step is arithmetic; what there is, is measured alone in the same
process, in turn, and subtracted: a token copied into a buffer and attention over 4096 slots, and
where slots are coded or rows ragged, reading them into a rectangle. Between steps the token is
taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diffcache.eval.cost.interleave import Turn
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.kv.contexts import seen_by
from diffcache.eval.kv.recall_cost import exact_bytes
from diffcache.eval.record import Setting, stats
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.attention import attention
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv, keydiff
from diffcache.kv.recipes.quantized import kivi
from diffcache.kv.slots import join
from diffcache.kv.store import KVStore
from diffcache.pipelines.small.recall import RecallBatch, Task, draw
from diffcache.pipelines.small.recall_llama import DIRECTORY, load

SLOTS = 4096
TARGET = 200.0  # microseconds a layer and step, without the arithmetic
LAYERS, HEADS, GROUPS, SIZE = 4, 2, 2, 16
_SCALE = SIZE**-0.5
_WARMUP, _STEPS = 3, 5


@dataclass(frozen=True)
class CacheVariant:
    """One way to take a step."""

    name: str  # name in the table
    step: Callable[[], None]  # takes a step through all layers
    back: Callable[[], None]  # takes the token back; not timed
    floor: str = ""  # the variant that is its arithmetic
    target: float | None = None  # microseconds above the floor

    def turn(self) -> Turn:
        """Return a few steps, each but the first timed: that one finds the caches cold."""

        def first() -> None:
            self.step()
            self.back()

        return Turn(self.step, prepare=first, after=self.back, calls=_STEPS)


@dataclass(frozen=True)
class Inputs:
    """Random tensors: a prompt, and one more token."""

    k: Tensor  # [1, H, slots, D]
    v: Tensor
    q_all: Tensor  # [1, Hq, slots, D]
    one: tuple[Tensor, Tensor, Tensor]  # k, v [1, H, 1, D] and q [1, Hq, 1, D] of the next token

    @classmethod
    def draw(cls, setting: Setting, slots: int) -> Inputs:
        """Draw them."""
        drawn = torch.Generator().manual_seed(0)

        def normal(heads: int, count: int) -> Tensor:
            x = torch.randn(1, heads, count, SIZE, generator=drawn)
            return x.to(setting.device, setting.dtype)

        one = normal(HEADS, 1), normal(HEADS, 1), normal(HEADS * GROUPS, 1)
        return cls(normal(HEADS, slots), normal(HEADS, slots), normal(HEADS * GROUPS, slots), one)


def store_variant(name: str, floor: str, recipe: Recipe, x: Inputs) -> tuple[CacheVariant, KVStore]:
    """Return steps of a store: `begin`, and `write` and `attend` of every layer."""
    store = KVStore(LAYERS, recipe)
    store.begin(x.k.shape[2])
    for index, layer in enumerate(store.layers):
        layer.write(x.k, x.v)
        store.attend(index, Query(x.q_all, 0, _SCALE))
    store.settle()
    k, v, q = x.one

    def step() -> None:
        store.begin(1)
        for index, layer in enumerate(store.layers):
            layer.write(k, v)
            store.attend(index, Query(q, layer.seen - 1, _SCALE))

    return CacheVariant(name, step, lambda: store.rollback(1), floor, TARGET), store


def bare(name: str, x: Inputs, decoded: Callable[[int], tuple[Tensor, Tensor]]) -> CacheVariant:
    """Return steps that are arithmetic: a token copied to its place, and attention."""
    k, v, q = x.one

    def step() -> None:
        for index in range(LAYERS):
            keys, values = decoded(index)
            keys[:, :, -1:].copy_(k)
            values[:, :, -1:].copy_(v)
            functional.scaled_dot_product_attention(q, keys, values, scale=_SCALE, enable_gqa=True)

    return CacheVariant(name, step, lambda: None)


def _buffers(x: Inputs) -> Callable[[int], tuple[Tensor, Tensor]]:
    pairs = [(torch.cat([x.k, x.one[0]], 2), torch.cat([x.v, x.one[1]], 2)) for _ in range(LAYERS)]
    return lambda index: pairs[index]


def _decoding(store: KVStore) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that decodes a layer and joins it to one more token, as any cache of codes must."""

    def decoded(index: int) -> tuple[Tensor, Tensor]:
        layer = store.layers[index]
        parts = [segment.read() for segment in layer.segments]
        tail = layer.tail.read()
        slots = join([*parts, *([] if tail is None else [tail])])
        return slots.k, slots.v

    return decoded


def _cached(name: str, cache: Any, attend: Callable[..., Any], module: nn.Module, x: Inputs) -> CacheVariant:
    """Return steps of a cache of transformers, as an attention module of a model takes them."""
    for index in range(LAYERS):
        keys, values = cache.update(x.k, x.v, index)
        attend(module, x.q_all, keys, values, None, scaling=_SCALE)
    k, v, q = x.one

    def step() -> None:
        for index in range(LAYERS):
            # As from a projection: a new tensor each time.
            keys, values = cache.update(k.view_as(k), v.view_as(v), index)
            attend(module, q, keys, values, None, scaling=_SCALE)

    ours = isinstance(cache, KVCache)
    return CacheVariant(name, step, lambda: cache.crop(-1), "arithmetic", TARGET if ours else None)


def variants(setting: Setting, slots: int = SLOTS) -> list[CacheVariant]:
    """Return everything that is timed, in turn."""
    x, twice = Inputs.draw(setting, slots), Inputs.draw(setting, 2 * slots)
    coded = Inputs.draw(setting, slots + 64)
    found = [bare("arithmetic", x, _buffers(x))]
    found.append(store_variant("nothing dropped", "arithmetic", Recipe(), x)[0])
    found.append(store_variant("keydiff, half dropped", "arithmetic", keydiff(0.5), twice)[0])
    ragged, store = store_variant("adakv, ragged heads", "reading, adakv", adakv(0.5), twice)
    found += [bare("reading, adakv", twice, _decoding(store)), ragged]
    quantized, store = store_variant("kivi 2 bit", "reading, kivi", kivi(bits=2), coded)
    found += [bare("reading, kivi", coded, _decoding(store)), quantized]
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HEADS * GROUPS * SIZE,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * GROUPS,
        num_key_value_heads=HEADS,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")

    def ours(*given: Any, **more: Any) -> Any:
        return attention(sdpa_attention_forward, *given, **more)

    module, stock = model.model.layers[0].self_attn, DynamicCache(config=config)
    cache = cache_for(model, Recipe(), mode="native")
    found.append(_cached("in transformers", cache, ours, module, x))
    found.append(_cached("transformers DynamicCache", stock, sdpa_attention_forward, module, x))
    return found


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = 50, slots: int = SLOTS) -> dict[str, Any]:
    """Measure host time of a step over slots of every layer, and bytes, of float16, and error of codes."""
    found = variants(setting, slots)
    turns = {variant.name: variant.turn() for variant in found}
    timings = take_turns(turns, rounds, _WARMUP, setting)
    shapes = dict(device=setting.device.type, slots=slots, layers=LAYERS, heads=HEADS, groups=GROUPS, head_size=SIZE)
    return {
        "shapes": shapes,
        "rounds": rounds,
        "clock": setting.clock,
        "rows": times(found, timings.own(setting)),
        "held": [*held_rows(slots), *trained_rows(slots + 1)],
    }


def times(found: list[CacheVariant], taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return microseconds a layer and step, from seconds."""
    took = {name: stats(samples, 1e6 / LAYERS) for name, samples in taken.items()}
    rows = []
    for variant in found:
        mine, floor = took[variant.name], took.get(variant.floor)
        above = None
        if floor is not None:
            above = {key: mine[key] - floor["median"] for key in ("median", "q1", "q3")}
        rows.append(
            {
                "name": variant.name,
                "step_us": mine,
                "floor": variant.floor or None,
                "above_floor_us": above,
                "target_us": variant.target,
            }
        )
    return rows


# bytes that a store really holds, everything included, and what it costs attention ------------

HELD = 8, 4, 128  # heads of keys, queries of each, channels
ASKED = 32
SEED = 1 << 42  # of a context that nothing else is measured on


def cases() -> dict[str, tuple[Recipe, float | None]]:
    """Return the recipes that are weighed, and the share of exact bytes they may take."""
    return {
        "kivi 2 bit, group 32, residual 128": (kivi(bits=2, group=32, residual=128), 0.22),
        "kivi 4 bit, group 32, residual 128": (kivi(bits=4, group=32, residual=128), None),
        "adakv, a tenth": (adakv(0.1), 0.13),
        "adakv, a tenth, kivi 2 bit": (adakv(0.1) | kivi(bits=2, group=32, residual=128), None),
    }


@torch.no_grad()
def held_rows(tokens: int = SLOTS) -> list[dict[str, Any]]:
    """Return the bytes of each case for random keys of a prompt, heads of 128; nothing is said of errors."""
    drawn = torch.Generator().manual_seed(0)
    heads, groups, size = HELD
    k, v, q = (
        torch.randn(1, number, count, size, generator=drawn).half()
        for number, count in ((heads, tokens), (heads, tokens), (heads * groups, ASKED))
    )
    exact = 2 * k.numel() * k.element_size()
    rows = []
    for name, (recipe, most) in cases().items():
        store = KVStore(1, recipe)
        store.begin(tokens)
        store.layers[0].write(k, v)
        # The last queries are all that the recipes here look at.
        store.attend(0, Query(q, tokens - ASKED, size**-0.5))
        store.settle()
        rows.append(_row(f"random, {name}", store, exact, most, None))
    return rows


@torch.no_grad()
def trained_rows(tokens: int = SLOTS + 1) -> list[dict[str, Any]]:
    """Return bytes and the error of attention on recall-llama; nothing where it is not trained.

    The error is that of the outputs of all layers, for the queries of a question after a context of 1 + 4 n
    tokens, over the compressed and over the exact context: the norm of the difference by the norm.
    """
    if not (DIRECTORY / "config.json").is_file():
        return []
    model = load(torch.bfloat16, DIRECTORY)
    blocks = (tokens - 1) // 4
    task = Task(1 + 4 * blocks, min(blocks // 2, 128), 1)
    batch = draw(1, task, torch.Generator().manual_seed(SEED))
    try:
        whole = _read(model, Recipe(), batch)
        asked = torch.cat([batch.context, batch.questions[:, 0]], 1)
        later = [seen.query.narrow(task.context, seen.query.count) for seen in seen_by(model, asked)]
        wanted = _outputs(whole, later)
        exact = exact_bytes(whole, task.context)
        rows = []
        for name, (recipe, most) in cases().items():
            cache = _read(model, recipe, batch)
            error = float((_outputs(cache, later) - wanted).norm() / wanted.norm())
            rows.append(_row(f"recall-llama, {name}", cache.store, exact, most, error))
        return rows
    finally:
        detach(model)


def _row(name: str, store: KVStore, exact: int, most: float | None, error: float | None) -> dict[str, Any]:
    held = store.nbytes
    return dict(name=name, bytes=held, exact_bytes=exact, share=held / exact, target_share=most, error=error)


def _read(model: nn.Module, recipe: Recipe, batch: RecallBatch) -> KVCache:
    cache = cache_for(model, recipe, mode="native")
    model(input_ids=batch.context, **with_cache(model, cache))
    cache.settle()
    return cache


def _outputs(cache: KVCache, later: list[Query]) -> Tensor:
    """Return the attention of later queries over what a cache holds, [L, B, Hq, n, Dv]."""
    layers = zip(cache.store.layers, later, strict=True)
    return torch.stack([attend(asked, layer.views()).float() for layer, asked in layers])
