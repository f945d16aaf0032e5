"""diffusers' pipeline of DiffusionGemma: its canvas takes feature methods and no row plans."""

from typing import Any

import pytest
import torch
from diffusers import BlockRefinementScheduler, DiffusionGemmaPipeline
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import diffcache
from diffcache.dllm import BlockCache, DKVCache
from diffcache.errors import AttachError
from diffcache.foreign import cache_name
from tests.dllm.toys import SIZES, prompts

BLOCK = 8


class Processor:
    eos_token_id = None

    def apply_chat_template(self, messages: Any, **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(prompts(11))}


def gemma() -> DiffusionGemmaPipeline:
    text = SIZES | dict(num_hidden_layers=2, num_key_value_heads=2, num_global_key_value_heads=2, head_dim=8)
    text |= dict(global_head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    text |= dict(num_experts=4, top_k_experts=2, moe_intermediate_size=16)
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=BLOCK)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    scheduler = BlockRefinementScheduler(block_length=BLOCK)
    pipe = DiffusionGemmaPipeline(model=model, scheduler=scheduler, processor=Processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_canvas_of_diffusion_gemma_takes_feature_methods_and_no_row_plans() -> None:
    pipe = gemma()
    if cache_name(pipe.model.forward) == "cache":
        try:
            pipe(prompt="", gen_length=BLOCK, num_inference_steps=1)
        except TypeError as error:  # diffusers 0.42.1
            pytest.skip(f"diffusers calls it as transformers before 5.24 took it: {error}")
    assert diffcache.inspect(pipe)["model"].lists[0].key == "model.decoder.layers"
    for policy in (BlockCache(), DKVCache()):
        with pytest.raises(AttachError, match="encoder cache holds.*exactly.*method='taylorseer'"):
            diffcache.wrap(pipe, policy)

    def text(cache: str | None = None) -> Tensor:
        given = dict(prompt="", gen_length=2 * BLOCK, num_inference_steps=6, confidence_threshold=None)
        drawn = torch.Generator().manual_seed(0)
        return pipe(**given, cache_implementation=cache, output_type="seq", generator=drawn).sequences

    wanted = text()
    for cache in (None, "static"):
        with diffcache.wrapped(pipe, "interval", every=3):
            text(cache)
            computed = [call.index for call in diffcache.report(pipe).calls if call.computed]
        assert {0, 6} <= set(computed) and len(computed) < 10  # every canvas starts anew
    assert torch.equal(text(), wanted)
