"""Other caches on a denoiser, which must not run beside one of ours."""

from __future__ import annotations

from torch import nn

from diffcache.errors import AttachError
from diffcache.foreign import is_cached, registry_of

_PEERS = ("first_block_cache", "mag_cache", "taylorseer_cache", "pyramid_attention_broadcast",
          "faster_cache", "sea_cache", "text_kv_cache")  # fmt: skip


def check_alone(model: nn.Module) -> None:
    """Raise AttachError if a denoiser runs under a cache of diffusers, or one like cache-dit."""
    name = type(model).__name__
    if is_cached(model):
        raise AttachError(f"{name} already runs under another cache, such as cache-dit; disable it")
    for module in model.modules():
        registry = registry_of(module)
        for hook in registry.hooks.values() if registry is not None else ():
            if type(hook).__module__.rpartition(".")[2] in _PEERS:
                raise AttachError(
                    f"{name} already runs under diffusers' {type(hook).__name__}; call "
                    "disable_cache() first"
                )
