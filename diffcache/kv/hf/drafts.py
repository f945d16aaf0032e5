"""Draft tokens with the model itself, which reads little of a prompt, for assisted decoding.

`model.generate(**inputs, past_key_values=cache, assistant_model=triforce(model, cache))` says what
it says without a draft, in fewer forwards over the long prompt. A draft has what transformers asks
of an assistant; it is no model.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor
from transformers.cache_utils import DynamicCache, DynamicLayer

from diffcache.errors import AttachError
from diffcache.foreign import device_of_model, with_cache
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, set_up
from diffcache.kv.hf.model import attentions, decoder_config, last_logits
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.summary import news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from diffcache.method import check_int


class Draft(ABC):
    """An assistant of transformers that guesses what a model says next.

    Args:
        model: Model that guesses.
        guesses: Most tokens that are guessed at once. The first round, which reads the prompt,
            guesses none; then transformers' heuristic asks for two more where all were right.
    """

    def __init__(self, model: Any, guesses: int) -> None:
        check_int("guesses", guesses, 1)
        self.model, self.guesses, self.config = model, guesses, model.config
        self.device = device_of_model(model)
        self.generation_config = deepcopy(model.generation_config)
        self.generation_config.num_assistant_tokens = 0
        self.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
        self.generation_config.assistant_confidence_threshold = 0.0
        self.said: dict[int, Tensor] = {}  # scores of what follows so many tokens, [1, V]

    def _supports_logits_to_keep(self) -> bool:
        return True

    @abstractmethod
    def start(self, ids: Tensor) -> Tensor:
        """Return the logits [1, V] of what follows verified ids, int64 [1, T]."""

    @abstractmethod
    def step(self, token: Tensor, position: int) -> Tensor:
        """Return the logits of what follows a guess, int64 [1, 1]: [1, V]."""

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        generation_config: Any,
        max_new_tokens: int,
        logits_processor: Sequence[Any] = (),
        **others: Any,
    ) -> Any:
        """Return guesses and their scores, as `generate` of a model does."""
        if len(input_ids) != 1:
            raise ValueError(f"input_ids={list(input_ids.shape)}: drafts are of one row")
        ends = generation_config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        ids, scores = input_ids, []
        self.said.clear()
        logits = self.start(ids)
        count = min(max_new_tokens, self.guesses)
        for number in range(count):
            score = logits.float()
            for each in logits_processor:
                score = score if isinstance(each, Transfer) else each(ids, score)
            token = score.argmax(-1, keepdim=True)
            if generation_config.do_sample:
                token = torch.multinomial(score.softmax(-1), 1)
            self.said[ids.shape[1]] = score
            scores.append(score)
            ids = torch.cat([ids, token], 1)
            if number + 1 == count or int(token) in ends:
                break
            logits = self.step(token, ids.shape[1] - 1)
        return SimpleNamespace(sequences=ids, scores=tuple(scores), cache=None, past_key_values=None)


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
        heads, size = slots.k.shape[1], slots.k.shape[3]
        whole = slots.width // self.chunk
        most = min(self.budget // self.chunk, whole)
        mean = slots.k[:, :, : whole * self.chunk].unflatten(2, (whole, self.chunk)).mean(3)
        asked = query.q[:, :, -1].unflatten(1, (heads, -1)).to(mean.dtype)
        score = torch.einsum("bhgd,bhnd->bhgn", asked, mean).amax(2)
        score[..., :1] = torch.inf  # a short prompt has no whole chunk
        places = score.topk(most, -1).indices.sort(-1).values[..., None] * self.chunk
        places = (places + torch.arange(self.chunk, device=places.device)).flatten(2)
        rest = torch.arange(whole * self.chunk, slots.width, device=places.device)
        places = torch.cat([places, rest.expand(*places.shape[:2], -1)], 2)[..., None]
        k = slots.k.gather(2, places.expand(-1, -1, -1, size))
        v = slots.v.gather(2, places.expand(-1, -1, -1, slots.v.shape[3]))
        self.found[layer.index] = k, v
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


class RAPID(Draft):
    """A draft that reads a short prompt, made of chunks of the long one; see `rapid`."""

    def __init__(self, model: Any, prompt: Tensor, long: Tensor, guesses: int) -> None:
        super().__init__(model, guesses)
        self.prompt, self.long = prompt.to(self.device), long.to(self.device)
        self.small: Any = None
        self.read: list[int] = []

    def start(self, ids: Tensor) -> Tensor:
        """Read what was verified and not read before."""
        length = self.long.shape[1]
        if not torch.equal(ids[:, :length], self.long):
            raise ValueError("input_ids: another prompt than the draft was made for; make a new one")
        wanted = [*self.prompt[0].tolist(), *ids[0, length:].tolist()]
        same = 0
        for one, other in zip(self.read, wanted[:-1], strict=False):
            if one != other:
                break
            same += 1
        for layer in self.small.layers if self.read else ():
            layer.keys, layer.values = layer.keys[:, :, :same], layer.values[:, :, :same]
        if not self.read:
            self.small = DynamicCache(config=decoder_config(self.model))
            if {type(layer) for layer in self.small.layers} != {DynamicLayer}:
                raise AttachError(
                    f"{type(self.model).__name__} has layers that are not of full attention, "
                    "whose tokens a draft cannot take back; use another model to draft"
                )
        self.read = wanted[:same]
        return self._forward(wanted[same:])

    def step(self, token: Tensor, position: int) -> Tensor:
        """Read a guess."""
        return self._forward([int(token)])

    def _forward(self, tokens: list[int]) -> Tensor:
        given = with_cache(self.model, self.small) | last_logits(self.model)
        out = self.model(input_ids=torch.tensor([tokens], device=self.device), **given)
        self.read += tokens  # `start` takes back what a forward that failed left beyond them
        logits: Tensor = out.logits[:, -1]
        return logits

    def transfer(self, strength: float) -> Transfer:
        """Return a processor for `logits_processor` by which the model learns from this draft.

        With it the tokens are no longer those without a draft.

        Args:
            strength: Step down the loss of distillation, the paper's eta; 0 changes nothing.
        """
        return Transfer(self, strength)


class Transfer(LogitsProcessor):  # type: ignore[misc]
    """Move logits towards the distribution of a draft: `z + strength (q - p)`.

    Reference: RAPID, arXiv 2502.20330, its inference-time knowledge transfer, at temperature 1.
    """

    def __init__(self, draft: Draft, strength: float) -> None:
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength={strength}: must be 0 or more")
        self.draft, self.strength = draft, strength

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, V], moved where the draft has said something."""
        drafted = self.draft.said.get(input_ids.shape[1])
        if drafted is None:
            return scores
        return scores + self.strength * (drafted.softmax(-1) - scores.softmax(-1))


def overlap(chunks: Sequence[Tensor], question: Tensor) -> list[float]:
    """Return how well chunks of tokens match a question, by BM25 over tokens.

    Args:
        chunks: Tokens of each chunk, int64 [n].
        question: Tokens of the question, int64 [m].

    Reference: BM25, Robertson and Zaragoza 2009, with k1 = 1.2 and b = 0.75.
    """
    texts, words = [chunk.tolist() for chunk in chunks], set(question.tolist())
    mean = sum(map(len, texts)) / len(texts)
    found = [0.0] * len(texts)
    for word in words:
        counts = [text.count(word) for text in texts]
        having = len(texts) - counts.count(0)
        rare = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, count in enumerate(counts):
            long = 0.25 + 0.75 * len(texts[number]) / mean
            found[number] += rare * 2.2 * count / (count + 1.2 * long)
    return found


def rapid(
    model: nn.Module,
    ids: Tensor,
    question: int,
    *,
    keep: int = 512,
    chunk: int = 64,
    before: int = 0,
    score: Callable[[Sequence[Tensor], Tensor], Sequence[float]] = overlap,
    guesses: int = 8,
) -> RAPID:
    """Return a draft that reads the chunks of a prompt which its question asks for.

    Greedy tokens are those without a draft, and samples are of the same distribution, unless
    `RAPID.transfer` is used.

    Args:
        model: Model that drafts: the one that answers, or another of the same tokenizer.
        ids: The prompt, int64 [1, T].
        question: Last tokens of it that ask; all are kept.
        keep: Tokens of the chunks that are kept.
        chunk: Tokens of a chunk.
        before: First tokens that are kept, such as the beginning of a chat template.
        score: Function from chunks and the question, int64 [n] each, to a number for each chunk.
        guesses: Most tokens that are guessed at once.

    Raises:
        ValueError: If a number does not fit the prompt, or `score` gives too few or too many.

    Reference: RAPID, arXiv 2502.20330, not compared with its code. Departure: chunks are chosen by
    BM25 over tokens, where the paper embeds them with a model of its own; give that as `score`.
    """
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"ids={list(ids.shape)}: must be [1, T], one prompt")
    length = ids.shape[1]
    if question < 1 or before < 0 or before + question > length:
        raise ValueError(f"question={question}, before={before}: must fit the {length} tokens")
    if not 1 <= chunk <= keep:
        raise ValueError(f"keep={keep}, chunk={chunk}: must be one chunk of 1 or more at least")
    row = ids[0].cpu()
    context, asked = row[before : length - question], row[length - question :]
    chunks = list(context.split(chunk)) if len(context) else []
    worth = list(score(chunks, asked)) if chunks else []
    if len(worth) != len(chunks):
        raise ValueError(f"score: gave {len(worth)} numbers for {len(chunks)} chunks; give one each")
    order = sorted(range(len(chunks)), key=lambda number: -worth[number])
    chosen = sorted(order[: keep // chunk])
    parts = [row[:before], *(chunks[number] for number in chosen), asked]
    return RAPID(model, torch.cat(parts)[None], ids, guesses)
