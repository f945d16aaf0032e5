"""Questions about documents that are read once: prompts put together from what is held of them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from diffcache.foreign import device_of_model, with_cache
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.hf.model import last_logits
from diffcache.kv.hf.questions import answer, around, feed, one_answer, tokens_of
from diffcache.kv.hf.refresh import check_whole
from diffcache.kv.life.prefix import PrefixTree
from diffcache.kv.life.prepacking import pack
from diffcache.kv.recipe import Recipe, Space
from diffcache.kv.reuse.ape import ape
from diffcache.kv.reuse.cachecraft import Chunk, cachecraft, chunks_of
from diffcache.kv.reuse.hydragen import hydragen
from diffcache.kv.reuse.piece import Piece, cut, joined, lay_out
from diffcache.kv.reuse.recompute import cacheblend, kvshare, pie
from diffcache.kv.settings import Count, NotNegative, Positive, Share, check_setting
from diffcache.weights import all_of

NAMES = (*("recompute", "prefix", "hydragen", "concatenate"), *("cacheblend", "ape", "cachecraft", "kvshare", "pie"))
_READ = 512  # tokens of a row in which documents are read together
# A cache up to the question, None where nothing is held; the tokens of the prompt up to there,
# int64 [n]; and how many of them were computed.
_Filled: TypeAlias = "tuple[KVCache | None, Tensor, int]"


@dataclass(frozen=True)
class Answers:
    """Answers to questions about documents, and what they took.

    Attributes:
        texts: Answer to each question.
        tokens: Tokens of the prompt before a question.
        computed: Tokens of those that were computed in all layers for this, documents that were
            read alone for it aside.
        first_seconds: Time to the first token of the first answer.
        seconds: Time to the last token of the last one.
    """

    texts: tuple[str, ...]
    tokens: int
    computed: int
    first_seconds: float
    seconds: float


class Documents:
    """Documents that a model reads once and is then asked about, in any choice and order.

    A prompt is the beginning of the chat template (or the first token), the documents, and the
    question. `docs/kv_guide.md` says what each of `methods()` holds, in place of computing the
    documents again, and what it computes.

    Documents are read alone many in a row (prepacking). Weights are looked at in every call; where
    they changed (an adapter, a dtype) or moved to another device, nothing that was held is used.
    Not seen is what is written to a part of a weight through `.data`. An object is for one thread;
    `diffcache.kv.detach(model)` releases the model.

    Args:
        model: A model of transformers that generates text, all layers of which attend to all
            tokens.
        tokenizer: Its tokenizer.
        method: Method that puts a prompt together.
        budget_bytes: Most bytes of documents, or of beginnings, that are held between prompts; what
            was used least recently goes, what the last call named aside. One prompt, where the last
            is held, is not counted.
        clock: Function that returns the time in seconds.
        settings: Settings of the method: `share` and `check` of cacheblend and kvshare, `alpha` of
            cachecraft, `temperature` and `scale` of ape, `chunk` of prefix.

    Raises:
        ValueError: If there is no such method or setting, one is out of its range, or layers of
            the model attend otherwise.
        AttachError: If no cache of ours serves the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        method: str = "cacheblend",
        *,
        budget_bytes: int = 2**30,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ) -> None:
        self.method, self._budget = method, budget_bytes
        self._settings = settings_of(method, **settings)
        self._model, self._tokenizer, self._clock = model, tokenizer, clock
        self._before, self._after = around(tokenizer, "")
        self._forget()

    def _forget(self) -> None:
        """Hold nothing, and look at the model as it is now; raise ValueError if its layers attend otherwise."""
        self._device = device_of_model(self._model)
        self._head = self._tokens(self._before)
        self._tree: PrefixTree[Piece] = PrefixTree("", self._budget, self._settings.get("chunk", 1))
        self._held: dict[str | None, Piece | Chunk] = {}  # the least recently used first
        self._last: tuple[KVCache, Tensor] | None = None
        self._space: Space = "post"
        if self.method != "recompute":
            cache = self._empty("post" if self.method in ("prefix", "hydragen") else "pre")
            check_whole(cache)
            if self.method != "prefix" and any(cache.setup.windows):
                raise ValueError(
                    f"method={self.method!r}: the layers of {type(self._model).__name__} see a "
                    f"window of {max(filter(None, cache.setup.windows))} tokens, and documents are "
                    "moved; use method='prefix'"
                )
            # As keys are held before rotation, every layer of this cache knows its own.
            self._rotary = [each.rotary for each in cache.store.layers if each.rotary is not None]
            if any(each.varies for each in self._rotary):
                self._space = "pre"
        holds = self.method not in ("recompute", "hydragen")
        # Last, since all above is of these weights.
        self._weights = all_of(self._model, few=True) if holds else None

    @property
    def nbytes(self) -> int:
        """Bytes that are held between prompts."""
        last = 0 if self._last is None else self._last[0].nbytes
        return sum(map(_bytes, self._held.values())) + self._tree.nbytes + last

    def read(self, documents: Iterable[str]) -> None:
        """Read documents alone, where the method holds such, before questions; ValueError if one is empty."""
        texts = _texts("documents", documents)
        self._check_model()
        if self.method in ("concatenate", "cacheblend", "ape"):
            self._pieces(texts)

    def _check_model(self) -> None:
        """Forget what was computed with other weights, or elsewhere."""
        changed = self._weights is not None and self._weights.changed(True)
        if changed or device_of_model(self._model) != self._device:
            self._forget()

    def ask(
        self,
        questions: str | Iterable[str],
        documents: Iterable[str],
        *,
        answer_prefix: str = "",
        generate: dict[str, Any] | None = None,
    ) -> Answers:
        """Answer questions about documents, each as if it stood alone behind them.

        Args:
            questions: One question, or several.
            documents: Texts, in the order of the prompt.
            answer_prefix: Beginning of each answer, not part of what is returned.
            generate: Settings of `model.generate`; by default 50 new tokens, greedy.

        Raises:
            ValueError: If there are no questions or documents, one is empty or no text, or a
                setting of `generate` asks for beams, several answers or no cache.
        """
        asked = _texts("questions", [questions] if isinstance(questions, str) else questions)
        texts = _texts("documents", documents)
        if not asked or not texts:
            raise ValueError(f"questions={len(asked)}, documents={len(texts)}: give at least one of each")
        settings = one_answer(self._tokenizer, generate)
        started = self._clock()
        self._check_model()
        cache, ids, computed = getattr(self, f"_{self.method}")(texts, **self._settings)
        ends = [self._tokens(one + self._after + answer_prefix) for one in asked]
        together = [ends] if self.method == "hydragen" else [[end] for end in ends]
        noted, stops = _First(self._clock), settings.get("stopping_criteria") or ()
        settings["stopping_criteria"] = StoppingCriteriaList([*stops, noted])
        # Tokens stand for slots; documents side by side take as many as the longest.
        shown = ids if cache is None else ids[: cache.store.seen]
        answers: list[str] = []
        for some in together:
            answers += answer(self._model, self._tokenizer, cache, shown, some, settings)
        return Answers(tuple(answers), len(ids), computed, noted.time - started, self._clock() - started)

    def _recompute(self, documents: Sequence[str]) -> _Filled:
        ids = self._prompt(documents)
        return None, ids, len(ids)

    def _prefix(self, documents: Sequence[str], *, chunk: Count = 64) -> _Filled:
        ids, cache = self._prompt(documents), self._empty()
        held = self._tree.match(ids.tolist())
        known = len(held) * chunk
        if held:
            lay_out(cache.store, joined(held), torch.arange(known))
        if known < len(ids):
            feed(self._model, cache, ids[None, known:])
        starts = range(known, len(ids) // chunk * chunk, chunk)
        held += [cut(cache.store, ids[start : start + chunk], start) for start in starts]
        self._tree.insert(ids.tolist(), held, [piece.nbytes for piece in held])
        return cache, ids, len(ids) - known

    def _hydragen(self, documents: Sequence[str]) -> _Filled:
        ids, cache = self._prompt(documents), self._empty()
        feed(self._model, cache, ids[None])
        hydragen(cache.store)
        return cache, ids, len(ids)

    def _concatenate(self, documents: Sequence[str]) -> _Filled:
        whole, cache = joined(self._pieces(documents)), self._empty()
        lay_out(cache.store, whole, torch.arange(len(whole.ids)), self._rotary)
        return cache, whole.ids, 0

    def _cacheblend(self, documents: Sequence[str], *, share: Share = 0.15, check: Count = 1) -> _Filled:
        pieces, cache = self._pieces(documents), self._empty()
        index = cacheblend(self._model, cache, pieces, share=share, check=check, rotary=self._rotary)
        return cache, _ids(pieces), len(index)

    def _ape(self, documents: Sequence[str], *, temperature: Positive = 0.9, scale: Positive = 0.9) -> _Filled:
        pieces, cache = self._pieces(documents), self._empty()
        if not len(self._head):
            raise ValueError(
                "method='ape': the tokenizer puts nothing before a text, and documents that lie "
                "side by side need something before them; take another method"
            )
        ape(cache, pieces[0], pieces[1:], temperature=temperature, scale=scale, rotary=self._rotary)
        return cache, _ids(pieces), 0

    def _cachecraft(self, documents: Sequence[str], *, alpha: NotNegative = 1.0) -> _Filled:
        texts = self._parts(documents)
        new = any(text not in self._held for text in texts)
        if new:  # all are computed, in this order, so that nothing is owed to what is gone
            own = [self._text(text) for text in texts]
            found = chunks_of(self._model, self._empty("pre"), own, texts)
            for text, chunk in zip(texts, found, strict=True):
                self._held.setdefault(text, chunk)
        else:
            found = [self._held[text] for text in texts]  # type: ignore[misc]
        self._use(texts)
        cache = self._empty()
        index = cachecraft(self._model, cache, found, alpha=alpha, rotary=self._rotary)
        ids = _ids([each.piece for each in found])
        return cache, ids, len(ids) if new else len(index)

    def _kvshare(self, documents: Sequence[str], *, share: Share = 0.15, check: Count = 1) -> _Filled:
        index = ids = self._prompt(documents)
        cache = self._empty()
        if self._last is None:
            feed(self._model, cache, ids[None])
        else:
            piece = cut(self._last[0].store, self._last[1])
            index = kvshare(self._model, cache, piece, ids, share=share, check=check, rotary=self._rotary)
        self._last = cache, ids
        return cache, ids, len(index)

    def _pie(self, documents: Sequence[str]) -> _Filled:
        index = ids = self._prompt(documents)
        last, self._last = self._last, None  # an edit that is cut off leaves nothing to go on from
        if last is None:
            cache = self._empty()
            feed(self._model, cache, ids[None])
        else:
            cache, before = last
            index = pie(self._model, cache, before, ids, rotary=self._rotary)
        self._last = cache, ids
        return cache, ids, len(index)

    def _pieces(self, documents: Sequence[str]) -> list[Piece]:
        """Return the head and documents, each as read alone behind the head."""
        texts = self._parts(documents)
        new = [text for text in dict.fromkeys(texts) if text not in self._held]
        if new:
            self._read(new)
        self._use(texts)
        return [self._held[text] for text in texts]  # type: ignore[misc]

    @torch.no_grad()
    def _read(self, texts: Sequence[str | None]) -> None:
        """Read texts each alone behind the head, many in a row."""
        own = [self._text(text) for text in texts]
        prompts = [ids if text is None else torch.cat([self._head, ids]) for text, ids in zip(texts, own, strict=True)]
        packed = pack(prompts, max(_READ, max(map(len, prompts))))
        cache = self._empty("pre")
        given = {"position_ids": packed.position_ids, "attention_mask": packed.mask}
        given |= {**last_logits(self._model), **with_cache(self._model, cache)}
        self._model(input_ids=packed.ids, **given)
        for text, ids, layers in zip(texts, own, packed.unpack(cache.store), strict=True):
            first = 0 if text is None else len(self._head)
            slots = tuple(each.narrow(first, first + len(ids)).clone() for each in layers)
            self._held[text] = Piece(ids, slots, rotated=False)

    def _use(self, texts: Sequence[str | None]) -> None:
        """Mark texts as used; forget what was used least recently, beyond the budget."""
        for text in texts:
            self._held[text] = self._held.pop(text)
        total = sum(map(_bytes, self._held.values()))
        for text in list(self._held):
            if total > self._budget and text not in texts:
                total -= _bytes(self._held.pop(text))

    def _parts(self, documents: Sequence[str]) -> list[str | None]:
        """Return the texts of a prompt; None for the head, where there is one."""
        return [None, *documents] if len(self._head) else list(documents)

    def _prompt(self, documents: Sequence[str]) -> Tensor:
        """Return the tokens of a prompt up to its question, int64 [n]."""
        return torch.cat([self._head, *map(self._text, documents)])

    def _text(self, text: str | None) -> Tensor:
        return self._head if text is None else self._tokens(text.strip() + "\n\n")

    def _tokens(self, text: str) -> Tensor:
        return tokens_of(self._tokenizer, text)[0].to(self._device)

    def _empty(self, space: Space | None = None) -> KVCache:
        return cache_for(self._model, Recipe(space=space or self._space), mode="native")


def methods() -> dict[str, dict[str, Any]]:
    """Return the settings of each method of `Documents`, with their defaults."""
    return {name: {one.name: one.default for one in _taken(name)} for name in NAMES}


def _taken(method: str) -> list[inspect.Parameter]:
    """Return the settings of a method, each with its default and its range."""
    taken = inspect.signature(getattr(Documents, f"_{method}"), eval_str=True).parameters.values()
    return [one for one in taken if one.kind is one.KEYWORD_ONLY]


def settings_of(method: str, **settings: Any) -> dict[str, Any]:
    """Return all settings of a method of `Documents`, or raise ValueError, as `Documents` does."""
    if method not in NAMES:
        raise ValueError(f"method={method!r}: must be one of {', '.join(NAMES)}")
    taken = {one.name: one for one in _taken(method)}
    for name, value in settings.items():
        if name not in taken:
            allowed = ", ".join(taken) or "none"
            raise ValueError(f"{name}={value!r}: settings of {method} are {allowed}")
        check_setting(name, value, taken[name].annotation)
    return {name: settings.get(name, one.default) for name, one in taken.items()}


def _texts(name: str, given: Iterable[Any]) -> list[str]:
    """Return texts as a list, or raise ValueError if they are one text or no texts, or one is empty."""
    if isinstance(given, str):
        raise ValueError(f"{name} is one text: give a list of texts")
    for number, text in enumerate(texts := list(given)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name}[{number}]={text!r}: must be a text, and not empty")
    return texts


def _ids(pieces: Sequence[Piece]) -> Tensor:
    return torch.cat([piece.ids for piece in pieces])


def _bytes(held: Piece | Chunk) -> int:
    return (held.piece if isinstance(held, Chunk) else held).nbytes


class _First(StoppingCriteria):  # type: ignore[misc]
    """Note when the first token is there; stop nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.time = float("nan")
        self._clock = clock

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.time != self.time:  # not noted yet
            input_ids[:, -1].tolist()  # waits for an accelerator
            self.time = self._clock()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
