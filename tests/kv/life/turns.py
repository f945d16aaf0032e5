"""Two turns of a conversation, the second of which may run in another process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.life.save import load
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import h2o, snapkv
from tests.kv.tiny import GREEDY, llama, prompts, second_turn

_TWO = Recipe("two-bit", codec=Pair(GroupQuant(2, "tokens", 8), GroupQuant(2, "channels", 8), block=8, slide=True))
CASES: dict[str, tuple[Recipe, str]] = {
    "pre": (Recipe("pre", space="pre"), "native"),
    "evicted": (snapkv(16, window=4), "native"),
    "statistics": (h2o(24), "native"),
    "coded": (_TWO, "native"),
    "evicted-and-coded": (snapkv(20, window=4) | _TWO, "native"),
    "stock-coded": (_TWO, "stock"),
}


def cache(model: Any, case: str) -> KVCache:
    recipe, mode = CASES[case]
    return cache_for(model, recipe, mode=mode)


def asked(case: str) -> dict[str, Tensor]:
    """Return the first prompts; stock mode takes them without padding."""
    inputs = prompts(2)
    if CASES[case][1] == "stock":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    return inputs


def second(model: Any, held: KVCache, case: str, sequences: Tensor) -> Any:
    """Go on with a conversation."""
    return model.generate(**second_turn(asked(case), sequences), past_key_values=held, **GREEDY)


def main(folder: Path) -> None:
    """Load every case of a folder, go on, and write what came out."""
    torch.set_num_threads(1)
    model = llama()
    for case in CASES:
        held = cache(model, case)
        about = load(folder / f"{case}.safetensors", held.store)
        sequences = torch.tensor(eval_ids(about["sequences"]))
        out = second(model, held, case, sequences)
        logits = torch.stack(list(out.logits))
        save_file({"ids": out.sequences.contiguous(), "logits": logits}, folder / f"{case}.out")


def eval_ids(text: str) -> list[list[int]]:
    """Return numbers from text, rows by semicolons."""
    return [[int(number) for number in row.split()] for row in text.split(";")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
