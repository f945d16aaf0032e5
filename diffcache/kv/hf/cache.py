"""Recipes in models of transformers: `model.generate(**x, past_key_values=cache_for(model, ...))`.

It touches a model through two public doors: a
`Cache` object, and a registered attention function that a model is told to use.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from diffcache.errors import AttachError
from diffcache.kv.hf.attention import Writer, announce, check_mask_sizes, forget, handed_out
from diffcache.kv.hf.model import (
    Mode,
    Setup,
    attentions,
    check_generates_with_cache,
    check_native,
    choose,
    decoder_config,
    decoder_of,
    numbered,
    origin_of,
    output_of,
    reader,
)
from diffcache.kv.hf.rotary import RotaryReader
from diffcache.kv.hf.switch import NAME, switch
from diffcache.kv.hf.switch import detach as detach
from diffcache.kv.hf.versions import has_shared_layers, query_count, tokens_to_crop
from diffcache.kv.layer import KVLayer
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import make_recipe
from diffcache.kv.store import CUT_OFF, KVStore


def cache_for(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    mode: Mode = "auto",
    tags: Tensor | None = None,
    **settings: Any,
) -> KVCache:
    """Return a cache for one generation, or one conversation, with a model of transformers.

    Args:
        model: Any model whose attention goes through transformers' attention interface.
        recipe: What is done to the cache, or its name.
        mode: `"native"` attends over slots by their positions and can do everything; the model is
            told to use the attention function `"diffcache"`, which treats other caches as `"sdpa"`
            does (`detach` undoes it). `"stock"` leaves attention alone: the cache hands out
            decoded keys and values; rows must be equally long, and prompts must not be padded if
            slots are dropped. `"auto"` takes stock where the recipe drops nothing and reads all.
        tags: int [B, T], of the first T tokens, for recipes that look at tags.
        settings: Of a recipe that is given by name, such as `budget=256`.

    Raises:
        UnknownMethodError: If there is no recipe of that name.
        ValueError: If a setting is unknown, missing or out of its range.
        AttachError: If the model cannot be used this way; the message says why.
    """
    recipe = make_recipe(recipe, **settings)
    mode, why = choose(recipe, mode)
    config = decoder_config(model)
    check_generates_with_cache(model)
    stock = DynamicCache(config=config).layers
    owned = owned_layers(model, stock)
    windows = tuple(getattr(stock[index], "sliding_window", None) for index in owned)
    if mode == "stock" and recipe.evicts and any(windows):
        raise AttachError("mode='stock': layers with a window drop slots by themselves; use "
                          "mode='native'")  # fmt: skip
    if mode == "native" and has_shared_layers(config, stock):
        raise AttachError(
            f"{type(model).__name__} has layers that read the keys of others; use mode='stock' "
            "with a recipe that drops nothing"
        )
    modules = attentions(model, owned)
    if mode == "native":
        check_native(model, modules)
    readers = None
    if recipe.space == "pre":
        readers = [reader(model, modules, index, config) for index in owned]
    out = [output_of(modules, index) for index in owned] if recipe.wants_out else None
    eager = mode == "native" and switch(model) == "eager"
    store = KVStore(
        len(owned), recipe, rotary=None if readers is None else [r.read() for r in readers], out=out
    )
    store.origin = partial(origin_of, weakref.ref(decoder_of(model)))
    known = WeakSet(module for _, module in numbered(model))
    setup = Setup(mode, why, tuple(owned), config, windows, known, eager)
    return KVCache(store, stock, setup, readers, tags)


def owned_layers(model: nn.Module, stock: Sequence[Any]) -> list[int]:
    """Return the layers that follow a recipe: of full attention, or all if all have a window.

    Args:
        model: The model.
        stock: Layers of a cache of transformers for it.

    Raises:
        AttachError: If there are none.
    """
    kinds = [type(layer) for layer in stock]
    owned = [index for index, kind in enumerate(kinds) if kind is DynamicLayer]
    if not owned and set(kinds) == {DynamicSlidingWindowLayer}:
        return list(range(len(kinds)))
    if not owned:
        names = ", ".join(sorted({kind.__name__ for kind in kinds}))
        raise AttachError(
            f"{type(model).__name__} has no layer of full attention alone, only {names}; use the "
            "cache of transformers"
        )
    return owned


class KVCache(Cache):  # type: ignore[misc]
    """A cache of transformers whose layers of full attention follow a recipe.

    Attributes:
        store: Keys and values, and what is done to them.
        setup: How it goes with its model.
        writer: What writes into the store.
    """

    def __init__(
        self,
        store: KVStore,
        stock: list[Any],
        setup: Setup,
        readers: Sequence[RotaryReader] | None = None,
        tags: Tensor | None = None,
    ) -> None:
        layers = list(stock)
        for number, index in enumerate(setup.owned):
            layers[index] = _Layer(self, number)
        super().__init__(layers=layers)
        self.store, self.setup = store, setup
        self.writer = Writer(store, setup, readers, tags)

    @property
    def mode(self) -> Mode:
        """`"native"` or `"stock"`."""
        return self.setup.mode

    @property
    def why(self) -> str:
        """Why this mode."""
        return self.setup.why

    @property
    def owned(self) -> list[int]:
        """The layers of full attention, whose places in the store are 0, 1, ..."""
        return list(self.setup.owned)

    def settle(self) -> None:
        """Do now what the recipe does to a prompt, whether or not it is due.

        Raises:
            ValueError: If nothing was written.
        """
        self.store.settle()

    @property
    def nbytes(self) -> int:
        """Bytes held by the layers of full attention."""
        return self.store.nbytes

    def fork(self) -> KVCache:
        """Return a cache with the same content; going on with either leaves the other as it is."""
        stock = [None if isinstance(x, _Layer) else deepcopy(x) for x in self.layers]
        store, writer = self.store.fork(), self.writer
        other = KVCache(store, stock, self.setup, writer.readers, writer.tags)
        other.writer.exchange = writer.exchange
        for ours, theirs in zip(other._ours(), self._ours(), strict=True):
            ours.is_initialized = theirs.is_initialized
        return other

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cache of a model is not pickled; use diffcache.kv.life.save")

    def begin(self, count: int) -> None:
        """Settle what is due, at the first layer of a forward of `count` tokens; see `check`."""
        self._check_used()
        self.store.begin(count)

    def check(self) -> None:
        """Check, before a forward, that the model and this cache are as they were left.

        Raises:
            AttachError: If the model uses another attention function by now.
            ValueError: If an earlier forward did not come to its end.
        """
        self._check_used()
        sliding = [x for x in self.layers if type(x) is DynamicSlidingWindowLayer]
        if any(x.is_initialized and x.get_seq_length() != self.store.seen for x in sliding):
            raise ValueError(CUT_OFF)

    def _check_used(self) -> None:
        used = self.setup.config._attn_implementation
        if self.mode == "native" and used != NAME:
            raise AttachError(
                f"the model was released and uses {used!r}, which sees nothing of this cache; "
                "call cache_for(model, ...) again, which sets it up for all its caches"
            )

    # what generate calls -------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; see `tokens_to_crop`."""
        count = tokens_to_crop(tokens_to_remove, self.store)
        for layer in self.store.layers:
            layer.check_rollback(count)
        self._others("crop", tokens_to_remove)
        if count:
            self.store.rollback(count)

    def activate_past_recording(self) -> None:
        """Expect that tokens are taken back."""
        self.store.speculative = True
        for layer in self._stock():
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
        forget(self.writer)

    def _rows(self, index: Tensor) -> None:
        form = self.store.layers[0].form
        if form is not None:
            self.store.rows(index.to(form.device))
            self.writer.rows(index)

    def _ours(self) -> list[_Layer]:
        return [layer for layer in self.layers if isinstance(layer, _Layer)]

    def _stock(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, _Layer)]

    def _others(self, verb: str, *given: Any) -> None:
        for layer in self._stock():
            getattr(layer, verb)(*given)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of the store, as transformers sees it."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KVCache, number: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.number = number
        self._masked = 0  # keys that the mask of this forward is for, where that is known

    @property
    def cache(self) -> KVCache:
        """The cache it belongs to."""
        cache = self._cache()
        if cache is None:
            raise AttachError("this layer outlived its cache; keep the object of cache_for")
        return cache

    @property
    def core(self) -> KVLayer:
        """Its keys and values."""
        return self.cache.store.layers[self.number]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the store needs no shapes."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H, n, D] and return what the attention function gets.

        In native mode that is what came; the attention function writes and reads the store.
        """
        cache = self.cache
        self.is_initialized = True
        if self.number == 0 and cache.writer.refreshing is None:
            cache.begin(key_states.shape[2])
        if cache.mode == "native":
            announce(cache.writer, self.number, key_states, value_states)
            return key_states, value_states
        count, kept = key_states.shape[2], self._reached()
        check_mask_sizes(count, self._masked, kept + count)
        self._masked = 0
        slots = handed_out(cache.writer.write(self.number, key_states, value_states))
        slots = slots.narrow(slots.width - kept - count, slots.width)
        return slots.k, slots.v

    def get_seq_length(self) -> int:
        """Return the tokens seen, whether or not they are still held."""
        return self.core.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the mask is for, and the position of the first.

        In native mode the mask is by position: all that were ever seen.
        """
        self.cache.check()  # transformers asks before the first layer
        if self.cache.mode == "native":
            return self.core.seen + query_count(query_length), 0
        kept = self._reached()
        self._masked = kept + query_count(query_length)
        return self._masked, self.core.seen - kept

    def _reached(self) -> int:
        """Return how many of the slots held the next token sees."""
        window = self.cache.setup.windows[self.number]
        return self.core.held if window is None else min(self.core.held, window - 1)

    def get_max_length(self) -> int:
        """Return -1: there is no bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions
