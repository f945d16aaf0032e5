"""TriForce: draft with the model itself, over the chunks of a prompt that queries look at."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from diffcache.errors import AttachError
from diffcache.foreign import with_cache
from diffcache.kernels.move import gather_slots
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, set_up
from diffcache.kv.hf.drafts import Draft
from diffcache.kv.hf.model import attentions, decoder_config, last_logits
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.summary import news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from diffcache.method import check_int


@dataclass(frozen=True, eq=False)
class _Chunks(Retriever):
    """Choose chunks of each layer by their mean key, and read everything.

    Args:
        budget: Slots of a key-value head that are chosen.
        chunk: Slots of a chunk.
        found: Keys and values of the chosen slots of each layer, rotated, [1, H, budget, D].
    """

    budget: int
    chunk: int
    found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Choose by one query, whose own slot is the last."""
        slots = layer.rotated(layer.read())
        slots = slots.narrow(0, slots.width - query.count)
        _check_slots(slots)
        heads = slots.k.shape[1]
        whole = slots.width // self.chunk
        most = min(self.budget // self.chunk, whole)
        mean = slots.k[:, :, : whole * self.chunk].unflatten(2, (whole, self.chunk)).mean(3)
        asked = query.q[:, :, -1].unflatten(1, (heads, -1)).to(mean.dtype)
        score = torch.einsum("bhgd,bhnd->bhgn", asked, mean).amax(2)
        score[..., :1] = torch.inf  # a short prompt has no whole chunk
        places = score.topk(most, -1).indices.sort(-1).values[..., None] * self.chunk
        places = (places + torch.arange(self.chunk, device=places.device)).flatten(2)
        rest = torch.arange(whole * self.chunk, slots.width, device=places.device)
        places = torch.cat([places, rest.expand(*places.shape[:2], -1)], 2)
        self.found[layer.index] = gather_slots(slots.k, places), gather_slots(slots.v, places)
        return layer.views()


def _check_slots(slots: Slots) -> None:
    if "logn" in slots.meta or not bool(slots.valid.all()):
        raise AttachError(
            "cache: has merged or ragged slots, or padding, which a draft does not read; use a "
            "recipe that keeps all tokens, or as many in each head, such as kivi or snapkv"
        )


class TriForce(Draft):
    """A draft that reads chosen chunks of the cache that the model itself reads; see `triforce`."""

    def __init__(self, model: Any, cache: KVCache, budget: int, chunk: int, guesses: int) -> None:
        super().__init__(model, guesses)
        self.cache, self.chooser = cache, _Chunks(budget, chunk)
        modules = attentions(model, cache.setup.owned)
        self.eager = set_up(model, modules, latent=False) == "eager"
        self.small: Any = None
        self.chosen = self.since = 0  # slots that were chosen, and tokens seen before them

    def start(self, ids: Tensor) -> Tensor:
        """Choose chunks, or take the tokens that were verified, and read the last token."""
        position = ids.shape[1] - 1
        if self.cache.store.seen != position:
            raise ValueError(
                f"cache: has seen {self.cache.store.seen} tokens where {position} were verified: "
                "give generate the cache that the draft was made with, and a new draft to each call"
            )
        if self.small is None:
            return self._choose(ids[:, -1:])
        for number, layer in enumerate(self.cache.store.layers):
            new = news(layer, layer.held - (layer.seen - self.since), stored=False)
            held = self.small.layers[number]
            held.keys = torch.cat([held.keys[:, :, : self.chosen], new.k], 2)
            held.values = torch.cat([held.values[:, :, : self.chosen], new.v], 2)
        return self.step(ids[:, -1:], position)

    def step(self, token: Tensor, position: int) -> Tensor:
        """Read a token with the small cache."""
        at = torch.tensor([[position]], device=token.device)
        given = with_cache(self.model, self.small) | last_logits(self.model)
        logits: Tensor = self.model(input_ids=token, position_ids=at, **given).logits[:, -1]
        return logits

    def _choose(self, token: Tensor) -> Tensor:
        """Read a token with a fork of the whole cache, by which chunks are chosen."""
        fork = self.cache.fork()
        fork.store.recipe = replace(
            fork.store.recipe, retrieve=self.chooser, skip=0, score=None, budget=None, plan=None, trigger=None
        )
        setup = replace(fork.setup, mode="native", eager=self.eager)
        fork.setup = fork.writer.setup = setup
        given = with_cache(self.model, fork) | last_logits(self.model)
        logits: Tensor = self.model(input_ids=token, **given).logits[:, -1]
        small = DynamicCache(config=decoder_config(self.model))
        for number, layer in enumerate(fork.store.layers):
            k, v = self.chooser.found[number]
            own = news(layer, layer.held - 1, stored=False)
            small.update(torch.cat([k, own.k], 2), torch.cat([v, own.v], 2), number)
        self.chosen, self.since = k.shape[2], self.cache.store.seen
        self.small = small
        self.chooser.found.clear()
        return logits


def triforce(model: nn.Module, cache: KVCache, *, budget: int = 256, chunk: int = 8, guesses: int = 6) -> TriForce:
    """Return a draft of a model that reads chunks of its own cache, for one call of `generate`.

    The last token of the prompt chooses, in each layer and head, the chunks whose mean key it
    attends to most; the first chunk and what is generated are always read. Greedy tokens are those
    without a draft, and samples are of the same distribution. The model is told to use the
    attention function of native mode; `diffcache.kv.detach` undoes it.

    Args:
        model: The model.
        cache: Cache that `generate` is given, of `cache_for`: all layers of full attention, one
            row, and a recipe that drops nothing while tokens are generated.
        budget: Slots of the prompt that a head reads.
        chunk: Slots of a chunk.
        guesses: Most tokens that are guessed at once.

    Raises:
        AttachError: If such a cache is not read by drafts.
        ValueError: If a number is out of its range.

    Reference: TriForce, arXiv 2404.11912, section 4. Departures: query heads choose by the highest
    product of their group; generated tokens come on top of the budget, where the code overwrites
    the worst chunks with them; the small model that drafts for this draft is left out.
    """
    check_int("chunk", chunk, 1)
    if budget < chunk:
        raise ValueError(f"budget={budget}, chunk={chunk}: must be one chunk at least")
    if not isinstance(cache, KVCache):
        raise AttachError(
            f"cache: is a {type(cache).__name__}, which triforce does not read; give it and "
            "generate one of diffcache.kv.cache_for(model, ...)"
        )
    recipe = cache.store.recipe
    trigger = recipe.trigger
    wrong = None
    if len(cache.setup.owned) != len(cache.layers) or any(cache.setup.windows):
        wrong = "has layers that are not of full attention"
    elif any(layer.latent for layer in cache.store.layers) or recipe.positions is not None:
        wrong = "holds latents, or keys at positions of its own"
    elif recipe.retrieve is not None:
        wrong = f"reads what guesses choose together ({recipe.name})"
    elif trigger is not None and trigger.decoding and recipe.evicts:
        wrong = f"drops slots while tokens are generated ({recipe.name})"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        wrong = f"is of a {type(model).__name__}, which takes no position_ids"
    if wrong:
        raise AttachError(f"cache: {wrong}, which triforce does not read; use another recipe")
    return TriForce(model, cache, budget, chunk, guesses)
