"""The shapes data set, its reader and the shipped FluxPipeline."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.pipelines.small import scenes
from diffcache.pipelines.small.classifier import features, prompt_accuracy, read
from diffcache.pipelines.small.scenes import (
    Figure,
    Scene,
    draw,
    parse,
    prompt,
    render,
    sample_scene,
)

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pipe():
    from diffusers import FluxPipeline

    from diffcache.pipelines.small.flux import DIRECTORY

    loaded = FluxPipeline.from_pretrained(str(DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


class TestScenes:
    @pytest.mark.parametrize("phrasing", [0, 1])
    def test_prompt_and_parse_are_inverse(self, phrasing):
        rng = np.random.default_rng(0)
        for _ in range(200):
            scene = sample_scene(rng, held=None)
            assert parse(prompt(scene, phrasing)) == scene

    def test_prompt_reads_as_english(self):
        ring = Figure("ring", "red", "small", "left")
        square = Figure("square", "blue", "large", "top right")
        assert prompt(Scene("yellow", (ring, square))) == (
            "a small red ring on the left and a large blue square at the top right, "
            "on a yellow background"
        )

    def test_parse_ignores_case_and_full_stop(self):
        text = prompt(Scene("white", (Figure("cross", "black", "large", "center"),)), 1)
        assert parse(text.capitalize() + ".") == parse(text)

    def test_render_is_determined_by_its_generator(self):
        scene = sample_scene(np.random.default_rng(1))
        one, same, other = (render(scene, np.random.default_rng(n)) for n in (5, 5, 6))
        assert one.shape == (64, 64, 3) and one.dtype == np.uint8
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)

    @pytest.mark.parametrize("shape", scenes.SHAPES)
    def test_every_shape_fits_its_place(self, shape):
        for position, (x, y) in scenes.POSITIONS.items():
            picture = render(Scene("black", (Figure(shape, "white", "large", position),)))
            rows, columns = np.nonzero(picture.sum(-1) > 400)
            assert abs(columns.mean() + 0.5 - x) < 1
            assert abs(rows.mean() + 0.5 - y) < 2.5

    def test_objects_are_apart_and_never_of_the_background_color(self):
        rng = np.random.default_rng(2)
        for _ in range(300):
            scene = sample_scene(rng)
            assert scene.background not in {figure.color for figure in scene.figures}
            if len(scene.figures) == 2:
                (x, y), (u, v) = (scenes.POSITIONS[f.position] for f in scene.figures)
                assert max(abs(x - u), abs(y - v)) == 32

    def test_held_out_scenes_are_never_trained_on(self):
        rng = np.random.default_rng(3)
        trained = {sample_scene(rng).key() for _ in range(3000)}
        held = {parse(text).key() for text in scenes.held_out_prompts(300)}
        assert len(held) == 300
        assert not trained & held

    def test_order_of_objects_does_not_move_a_scene_between_the_splits(self):
        rng = np.random.default_rng(4)
        for _ in range(100):
            scene = sample_scene(rng, held=None, figures=2)
            turned = Scene(scene.background, scene.figures[::-1])
            assert scenes.held_out(scene) == scenes.held_out(turned)

    def test_shipped_prompts_are_held_out(self):
        prompts = scenes.shipped_prompts()
        assert len(set(prompts)) == 64
        assert all(scenes.held_out(parse(text)) for text in prompts)


class TestReader:
    def test_reads_rendered_scenes(self):
        drawn, pictures = draw(300, 99, held=True)
        overall, parts = prompt_accuracy(pictures, [prompt(scene) for scene in drawn])
        assert overall >= 0.99
        assert min(parts.values()) >= 0.98

    def test_takes_pil_arrays_and_tensors_alike(self):
        _, pictures = draw(3, 7)
        arrays = list(pictures.movedim(1, -1).numpy())
        found = read(pictures)
        assert read(arrays) == found
        assert read([Image.fromarray(array) for array in arrays]) == found
        assert read(pictures.float() / 127.5 - 1) == found

    def test_wrong_prompts_score_low(self):
        drawn, pictures = draw(100, 8)
        overall, parts = prompt_accuracy(pictures, [prompt(s) for s in drawn[1:] + drawn[:1]])
        assert overall < 0.4
        assert parts["exact"] == 0

    def test_features_tell_pictures_apart(self):
        _, pictures = draw(4, 9)
        vectors = features(pictures)
        assert vectors.shape == (4, 96)
        assert torch.cdist(vectors, vectors)[~torch.eye(4, dtype=bool)].min() > 0.1


class TestPipeline:
    def test_is_small(self):
        from diffcache.pipelines.small.flux import DIRECTORY

        files = [path for path in DIRECTORY.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 10 * MEGABYTE

    def test_is_a_plain_flux_pipeline(self, pipe):
        assert type(pipe).__name__ == "FluxPipeline"
        assert len(pipe.transformer.transformer_blocks) == 4
        assert len(pipe.transformer.single_transformer_blocks) == 8
        assert not pipe.transformer.config.guidance_embeds

    def test_every_word_is_one_token(self, pipe):
        for text in scenes.held_out_prompts(50):
            count = len(text.replace(",", " ,").split())
            assert len(pipe.tokenizer_2(text).input_ids) == count + 1 <= 24
            assert len(pipe.tokenizer(text).input_ids) == count + 2
            assert pipe.tokenizer_2.unk_token_id not in pipe.tokenizer_2(text).input_ids

    def test_plain_attention_is_the_same_attention(self, pipe):
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        from diffcache.eval.workshop.small.plain_attention import PlainFluxAttention
        from diffcache.pipelines.small.flux import CALL

        def latents():
            noise = torch.Generator().manual_seed(0)
            call = {**CALL, "num_inference_steps": 2, "output_type": "latent"}
            return pipe("a small red ring on the left", generator=noise, **call).images

        wanted = latents()
        pipe.transformer.set_attn_processor(PlainFluxAttention())
        try:
            assert torch.allclose(latents(), wanted, atol=1e-4)
        finally:
            pipe.transformer.set_attn_processor(FluxAttnProcessor())

    def test_few_steps_give_finite_pictures(self, pipe):
        from diffcache.pipelines.small.flux import CALL

        call = {**CALL, "num_inference_steps": 2, "output_type": "np"}
        pictures = pipe(scenes.shipped_prompts()[:2], **call).images
        assert pictures.shape == (2, 64, 64, 3)
        assert np.isfinite(pictures).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_load_gives_one_dtype_and_the_right_size(self, dtype):
        from diffcache.pipelines.small.flux import TEXT_TOKENS, load

        small = load(dtype)
        parts = (small.transformer, small.text_encoder, small.text_encoder_2, small.vae)
        assert {weight.dtype for part in parts for weight in part.parameters()} == {dtype}
        text = scenes.shipped_prompts()[0]
        call = {"num_inference_steps": 1, "max_sequence_length": TEXT_TOKENS}
        assert small(text, **call).images[0].size == (64, 64)

    def test_same_noise_same_picture(self, pipe):
        from diffcache.eval.workshop.shipped.draw import draw_pictures

        one, same, other = (
            np.asarray(draw_pictures(pipe, scenes.shipped_prompts()[:1], steps=3, seed=seed)[0])
            for seed in (1, 1, 2)
        )
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)

    @pytest.mark.slow
    def test_draws_what_held_out_prompts_say(self, pipe):
        from diffcache.eval.workshop.shipped.quality import QUALITIES

        found = QUALITIES["shapes-flux"].measure(pipe, 28, 12, 1)
        assert len(found["whole_right"]) == 12
        assert found["prompt_accuracy"].mean() >= 0.9
