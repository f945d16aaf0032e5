"""Score what follows a context after a model's cache of it was compressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.foreign import with_cache
from diffcache.kv.hf.cache import KVCache
from diffcache.kv.recipe import Recipe


def acts_on_tokens(recipe: Recipe) -> bool:
    """Return whether a recipe does anything while tokens are generated one by one."""
    decoding = recipe.trigger is not None and recipe.trigger.decoding
    return decoding or recipe.codec is not None or recipe.retrieve is not None


@torch.no_grad()
def score(model: Any, cache: KVCache, given: list[int], following: list[int], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return how likely tokens are after a context, and which of them greedy decoding gives.

    They are fed token by token where the recipe acts while tokens are generated, and at once where it does not, so
    that each is scored as `generate` would meet it. The cache holds the context but for its last tokens, and goes on
    with what is fed. `given` are these last tokens, or a question after the context; they are fed at once.

    Returns:
        Log-likelihoods in nats, float32 [n], and whether each token is the likeliest after those before it, bool
        [n]; on the CPU.
    """
    rest = following[:-1]
    fed = [[*given, *rest]]
    if acts_on_tokens(recipe):
        fed = [given, *([token] for token in rest)]
    parts, first = [], len(given) - 1  # logits before are of tokens that are not scored
    for tokens in fed:
        ids = torch.tensor([tokens], device=model.device)
        parts.append(model(input_ids=ids, **with_cache(model, cache)).logits[0, first:])
        first = 0
    known = torch.cat(parts).float().log_softmax(-1)
    wanted = torch.tensor(following, device=known.device)
    each = known.gather(1, wanted[:, None])[:, 0]
    return each.cpu(), (known.argmax(-1) == wanted).cpu()
