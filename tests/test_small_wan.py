"""The shipped WanPipeline of moving shapes, and how it is trained."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from diffcache.eval.workshop.shipped.draw import draw_films
from diffcache.eval.workshop.small import train_wan, train_wan_text, train_wan_vae
from diffcache.eval.workshop.small.course import update
from diffcache.eval.workshop.small.export_wan import RECORD
from diffcache.eval.workshop.small.loop import to_unit
from diffcache.eval.workshop.small.train_wan_vae import draw_scenes, draw_scenes_and_films
from diffcache.eval.workshop.small.wan_step import REAL_TOKENS, Step, draw_sigmas
from diffcache.eval.workshop.small.wan_whole import decode, encode
from diffcache.pipelines.small import wan
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.scenes import held_out_singles, prompt
from diffcache.pipelines.small.wan_places import start_with_places
from diffcache.psnr import psnr

MEGABYTE = 1_000_000
RED = "a small red ring on the left, on a yellow background"


@pytest.fixture(scope="module")
def pipe():
    from diffusers import WanPipeline

    loaded = WanPipeline.from_pretrained(str(wan.DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture
def untrained():
    torch.manual_seed(0)
    made = wan.build_pipeline(wan.build_autoencoder())
    for weight in made.transformer.parameters():
        nn.init.normal_(weight, std=0.1)
    return made


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

    def test_autoencoder_returns_held_out_films(self, pipe):
        _, films = draw_scenes_and_films(4, 77, held=True)
        films = to_unit(films)
        with torch.no_grad():
            made = pipe.vae.decode(pipe.vae.encode(films).latent_dist.mode()).sample
        assert psnr(made, films, span=2).mean() > 26

    def test_latents_have_unit_deviation(self, pipe):
        _, films = draw_scenes_and_films(16, 78)
        latents = train_wan.encode_films(pipe.vae, films).float()
        assert abs(float(latents.mean())) < 0.2
        assert float(latents.std()) == pytest.approx(1.0, abs=0.2)

    def test_records_are_of_this_model(self):
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        assert record["stages"]["denoiser"]["steps"] > 0


class TestWhole:
    @pytest.mark.parametrize("frames", [1, 5, 9])
    def test_equals_the_walk_in_pieces(self, frames):
        torch.manual_seed(0)
        model = wan.build_autoencoder()
        films = torch.rand(1, 3, frames, 32, 48) * 2 - 1
        with torch.no_grad():
            posterior = model.encode(films).latent_dist
            mean, logarithm = encode(model, films)
            made = model.decode(posterior.mean).sample
            whole = decode(model, posterior.mean).clamp(-1, 1)
        assert torch.allclose(mean, posterior.mean, atol=1e-5)
        assert torch.allclose(logarithm, posterior.logvar, atol=1e-5)
        assert torch.allclose(whole, made, atol=1e-5)


class TestStep:
    @pytest.mark.parametrize("text_tokens", [24, 100, 512])
    def test_sees_what_the_pipeline_shows(self, untrained, text_tokens):
        texts, sigmas = [RED, ""], torch.tensor([0.3, 0.8])
        noised = torch.randn(2, wan.LATENT_CHANNELS, 4, 4, 4)
        with torch.no_grad():
            states, _ = untrained.encode_prompt(
                texts, do_classifier_free_guidance=False, max_sequence_length=text_tokens
            )
            wanted = untrained.transformer(noised, 1000 * sigmas, states, return_dict=False)[0]
            seen = Step(untrained).velocity(noised, sigmas, texts, text_tokens)
        assert torch.allclose(seen, wanted, atol=1e-4)

    def test_the_longest_prompt_fits(self, untrained):
        for scene in draw_scenes(200, 4):
            for phrasing in (0, 1):
                text = prompt(scene, phrasing).capitalize() + "."
                assert len(untrained.tokenizer(text).input_ids) <= REAL_TOKENS

    def test_training_lowers_the_loss(self):
        torch.manual_seed(0)
        pipe = wan.build_pipeline(wan.build_autoencoder())
        step = Step(pipe)
        optimizer = torch.optim.AdamW([{"params": step.parameters(), "factor": 1.0}])
        latents, noise = (torch.randn(8, wan.LATENT_CHANNELS, 2, 4, 4) for _ in range(2))
        drawn = (latents, noise, torch.linspace(0.1, 0.9, 8), [RED] * 8, 24)
        losses = [update(step, optimizer, step, drawn, 2e-3) for _ in range(25)]
        assert losses[-1] < 0.8 * losses[0]

    def test_text_lengths_reach_from_the_usual_to_the_default(self):
        rng = np.random.default_rng(0)
        drawn = [train_wan.draw_text_tokens(rng) for _ in range(500)]
        assert min(drawn) == wan.TEXT_TOKENS and 300 < max(drawn) <= 512
        assert 0.6 < np.mean([count == wan.TEXT_TOKENS for count in drawn]) < 0.9

    def test_noise_levels_are_the_samplers_at_last_and_higher_before(self):
        early, late = (draw_sigmas(4000, torch.Generator().manual_seed(0), p) for p in (0.0, 1.0))
        assert late.min() > 0 and early.max() < 1
        assert early.median() == pytest.approx(6 / 7, abs=0.02)
        assert late.median() == pytest.approx(3 / 4, abs=0.02)


class TestPlaces:
    def test_the_first_block_flags_edges_in_pure_noise(self):
        torch.manual_seed(0)
        model, kept = wan.build_transformer(), []
        model.blocks[0].register_forward_hook(lambda block, given, out: kept.append(out))
        with torch.no_grad():
            noise = torch.randn(8, wan.LATENT_CHANNELS, 3, 8, 8)
            model(noise, torch.full((8,), 1000.0), torch.zeros(8, 4, 64))
        flags = kept[0][..., 72:76].unflatten(1, (3, 4, 4)).mean(dim=(0, 1))
        wanted = torch.ones(4, 4, 4)
        wanted[:, 0, 0] = wanted[:, 3, 1] = wanted[0, :, 2] = wanted[3, :, 3] = -1
        assert torch.equal(flags.sign(), wanted)
        assert torch.allclose(flags, wanted, atol=0.4)

    def test_the_start_is_the_same_every_time_and_trainable(self):
        torch.manual_seed(0)
        one = wan.build_transformer()
        torch.manual_seed(0)
        same = wan.build_transformer().state_dict()
        assert all(torch.equal(value, same[name]) for name, value in one.state_dict().items())
        assert all(weight.requires_grad for weight in one.parameters())

    def test_another_width_is_refused(self):
        from diffusers import WanTransformer3DModel

        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=24, in_channels=4, num_layers=2, text_dim=8
        )
        with pytest.raises(ValueError, match="4 heads of 24"):
            start_with_places(model)


class TestData:
    def test_scenes_are_those_of_the_films(self):
        scenes, films = draw_scenes_and_films(3, 6)
        assert scenes == draw_scenes(3, 6)
        again = draw_scenes_and_films(3, 6)[1]
        assert films.shape == (3, 3, wan.FRAMES, 64, 64) and torch.equal(films, again)
        texts = [prompt(scene) for scene in scenes]
        assert prompt_accuracy(films[:, :, wan.FRAMES // 2], texts)[0] == 1.0

    def test_classes_name_the_scene(self):
        (scene,) = draw_scenes(1, 9)
        (row,) = train_wan_text.classes([scene]).tolist()
        assert list(train_wan_text.COLORS)[row[0]] == scene.background
        assert list(train_wan_text.POSITIONS)[row[4]] == scene.figures[0].position

    def test_latents_on_disk_are_read_back(self, tmp_path):
        torch.manual_seed(0)
        model = wan.build_autoencoder()
        scenes, latents = train_wan.draw_latents(tmp_path, model, train_wan.Plan(films=3))
        again = train_wan.draw_latents(tmp_path, None, train_wan.Plan(films=3, resume=True))
        assert again[0] == scenes and torch.equal(again[1], latents)
        assert latents.shape == (3, wan.LATENT_CHANNELS, 5, 8, 8)


class TestAutoencoderTraining:
    def test_factors_bring_latents_to_unit_deviation(self):
        torch.manual_seed(0)
        model = wan.build_autoencoder()
        _, films = draw_scenes_and_films(4, 1)
        train_wan_vae.set_factors(model, to_unit(films))
        latents = train_wan.encode_films(model, films).float()
        per_channel = latents.transpose(0, 1).flatten(1)
        assert torch.allclose(per_channel.std(1), torch.ones(wan.LATENT_CHANNELS), atol=0.05)

    def test_objects_weigh_more_than_their_background(self):
        wanted = -torch.ones(1, 3, 1, 4, 4)
        wanted[..., 0, 0] = 1.0
        there, around = wanted.clone(), wanted.clone()
        there[..., 0, 0] += 0.2
        around[..., 3, 3] += 0.2
        errors = [float(train_wan_vae.error_of(made, wanted)) for made in (there, around)]
        assert errors[0] == pytest.approx(5 * errors[1])
        assert errors[1] == pytest.approx((0.2 + 2 * 0.2**2) / (15 + 5))

    def test_narrow_keeps_what_the_latents_hold(self):
        torch.manual_seed(0)
        count = train_wan_vae.WIDE_CHANNELS
        wide = wan.build_autoencoder(count)
        with torch.no_grad():  # latents that lie in six directions
            mixed = torch.randn(count, 6) @ torch.randn(6, count)
            mean = wide.quant_conv.weight[:count, :, 0, 0, 0]
            mean.copy_(mixed @ mean)
            wide.quant_conv.bias[:count] = mixed @ wide.quant_conv.bias[:count]
            wide.post_quant_conv.bias.zero_()  # the one thing lost at the edges
        films = to_unit(draw_scenes_and_films(4, 1)[1])
        made = train_wan_vae.narrow(wide, films)
        with torch.no_grad():
            before = wide.decode(wide.encode(films).latent_dist.mode()).sample
            after = made.decode(made.encode(films).latent_dist.mode()).sample
        assert made.config.z_dim == wan.LATENT_CHANNELS
        assert torch.allclose(after, before, atol=1e-3)

    def test_perfect_films_are_measured_as_such(self, monkeypatch):
        films = to_unit(draw_scenes_and_films(2, 1)[1])
        monkeypatch.setattr(train_wan_vae, "encode", lambda model, part: (part, None))
        monkeypatch.setattr(train_wan_vae, "decode", lambda model, latents: latents)
        assert train_wan_vae.measure(None, films) == {
            "psnr": 100.0,
            "motion_error": 0.0,
        }
