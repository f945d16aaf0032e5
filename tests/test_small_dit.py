"""The shipped class-conditional pipeline, and how it and its sibling are trained."""

import pytest
import torch

from diffcache.eval.workshop.shipped.draw import draw_pictures
from diffcache.eval.workshop.shipped.quality import of_classes
from diffcache.eval.workshop.small.dit import CALL, DIRECTORY, EMPTY, LABELS, draw, load
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
