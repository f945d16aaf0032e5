"""Small random language models whose attention is peaked, so that dropping slots shows."""

from functools import cache
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from diffcache.foreign import with_cache
from diffcache.kv import detach, snapkv
from tests.zoo.language import build

GREEDY = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
GREEDY |= dict(return_dict_in_generate=True, output_logits=True)
SIZES: dict[str, Any] = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
SIZES |= dict(hidden_size=64, intermediate_size=128, vocab_size=256, max_position_embeddings=4096)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHORT = {**GREEDY, "max_new_tokens": 4}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3}}
WAYS |= {"chunks": {"prefill_chunk_size": 16}, "assisted": {"prompt_lookup_num_tokens": 3}}
ALL = snapkv(1.0, window=4)  # drops nothing
IDS = torch.randint(3, 120, (1, 24), generator=torch.Generator().manual_seed(3))
ONE = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
PADDING = (17, 0, 5)  # padding of the rows of `prompts`


@cache
def zoo(name: str, kind: str) -> Any:
    """Return a tiny model of a class of transformers."""
    return build(name, kind)


def generate(model: Any, cache: Any = None, inputs: Any = ONE, **settings: Any) -> Any:
    """Return four tokens that a model generates with a cache, or with its own."""
    return model.generate(**inputs, **with_cache(model, cache), **SHORT, **settings)


def stock(model: Any, inputs: Any, **settings: Any) -> Any:
    """Return what a model generates without a cache of ours, four tokens by default."""
    detach(model)
    return model.generate(**inputs, **{**SHORT, **settings})


def given(way: str) -> Any:
    """Return the prompts for a way to generate: transformers assists one row at a time."""
    return row(prompts(), 1) if way == "assisted" else prompts()


def peaked(model: Any) -> Any:
    """Make every query prefer some keys."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(12)
    return model.eval()


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a Llama of four layers, four heads and two key-value heads."""
    torch.manual_seed(seed)
    return peaked(LlamaForCausalLM(LlamaConfig(**SIZES | changes)))


def gemma(seed: int = 0) -> Gemma3ForCausalLM:
    """Return a Gemma 3 whose every third layer attends to all tokens, the others to 16."""
    torch.manual_seed(seed)
    changes = dict(num_hidden_layers=6, sliding_window=16, max_position_embeddings=512)
    return peaked(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | changes)))


def prompts(rows: int = 3, length: int = 48, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return prompts with padding on the left, `input_ids` and `attention_mask` [B, T]."""
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in zip(range(rows), PADDING, strict=False):
        mask[row, :pad] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def row(inputs: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Return one row of prompts, without its padding."""
    keep = inputs["attention_mask"][number].bool()
    return {name: value[number : number + 1, keep] for name, value in inputs.items()}


def second_turn(inputs: Any, sequences: torch.Tensor, count: int = 5, seed: int = 9) -> dict[str, torch.Tensor]:
    """Return all ids so far with `count` more, as transformers wants a conversation."""
    more = torch.randint(3, 256, (len(sequences), count), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([sequences, more], 1)
    fresh = ids.shape[1] - inputs["attention_mask"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), fresh, dtype=torch.long)], 1)
    return {"input_ids": ids, "attention_mask": mask}


def grouped_rounding() -> float:
    """Return what two ways to attend in groups under a mask may differ by, 0 where torch has one.

    transformers repeats keys under a mask, diffcache leaves the groups to torch: in torch 2.6 these
    are two kernels, which round otherwise.
    """
    seed = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(1, heads, n, 16, generator=seed) for heads, n in ((4, 16), (2, 60)))
    mask = torch.rand(1, 1, 16, 60, generator=seed) > 0.3
    attend = torch.nn.functional.scaled_dot_product_attention
    wide = kv.repeat_interleave(2, 1)
    one = torch.equal(attend(q, kv, kv, mask, enable_gqa=True), attend(q, wide, wide, mask))
    return 0.0 if one else 1e-6


def same(one: Any, two: Any, tolerance: float = 0.0) -> None:
    """Assert that two outputs of generate have the same tokens and logits."""
    assert torch.equal(one.sequences, two.sequences)
    worst = max(float((a - b).abs().max()) for a, b in zip(one.logits, two.logits, strict=True))
    assert worst <= tolerance, worst
