"""Attend over the latents of multi-head latent attention, which stand for keys and values.

A model gives its cache a latent of each token and the rotary part of its key, and makes keys and
values of all heads from them afterwards. The same attention is had without making them: what turns
latents into keys is multiplied into the queries, and what turns them into values into the output.
Latents are then the keys and values of one head that all queries share, and each slot is held,
dropped and chosen as a whole.

Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.recipe import Recipe

_NEAR = 1e-4  # of the largest key, or four roundings of its dtype


def check_latent(model: nn.Module, modules: Iterable[nn.Module], recipe: Recipe) -> bool:
    """Return whether the layers cache latents, all of them or none.

    Raises:
        AttachError: If they do, and keys are not a linear layer of latents, or the recipe needs
            keys and values of their own.
    """
    found = list(modules)
    latent = [module for module in found if getattr(module, "kv_lora_rank", None) is not None]
    if not latent:
        return False
    name, kind = type(model).__name__, type(latent[0]).__name__
    made = [getattr(module, "kv_b_proj", None) for module in found]
    if any(not isinstance(layer, nn.Linear) or layer.bias is not None for layer in made):
        raise AttachError(
            f"{name} caches latents, of which {kind} makes keys and values by more than a linear "
            "kv_b_proj without bias: slots cannot be dropped or chosen. What holds all of them can "
            "be used, such as kivi, or mode='stock'"
        )
    needs = [
        text
        for wanted, text in (
            (recipe.space == "pre", "holds keys before rotation (space='pre')"),
            (recipe.positions is not None, "reads keys at other positions"),
            (recipe.merge is not None, "merges slots"),
            (bool(recipe.ladder), "sends slots to other codecs"),
            (recipe.wants_out, "reads output projections"),
        )
        if wanted
    ]
    if needs:
        raise AttachError(
            f"{name} caches latents, of which {kind} makes keys and values, and {recipe.name} "
            f"{needs[0]}, which is not served there; use a recipe that drops, chooses or codes "
            "slots as they are, such as snapkv, quest, kivi or streaming_llm(rotate=False)"
        )
    return True


def absorbed(module: Any, query: Tensor, rotary: Tensor) -> Tensor:
    """Return queries that meet latents and rotary parts as they met keys.

    Args:
        module: The attention module.
        query: [B, Hq, n, D], the part without positions first.
        rotary: [B, 1, n, R], the rotary part of new keys.

    Returns:
        [B, Hq, n, L + R], L being the size of a latent.
    """
    size = query.shape[3] - rotary.shape[3]
    keys = _weight(module, query.shape[1])[:, :size]
    return torch.cat([torch.einsum("bhnd,hdl->bhnl", query[..., :size], keys), query[..., size:]], 3)


def values_of(module: Any, out: Tensor, size: int) -> Tensor:
    """Return attention over values from attention over latents.

    Args:
        module: The attention module.
        out: [B, Hq, n, L].
        size: Channels of a value.

    Returns:
        [B, Hq, n, size].
    """
    values = _weight(module, out.shape[1])[:, -size:]
    return torch.einsum("bhnl,hdl->bhnd", out, values)


def check_made(module: Any, latent: Tensor, rotary: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that a module makes its keys and values from latents as they are made here.

    Args:
        module: The attention module.
        latent: [B, 1, n, L], as it was given to the cache.
        rotary: [B, 1, n, R].
        key: [B, Hq, n, D], as the module made them.
        value: [B, Hq, n, Dv].

    Raises:
        AttachError: If it does not.
    """
    made = torch.einsum("bnl,hdl->bhnd", latent[:, 0], _weight(module, key.shape[1]))
    size = key.shape[3] - rotary.shape[3]
    ours = torch.cat([made[..., :size], rotary.expand(-1, made.shape[1], -1, -1)], 3)
    pairs = (("keys", ours, key), ("values", made[..., size:], value))
    wrong = [word for word, one, other in pairs if not _near(one, other)]
    if wrong:
        raise AttachError(
            f"{type(module).__name__} makes {' and '.join(wrong)} from latents otherwise than by "
            "its kv_b_proj: slots cannot be dropped or chosen. What holds all of them can be used, "
            "such as kivi, or mode='stock'"
        )


def _near(one: Tensor, other: Tensor) -> bool:
    most = max(_NEAR, 4 * torch.finfo(other.dtype).eps) * other.abs().max()
    return one.shape == other.shape and bool((one - other).abs().max() <= most)


def _weight(module: Any, heads: int) -> Tensor:
    """Return what turns latents into keys and values, [H, D + Dv, L]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(heads, -1, weight.shape[1])
