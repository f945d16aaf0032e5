"""Questions about documents that are read once: prompts put together from what is held of them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from diffcache.foreign import device_of_model, with_cache
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.hf.model import last_logits
from diffcache.kv.hf.questions import around, feed, tokens_of
from diffcache.kv.hf.refresh import check_whole
from diffcache.kv.life.pack import pack
from diffcache.kv.life.prefix import PrefixTree
from diffcache.kv.recipe import Recipe
from diffcache.kv.refresh import check_share
from diffcache.kv.reuse.ape import ape
from diffcache.kv.reuse.cachecraft import Chunk, cachecraft, chunks_of
from diffcache.kv.reuse.hydragen import hydragen
from diffcache.kv.reuse.piece import Piece, cut, joined, lay_out
from diffcache.kv.reuse.recompute import cacheblend, kvshare, pie
from diffcache.method import check_int, is_number
from diffcache.weights import all_of

_GENERATE = {"max_new_tokens": 50, "do_sample": False}
_READ = 512  # tokens of a row in which documents are read together


@dataclass(frozen=True)
class Answers:
    """Answers to questions about documents, and what they took.

    Attributes:
        texts: Answer to each question.
        tokens: Tokens of the prompt before a question.
        computed: Tokens of those that were computed in all layers for this.
        first_seconds: Time to the first token of the first answer.
        seconds: Time to the last token of the last one.
    """

    texts: tuple[str, ...]
    tokens: int
    computed: int
    first_seconds: float
    seconds: float


@dataclass(frozen=True, eq=False)
class _Filled:
    """A cache of a prompt up to its question.

    Attributes:
        cache: The cache; None where nothing is held.
        ids: int64 [n], the tokens that it stands for.
        computed: Number of tokens that were computed.
    """

    cache: KVCache | None
    ids: Tensor
    computed: int


class Documents:
    """Documents that a model reads once and is then asked about, in any choice and order.

    A prompt is the beginning of the chat template (or the first token), the documents, and the
    question. What is held of the documents before it stands in for computing them again:

    | method | holds | computes for a prompt |
    |---|---|---|
    | `recompute` | nothing | everything |
    | `prefix` | prompts, by their beginnings | what comes after a beginning that is held; exact |
    | `hydragen` | nothing | documents once for all questions, which are asked at once; exact |
    | `concatenate` | documents, each read alone | nothing |
    | `cacheblend` | documents, each read alone | the share of tokens that change most |
    | `ape` | documents, each read alone | nothing; documents lie side by side |
    | `cachecraft` | documents, each read behind others | what owes most to those that are gone |
    | `kvshare` | the last prompt | what it lacks, and the share that changes most |
    | `pie` | the last prompt | what it lacks |

    Documents are read alone many in a row (prepacking). All weights are summed at every call; where
    they changed (an adapter, a dtype), nothing that was held is used. An object is for one thread,
    and for a model that stays on its device; `diffcache.kv.detach(model)` releases it.

    Args:
        model: A model of transformers that generates text, all layers of which attend to all
            tokens.
        tokenizer: Its tokenizer.
        method: Method that puts a prompt together.
        budget_bytes: Most bytes of documents, or of beginnings, that are held between prompts; what
            was used least recently goes. One prompt, where the last is held, is not counted.
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
        self.method, self.budget_bytes = method, budget_bytes
        self._settings = settings_of(method, **settings)
        self._model, self._tokenizer, self._clock = model, tokenizer, clock
        self._device = device_of_model(model)  # what is held stays there
        before, self._after = around(tokenizer, "")
        self._head = self._tokens(before)
        self._weights = all_of(model)
        self._forget()
        if method != "recompute":
            cache = self._empty("post" if method in ("prefix", "hydragen") else "pre")
            check_whole(cache)
            if method != "prefix" and any(cache.setup.windows):
                raise ValueError(
                    f"method={method!r}: the layers of {type(model).__name__} see a window of "
                    f"{max(filter(None, cache.setup.windows))} tokens, and documents are moved; "
                    "use method='prefix'"
                )
            # As keys are held before rotation, every layer of this cache knows its own.
            self._rotary = [
                layer.rotary for layer in cache.store.layers if layer.rotary is not None
            ]

    def _forget(self) -> None:
        """Hold nothing, under the weights as they are."""
        self._tree: PrefixTree[Piece] = PrefixTree(
            type(self._model).__name__, self.budget_bytes, self._settings.get("chunk", 1)
        )
        self._held: dict[str | None, Piece | Chunk] = {}  # the least recently used first
        self._last: _Filled | None = None

    def _check_weights(self) -> None:
        """Forget what was computed with other weights."""
        if self.method not in ("recompute", "hydragen") and self._weights.changed(True):
            self._forget()
            self._weights = all_of(self._model)

    @property
    def nbytes(self) -> int:
        """Bytes that are held between prompts."""
        last = 0 if self._last is None or self._last.cache is None else self._last.cache.nbytes
        return sum(map(_bytes, self._held.values())) + self._tree.nbytes + last

    def read(self, documents: Sequence[str]) -> None:
        """Read documents each alone, where the method holds such, before they are asked about."""
        self._check_weights()
        if self.method in ("concatenate", "cacheblend", "ape"):
            self._pieces(documents)

    def ask(
        self,
        questions: str | Sequence[str],
        documents: Sequence[str],
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
            ValueError: If there are no questions or documents, or one has no tokens.
        """
        asked = [questions] if isinstance(questions, str) else list(questions)
        if isinstance(documents, str):
            raise ValueError("documents is one text: give a list of texts")
        if not asked or not documents or not all(text.strip() for text in documents):
            raise ValueError(
                f"questions={len(asked)}, documents={len(documents)}: give at least one of each, "
                "none of them empty"
            )
        ends = [self._tokens(one + self._after + answer_prefix) for one in asked]
        if not all(map(len, ends)):
            raise ValueError(f"questions={asked!r}: one has no tokens; leave it out")
        started = self._clock()
        self._check_weights()
        filled: _Filled = getattr(self, f"_{self.method}")(documents, **self._settings)
        noted = _First(self._clock)
        together = [ends] if self.method == "hydragen" else [[end] for end in ends]
        texts: list[str] = []
        for some in together:
            texts += self._generate(filled, some, noted, generate or {})
        return Answers(
            tuple(texts), len(self._prompt(documents)), filled.computed, noted.time - started,
            self._clock() - started,
        )  # fmt: skip

    def _generate(
        self, filled: _Filled, ends: Sequence[Tensor], noted: _First, settings: dict[str, Any]
    ) -> list[str]:
        """Return the answers to questions behind one prompt, padded between it and them."""
        width = max(len(end) for end in ends)
        gaps = [width - len(end) for end in ends]
        pad = getattr(self._tokenizer, "pad_token_id", None) or 0
        rows = [
            torch.cat([filled.ids, end.new_full((gap,), pad), end])
            for gap, end in zip(gaps, ends, strict=True)
        ]
        mask = torch.ones(len(rows), len(rows[0]), dtype=torch.long, device=filled.ids.device)
        for row, gap in enumerate(gaps):
            mask[row, len(filled.ids) : len(filled.ids) + gap] = 0
        chosen: dict[str, Any] = {**_GENERATE, "pad_token_id": pad, **settings}
        if chosen.get("num_return_sequences", 1) != 1:
            raise ValueError("generate: num_return_sequences must be 1, an answer to a question")
        stops = [*chosen.pop("stopping_criteria", ()), noted]
        cache = {}
        if filled.cache is not None:
            cache = with_cache(self._model, filled.cache.fork())
        out = self._model.generate(  # type: ignore[operator]
            input_ids=torch.stack(rows), attention_mask=mask, **(cache | chosen),
            stopping_criteria=StoppingCriteriaList(stops),
        )  # fmt: skip
        tokens = out if isinstance(out, Tensor) else out.sequences
        return list(
            self._tokenizer.batch_decode(tokens[:, mask.shape[1] :], skip_special_tokens=True)
        )

    def _recompute(self, documents: Sequence[str]) -> _Filled:
        ids = self._prompt(documents)
        return _Filled(None, ids, len(ids))

    def _prefix(self, documents: Sequence[str], *, chunk: int = 64) -> _Filled:
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
        return _Filled(cache, ids, len(ids) - known)

    def _hydragen(self, documents: Sequence[str]) -> _Filled:
        ids, cache = self._prompt(documents), self._empty()
        feed(self._model, cache, ids[None])
        hydragen(cache.store)
        return _Filled(cache, ids, len(ids))

    def _concatenate(self, documents: Sequence[str]) -> _Filled:
        whole, cache = joined(self._pieces(documents)), self._empty()
        lay_out(cache.store, whole, torch.arange(len(whole.ids)), self._rotary)
        return _Filled(cache, whole.ids, 0)

    def _cacheblend(
        self, documents: Sequence[str], *, share: float = 0.15, check: int = 1
    ) -> _Filled:
        pieces, cache = self._pieces(documents), self._empty()
        index = cacheblend(
            self._model, cache, pieces, share=share, check=check, rotary=self._rotary
        )
        return _Filled(cache, self._prompt(documents), len(index))

    def _ape(
        self, documents: Sequence[str], *, temperature: float = 0.9, scale: float = 0.9
    ) -> _Filled:
        pieces, cache = self._pieces(documents), self._empty()
        if not len(self._head):
            raise ValueError(
                "method='ape': the tokenizer puts nothing before a text, and documents that lie "
                "side by side need something before them; take another method"
            )
        ape(cache, pieces[0], pieces[1:], temperature=temperature, scale=scale, rotary=self._rotary)
        # The longest document stands for all of them, which are at the same positions.
        longest = max((piece.ids for piece in pieces[1:]), key=len)
        return _Filled(cache, torch.cat([self._head, longest]), 0)

    def _cachecraft(self, documents: Sequence[str], *, alpha: float = 1.0) -> _Filled:
        texts, ids = self._parts(documents), self._prompt(documents)
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
        return _Filled(cache, ids, len(ids) if new else len(index))

    def _kvshare(self, documents: Sequence[str], *, share: float = 0.15, check: int = 1) -> _Filled:
        ids, last, cache = self._prompt(documents), self._last, self._empty()
        if last is None or last.cache is None:
            feed(self._model, cache, ids[None])
            index = ids
        else:
            piece = cut(last.cache.store, last.ids)
            index = kvshare(
                self._model, cache, piece, ids, share=share, check=check, rotary=self._rotary
            )
        self._last = _Filled(cache, ids, len(index))
        return self._last

    def _pie(self, documents: Sequence[str]) -> _Filled:
        ids, last = self._prompt(documents), self._last
        self._last = None  # an edit that is cut off leaves nothing to go on from
        if last is None or last.cache is None:
            cache, index = self._empty(), ids
            feed(self._model, cache, ids[None])
        else:
            cache = last.cache
            index = pie(self._model, cache, last.ids, ids, rotary=self._rotary)
        self._last = _Filled(cache, ids, len(index))
        return self._last

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
        prompts = [
            ids if text is None else torch.cat([self._head, ids])
            for text, ids in zip(texts, own, strict=True)
        ]
        packed = pack(prompts, max(_READ, max(map(len, prompts))))
        cache = self._empty("pre")
        self._model(
            input_ids=packed.ids, position_ids=packed.position_ids, attention_mask=packed.mask,
            **last_logits(self._model), **with_cache(self._model, cache),
        )  # fmt: skip
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
            if total > self.budget_bytes and text not in texts:
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

    def _empty(self, space: Any = "post") -> KVCache:
        return cache_for(self._model, Recipe(space=space), mode="native")


def methods() -> dict[str, dict[str, Any]]:
    """Return the settings of each method of `Documents`, with their defaults."""
    names = ("recompute", "prefix", "hydragen", "concatenate", "cacheblend", "ape", "cachecraft",
             "kvshare", "pie")  # fmt: skip
    found = {}
    for name in names:
        taken = inspect.signature(getattr(Documents, f"_{name}")).parameters.values()
        found[name] = {one.name: one.default for one in taken if one.kind is one.KEYWORD_ONLY}
    return found


def settings_of(method: str, **settings: Any) -> dict[str, Any]:
    """Return all settings of a method of `Documents`.

    Raises:
        ValueError: If there is no such method or setting, or one is out of its range.
    """
    known = methods()
    if method not in known:
        raise ValueError(f"method={method!r}: must be one of {', '.join(known)}")
    for name in settings.keys() - known[method].keys():
        allowed = ", ".join(known[method]) or "none"
        raise ValueError(f"{name}={settings[name]!r}: settings of {method} are {allowed}")
    found = {**known[method], **settings}
    for name, value in found.items():
        if name == "share":
            check_share(value)
        elif name in ("check", "chunk"):
            check_int(name, value, 1)
        elif name == "alpha" and not (is_number(value) and value >= 0):
            raise ValueError(f"alpha={value!r}: must be a number of at least 0")
        elif name in ("temperature", "scale") and not (is_number(value) and value > 0):
            raise ValueError(f"{name}={value!r}: must be a number above 0")
    return found


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
