"""Have models of transformers use the attention function of caches, and what they used before."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diffcache.errors import AttachError
from diffcache.foreign import attention_name_before, attention_name_of, restore_attention, use_attention
from diffcache.kv.hf.attention import attention
from diffcache.kv.hf.model import NAME, config_of, decoder_of
from diffcache.kv.hf.writer import unwatch


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
