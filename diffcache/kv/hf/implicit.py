"""Have a model use caches of a recipe in code that gives it none."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from diffcache.anchor import Attached, claim, described, owner_of, release, subclass
from diffcache.errors import AttachError
from diffcache.foreign import CACHES, attention_name_of, brings_cache, cache_name, with_cache
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.cache import Recipes as Recipes
from diffcache.kv.hf.model import NAME, Mode, decoder_config

_LOCK = threading.Lock()  # held as a model is taken


class Caching(Attached):
    """Caches of a recipe for the calls of a model that bring none; see `caching`.

    Attributes:
        method: The recipe.
        cache: The cache that was made last, None before the first call.
        count: Caches that were made.
    """

    def __init__(self, model: nn.Module, recipe: Recipes, *, mode: Mode = "auto", **settings: Any) -> None:
        config = decoder_config(model)
        with _LOCK:
            owner = owner_of(model)
            if owner is not None:
                raise AttachError(
                    f"{type(model).__name__} already runs under {described(owner)}, perhaps of "
                    "another thread; take that off first, or give caches of cache_for as "
                    "past_key_values"
                )
            claim(model, self)
        self.model = weakref.ref(model)
        self.cache: KVCache | None = None
        self.count = 0
        self.recipe, self.settings = recipe, {"mode": mode, **settings}
        self.generate: Callable[..., Any] | None = vars(model).pop("generate", None)
        self._was_set_up = attention_name_of(config) == NAME
        self._class = type(model)
        self._open: list[int] = []  # threads that are in a call
        self._hooks: list[Any] = []
        try:
            # what cannot be used is refused at once
            self.method = cache_for(model, recipe, **self.settings).store.recipe
        except BaseException:
            self.detach()
            raise
        self._hooks = [
            model.register_forward_pre_hook(_given, with_kwargs=True),
            model.register_forward_hook(_over, always_call=True),
        ]
        if hasattr(model, "generate"):
            model.__class__ = subclass(type(model), generate=_generate)

    def fresh(self, model: Any) -> KVCache:
        """Return a new cache."""
        self.cache = cache_for(model, self.recipe, **self.settings)
        self.count += 1
        return self.cache

    def check_idle(self) -> None:
        """Raise AttachError if a call of the model is under way in any thread."""
        if self._open:
            raise AttachError("a call of this model is under way; unwrap it when that has returned")

    def reset(self) -> None:
        """Let go of the cache that was made last."""
        self.cache = None

    def detach(self) -> None:
        """Give the model its own `generate`, hooks and attention function back."""
        model: Any = self.model()
        if model is None or owner_of(model) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        if self._hooks and hasattr(model, "generate"):
            model.__class__ = self._class
        if self.generate is not None:
            vars(model)["generate"] = self.generate
        if not self._was_set_up:
            detach(model)
        release(model)


def caching(model: nn.Module, recipe: Recipes, *, mode: Mode = "auto", **settings: Any) -> Caching:
    """Give a model a new cache in every call that would make one of its own, in a `with` block.

    In the block, `model.generate(...)` and `model(...)` without `past_key_values` get a cache of
    `cache_for`, each call its own, in whatever thread it is made. A call with a cache, or with
    `use_cache=False`, stays as it is. At the end of the block, also after an error, the model has
    its own `generate`, hooks and attention function again; caches made in the block are of no more
    use then, unless the model was set up by `cache_for` before. `diffcache.wrap(model, recipe)`
    does the same until `diffcache.unwrap(model)`.

    Args:
        model: The model whose `generate` or forward is called, as for `cache_for`.
        recipe: Recipe for the caches, or its name, as for `cache_for`.
        mode: `"native"`, `"stock"` or `"auto"`, as for `cache_for`.
        settings: Settings of a recipe that is given by name, such as `budget=256`.

    Returns:
        What to open with `with`, which knows the cache that was made last, and how many there were.

    Raises:
        AttachError: If the model cannot be used this way, or runs under another cache already.
        UnknownMethodError: If there is no recipe of that name.
        ValueError: If a setting is unknown, missing or out of its range.
    """
    return Caching(model, recipe, mode=mode, **settings)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `generate` of a model, with a new cache where none is given."""
    used = owner_of(model)
    plain: Callable[..., Any] = super(type(model), model).generate
    if not isinstance(used, Caching):
        return plain(*args, **kwargs)
    plain = used.generate or plain
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    configs = [given, getattr(model, "generation_config", None)]
    settings = {}
    for name in ("use_cache", "cache_implementation"):
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        settings[name] = next((value for value in values if value is not None), None)
    if not brings_cache(kwargs) and settings["use_cache"] is not False:
        if settings["cache_implementation"] is not None:
            raise ValueError(
                f"cache_implementation={settings['cache_implementation']!r}: the cache is that of "
                f"{used.method.name}; leave one of the two out"
            )
        kwargs = {**kwargs, **with_cache(model, used.fresh(model))}
    used._open.append(threading.get_ident())
    try:
        return plain(*args, **kwargs)
    finally:
        used._open.remove(threading.get_ident())


def _given(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a forward a new cache where it has none and would make one; not that of a copy."""
    used = owner_of(model)
    if not isinstance(used, Caching):
        return None
    used._open.append(threading.get_ident())
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    use = given.get("use_cache")
    if use is None:
        use = getattr(decoder_config(model), "use_cache", False)
    if brings_cache(given) or not use:
        return None
    bound.arguments[cache_name(model.forward) or CACHES[0]] = used.fresh(model)
    return bound.args, bound.kwargs


def _over(model: Any, args: tuple[Any, ...], out: Any) -> None:
    """Note that a forward is over, after an error as well."""
    used, thread = owner_of(model), threading.get_ident()
    if isinstance(used, Caching) and thread in used._open:
        used._open.remove(thread)
