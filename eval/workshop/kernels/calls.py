"""Expect how long a step, a skipped one and a token take, for `docs/predict.md`: not measured.

python -m diffcache.eval.workshop.kernels.calls --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from diffcache.eval.cost.predict import Cost, predict
from diffcache.eval.cost.roofline import DEVICES, Roofline
from diffcache.eval.pages import keep_pages, rendered
from diffcache.eval.record import ROOT

PAGE = ROOT / "docs" / "predict.md"
HEAD = "## A step and a token\n"  # what stands before is written by hand
DEVICE = "h200"
# Pipeline, published sizes, and size of a call.
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("FluxPipeline", "flux.1-dev", {"height": 1024, "width": 1024}),
    ("WanPipeline", "wan2.1-t2v-1.3b", {"height": 480, "width": 832, "frames": 81}),
    ("WanPipeline", "wan2.1-t2v-14b", {"height": 480, "width": 832, "frames": 81}),
)
HELD = 32768  # tokens


def _shown(cost: Cost | None, share: float = 1.0) -> str:
    if cost is None:
        return "-"
    least, expected = (1e3 * share * one for one in (cost.seconds, cost.expected))
    return f"{float(f'{least:.3g}'):g} ({float(f'{expected:.3g}'):g})"


def steps() -> Iterator[dict[str, str]]:
    """Yield rows of steps: model, computed, skipped at `stack` and at `module`."""
    taylor: dict[str, Any] = {"every": 5, "order": 1, "steps": 11, "device": DEVICE}
    for pipeline, name, size in MODELS:
        stack, module = (
            predict(pipeline, "taylorseer", site=site, published=name, **taylor, **size)
            for site in ("stack", "module")
        )
        skipped = {"stack": _shown(stack.skipped), "module": _shown(module.skipped)}
        yield {"model": name, "computed": _shown(stack.uncached, 1 / 11), **skipped}


def token() -> Cost:
    """Return the cost of a token of Llama-3.1-8B."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=4 * HELD,
        attn_implementation="sdpa",
    )
    with torch.device("meta"), torch.no_grad():
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            given = torch.empty(1, config.num_key_value_heads, HELD, 128, dtype=torch.bfloat16)
            cache.update(given, given, layer)
        ids, place = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
        with Roofline(DEVICES[DEVICE]) as spent:
            model(input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True)
    return Cost(1, spent.flops, spent.seconds, spent.expected())


def page(before: str) -> str:
    """Return the page with its table."""
    introduction, _, rest = before.partition(HEAD)
    last = {"model": "llama-3.1-8b, a token", "computed": _shown(token()), "stack": "", "module": ""}
    rows = [{**row, "device": DEVICE} for row in (*steps(), last)]
    after = rest.partition("\n## ")[2]
    return f"{introduction}{rendered('workshop/kernels/calls.md.jinja', rows=rows)}\n## {after}"


main = keep_pages(page, PAGE)

if __name__ == "__main__":
    sys.exit(main())
