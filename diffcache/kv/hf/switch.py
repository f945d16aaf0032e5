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
from diffcache.foreign import attention_name_of, attention_names, set_attention_names
from diffcache.kv.hf.attention import attention
from diffcache.kv.hf.model import config_of, decoder_of

NAME = "diffcache"
_BEFORE: weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def switch(model: nn.Module) -> str:
    """Have the decoder of a model use our attention function; its other parts stay as they are.

    Returns:
        The name of the one that it used before.

    Raises:
        AttachError: If its attention cannot be exchanged.
    """
    decoder: Any = decoder_of(model)
    if attention_name_of(decoder.config) == NAME:
        return str(_BEFORE[decoder][0][1]) if decoder in _BEFORE else "sdpa"
    before = attention_names(decoder)
    AttentionInterface.register(NAME, partial(attention, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.set_attn_implementation(NAME)
    if attention_name_of(decoder.config) != NAME:
        set_attention_names(before)
        raise AttachError(
            f"{type(model).__name__} does not go through transformers' attention interface; use "
            "mode='stock' with a recipe that drops nothing"
        )
    _BEFORE[decoder] = before
    return str(before[0][1])


def detach(model: nn.Module) -> None:
    """Have each part of a model use the attention function it used before `cache_for`.

    Raises:
        AttachError: If it is no model of transformers.
    """
    config_of(model)
    parts = [model, *model.modules()]
    for before in [_BEFORE.pop(part) for part in parts if part in _BEFORE]:
        set_attention_names(before)
    # A copy of a model that was set up, or one that shares its configuration, has no entry.
    left = [(config, "sdpa") for config, name in attention_names(model) if name == NAME]
    set_attention_names(left)
