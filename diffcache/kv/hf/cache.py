"""Recipes in models of transformers: `model.generate(**x, past_key_values=cache_for(model, ...))`.

It touches a model through two public doors: a
`Cache` object, and a registered attention function that a model is told to use.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diffcache.errors import AttachError
from diffcache.foreign import attention_name_before, attention_name_of, is_assisted, restore_attention, use_attention
from diffcache.kv.hf.attention import attention, forget
from diffcache.kv.hf.latent import check_latent
from diffcache.kv.hf.layer import FusedLayer, SlotLayer, copy_states
from diffcache.kv.hf.model import (
    NAME,
    CacheSetup,
    Mode,
    attentions,
    check_generates_with_cache,
    check_takes_cache,
    choose,
    config_of,
    decoder_config,
    decoder_of,
    numbered,
    origin_of,
    output_of,
    reader,
    rotary_embedding,
)
from diffcache.kv.hf.probe import check_hands_over
from diffcache.kv.hf.rotary import RotaryReader, noted_by
from diffcache.kv.hf.versions import FUSED, has_shared_layers, tokens_to_crop
from diffcache.kv.hf.writer import Host, Writer, unwatch, watch
from diffcache.kv.layer import KVLayer
from diffcache.kv.per_layer import per_layer
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import make_recipe
from diffcache.kv.segment import PLAIN
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail

_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
Recipes: TypeAlias = "Recipe | str | Sequence[Recipe | str] | Mapping[int, Recipe | str]"


def cache_for(
    model: nn.Module,
    recipe: Recipes,
    *,
    mode: Mode = "auto",
    tags: Tensor | None = None,
    past: Cache | None = None,
    past_mask: Tensor | None = None,
    **settings: Any,
) -> KVCache:
    """Return a cache for one generation, or one conversation, with a model of transformers.

    Args:
        model: Any model whose attention goes through transformers' attention interface.
        recipe: Recipe for the cache, or its name. Or recipes of single layers that do not
            look across layers: a list with one for each layer that follows a recipe, or a mapping
            from numbers of layers of the model, the others being left as they are.
        mode: `"native"` attends over slots by their positions and can do everything; the model is
            told to use the attention function `"diffcache"`, which treats other caches as `"sdpa"`
            does (`detach` undoes it). `"stock"` leaves attention alone: the cache hands out
            decoded keys and values; rows must be equally long, and prompts must not be padded if
            slots are dropped. `"auto"` takes stock where the recipe drops nothing and reads all.
        tags: int [B, T], of the first T tokens, for recipes that look at tags.
        past: A `DynamicCache` of this model, such as of a system prompt, that the cache begins
            with a copy of. Recipes that note how every query attends are refused then; those that
            look at the last queries need as many tokens after it.
        past_mask: bool or int [B, T], 0 for padding in `past`.
        settings: Settings of a recipe that is given by name, such as `budget=256`.

    Raises:
        UnknownMethodError: If there is no recipe of that name.
        ValueError: If a setting is unknown, missing or out of its range, or recipes of layers do
            not go together, or `past_mask` is of another shape.
        AttachError: If the model cannot be used this way; the message says why.
    """
    config = decoder_config(model)
    check_takes_cache(model)
    check_generates_with_cache(model)
    stock = DynamicCache(config=config).layers
    owned = owned_layers(model, stock)
    seen = 0 if past is None else check_past(past, stock, owned)
    recipe = one_recipe(recipe, owned, settings)
    mode, why = choose(recipe, mode)
    windows = tuple(getattr(stock[index], "sliding_window", None) for index in owned)
    if mode == "stock" and recipe.evicts and any(windows):
        why = "layers with a window drop slots by themselves"
        raise AttachError(f"mode='stock': {why}; use mode='native'")
    if mode == "native" and has_shared_layers(config, stock):
        raise AttachError(
            f"{type(model).__name__} has layers that read the keys of others; use mode='stock' "
            "with a recipe that drops nothing"
        )
    modules = attentions(model, owned)
    latent = mode == "native" and check_latent(model, modules.values(), recipe)
    readers = None
    if recipe.rotates:
        readers = [reader(model, modules, index, config) for index in owned]
        # Only by one axis and frequencies that stay can keys be turned on by a difference.
        if any(each.varies or each.layout.axes for each in readers):
            recipe = replace(recipe, space="pre")
    out = [output_of(modules, index) for index in owned] if recipe.wants_out else None
    eager = mode == "native" and set_up(model, modules, latent) == "eager"
    store = KVStore(len(owned), recipe, rotary=None if readers is None else [r.read() for r in readers], out=out)
    for layer in store.layers:
        layer.latent = latent
    store.origin = partial(origin_of, weakref.ref(decoder_of(model)))
    known = WeakSet(module for _, module in numbered(model))
    setup = CacheSetup(mode, why, tuple(owned), config, windows, known, eager)
    cache = KVCache(store, stock, setup, readers, tags)
    cache.writer.noted = noted_by(readers or ())
    if seen:
        take_over(cache, past, past_mask, seen)
    watch(model)
    return cache


def set_up(model: nn.Module, modules: Mapping[int, nn.Module], latent: bool) -> str:
    """Have a model use our attention, and return the name of its own; AttachError if that is refused."""
    was_set_up = attention_name_of(decoder_config(model)) == NAME
    before = switch(model)
    try:
        if modules and not latent:
            check_hands_over(next(iter(modules.values())), rotary_embedding(model))
    except AttachError:
        if not was_set_up:
            detach(model)
        raise
    return before


def switch(model: nn.Module) -> str:
    """Have the decoder of a model use our attention function; its other parts stay as they are.

    Returns:
        The name of the one that it used before.

    Raises:
        AttachError: If its attention cannot be exchanged.
    """
    decoder: Any = decoder_of(model)
    if attention_name_of(decoder.config) != NAME:
        AttentionInterface.register(NAME, partial(attention, sdpa_attention_forward))
        AttentionMaskInterface.register(NAME, sdpa_mask)
        if not use_attention(decoder, NAME):
            raise AttachError(
                f"{type(model).__name__} does not go through transformers' attention interface; "
                "use mode='stock' with a recipe that drops nothing"
            )
    return attention_name_before(decoder.config)


def detach(model: nn.Module) -> None:
    """Take off a model of transformers what `cache_for` put there; raise AttachError if it is no such model."""
    config_of(model)
    restore_attention(model, NAME)
    unwatch(model)


def one_recipe(recipe: Recipes, owned: Sequence[int], settings: Mapping[str, Any]) -> Recipe:
    """Return what a cache does to layers that follow `recipe`, as `cache_for` takes it, those of numbers `owned`.

    Raises:
        UnknownMethodError: If there is no recipe of a name.
        ValueError: If there are recipes of no layer or of others than these, or they do not go
            together.
    """
    if isinstance(recipe, (str, Recipe)) or not isinstance(recipe, (Mapping, Sequence)):
        return make_recipe(recipe, **settings)
    if settings:
        raise ValueError(
            f"settings {sorted(settings)} go with one name, not with recipes of layers; give "
            "recipes such as diffcache.kv.snapkv(budget=256)"
        )
    if not recipe:
        raise ValueError(
            f"recipe={recipe!r}: names no layer; give a recipe for all layers, such as 'snapkv', "
            f"or recipes of some of {list(owned)}, such as {{{owned[0]}: 'snapkv'}}"
        )
    if not isinstance(recipe, Mapping):
        if len(recipe) != len(owned):
            raise ValueError(
                f"recipe={len(recipe)} recipes: must be one for each of the {len(owned)} layers "
                f"{list(owned)}, or a mapping from some of their numbers"
            )
        recipe = dict(zip(owned, recipe, strict=True))
    others = [number for number in recipe if number not in owned]
    if others:
        raise ValueError(f"recipe of layers {others}: must be of {list(owned)}")
    blank = Recipe()
    return per_layer([make_recipe(recipe.get(number, blank)) for number in owned])


def owned_layers(model: nn.Module, stock: Sequence[Any]) -> list[int]:
    """Return the layers of a new cache that follow a recipe: of full attention, or all if all have a window.

    Raises:
        AttachError: If there are none, or the cache does not show the states that the model keeps.
    """
    kinds = [type(layer) for layer in stock]
    stateless = {DynamicLayer, DynamicSlidingWindowLayer}
    if getattr(model, "_is_stateful", False) and set(kinds) <= stateless:
        raise AttachError(  # RecurrentGemma before transformers 5.23
            f"{type(model).__name__} keeps states of its own, which its cache does not show; use "
            "the cache of transformers, or a newer transformers"
        )
    owned = [index for index, kind in enumerate(kinds) if kind in (DynamicLayer, FUSED)]
    if not owned and set(kinds) == {DynamicSlidingWindowLayer}:
        return list(range(len(kinds)))
    if not owned:
        names = ", ".join(sorted({kind.__name__ for kind in kinds}))
        raise AttachError(
            f"{type(model).__name__} has no layer of full attention alone, only {names}; use the cache of transformers"
        )
    return owned


class KVCache(Host, Cache):  # type: ignore[misc]
    """A cache of transformers whose layers of full attention follow a recipe."""

    def __init__(
        self,
        store: KVStore,
        stock: list[Any],
        setup: CacheSetup,
        readers: Sequence[RotaryReader] | None = None,
        tags: Tensor | None = None,
    ) -> None:
        layers = list(stock)
        for number, index in enumerate(setup.owned):
            fused = FUSED is not DynamicLayer and isinstance(stock[index], FUSED)
            layers[index] = FusedLayer(self, number, stock[index]) if fused else SlotLayer(self, number)
        super().__init__(layers=layers)
        self.store, self.setup = store, setup
        self.writer = Writer(store, setup, readers, tags)

    @property
    def why(self) -> str:
        """Why this mode."""
        return self.setup.why

    @property
    def owned(self) -> list[int]:
        """The layers of full attention, whose places in the store are 0, 1, ..."""
        return list(self.setup.owned)

    def settle(self) -> None:
        """Do now what the recipe does to a prompt, due or not; raise ValueError if nothing was written."""
        self.store.settle()

    def to_dynamic(self) -> DynamicCache:
        """Return a cache of transformers with the same content: a copy, keys and values decoded.

        Raises:
            ValueError: If slots were dropped, merged or moved.
        """
        return dynamic_of(self)

    @property
    def nbytes(self) -> int:
        """Bytes held by the layers of full attention."""
        return self.store.nbytes

    def fork(self) -> KVCache:
        """Return a cache with the same content; going on with either leaves the other as it is."""
        stock = [x if isinstance(x, SlotLayer) else deepcopy(x) for x in self.layers]
        store, writer = self.store.fork(), self.writer
        other = KVCache(store, stock, self.setup, writer.readers, writer.given_tags)
        other.writer.tags = writer.tags
        other.writer.exchange, other.writer.past = writer.exchange, writer.past
        other.writer.noted, other.writer.table = writer.noted, writer.table
        for ours, theirs in zip(other._ours(), self._ours(), strict=True):
            ours.is_initialized = theirs.is_initialized
        return other

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cache of a model is not pickled; use diffcache.kv.save(path, cache.store)")

    # what generate calls -------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; see `tokens_to_crop`."""
        count = tokens_to_crop(tokens_to_remove, self.store)
        self.store.check_rollback(count)
        if self.store.has_noted(count):
            raise AttachError(
                f"{self.store.recipe.name} took note of what the last {count} tokens attend to, "
                "which cannot be taken back; call cache.activate_past_recording() before they are "
                "read, or go on from a cache.fork() of before"
            )
        self._others("crop", tokens_to_remove)
        if count:
            self.store.rollback(count)

    def activate_past_recording(self) -> None:
        """Expect that tokens are taken back.

        Raises:
            AttachError: If assisted decoding is to go on from tokens that are there. It reads the
                whole prompt first, whatever a cache holds, that of transformers too.
        """
        if self.store.seen and is_assisted(sys._getframe(1)):
            raise AttachError(
                f"past_key_values: holds {self.store.seen} tokens, and assisted decoding would "
                "read them a second time; generate without an assistant, or give all tokens and a "
                "new cache of cache_for(model, ...)"
            )
        self.store.speculative = True
        for layer in self.beside:
            record = getattr(layer, "activate_past_recording", None)
            if record is not None:
                record()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search."""
        self._others("reorder_cache", beam_idx)
        self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._others("batch_repeat_interleave", repeats)
        form = self.store.layers[0].form
        if form is not None:
            self._rows(torch.arange(form.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._others("batch_select_indices", indices)
        if self.store.seen and indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._rows(indices)

    def reset(self) -> None:
        """Forget everything."""
        self._others("reset")
        self.store.reset()
        self.store.speculative = False
        self.writer.reset()
        forget(self.writer)

    def _rows(self, index: Tensor) -> None:
        form = self.store.layers[0].form
        if form is not None:
            self.store.rows(index.to(form.device))
            self.writer.rows(index)

    def _ours(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def _others(self, verb: str, *given: Any) -> None:
        for layer in self.beside:
            getattr(layer, verb)(*given)


def check_past(past: Any, stock: Sequence[Any], owned: Sequence[int]) -> int:
    """Return the tokens that a cache has seen that is to be taken over by another, whose new layers are `stock`.

    Raises:
        AttachError: If it is no `DynamicCache`, or not one of this model.
    """
    name = type(past).__name__
    if isinstance(getattr(past, "store", None), KVStore):
        raise AttachError(f"past={name}: is a cache of cache_for already; go on from past.fork()")
    if not isinstance(past, DynamicCache):
        raise AttachError(
            f"past={name}: must be a DynamicCache, whose keys and values are plain tensors; read "
            "the prompt again with DynamicCache(config=model.config), or with this cache"
        )
    if past.offloading:
        raise AttachError(f"past={name}(offloading=True): must be on the device of the model")
    kinds = [type(layer) for layer in past.layers]
    wanted = [type(layer) for layer in stock]
    fits = len(kinds) == len(wanted) and all(
        one in _PLAIN if index in owned and other in _PLAIN else one is other
        for index, (one, other) in enumerate(zip(kinds, wanted, strict=True))
    )
    lengths = {past.layers[index].get_seq_length() for index in owned} if fits else set()
    if len(lengths) != 1:
        said = ", ".join(sorted({kind.__name__ for kind in kinds})) or "none"
        raise AttachError(
            f"past={name} of {len(kinds)} layers ({said}): the layers of this model are "
            f"{len(wanted)} ({', '.join(sorted({kind.__name__ for kind in wanted}))}), all of one "
            "length; make it with DynamicCache(config=model.config)"
        )
    return int(lengths.pop())


def check_unobserved(store: KVStore) -> None:
    """Refuse recipes that cannot do without the queries of tokens that are taken over.

    Raises:
        AttachError: If each of them has to be seen.
        ValueError: If frequencies of rotation change with the length.
    """
    recipe = store.recipe
    if recipe.score is not None and recipe.score.statistics:
        raise AttachError(
            f"past: {recipe.name} notes how every query of the prompt attended, and those of `past`"
            " are gone; read the prompt with this cache, or use a recipe that looks at keys alone "
            "or at the last queries, such as keydiff or snapkv"
        )
    if any(layer.rotary is not None and layer.rotary.varies for layer in store.layers):
        raise ValueError(
            f"past: {recipe.name} holds keys before rotation, and this model's frequencies change "
            "with the length, so that those of `past` are not known; read the prompt with this "
            "cache"
        )


def take_over(cache: Host, past: DynamicCache, mask: Tensor | None, seen: int) -> None:
    """Write copies of what a cache of transformers holds, as if the prompt had been read.

    Args:
        cache: A new cache.
        past: Cache that is taken over; it stays as it is.
        mask: bool or int [B, seen], 0 for padding; None where there is none.
        seen: Tokens that `past` has seen.

    Raises:
        ValueError: If the mask is of another shape.
    """
    store, setup = cache.store, cache.setup
    check_unobserved(store)
    if cache.writer.noted is not None:
        raise AttachError(
            f"past: {store.recipe.name} holds keys before rotation, and positions on several axes "
            "are not known of `past`; read the prompt with this cache, or use a recipe that holds "
            "keys as they are (space='post')"
        )
    first = past.layers[setup.owned[0]].keys
    if mask is not None and mask.shape != (len(first), seen):
        raise ValueError(f"past_mask={list(mask.shape)}: must be {[len(first), seen]}, 0 for padding")
    valid = pos = None
    if mask is not None and setup.mode == "native" and not bool(mask.all()):
        valid = mask.to(first.device).bool()
        pos = (valid.long().cumsum(-1) - 1).clamp_min(0)  # as `generate` has them
    store.begin(seen)
    for number, index in enumerate(setup.owned):
        k, v = past.layers[index].keys.detach(), past.layers[index].values.detach()
        gone = seen - k.shape[2]  # those that a window has left behind
        store.layers[number].tail = Tail(gone)
        store.layers[number].seen = gone
        own = None if valid is None else valid[:, gone:]
        at = pos if pos is None else pos[:, gone:]
        cache.writer.write(number, k, v, valid=own, position_ids=at)
        cache.layers[index].is_initialized = True
        if isinstance(cache.layers[index], FusedLayer):
            copy_states(past.layers[index], cache.layers[index])
    for index, layer in enumerate(past.layers):
        if index not in setup.owned:
            cache.layers[index] = deepcopy(layer)
    store.taken_over = True
    if setup.mode == "native":
        cache.writer.past = valid if valid is not None else first.new_ones(1, seen).bool()


def dynamic_of(cache: Host) -> DynamicCache:
    """Return what `KVCache.to_dynamic` does: a `DynamicCache` knows no positions."""
    made = DynamicCache(config=cache.setup.config)
    for number, index in enumerate(cache.setup.owned):
        core = cache.store.layers[number]
        if not core.seen:
            continue
        slots = _all_of(core, cache.setup.windows[number])
        if slots is None:
            raise ValueError(
                f"layer {index} holds {core.held} slots of {core.seen} tokens, not each of the "
                "last ones as it came: a DynamicCache takes each slot for the next token; go on "
                "with this cache, or use a recipe that drops and merges nothing"
            )
        made.layers[index].update(slots.k, slots.v)
        if isinstance(cache.layers[index], FusedLayer):
            copy_states(cache.layers[index], made.layers[index])
        if core.held < core.seen:
            made.layers[index].cumulative_length += core.seen - core.held
    for index, layer in enumerate(cache.layers):
        if index not in cache.setup.owned:
            made.layers[index] = deepcopy(layer)
    return made


def _all_of(core: KVLayer, window: int | None) -> Slots | None:
    """Return the slots of a layer if they are its tokens in order, or the last of a window."""
    gone = core.seen - core.held
    if gone and (window is None or core.held < window - 1):
        return None
    slots = core.read() if core.latent else core.rotated(core.read())
    if "logn" in slots.meta or any(segment.traits != PLAIN for segment in core.segments):
        return None
    held = torch.full((len(slots.k), 1), core.held, device=slots.k.device)
    if core.padding is not None:
        held = held - (core.padding[:, None] - gone).clamp_min(0)
    place = torch.arange(gone, core.seen, device=slots.k.device)
    whole = ((slots.pos == place) | ~slots.valid).all() & (slots.valid.sum(-1) == held).all()
    return slots if bool(whole) else None
