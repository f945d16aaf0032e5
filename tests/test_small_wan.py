"""The shipped WanPipeline of moving shapes."""

import pytest
import torch

from diffcache.eval.workshop.shipped.draw import draw_films
from diffcache.pipelines.small import wan
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.scenes import held_out_singles

MEGABYTE = 1_000_000
RED = "a small red ring on the left, on a yellow background"


@pytest.fixture(scope="module")
def pipe():
    from diffusers import WanPipeline

    loaded = WanPipeline.from_pretrained(str(wan.DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


class TestShipped:
    def test_is_small(self):
        files = [path for path in wan.DIRECTORY.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 10 * MEGABYTE

    def test_has_the_parts_of_wan(self, pipe):
        from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
        from diffusers import WanTransformer3DModel as Transformer
        from transformers import UMT5EncoderModel

        assert type(pipe.transformer) is Transformer and pipe.transformer_2 is None
        assert type(pipe.vae) is AutoencoderKLWan
        assert type(pipe.text_encoder) is UMT5EncoderModel
        assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
        assert (pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial) == (2, 8)

    def test_films_what_held_out_prompts_say(self, pipe):
        prompts = held_out_singles(5)[:8]
        films = draw_films(pipe, prompts, steps=8, seed=5)
        assert films.shape == (8, wan.FRAMES, 64, 64, 3)
        share, _ = prompt_accuracy(films[:, wan.FRAMES // 2].permute(0, 3, 1, 2), prompts)
        assert share > 0.7

    def test_the_same_noise_makes_the_same_film(self, pipe):
        one, same, other = (draw_films(pipe, [RED], steps=2, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)

    def test_load_takes_a_dtype(self):
        loaded = wan.load(torch.bfloat16)
        weights = [*loaded.transformer.parameters(), *loaded.vae.parameters()]
        assert {weight.dtype for weight in weights} == {torch.bfloat16}
