"""Open the door to attention in models of transformers, by an attention function of theirs.

Keys arrive as the model rotated them, so that `rotary` of a call is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite, Strategy
from diffcache.errors import AttachError
from diffcache.foreign import attention_name_of, restore_attention, use_attention, without_dynamo

NAME = "diffcache_door"
HELD = "diffcache_held"  # argument that models hand on to their attention
_DOORS: WeakKeyDictionary[nn.Module, tuple[Strategy, AttentionSite]] = WeakKeyDictionary()


def sites_of(model: nn.Module) -> list[AttentionSite]:
    """Return the attentions of a model; raise AttachError if none goes through the attention interface."""
    found: list[AttentionSite] = []
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "is_causal") and config is not None:
            kind = "cross" if "Cross" in type(module).__name__ else "self"
            heads = config.get_text_config().num_attention_heads
            found.append(AttentionSite(path, len(found), heads, kind))  # type: ignore[arg-type]
    if not found:
        raise AttachError(f"{type(model).__name__}: no attention module was found")
    return found


def install(model: nn.Module, strategy: Strategy, sites: list[AttentionSite]) -> Callable[[], None]:
    """Have a model use the door's attention function; return a function that undoes that.

    Raises AttachError if it uses another than sdpa, or does not go through the interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config, name = model.config, type(model).__name__
    used = attention_name_of(config)
    if used != "sdpa":
        raise AttachError(
            f"{name} has attn_implementation={str(used)!r}: the door serves 'sdpa'; call "
            "model.set_attn_implementation('sdpa') first"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if not use_attention(model, NAME):
        raise AttachError(f"{name} does not go through transformers' attention interface")
    modules = [model.get_submodule(site.path) for site in sites]
    for module, site in zip(modules, sites, strict=True):
        _DOORS[module] = (strategy, site)

    def undo() -> None:
        for module in modules:
            _DOORS.pop(module, None)
        restore_attention(model, NAME)

    return undo


def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attend as the strategy of a module does, or as sdpa does; compiled code leaves it out.

    A compiled forward of rows is given what is held as an argument, and does not.
    """
    held = kwargs.pop(HELD, None)
    if held is not None:
        return held.attend(*args, **kwargs), None
    # once dynamo is there, a function that it must not see costs 20 microseconds a call
    attend = _apart if torch.compiler.is_compiling() else _attention
    return attend(*args, **kwargs)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as `attention` says to rotated queries `[B, H, T, D]` and keys `[B, H or fewer, N, D]`.

    Values are as keys, the mask is bool `[B or 1, 1, T, N]` or None, and further arguments are
    those of the model's attention function, such as `scaling`.
    """
    entry = _DOORS.get(module)
    if entry is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return _sdpa(module, kwargs, q, k, v, attention_mask), None
    strategy, site = entry
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    call = AttentionCall(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        partial(_sdpa, module, kwargs),
        mask=attention_mask,
        causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scaling=kwargs.get("scaling"),
    )
    out = strategy.attend(site, call)
    return (call.plain() if out is None else out), None


_apart: Any = without_dynamo(_attention)


def _sdpa(
    module: nn.Module, kwargs: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out: Tensor = sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]
    return out
