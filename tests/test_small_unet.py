"""The shipped StableDiffusionPipeline of shapes, and its training."""

import pytest
import torch

from diffcache.eval.workshop.shipped.draw import draw_pictures
from diffcache.eval.workshop.small.small_unet import CALL, DIRECTORY, load
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.scenes import shipped_prompts

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pipe():
    from diffusers import StableDiffusionPipeline

    loaded = StableDiffusionPipeline.from_pretrained(str(DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


class TestShipped:
    def test_draws_what_the_prompt_says(self, pipe):
        prompts = shipped_prompts()[30:42]
        pictures = draw_pictures(pipe, prompts, steps=14, seed=5, call=CALL)
        assert pictures[0].size == (64, 64)
        overall, parts = prompt_accuracy(pictures, prompts)
        assert overall >= 0.4 and parts["background"] >= 0.8
        others = prompts[1:] + prompts[:1]
        assert prompt_accuracy(pictures, others)[1]["background"] <= 0.5

    def test_loads_in_float32_without_a_safety_checker(self, pipe):
        parts = (pipe.unet, pipe.vae, pipe.text_encoder)
        assert {part.dtype for part in parts} == {torch.float32}
        assert pipe.safety_checker is None and pipe.vae.config.shift_factor is None
        assert load(torch.bfloat16).unet.dtype == torch.bfloat16

    def test_every_prompt_fits_and_every_word_is_known(self, pipe):
        unknown = pipe.tokenizer.unk_token_id
        for text in shipped_prompts():
            tokens = pipe.tokenizer(text).input_ids
            assert len(tokens) <= pipe.tokenizer.model_max_length
            assert unknown not in tokens[1:-1]

    def test_files_are_small(self):
        sizes = [path.stat().st_size for path in DIRECTORY.rglob("*") if path.is_file()]
        assert max(sizes) < 6 * MEGABYTE and sum(sizes) < 7 * MEGABYTE
