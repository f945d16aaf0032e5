"""Attend over the slots of a store in place of a model's attention function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kernels.attention import takes
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.latent import absorbed, check_made, values_of
from diffcache.kv.hf.probe import TRIAL, changes, leave_trial
from diffcache.kv.hf.writer import Writer
from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import PLAIN
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View

Attention = Callable[..., tuple[Tensor, None]]
# What models give their attention function that is served here, or says nothing of attention.
_KNOWN = {
    "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "dropout",
    "use_cache", "cache_position", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch",
}  # fmt: skip


@dataclass
class _Handle:
    """New keys and values on their way from `Cache.update` to the attention function."""

    writer: Writer
    number: int
    key: Tensor
    value: Tensor


@dataclass
class _Served:
    """Queries that attention over slots was last asked, and the keys handed out in this forward, kept weakly."""

    query: weakref.ref[Tensor]
    handed: list[weakref.ref[Tensor]]


_CURRENT: ContextVar[_Handle | _Served | None] = ContextVar("diffcache_kv", default=None)


def announce(writer: Writer, number: int, key: Tensor, value: Tensor) -> None:
    """Say that these are about to reach attention; AttachError if those of the layer before never did."""
    last = _CURRENT.get()
    waits = isinstance(last, _Handle) and last.writer is writer and last.number == number - 1
    if number and waits:
        forget(writer)
        raise AttachError(
            f"keys of layer {number - 1} never reached the attention function of the cache: this "
            "is not the model that it was made for, or its attention was changed since (make a new "
            "cache with cache_for(model, ...)), or this layer does not go through transformers' "
            "attention interface (use mode='stock' with a recipe that drops nothing)"
        )
    if not number:
        writer.begin()
    writer.handed.append(weakref.ref(key))
    _CURRENT.set(_Handle(writer, number, key, value))


def forget(writer: Writer) -> None:
    """Expect no keys of this writer any more."""
    last = _CURRENT.get()
    if isinstance(last, _Handle) and last.writer is writer:
        _CURRENT.set(None)


def attention(
    stock: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the slots of a cache of `cache_for`, and over any other as `"sdpa"` does.

    Args:
        stock: Attends where the keys are not of a cache of ours.
        module: The attention module.
        query: [B, Hq, n, D].
        key: [B, H, n, D], as `Cache.update` returned it.
        value: [B, H, n, Dv].
        attention_mask: bool [B or 1, 1, n, T] by position, or None.
        kwargs: `scaling`, `is_causal`, `sliding_window`, `softcap`, `s_aux`, `position_ids`.

    Raises:
        AttachError: If the model changed the keys or values after the cache had seen them,
            attends to them twice, or is not the one that the cache was made for.
        ValueError: If something is asked for that slots cannot give.
    """
    if TRIAL.get() is not None:
        leave_trial(key, value)
    handle = _CURRENT.get()
    if not isinstance(handle, _Handle):
        _check_first(handle, module, query, key)
        return _foreign(stock, module, query, key, value, attention_mask, **kwargs)
    _CURRENT.set(None)
    writer, count, number = handle.writer, key.shape[2], handle.number
    layer = writer.store.layers[number]
    _check_meant(handle, module, key, value)
    _CURRENT.set(_Served(weakref.ref(query), writer.handed))
    start, refreshing = layer.seen, writer.refreshing
    _check(module, attention_mask, None if refreshing is not None else start + count, kwargs)
    scaling, window = kwargs.get("scaling"), writer.setup.windows[number]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = kwargs.get("sliding_window") if window is None else window
    causal = _causal(module, kwargs, writer.setup.eager)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    asked = Query(query, start, scale, None, attention_mask, causal, window, softcap, sinks)
    if refreshing is not None:
        return _refreshed(handle, module, asked, (key, value)), None
    in_order = (
        attention_mask is not None
        and not layer.latent
        and takes(query, key, value)
        and writer.is_in_order(attention_mask, start, asked.window)
    )
    noted = asked
    if window is not None and (writer.store.recipe.observes or not in_order):
        # Scorers keep no masks; a window that the model names is in its mask as well.
        noted = replace(asked, mask=_reached(asked, window), window=kwargs.get("sliding_window"))
    if in_order:
        asked = replace(asked, mask=None, causal=True)
        noted = asked if window is None else noted  # scorers are told the same with kernels on
    else:
        asked = noted if noted.window is None else replace(noted, window=None)
    valid = None
    if attention_mask is not None:
        if window is None or start + count <= window:
            writer.check_past(attention_mask)
        if not in_order:
            valid = writer.valid(attention_mask, start, count, len(key))
    if layer.latent:
        out = _over_latents(handle, module, asked, (key, value), valid)
    else:
        writer.write(number, key, value, valid=valid, position_ids=kwargs.get("position_ids"))
        out = writer.store.attend(number, asked, valid, noted=noted)
    return out.transpose(1, 2).contiguous(), None


def _refreshed(handle: _Handle, module: nn.Module, asked: Query, made: tuple[Tensor, Tensor]) -> Tensor:
    """Return attention of tokens that are computed anew in place, [B, n, Hq, Dv]."""
    writer, layer = handle.writer, handle.writer.store.layers[handle.number]
    assert writer.refreshing is not None
    if layer.latent:
        raise AttachError(
            f"{type(module).__name__} caches latents: tokens are not computed anew in place; "
            "read them again with a new cache"
        )
    if writer.readers is not None and layer.mover is None:
        layer.rotary = writer.readers[handle.number].read()
    out = writer.refreshing.attend(handle.number, *made, asked)
    return out.transpose(1, 2).contiguous()


def _over_latents(
    handle: _Handle, module: nn.Module, asked: Query, made: tuple[Tensor, Tensor], valid: Tensor | None
) -> Tensor:
    """Return attention over slots that hold latents, [B, Hq, n, Dv].

    Args:
        handle: New latents and rotary parts, as the cache was given them.
        module: The attention module.
        asked: Its queries.
        made: Keys and values [B, Hq, n, D] that it made of the new latents.
        valid: bool [B, n], which of them are no padding.
    """
    writer, number = handle.writer, handle.number
    if number not in writer.checked:
        check_made(module, handle.key, handle.value, *made)
        writer.checked.add(number)
    writer.handed.append(weakref.ref(made[0]))
    writer.write(number, handle.key, handle.value, valid=valid)
    query = replace(asked, q=absorbed(module, asked.q, handle.value))
    out = writer.store.attend(number, query, valid)
    return values_of(module, out, made[1].shape[3])


def _check_first(served: _Served | None, module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Refuse attention to keys that were attended to before in this forward."""
    if served is None:
        return
    if served.query() is query or any(given() is key for given in served.handed):
        raise AttachError(
            f"{type(module).__name__} attends to keys that were attended to before in this "
            "forward, and a slot is read once; use cache_for(..., mode='stock') with a recipe that "
            "drops nothing"
        )


def _check_meant(handle: _Handle, module: nn.Module, key: Tensor, value: Tensor) -> None:
    """Refuse other keys and values than those that the cache was given."""
    known = handle.writer.setup.modules
    if known and module not in known:
        raise AttachError(
            f"{type(module).__name__} is of another model than this cache; make a cache for it "
            "with cache_for(model, ...)"
        )
    if handle.writer.store.layers[handle.number].latent:
        return  # it makes them of what the cache was given; see `check_made`
    changed = ["keys"] * (key is not handle.key) + ["values"] * (value is not handle.value)
    if changed:
        raise AttachError(
            f"{changes(type(module).__name__, changed)} (or an earlier forward was cut off between "
            "the two: then call it again)"
        )


def _reached(asked: Query, window: int) -> Tensor | None:
    """Return the mask of queries without what a cache of a window would not hold any more.

    Most models leave it out of their masks as well; the others rely on the cache.
    """
    first = asked.start - window + 1
    if first <= 0:
        return asked.mask
    mask = asked.mask
    if mask is None:
        width = asked.start + asked.count
        mask = torch.ones(1, 1, asked.count, width, dtype=torch.bool, device=asked.q.device)
        mask = mask.tril(asked.start) if asked.causal else mask
    return mask.index_fill(-1, torch.arange(first, device=mask.device), False)


def check_mask_sizes(count: int, masked: int, expected: int) -> None:
    """Raise AttachError if slots were dropped since the mask of several tokens was made."""
    if count > 1 and masked not in (0, expected):
        raise AttachError(
            f"mode='stock': slots were dropped after the mask of these {count} tokens was made; "
            "call settle() of the cache before, or use mode='native'"
        )


def handed_out(layer: KVLayer) -> Slots:
    """Return all slots, for attention to which each is one token, or raise AttachError if some are not."""
    slots = layer.rotated(layer.read())
    runs = [segment.first for segment in layer.segments] + [layer.tail.start]
    why = None
    if None in runs and not bool(slots.valid.all()):
        why = "rows or heads hold different numbers of tokens"
    elif "logn" in slots.meta or any(segment.traits != PLAIN for segment in layer.segments):
        why = "slots stand for several tokens, or weigh otherwise"
    if why is not None:
        raise AttachError(f"mode='stock': {why}, which it cannot tell; use mode='native'")
    return slots


def _foreign(
    stock: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend without a cache of ours."""
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return stock(module, query, key, value, mask, **kwargs)
    width, scaling = key.shape[2], kwargs.get("scaling")
    slots = Slots(key, value, {"pos": span(0, width, len(key), key.device)})
    softcap, sinks, causal = kwargs.get("softcap"), kwargs.get("s_aux"), _causal(module, kwargs, eager=True)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = Query(query, width - query.shape[2], scale, mask=mask, causal=causal, softcap=softcap, sinks=sinks)
    return attend(asked, [View(slots)]).transpose(1, 2).contiguous(), None


def _causal(module: nn.Module, kwargs: dict[str, Any], eager: bool) -> bool:
    """Return whether queries without a mask see no later token.

    Where transformers leaves a causal mask out, its sdpa asks the call, then the module. Its eager
    attention is given the mask: modules that are made for it alone may say anything.
    """
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = eager or getattr(module, "is_causal", True)
    if not isinstance(causal, bool):
        raise AttachError(
            f"is_causal={causal!r} of {type(module).__name__}: must be True or False, as else it "
            "cannot be told which tokens are seen"
        )
    return causal


def _check(module: nn.Module, mask: Tensor | None, width: int | None, kwargs: dict[str, Any]) -> None:
    """Refuse what attention over slots would have to leave out."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: attention over slots hands out no weights; leave it out, or "
            "use a stock cache and attn_implementation='eager'"
        )
    if kwargs.get("dropout"):
        raise ValueError(f"dropout={kwargs['dropout']}: a cache is for inference; call model.eval() first")
    unknown = kwargs.keys() - _KNOWN
    if unknown:  # most often there is none
        unknown -= {name for name in unknown if kwargs[name] is None or kwargs[name] is False}
    if unknown:
        raise AttachError(
            f"{type(module).__name__} gives its attention {', '.join(sorted(unknown))}, which "
            "slots know nothing of; use cache_for(..., mode='stock') with a recipe that drops "
            "nothing"
        )
    if mask is None:
        return
    fits = mask.dim() == 4 and mask.shape[1] == 1 and width in (None, mask.shape[3])
    if mask.dtype != torch.bool or not fits:
        raise AttachError(
            f"{type(module).__name__} makes, or was given, attention_mask={list(mask.shape)} of "
            f"{mask.dtype}: must be [B, T] of 0 and 1, or bool [B, 1, n, T], T={width} being all "
            "tokens ever seen, whether or not still held; a model that makes others of its own "
            "takes mode='stock' with a recipe that drops nothing"
        )
