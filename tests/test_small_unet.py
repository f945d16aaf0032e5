"""The shipped StableDiffusionPipeline of shapes, and its training."""

import pytest
import torch

from diffcache.eval.workshop.shipped.draw import draw_pictures
from diffcache.eval.workshop.small import train_unet
from diffcache.eval.workshop.small.course import Course, Plan
from diffcache.eval.workshop.small.diffusion import load_autoencoder
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.small_unet import (
    CALL,
    DIRECTORY,
    build_pipeline,
    build_unet,
    load,
    load_text,
)
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


class TestTraining:
    def test_building_is_deterministic_and_predicts_nothing_at_first(self):
        built = []
        for _ in range(2):
            torch.manual_seed(1)
            built.append(build_unet())
        pairs = zip(*(model.state_dict().items() for model in built), strict=True)
        assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
        states = torch.randn(1, 32, 64)
        called = built[0](torch.randn(1, 4, 16, 16), 9, encoder_hidden_states=states)
        assert not called.sample.any()

    def test_the_text_side_starts_where_shapes_flux_is(self):
        tokenizer, encoder = load_text()
        pipe = build_pipeline(load_autoencoder())
        assert pipe.tokenizer.get_vocab() == tokenizer.get_vocab()
        mine = pipe.text_encoder.state_dict()
        assert all(torch.equal(mine[name], value) for name, value in encoder.state_dict().items())

    def test_steps_lower_the_loss(self):
        torch.manual_seed(0)
        pipe = build_pipeline(load_autoencoder())
        step = train_unet.Step(pipe, compiled=False)
        latents = torch.randn(4, 4, 1, 1).expand(4, 4, 16, 16)
        prompts = ["", *shipped_prompts()[:3]]
        parameters = [*pipe.unet.parameters(), *pipe.text_encoder.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        losses = []
        for _ in range(8):
            loss = step(latents, prompts, torch.Generator().manual_seed(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.7 * losses[0]
        used = [name for name, p in pipe.text_encoder.named_parameters() if p.grad is not None]
        assert len(used) == len(list(pipe.text_encoder.parameters()))

    def test_a_training_is_exported(self, tmp_path):
        train_unet.fit(
            tmp_path, Plan(compiled=False), Course("unet", examples=12, steps=2, batch=2)
        )
        pipe = train_unet.assemble(tmp_path)
        kept = pipe.unet.conv_out.weight.detach().bfloat16().float()
        assert save_pipeline(pipe, tmp_path / "model") < 7 * MEGABYTE
        assert torch.equal(load(directory=tmp_path / "model").unet.conv_out.weight, kept)
