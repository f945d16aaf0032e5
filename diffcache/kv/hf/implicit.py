"""Have a model use caches of a recipe in code that gives it none."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from diffcache.errors import AttachError
from diffcache.foreign import attention_name_of
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.hf.cache import Recipes as Recipes
from diffcache.kv.hf.model import NAME, Mode, decoder_config
from diffcache.kv.hf.switch import detach

_USED: WeakSet[nn.Module] = WeakSet()  # models that are in a block now
_LOCK = threading.Lock()


@dataclass
class Caching:
    """What a block of `caching` knows.

    Attributes:
        cache: The cache that was made last, None before the first call.
        count: Caches that were made.
    """

    cache: KVCache | None = None
    count: int = 0


@contextmanager
def caching(
    model: nn.Module, recipe: Recipes, *, mode: Mode = "auto", **settings: Any
) -> Iterator[Caching]:
    """Give a model a new cache in every call that would make one of its own.

    In the block, `model.generate(...)` and `model(...)` without `past_key_values` get a cache of
    `cache_for`, each call its own, in whatever thread it is made. A call with a cache, or with
    `use_cache=False`, stays as it is. At the end of the block, also after an error, the model has
    its own `generate`, hooks and attention function again; caches made in the block are of no more
    use then, unless the model was set up by `cache_for` before.

    Args:
        model: The model whose `generate` or forward is called, as for `cache_for`.
        recipe: Recipe for the caches, or its name, as for `cache_for`.
        mode: `"native"`, `"stock"` or `"auto"`, as for `cache_for`.
        settings: Settings of a recipe that is given by name, such as `budget=256`.

    Yields:
        The cache that was made last, and how many there were.

    Raises:
        AttachError: If the model cannot be used this way, or is in such a block already.
        UnknownMethodError: If there is no recipe of that name.
        ValueError: If a setting is unknown, missing or out of its range.
    """
    config = decoder_config(model)
    with _LOCK:
        if model in _USED:
            raise AttachError(
                f"{type(model).__name__} is in a block of caching(...) already, perhaps of another "
                "thread; leave that first, or give caches of cache_for as past_key_values"
            )
        _USED.add(model)
    was_set_up = attention_name_of(config) == NAME
    used = Caching()

    def fresh() -> KVCache:
        used.cache = cache_for(model, recipe, mode=mode, **settings)
        used.count += 1
        return used.cache

    before = vars(model).get("generate")
    hook = None
    try:
        cache_for(model, recipe, mode=mode, **settings)  # what cannot be used is refused at once
        hook = model.register_forward_pre_hook(functools.partial(_given, fresh), with_kwargs=True)
        if hasattr(model, "generate"):
            vars(model)["generate"] = _generating(model, fresh)
        yield used
    finally:
        if hook is not None:
            hook.remove()
        vars(model).pop("generate", None)
        if before is not None:
            vars(model)["generate"] = before
        if not was_set_up:
            detach(model)
        with _LOCK:
            _USED.discard(model)


def _generating(model: Any, fresh: Callable[[], KVCache]) -> Callable[..., Any]:
    """Return `generate` of a model with a new cache where none is given."""
    generate = model.generate

    @functools.wraps(generate)
    def cached(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        configs = [given, getattr(model, "generation_config", None)]
        settings = {
            name: next((x for x in [kwargs.get(name), *(getattr(c, name, None) for c in configs)]
                        if x is not None), None)
            for name in ("use_cache", "cache_implementation")
        }  # fmt: skip
        if kwargs.get("past_key_values") is not None or settings["use_cache"] is False:
            return generate(*args, **kwargs)
        if settings["cache_implementation"] is not None:
            raise ValueError(
                f"cache_implementation={settings['cache_implementation']!r}: in a block of "
                "caching(...) the cache is that of the recipe; leave one of the two out"
            )
        return generate(*args, **{**kwargs, "past_key_values": fresh()})

    return cached


def _given(
    fresh: Callable[[], KVCache], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a forward a new cache where it has none and would make one."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    use = given.get("use_cache")
    if use is None:
        use = getattr(decoder_config(model), "use_cache", False)
    if given.get("past_key_values") is not None or not use:
        return None
    bound.arguments["past_key_values"] = fresh()
    return bound.args, bound.kwargs
