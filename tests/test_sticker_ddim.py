"""The sticker pipelines on DDIM's schedule draw what their trainings show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.sticker_autoencoder import build_autoencoder
from diffcache.eval.workshop.small.sticker_ddim import CALL, LATENT, Denoising
from diffcache.eval.workshop.small.sticker_dit import EMPTY, Dit, load
from diffcache.eval.workshop.small.sticker_unet import Unet
from diffcache.eval.workshop.small.stickers import OBJECTS
from diffcache.eval.workshop.small.trainer import Draws, Settings, seeded

SETTINGS = Settings(steps=2, batch=8, examples=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder with an autoencoder of random weights."""
    made = tmp_path_factory.mktemp("ddim")
    torch.manual_seed(0)
    torch.save({"average": build_autoencoder().state_dict()}, made / "sticker-autoencoder.state")
    return made


@pytest.fixture(scope="module")
def dit(folder) -> Dit:
    return Dit(SETTINGS, folder)


@pytest.fixture(scope="module")
def unet(folder) -> Unet:
    return Unet(SETTINGS, folder)


@pytest.fixture(params=["dit", "unet"])
def job(request) -> Denoising:
    return request.getfixturevalue(request.param)


def filled(job: Denoising) -> nn.ModuleDict:
    """Build models with weights in every gate, since gates of zero would hide most of it."""
    torch.manual_seed(1)
    models = job.build()
    for name, weight in models.named_parameters():
        if not weight.any() and "embedding_table" not in name:
            nn.init.normal_(weight, std=0.05)
    return models


def test_the_pipeline_draws_what_training_showed(job: Denoising):
    models = filled(job)
    texts = list(job.titles[:2])
    shown = job.sample(models, texts, steps=3)
    pipe = job.pipeline(models)
    pipe.set_progress_bar_config(disable=True)
    asked = CALL | {"num_inference_steps": 3, "output_type": "np", "generator": seeded(0)}
    classes = pipe.get_label_ids(texts) if isinstance(job, Dit) else texts
    drawn = torch.from_numpy(pipe(classes, **asked).images)
    assert drawn.std() > 0.02 and not torch.equal(shown[0], shown[1])
    assert (drawn * 255 - shown).abs().max() <= 1.0


def test_the_loss_is_the_same_for_the_same_seed_and_trains_every_part(job: Denoising):
    models = filled(job)
    losses = [job.loss(models, Draws(job)[0], seeded(3)) for _ in range(2)]
    assert torch.equal(*losses) and losses[0] > 0.5
    losses[0].backward()
    still = [name for name, weight in models.named_parameters() if not weight.grad.any()]
    assert still == []


def test_tables_hold_the_objects_the_empty_class_and_zeros(dit: Dit):
    drawn = [label for step in range(2) for label in Draws(dit)[step]["asked"].tolist()]
    named = [scene.stickers[0].name for scene in dit.scenes]
    assert {OBJECTS[label] for label in drawn if label != EMPTY} <= set(named)
    assert all(len(scene.stickers) == 1 for scene in dit.scenes)
    rng = np.random.default_rng(0)
    told = [dit.tell(dit.scenes[0], rng) for _ in range(500)]
    assert 0.05 < told.count("") / 500 < 0.15
    for block in dit.build()["transformer"].transformer_blocks:
        table = block.norm1.emb.class_embedder.embedding_table.weight
        assert table.shape[0] == EMPTY + 1 and not table[len(OBJECTS) : EMPTY].any()
        assert table[: len(OBJECTS)].any(1).all() and table[EMPTY].any()


def test_a_saved_pipeline_knows_the_names_of_its_classes(folder: Path, tmp_path: Path):
    fresh = Dit(SETTINGS, folder)  # saving converts weights in place
    size = save_pipeline(fresh.pipeline(fresh.build()), tmp_path / "dit", CALL)
    loaded = load(directory=tmp_path / "dit")
    assert loaded.get_label_ids(list(OBJECTS)) == list(range(len(OBJECTS)))
    assert size < 12_000_000


def test_latents_are_scaled_alone_as_the_pipelines_take_them(job: Denoising):
    assert job.autoencoder.config.shift_factor is None
    assert job.latents.shape == (SETTINGS.examples, *LATENT)
    assert job.latents.float().std() == pytest.approx(1, abs=0.1)
