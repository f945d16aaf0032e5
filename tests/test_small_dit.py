"""The shipped class-conditional pipeline, and how it and its sibling are trained."""

import pytest
import torch

from diffcache.eval.workshop.shipped.draw import draw_pictures
from diffcache.eval.workshop.shipped.quality import of_classes
from diffcache.eval.workshop.small import train_dit
from diffcache.eval.workshop.small.course import Course, Plan
from diffcache.eval.workshop.small.diffusion import (
    build_scheduler,
    disturb,
    draw_timesteps,
    load_autoencoder,
    noise_error,
    record,
)
from diffcache.eval.workshop.small.dit import (
    CALL,
    DIRECTORY,
    EMPTY,
    LABELS,
    build_pipeline,
    build_transformer,
    draw,
    load,
)
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.pipelines.small.classifier import read

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pipe():
    from diffusers import DiTPipeline

    loaded = DiTPipeline.from_pretrained(str(DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


class TestShipped:
    def test_draws_what_the_class_says(self, pipe):
        labels = pipe.get_label_ids([LABELS[number] for number in range(0, 35, 3)])
        assert labels == list(range(0, 35, 3))
        pictures = draw_pictures(pipe, labels, steps=14, seed=5, call=CALL)
        assert pictures[0].size == (64, 64)
        found = of_classes(pictures, labels)
        assert found["whole_right"].float().mean() >= 0.25
        assert found["color"].float().mean() >= 0.4

    def test_without_guidance_no_empty_class_is_asked_for(self, pipe):
        seen = []
        hook = pipe.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["class_labels"]), with_kwargs=True
        )
        try:
            for scale in (1.0, 3.0):
                noise = torch.Generator().manual_seed(0)
                pipe([4], guidance_scale=scale, num_inference_steps=1, generator=noise)
        finally:
            hook.remove()
        assert [labels.tolist() for labels in seen] == [[4], [4, EMPTY]]

    def test_every_block_holds_the_classes_and_zeros(self, pipe):
        for block in pipe.transformer.transformer_blocks:
            table = block.norm1.emb.class_embedder.embedding_table.weight
            assert table.shape == (EMPTY + 1, 128)
            assert not table[len(LABELS) : EMPTY].any()
            assert table[: len(LABELS)].any(dim=1).all() and table[EMPTY].any()

    def test_loads_in_float32_with_a_name_for_every_class(self, pipe):
        assert pipe.transformer.dtype == pipe.vae.dtype == torch.float32
        assert pipe.vae.config.shift_factor is None
        assert set(pipe.labels) == set(LABELS) and len(LABELS) == 35
        assert load(torch.bfloat16).transformer.dtype == torch.bfloat16

    def test_files_are_small(self):
        sizes = [path.stat().st_size for path in DIRECTORY.rglob("*") if path.is_file()]
        assert max(sizes) < 8 * MEGABYTE and sum(sizes) < 10 * MEGABYTE


class TestPictures:
    def test_one_large_object_of_the_class_in_another_color_than_the_ground(self):
        labels, pictures = draw(70, 3)
        assert labels.dtype == torch.int64 and pictures.shape == (70, 3, 64, 64)
        right = 0
        for label, scene in zip(labels.tolist(), read(pictures), strict=True):
            figure = scene.figures[0]
            right += LABELS[label] == f"{figure.color} {figure.shape}"
            assert len(scene.figures) == 1 and figure.size == "large"
            assert scene.background != figure.color
        assert right >= 68

    def test_the_same_for_the_same_seed(self):
        one, same, other = draw(3, 3), draw(3, 3), draw(3, 4)
        assert torch.equal(one[1], same[1]) and not torch.equal(one[1], other[1])


class TestNoise:
    def test_mixes_as_the_scheduler_does(self):
        scheduler, generator = build_scheduler(), torch.Generator().manual_seed(0)
        times = draw_timesteps(6, generator)
        latents, noise = torch.randn(2, 6, 4, 16, 16, generator=generator)
        mixed = disturb(latents, noise, scheduler.alphas_cumprod[times])
        assert torch.equal(mixed, scheduler.add_noise(latents, noise, times))

    def test_error_is_that_of_the_velocity(self):
        generator = torch.Generator().manual_seed(0)
        latents, noise, off = torch.randn(3, 5, 4, 8, 8, generator=generator)
        signal = torch.tensor([0.03, 0.1, 0.4, 0.8, 0.99])
        mixed = disturb(latents, noise, signal)
        predicted = noise + 0.1 * off
        share = signal[:, None, None, None]
        guess = (mixed - (1 - share).sqrt() * predicted) / share.sqrt()
        velocity = share.sqrt() * predicted - (1 - share).sqrt() * guess
        truth = share.sqrt() * noise - (1 - share).sqrt() * latents
        torch.testing.assert_close(
            noise_error(predicted, noise, signal), (velocity - truth).square().mean()
        )

    def test_the_weight_is_held_below_two_hundredths(self):
        signal = torch.tensor([1e-5])
        found = noise_error(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), signal)
        assert found == pytest.approx(50.0)

    def test_timesteps_are_in_range_and_lean_to_the_middle(self):
        times = draw_timesteps(4000, torch.Generator().manual_seed(0))
        assert times.min() >= 0 and times.max() <= 999
        assert ((times > 150) & (times < 550)).float().mean() > 0.5


class TestTraining:
    def test_building_is_deterministic_and_predicts_nothing_at_first(self):
        built = []
        for _ in range(2):
            torch.manual_seed(1)
            built.append(build_transformer())
        pairs = zip(*(model.state_dict().items() for model in built), strict=True)
        assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
        given = torch.randn(1, 4, 16, 16)
        called = built[0](given, timestep=torch.tensor([9]), class_labels=torch.tensor([EMPTY]))
        assert not called.sample.any() and not built[0].training

    def test_steps_lower_the_loss(self):
        torch.manual_seed(0)
        pipe = build_pipeline(load_autoencoder())
        step = train_dit.Step(pipe, compiled=False)
        labels, latents = torch.arange(4), torch.randn(4, 4, 1, 1).expand(4, 4, 16, 16)
        optimizer = torch.optim.AdamW(pipe.transformer.parameters(), lr=1e-3)
        losses = []
        for _ in range(8):
            loss = step(latents, labels, torch.Generator().manual_seed(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.7 * losses[0]

    def test_a_training_is_exported(self, tmp_path):
        train_dit.fit(tmp_path, Plan(compiled=False), Course("dit", examples=4, steps=2, batch=2))
        pipe = train_dit.assemble(tmp_path)
        kept = pipe.transformer.proj_out_2.weight.detach().bfloat16().float()
        assert save_pipeline(pipe, tmp_path / "model") < 10 * MEGABYTE
        assert torch.equal(load(directory=tmp_path / "model").transformer.proj_out_2.weight, kept)
        done = record(tmp_path, "dit", tmp_path / "some-training.json", seed=3, command="python")
        assert done["model"] == "some" and done["steps"] == 2
