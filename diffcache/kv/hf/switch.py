"""Have models of transformers use the attention function of caches, and what they used before."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diffcache.errors import AttachError
from diffcache.kv.hf.attention import attention
from diffcache.kv.hf.model import config_of

NAME = "diffcache"
_BEFORE: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def switch(model: nn.Module) -> None:
    """Have a model use our attention function.

    Raises:
        AttachError: If its attention cannot be exchanged.
    """
    config: Any = model.config
    before = config._attn_implementation
    if before == NAME:
        return
    AttentionInterface.register(NAME, partial(attention, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    if config._attn_implementation != NAME:
        raise AttachError(
            f"{type(model).__name__} does not go through transformers' attention interface; use "
            "mode='stock' with a recipe that drops nothing"
        )
    _BEFORE[model] = before or "sdpa"


def detach(model: nn.Module) -> None:
    """Have a model use the attention function it used before `cache_for`.

    Raises:
        AttachError: If it is no model of transformers.
    """
    config = config_of(model)
    before = _BEFORE.pop(model, None)
    if before is None and config._attn_implementation == NAME:
        before = "sdpa"  # a copy of a model that was set up, or one that shares its config
    if before is not None:
        model.set_attn_implementation(before)  # type: ignore[operator]
