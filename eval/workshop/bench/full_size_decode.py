"""Seconds of a generated token at the size of LLaMA-3.1-8B, with key-value caches of all makers.

Weights are random: speed does not depend on them, and nothing here says anything about quality.
Every cache reads the same prompt once, then all take one token each in turn, in one process. Caches
of other libraries that are not installed, or fail, stay in the table with the reason. On a CPU the
model is tiny, which only shows that every row runs. quanto compiles an extension at its first token
on a machine, which takes minutes once and is not timed.

Time on one H100, by roofline (3.35 TB/s; 400 TFLOP/s in bfloat16, half of its peak): a prompt is
2 * 7.5e9 * 32,768 operations of weights and 2 * 32,768**2 * 4,096 * 32 of causal attention,
7.7e14 or 2 s. A token reads 16 GB of weights and up to 4.3 GB of keys and values, 6 ms; the host
takes 30 ms, and a cache that decodes all its codes in plain PyTorch moves 90 GB more, 30 ms. So 20
caches take 20 * (2 s + 33 * 60 ms), 80 s. They hold about 40 GB beside the weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

from diffcache.eval.cost.interleave import Call, Turn
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.kv.peer import INSTALL, PRESSES, build, installed
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.decode import (
    STOCK,
    Case,
    Contender,
    beside,
    drawn,
    made,
    rows,
    stock,
)
from diffcache.eval.workshop.bench.full_size import made as random_model
from diffcache.kernels.dispatch import has_triton
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv, tova
from diffcache.kv.recipes.quantized import kivi
from diffcache.kv.recipes.retrieval import quest
from diffcache.kv.recipes.streaming import streaming_llm

PROMPT, TINY_PROMPT = 32_768, 256
TOKENS, WARMUP = 10, 2  # timed tokens of a round, and untimed ones before all rounds
CONFIG: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
TINY = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_FAILURES = (ImportError, RuntimeError, ValueError, TypeError, LookupError, AttributeError,
             AssertionError)  # fmt: skip


def cases(prompt: int) -> dict[str, Case]:
    """Return our caches, by name.

    Args:
        prompt: Tokens of the prompt; evicting recipes hold a quarter of it, and retrieval reads an
            eighth.
    """
    quarter, read = prompt // 4, prompt // 8
    return {
        "full": Case(Recipe(), mode="native"),
        "streaming_llm 25 %": Case(streaming_llm(quarter)),
        "snapkv 25 %": Case(snapkv(quarter)),
        "tova 25 %": Case(tova(quarter)),
        f"quest {read}": Case(quest(read)),
        "kivi 4": Case(kivi(4)),
        "kivi 2": Case(kivi(2)),
    }


class Pressed(Contender):
    """A model whose prompt kvpress shortens, by the attention of its last 64 tokens (SnapKV)."""

    def read(self, count: int, **more: Any) -> None:
        """Read some tokens.

        Args:
            count: Number of tokens.
            more: Further arguments of the model.

        Raises:
            MissingPackageError: If kvpress is not installed.
        """
        if installed() is None:
            raise MissingPackageError(f"kvpress is not installed: {INSTALL}")
        # The cache does not tell positions any more once it is shortened, and kvpress' hooks look
        # for an argument that transformers 5 does not give by itself.
        at = torch.arange(self.taken, self.taken + count, device=self.tokens.device)
        press = build(PRESSES["snapkv"], 0.75, {"window_size": 64})
        with nullcontext() if self.taken else press(self.model):
            super().read(count, position_ids=at[None], cache_position=at, **more)


def _quantized(backend: str, **settings: Any) -> Callable[[LlamaForCausalLM], QuantizedCache]:
    return lambda model: QuantizedCache(backend, model.config, **settings)


PEERS: dict[str, tuple[type[Contender], Callable[[LlamaForCausalLM], Any]]] = {
    "QuantizedCache fp8": (Contender, _quantized("fp8")),
    "QuantizedCache quanto 4": (Contender, _quantized("quanto", nbits=4)),
    "QuantizedCache quanto 2": (Contender, _quantized("quanto", nbits=2)),
    "QuantizedCache hqq 4": (Contender, _quantized("hqq", nbits=4, axis_key=1, axis_value=1)),
    "kvpress snapkv 25 %": (Pressed, lambda model: DynamicCache(config=model.config)),
}


@contextmanager
def choosing(kernels: str) -> Iterator[None]:
    """Choose between kernels and plain PyTorch.

    Args:
        kernels: Value of `DIFFCACHE_KERNELS`.
    """
    before = os.environ.get("DIFFCACHE_KERNELS")
    os.environ["DIFFCACHE_KERNELS"] = kernels
    try:
        yield
    finally:
        del os.environ["DIFFCACHE_KERNELS"]
        if before is not None:
            os.environ["DIFFCACHE_KERNELS"] = before


def contenders(
    model: LlamaForCausalLM, chosen: Mapping[str, Case], tokens: int
) -> dict[str, Contender]:
    """Return what is timed, by name: the stock cache, ours, ours with kernels, those of others.

    Args:
        model: Model whose weights all share.
        chosen: Our caches; with kernels only on a CUDA device with triton.
        tokens: Tokens that each will be given, the prompt among them.
    """
    ids = drawn(model, tokens)
    found = {STOCK: Contender(beside(model), stock, ids)}
    ways = {"": "torch"}
    if model.device.type == "cuda" and has_triton():
        ways[", kernels"] = "triton"
    for name, case in chosen.items():
        for suffix, kernels in ways.items():
            within = partial(choosing, kernels)
            found[name + suffix] = Contender(beside(model), made(case), ids, within)
    for name, (kind, make) in PEERS.items():
        found[name] = kind(beside(model), make, ids)
    return found


def fill(
    run: dict[str, Contender], prompt: int, setting: Setting
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """Read the prompt and one more token, and take out what fails.

    Args:
        run: Contenders by name, the stock cache first.
        prompt: Tokens of the prompt.
        setting: Device and dtype.

    Returns:
        Seconds of the prompt, seconds of the token after it, and why others failed, all by name.
    """
    prefill: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    run[STOCK].prefill(prompt)  # else the first to come pays for the start of the libraries
    for number, (name, each) in enumerate(list(run.items())):
        if setting.progress is not None:
            setting.progress(number, len(run) + len(failed), f"prompt of {name}")
        try:
            with each.within():
                prefill[name] = [_seconds(partial(each.prefill, prompt), setting)]
                first[name] = [_seconds(each.step, setting)]
        except _FAILURES as error:
            if name == STOCK:
                raise
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            del run[name]
    return prefill, first, failed


def _seconds(call: Call, setting: Setting) -> float:
    setting.wait()
    start = time.perf_counter()
    call()
    setting.wait()
    return time.perf_counter() - start


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = 3) -> dict[str, Any]:
    """Measure tokens after a long prompt.

    Args:
        setting: Device and dtype.
        rounds: Rounds of ten timed tokens with each cache.
    """
    tiny = setting.device.type == "cpu"
    config, prompt = (TINY, TINY_PROMPT) if tiny else (CONFIG, PROMPT)
    model = random_model(LlamaForCausalLM, setting, config=LlamaConfig(**config))
    chosen, timed = cases(prompt), rounds * TOKENS
    run = contenders(model, chosen, prompt + 1 + WARMUP + timed)
    prefill, first, failed = fill(run, prompt, setting)
    turns: dict[str, Any] = {name: Turn(each.step, each.within) for name, each in run.items()}
    later = take_turns(turns, timed, WARMUP, setting)
    shapes = {"device": setting.device.type, "prompt": prompt, **config}
    found = rows(run, chosen, (prefill, first, later.seconds))
    return {
        "shapes": shapes, "rounds": rounds, "tiny": tiny, "load": later.load,
        "rows": found + [{"name": name, "failed": why} for name, why in failed.items()],
    }  # fmt: skip
