"""Seconds of answers at the size of LLaDA-8B, uncached and with each cache of `diffcache.dllm`.

The model is a Llama of transformers without a causal mask, which computes what LLaDA's own code
does. Weights are random: nothing here says anything about quality, and how often Elastic-Cache
computes anew on drift says nothing of trained models, so it also stands here never doing so. On a
CPU the model is tiny, which only shows that every row runs.

Time on one H100, by roofline (400 TFLOP/s in bfloat16, half of its peak): an uncached forward is
2 * 7.5e9 * 1,280 operations of weights and 4 * 1,280**2 * 4,096 * 32 of attention, 2e13 or 50 ms;
64 of them are 3.2 s. With a cache the weights are read, 5 ms, and the host takes 30 ms: 2 s. So 11
rows take 4 * (2 * 3.2 s + 9 * 2 s), 100 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.cost.interleave import summary
from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.full_size import made
from diffcache.eval.workshop.dllm.at_size import Size
from diffcache.eval.workshop.dllm.measure import runners_of, timing
from diffcache.eval.workshop.dllm.rows import Row, rows

FULL = {"prompt": 1024, "length": 256, "block": 32, "steps": 64}
LITTLE = {"prompt": 24, "length": 16, "block": 8, "steps": 8}
TINY = Size(layers=3, width=32, inner=48, heads=4, vocabulary=64)
NAMES = (
    "uncached", "dKV-Cache decode, every 8", "Fast-dLLM prefix", "Fast-dLLM dual", "FreeCache",
    "dLLM-Cache 100/7, a quarter", "d2Cache", "uncached, sliding window", "Elastic-Cache, never",
    "Elastic-Cache, head axis 0.9", "Window-Diffusion",
)  # fmt: skip


def chosen(share: float) -> list[Row]:
    """Return the rows that are timed, the uncached one first.

    Args:
        share: Forwards, as a share of the tokens of an answer.
    """
    known = {row.name: row for row in rows("chain-llada-probe")}
    return [replace(known[name], share=share) for name in NAMES]


def llada(size: Size, tokens: int, setting: Setting) -> LlamaForCausalLM:
    """Return a model of LLaDA's architecture with random weights.

    Args:
        size: Sizes; its last token is the mask.
        tokens: Positions that it has to know.
        setting: Device and dtype.
    """
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.inner,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, is_causal=False,
        mask_token_id=size.vocabulary - 1, max_position_embeddings=tokens, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    model: LlamaForCausalLM = made(LlamaForCausalLM, setting, config=config)
    return model


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = 3) -> dict[str, Any]:
    """Measure one forward without a cache, and whole answers.

    Args:
        setting: Device and dtype.
        rounds: Timed answers with each cache.
    """
    tiny = setting.device.type == "cpu"
    size, shapes = (TINY, LITTLE) if tiny else (Size(), FULL)
    total = shapes["prompt"] + shapes["length"]
    model = llada(size, total, setting)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, size.vocabulary - 1, (rounds + 1, total), generator=generator)
    one = ids[:1].to(setting.device)
    alone = take_turns(
        {"forward": lambda: model(input_ids=one, use_cache=False)}, 5 * rounds, 1, setting
    )
    run = runners_of(model, chosen(shapes["steps"] / shapes["length"]), shapes["length"],
                     shapes["block"])  # fmt: skip
    found = timing(run, ids[:, : shapes["prompt"]], 1, setting)
    return {
        "shapes": {"device": setting.device.type, **shapes, **vars(size)}, "rounds": rounds,
        "tiny": tiny, "forward_seconds": summary(alone.seconds["forward"]),
        "rows": [{"name": name, "policy": run[name].row.policy, **told}
                 for name, told in found.items()],
    }  # fmt: skip
