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
from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT

PAGE = ROOT / "docs" / "predict.md"
HEAD = "## A step and a token\n"  # what stands before is written by hand
WHERE = ("h200",)
# Pipeline, published sizes, and size of a call.
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("FluxPipeline", "flux.1-dev", {"height": 1024, "width": 1024}),
    ("WanPipeline", "wan2.1-t2v-1.3b", {"height": 480, "width": 832, "frames": 81}),
    ("WanPipeline", "wan2.1-t2v-14b", {"height": 480, "width": 832, "frames": 81}),
)
# Layers, hidden, intermediate, heads, key-value heads, words and tokens that are held.
LLAMA = (32, 4096, 14336, 32, 8, 128256)
HELD = 32768
EXPLAINED = """\
Milliseconds of the denoiser, all calls of a step together, in bfloat16: least by the roofline
above, and **expected, not measured**, in brackets. What is expected takes copies at 88 % and
products at 79 % of the peaks, which one H200 reached; 3.5 µs for an operation on the device, and
5.4 µs on the host, with 100 µs for each module that a cache stands in for. The two of the host were
fitted to the two skipped steps of FLUX.1-dev on that H200 (0.50 and 27.1 ms), the others to its
kernels; its computed step, to which nothing was fitted, took 173.3 ms. Steps are skipped by
`TaylorSeer(every=5, order=1)` with the site `stack` or `module`. A token is one of Llama-3.1-8B,
batch 1, after 32,768 others, with torch's fused attention and transformers' own cache, which copies
all keys and values for each token.

"""


def _shown(cost: Cost, share: float = 1.0) -> str:
    least, expected = (1e3 * share * one for one in (cost.seconds, cost.expected))
    return f"{float(f'{least:.3g}'):g} ({float(f'{expected:.3g}'):g})"


def steps() -> Iterator[list[str]]:
    """Yield rows of steps: model, device, computed, skipped at `stack` and at `module`."""
    for pipeline, name, size in MODELS:
        for device in WHERE:
            said = [
                predict(
                    pipeline,
                    "taylorseer",
                    every=5,
                    order=1,
                    site=site,
                    steps=11,
                    published=name,
                    device=device,
                    **size,
                )
                for site in ("stack", "module")
            ]
            skips = [_shown(one.skipped) if one.skipped else "-" for one in said]
            yield [name, device, _shown(said[0].uncached, 1 / 11), *skips]


def token(device: str) -> Cost:
    """Return the cost of a token of Llama-3.1-8B."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    layers, hidden, wide, heads, own, words = LLAMA
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=wide,
        num_attention_heads=heads,
        num_key_value_heads=own,
        vocab_size=words,
        max_position_embeddings=4 * HELD,
        attn_implementation="sdpa",
    )
    with torch.device("meta"), torch.no_grad():
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        cache = DynamicCache()
        for layer in range(layers):
            given = torch.empty(1, own, HELD, hidden // heads, dtype=torch.bfloat16)
            cache.update(given, given, layer)
        ids, place = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
        with Roofline(DEVICES[device]) as spent:
            model(input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True)
    return Cost(1, spent.flops, spent.seconds, spent.expected())


def page(before: str) -> str:
    """Return the page with its table."""
    introduction, _, rest = before.partition(HEAD)
    _, _, after = rest.partition("\n## ")
    titles = ("Model", "Device", "Computed step, or token", "Skipped, `stack`", "Skipped, `module`")
    rows = [*steps(), *(["llama-3.1-8b, a token", one, _shown(token(one)), "", ""] for one in WHERE)]
    return "\n".join([introduction + HEAD, EXPLAINED + "\n".join(table(titles, rows)), "", "## " + after])


main = keep_pages(page, PAGE)

if __name__ == "__main__":
    sys.exit(main())
