"""Two turns of a conversation, the second of which may run in another process."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffcache.kv import Recipe, h2o, load, snapkv
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.hf.cache import KVCache, cache_for
from tests.kv.tiny import GREEDY, llama, prompts, second_turn

_TWO = Recipe("two-bit", codec=Pair(GroupQuant(2, "tokens", 8), GroupQuant(2, "channels", 8), block=8, slide=True))
CASES = {"statistics": h2o(24), "evicted-and-coded": snapkv(20, window=4) | _TWO, "coded": _TWO}


def second(model: Any, held: KVCache, sequences: Tensor) -> Any:
    """Go on with a conversation."""
    return model.generate(**second_turn(prompts(2), sequences), past_key_values=held, **GREEDY)


def main(folder: Path) -> None:
    """Load every case of a folder, go on, and write what came out."""
    torch.set_num_threads(1)
    model = llama()
    for case, recipe in CASES.items():
        held = cache_for(model, recipe, mode="native")
        about = load(folder / f"{case}.safetensors", held.store)
        sequences = [[int(number) for number in row.split()] for row in about["sequences"].split(";")]
        out = second(model, held, torch.tensor(sequences))
        logits = torch.stack(list(out.logits))
        save_file({"ids": out.sequences.contiguous(), "logits": logits}, folder / f"{case}.out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
