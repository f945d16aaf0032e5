"""Questions about a context and the score of answers: sentences at depths, pairs, chains of variables, frequent words.

The kinds are those of RULER (arXiv 2404.06654), in one context that is read once and asked many questions, as in
SCBench (arXiv 2412.10319). An answer is right when greedy generation gives the whole of it.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffcache.foreign import with_cache
from diffcache.kv.hf.cache import KVCache
from diffcache.kv.hf.questions import around, compress, feed, tokens_of
from diffcache.kv.recipe import Recipe

_DRAWN = 1 << 20  # seeds, apart from that of the windows
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths of the needles in a context, as shares
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Delhi", "Seoul", "Rome", "Accra",
          "Bern", "Hanoi", "Sofia", "Tunis", "Riga", "Doha")  # fmt: skip
WORDS = ("river", "candle", "garden", "window", "pepper", "ladder", "silver", "bottle", "forest",
         "carpet", "saddle", "turnip", "magnet", "pillow", "rocket", "walnut")  # fmt: skip
NEEDLE = "The secret number of {} is {}."
SEVERAL, PAIRS, CHAIN, OFTEN = 2, 4, 3, 8  # values of a key, pairs, variables, times a word is said


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    kind: str  # kind of question
    text: str
    start: str  # beginning of the answer, which is given
    answer: str  # the rest of it, which the model must say; with a space first where it begins a word


@dataclass(frozen=True)
class Asked:
    """A context and what is asked about it."""

    text: str
    questions: tuple[Question, ...]

    @classmethod
    def draw(cls, text: str, seed: int) -> Asked:
        """Put sentences into a text, between its words, and ask for them."""
        drawn = random.Random(_DRAWN + seed)
        words = text.split(" ")
        count = len(words)
        cities, names = drawn.sample(CITIES, len(CITIES)), drawn.sample(WORDS, len(WORDS))
        put: list[tuple[float, str]] = []
        asked: list[Question] = []
        for depth in DEPTHS:
            city, number = cities.pop(), str(drawn.randrange(100, 1000))
            put.append((depth, NEEDLE.format(city, number)))
            secret = f"secret number of {city}"
            question, start = f"What is the {secret}?", f"The {secret} is"
            asked.append(Question("needle", question, start, f" {number}"))
        city, values = cities.pop(), names[:SEVERAL]
        places = sorted(drawn.random() for _ in values)
        for place, word in zip(places, values, strict=True):
            put.append((place, f"The secret word of {city} is {word}."))
        question = f"What are the {SEVERAL} secret words of {city}, in their order?"
        start = f"The {SEVERAL} secret words of {city} are"
        asked.append(Question("values", question, start, f" {' and '.join(values)}"))
        keys = names[SEVERAL : SEVERAL + 2 * PAIRS]
        for key, value in zip(keys[::2], keys[1::2], strict=True):
            put.append((drawn.random(), f'{{"{key}": "{value}"}}'))
            question = f'What is the value of "{key}" in the JSON?'
            asked.append(Question("pair", question, f'"{key}": "', value))
        chain = [f"VAR_{letter}" for letter in drawn.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", CHAIN)]
        number = str(drawn.randrange(100, 1000))
        values = [number, *chain[:-1]]
        places = sorted(drawn.random() for _ in chain)
        for place, name, value in zip(places, chain, values, strict=True):
            put.append((place, f"{name} = {value}."))
        question = f"What is the number that {chain[-1]} stands for?"
        start = f"{chain[-1]} = {' = '.join(reversed(chain[:-1]))} ="
        asked.append(Question("variables", question, start, f" {number}"))
        often = names[-1]
        put += [(drawn.random(), f"Take the {often}.") for _ in range(OFTEN)]
        put += [(drawn.random(), f"Take the {word}.") for word in names[-4:-1] for _ in range(2)]
        question = "Which thing is to be taken most often?"
        start = "Most often you are told to take the"
        asked.append(Question("frequent", question, start, f" {often}"))
        for place, sentence in sorted(put, key=lambda one: -one[0]):
            words.insert(round(place * count), sentence)
        return cls(" ".join(words), tuple(asked))


@dataclass(frozen=True)
class Spelled:
    """A context and its questions as tokens."""

    ids: Tensor  # context, int64 [1, T]
    kinds: tuple[str, ...]  # kind of each question
    questions: tuple[list[int], ...]  # tokens of each question, up to where the answer begins
    starts: tuple[list[int], ...]  # tokens of the given beginning of each answer
    answers: tuple[list[int], ...]  # tokens that must be said

    @classmethod
    def of(cls, tokenizer: Any, asked: Asked, kinds: Collection[str] | None = None) -> Spelled:
        """Spell a context and its questions; with a chat template both are the user's message.

        `kinds` are the kinds of questions that are asked; None asks all of them.
        """
        before, after = around(tokenizer, asked.text)
        chosen = [one for one in asked.questions if kinds is None or one.kind in kinds]
        questions, starts, answers = [], [], []
        for one in chosen:
            question = tokens_of(tokenizer, one.text + after)[0].tolist()
            start = tokens_of(tokenizer, one.text + after + one.start)[0].tolist()
            whole = tokens_of(tokenizer, one.text + after + one.start + one.answer)[0].tolist()
            alike = _alike(start, whole)  # a tokenizer may join letters across the border
            shared = min(_alike(question, whole), alike - 1)  # at least one token begins the answer
            questions.append(whole[:shared])
            starts.append(whole[shared:alike])
            answers.append(whole[alike:])
        kinds = tuple(one.kind for one in chosen)
        said = tuple(questions), tuple(starts), tuple(answers)
        return cls(tokens_of(tokenizer, before), kinds, *said)

    def hits(self, model: Any, cache: KVCache, recipe: Recipe) -> list[bool]:
        """Return which answers greedy generation gives whole, each on a fork of a cache.

        `cache` holds the context except for its last token, compressed by `recipe`.
        """
        last = self.ids[0, -1:].tolist()
        return [
            bool(score(model, cache.fork(), last + question + start, answer, recipe)[1].all())
            for question, start, answer in zip(self.questions, self.starts, self.answers, strict=True)
        ]

    def aware_hits(self, model: Any, tokenizer: Any, raw: KVCache, recipe: Recipe) -> list[bool]:
        """Return which answers are given whole when the cache is compressed with the question in view.

        `raw` holds the context except for its last token, not compressed.
        """
        found = []
        for question, start, answer in zip(self.questions, self.starts, self.answers, strict=True):
            cache = raw.fork()
            ids = torch.cat([self.ids[:, -1:], self.ids.new_tensor([question])], 1)
            feed(model, cache, ids.to(model.device))
            compress(model, tokenizer, cache, ids)
            found.append(bool(score(model, cache, start, answer, recipe)[1].all()))
        return found


def _alike(one: list[int], other: list[int]) -> int:
    """Return the number of first tokens that two lists share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def spells(tokenizer: Any) -> bool:
    """Return whether a tokenizer can write the sentences that are hidden in texts."""
    text = NEEDLE.format(CITIES[0], 123)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return "123" in tokenizer.decode(ids).replace(" ", "")


def acts_on_tokens(recipe: Recipe) -> bool:
    """Return whether a recipe has an effect while tokens are generated one by one."""
    decoding = recipe.trigger is not None and recipe.trigger.decoding
    return decoding or recipe.codec is not None or recipe.retrieve is not None


@torch.no_grad()
def score(model: Any, cache: KVCache, given: list[int], following: list[int], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the likelihood of tokens after a context, and whether greedy decoding gives each.

    They are fed token by token where the recipe acts while tokens are generated, and at once where it does not, so
    that each is scored as `generate` would meet it.

    Args:
        model: The model.
        cache: Cache of the context except for its last tokens; it takes in the tokens that are fed.
        given: These last tokens, or a question after the context; they are fed at once.
        following: The n tokens that are scored.
        recipe: Recipe of the cache.

    Returns:
        Log-likelihoods in nats, float32 [n], and whether each token is the likeliest after those before it, bool [n];
        both on the CPU.
    """
    rest = following[:-1]
    fed = [[*given, *rest]]
    if acts_on_tokens(recipe):
        fed = [given, *([token] for token in rest)]
    parts, first = [], len(given) - 1  # earlier logits predict tokens that are not scored
    for tokens in fed:
        ids = torch.tensor([tokens], device=model.device)
        parts.append(model(input_ids=ids, **with_cache(model, cache)).logits[0, first:])
        first = 0
    known = torch.cat(parts).float().log_softmax(-1)
    wanted = torch.tensor(following, device=known.device)
    each = known.gather(1, wanted[:, None])[:, 0]
    return each.cpu(), (known.argmax(-1) == wanted).cpu()
