"""Compress a context once, and ask a model many questions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from diffcache.foreign import device_of_model, with_cache
from diffcache.kv.hf.cache import KVCache, Recipes, cache_for
from diffcache.kv.hf.model import last_logits
from diffcache.kv.life.on_request import OnRequest, compress_by_probe
from diffcache.kv.score.most_attention import Asked

_REPEAT = "\n\nRepeat the text above:\n"
_ONE = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}  # what is held is one row
_GENERATE = {"max_new_tokens": 50, "do_sample": False, **_ONE}


@overload
def ask(model: nn.Module, tokenizer: Any, context: str, questions: str, recipe: Recipes, **settings: Any) -> str: ...


@overload
def ask(
    model: nn.Module, tokenizer: Any, context: str, questions: Sequence[str], recipe: Recipes, **settings: Any
) -> list[str]: ...


def ask(
    model: nn.Module,
    tokenizer: Any,
    context: str,
    questions: str | Sequence[str],
    recipe: Recipes,
    *,
    answer_prefix: str = "",
    generate: Mapping[str, Any] | None = None,
    **settings: Any,
) -> str | list[str]:
    """Answer questions about a context that is read and compressed once, before any of them.

    Each question goes on from a fork of the compressed context, so that no answer depends on
    another. Recipes that compress a prompt compress the context alone; those that compress at
    every step go on doing so. Recipes that score by a probe (kvzip) repeat the context. With a
    chat template, context and question are one message of the user.

    Args:
        model: A model of transformers that generates text, as for `cache_for`.
        tokenizer: Its tokenizer.
        context: Text that the questions are about.
        questions: One question, or several.
        recipe: Recipe of the cache, as for `cache_for`.
        answer_prefix: Beginning of each answer, not part of what is returned.
        generate: Settings of `model.generate`; by default 50 new tokens, greedy.
        settings: `mode` of `cache_for`, and settings of a recipe that is given by name.

    Returns:
        The answer, or the answers in the order of the questions.

    Raises:
        AttachError: If the model cannot be used this way.
        UnknownMethodError: If there is no recipe of that name.
        ValueError: If the context is empty, or a setting is unknown or out of its range.
    """
    chosen = one_answer(tokenizer, generate)
    before, after = around(tokenizer, context)
    ids = tokens_of(tokenizer, before).to(device_of_model(model))
    if not context or not ids.shape[1]:
        raise ValueError("context='': there is nothing to ask about; give a text")
    cache = cache_for(model, recipe, **settings)
    read_context(model, tokenizer, cache, ids)
    answers: list[str] = []
    for question in [questions] if isinstance(questions, str) else questions:
        asked = tokens_of(tokenizer, question + after + answer_prefix).to(ids.device)
        answers += answer(model, tokenizer, cache, ids[0], list(asked), chosen)
    return answers[0] if isinstance(questions, str) else answers


def one_answer(tokenizer: Any, generate: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of `model.generate` for one answer behind a cache of one row.

    Args:
        tokenizer: Tokenizer that pads.
        generate: Settings in place of the defaults: 50 new tokens, greedy.

    Raises:
        ValueError: If they ask for beams, several answers, or no cache.
    """
    settings = {**_GENERATE, **(generate or {})}
    if getattr(tokenizer, "pad_token_id", None) is not None:
        settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    for name, value in _ONE.items():
        if settings[name] != value:
            raise ValueError(
                f"generate: {name}={settings[name]!r}: {name} must be {value}, an answer to a "
                "question from one row of keys and values; leave it out"
            )
    return settings


def answer(
    model: Any, tokenizer: Any, cache: KVCache | None, ids: Tensor, ends: Sequence[Tensor], settings: Mapping[str, Any]
) -> list[str]:
    """Answer questions behind one prompt in one batch, padded between it and them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cache: Cache of the prompt, which is forked; None to compute it.
        ids: The prompt, int64 [T].
        ends: Tokens of each question, int64 [n].
        settings: Settings of `model.generate`, as `one_answer` returns them.
    """
    pad = settings.get("pad_token_id") or 0
    asked = pad_sequence(list(ends), True, pad, "left")
    there = pad_sequence([torch.ones_like(end) for end in ends], True, 0, "left")
    before = ids.expand(len(asked), -1)
    held = {} if cache is None else with_cache(model, cache.fork())
    out = model.generate(
        input_ids=torch.cat([before, asked], 1),
        attention_mask=torch.cat([torch.ones_like(before), there], 1),
        **{**settings, "pad_token_id": pad, **held},
    )
    tokens = (out if isinstance(out, Tensor) else out.sequences)[:, len(ids) + asked.shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]


def read_context(model: nn.Module, tokenizer: Any, cache: KVCache, ids: Tensor) -> None:
    """Have a model read a context, and compress it once and for all.

    Args:
        model: The model.
        tokenizer: Its tokenizer, which writes the probe of recipes that score by one.
        cache: Its cache, empty.
        ids: The context, int64 [1, T].
    """
    feed(model, cache, ids)
    compress(model, tokenizer, cache, ids)


@torch.no_grad()
def feed(model: nn.Module, cache: KVCache, ids: Tensor) -> None:
    """Have a model read tokens, int64 [1, T], of which no more than one logit is made."""
    model(input_ids=ids, **with_cache(model, cache), **last_logits(model))


@torch.no_grad()
def compress(model: nn.Module, tokenizer: Any, cache: KVCache, ids: Tensor) -> None:
    """Compress what a cache holds once and for all, as `read_context` does after its context."""
    recipe = cache.store.recipe
    if recipe.score == Asked():
        probe = torch.cat([tokens_of(tokenizer, _REPEAT).to(ids.device), ids], 1)
        compress_by_probe(cache, lambda fork: feed(model, fork, probe))
    else:
        cache.settle()
    if recipe.trigger is not None and not recipe.trigger.decoding:
        cache.store.recipe = replace(recipe, trigger=OnRequest())


def around(tokenizer: Any, context: str) -> tuple[str, str]:
    """Return the text up to the end of a context, and what comes after a question.

    Args:
        tokenizer: A tokenizer; with its chat template both are in one message of the user.
        context: The context.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return (getattr(tokenizer, "bos_token", None) or "") + context, "\n"
    mark = "<question>"
    while mark in context:
        mark += ">"
    message = [{"role": "user", "content": context + "\n" + mark}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    before, _, after = text.partition(mark)
    return before, after


def tokens_of(tokenizer: Any, text: str) -> Tensor:
    """Return the tokens of a text, int64 [1, n], none added."""
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]).long()
