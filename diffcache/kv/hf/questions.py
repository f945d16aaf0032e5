"""Compress a context once, and ask a model many questions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from diffcache.foreign import device_of_model, with_cache
from diffcache.kv.hf.cache import KVCache, Recipes, cache_for
from diffcache.kv.hf.model import last_logits
from diffcache.kv.life.on_request import OnRequest, compress_by_probe
from diffcache.kv.score.probe import Asked

_REPEAT = "\n\nRepeat the text above:\n"
_GENERATE = {"max_new_tokens": 50, "do_sample": False}


@overload
def ask(
    model: nn.Module, tokenizer: Any, context: str, questions: str, recipe: Recipes, **settings: Any
) -> str: ...


@overload
def ask(
    model: nn.Module, tokenizer: Any, context: str, questions: Sequence[str], recipe: Recipes,
    **settings: Any,
) -> list[str]: ...  # fmt: skip


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
    before, after = around(tokenizer, context)
    device = device_of_model(model)
    ids = tokens_of(tokenizer, before).to(device)
    if not context or not ids.shape[1]:
        raise ValueError("context='': there is nothing to ask about; give a text")
    cache = cache_for(model, recipe, **settings)
    read_context(model, tokenizer, cache, ids)
    chosen: dict[str, Any] = {**_GENERATE, **(generate or {})}
    if getattr(tokenizer, "pad_token_id", None) is not None:
        chosen.setdefault("pad_token_id", tokenizer.pad_token_id)
    answers = []
    for question in [questions] if isinstance(questions, str) else questions:
        asked = tokens_of(tokenizer, question + after + answer_prefix).to(device)
        whole = torch.cat([ids, asked], 1)
        out = model.generate(  # type: ignore[operator]
            input_ids=whole, attention_mask=torch.ones_like(whole),
            **(with_cache(model, cache.fork()) | chosen),
        )  # fmt: skip
        tokens = out if isinstance(out, Tensor) else out.sequences
        answers.append(tokenizer.decode(tokens[0, whole.shape[1] :], skip_special_tokens=True))
    return answers[0] if isinstance(questions, str) else answers


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
