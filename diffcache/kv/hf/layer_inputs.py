"""Caches of transformers models that hold the inputs of layers instead of keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diffcache.errors import AttachError
from diffcache.kv.codec.remat import Projections
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.hf.model import attentions
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.low_rank import rematerialised

_Noted: TypeAlias = dict[tuple[int, int], Tensor]  # by thread, as others run the model too, and by layer
_NEAR = 1e-2  # of the largest key; rotating there and back in bfloat16 is off by up to 4e-3


def projections_of(model: nn.Module, owned: list[int]) -> tuple[Projections, ...]:
    """Return how layers make keys and values.

    Args:
        model: Model whose attention modules have `k_proj` and `v_proj`, linear layers of one input.
        owned: Numbers of the layers.

    Raises:
        AttachError: If a layer has no such projections.
    """
    modules, found = attentions(model, owned), []
    for index in owned:
        k, v, size = (getattr(modules.get(index), name, None) for name in ("k_proj", "v_proj", "head_dim"))
        if not isinstance(k, nn.Linear) or not isinstance(v, nn.Linear) or not isinstance(size, int):
            raise AttachError(
                f"{type(model).__name__}: layer {index} has no linear k_proj and v_proj of a known "
                "head_dim; keys and values cannot be made again: use a recipe that holds them"
            )
        found.append(Projections(k.weight, v.weight, k.out_features // size, k.bias, v.bias))
    return tuple(found)


def remat_cache_for(model: nn.Module, bits: float | None = 4, **settings: Any) -> KVCache:
    """Return a cache that holds the inputs that keys and values are made of.

    The inputs are noted by hooks on the key projections, which go with the cache. At the first
    tokens of each layer it is checked that the projections give the keys the model used: models
    that normalize keys after the projection are refused. Slots cannot be dropped by what keys say.

    Args:
        model: A model of transformers.
        bits: Bits of a code of the inputs; None holds them exact.
        settings: `group`, `residual`, `layers` of `diffcache.kv.recipes.low_rank.rematerialised`.

    Raises:
        AttachError: If keys and values of the model cannot be made again.
        ValueError: If a setting is out of its range.
    """
    probe = cache_for(model, Recipe(), mode="stock")
    projections = projections_of(model, probe.owned)
    recipe = rematerialised(projections, bits, **settings)
    cache = cache_for(model, recipe)
    found = attentions(model, cache.owned)
    noted: _Noted = {}
    handles: list[RemovableHandle] = []
    for number, index in enumerate(cache.owned):
        projection = found[index].k_proj
        assert isinstance(projection, nn.Module)
        handles.append(projection.register_forward_pre_hook(partial(_note, noted, number)))
    cache.writer.exchange = _exchange(projections, noted)
    for handle in handles:
        weakref.finalize(cache.writer.exchange, handle.remove)  # forks share it
    return cache


def _note(noted: _Noted, number: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
    noted[get_ident(), number] = given[0].detach()


def _exchange(
    projections: tuple[Projections, ...], noted: _Noted
) -> Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]:
    checked: set[int] = set()

    def exchange(number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x = noted.pop((get_ident(), number))
        if number not in checked:
            _check(projections[number], x, k, v)
            checked.add(number)
        return x[:, None], x.new_empty(len(x), 1, x.shape[1], 0)

    return exchange


def _check(projection: Projections, x: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the projections give the keys and values that the model used."""
    for name, ours, theirs in zip(("keys", "values"), projection(x), (k, v), strict=True):
        fits = ours.shape == theirs.shape
        if not fits or not torch.allclose(ours.to(theirs.dtype), theirs, atol=_NEAR * float(theirs.abs().max())):
            raise AttachError(
                f"the {name} are not what the projections give: the model changes them afterwards "
                "(as by normalization); use a recipe that holds keys and values"
            )
