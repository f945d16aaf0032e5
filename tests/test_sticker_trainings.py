"""Trainings of the sticker models: their pipelines draw what training showed, and every part learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diffcache.eval.workshop.small import (
    sticker_dit,
    sticker_flux,
    sticker_kontext,
    sticker_video_autoencoder,
    sticker_wan,
)
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.job import Settings, seeded
from diffcache.eval.workshop.small.sticker_autoencoder import build_autoencoder
from diffcache.eval.workshop.small.sticker_dit import CLASSES, EMPTY, Dit, load
from diffcache.eval.workshop.small.sticker_flux import Flux
from diffcache.eval.workshop.small.sticker_kontext import Kontext
from diffcache.eval.workshop.small.sticker_text import Encoder, learn_words
from diffcache.eval.workshop.small.sticker_wan import Wan
from diffcache.eval.workshop.small.stickers import draw_scenes, held_out_captions, render
from diffcache.eval.workshop.small.trainer import Draws

SETTINGS = Settings(steps=2, batch=4, examples=16)
FEW = {"num_inference_steps": 3, "output_type": "np"}
UNGUIDED = {"negative_prompt": ["", ""]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of autoencoders and text encoders of random weights, without text in a part."""
    made = tmp_path_factory.mktemp("trainings")
    (made / "textless").mkdir()
    torch.manual_seed(0)
    autoencoder = build_autoencoder()
    clip, t5 = Encoder().build()
    for name, model in {
        "sticker-autoencoder": autoencoder,
        "sticker-text": nn.ModuleDict({"text_encoder": clip, "text_encoder_2": t5}),
        "sticker-video-autoencoder": nn.ModuleDict({"vae": sticker_video_autoencoder.build_autoencoder()}),
    }.items():
        for place in (made, made / "textless"):
            if name != "sticker-text" or place == made:
                torch.save({"average": model.state_dict()}, place / f"{name}.state")
    return made


def of_flux(job: Flux, models: nn.ModuleDict, pipe: Any) -> tuple[Tensor, Any]:
    texts = held_out_captions(2)
    call = sticker_flux.CALL | FEW | UNGUIDED | {"latents": torch.randn(2, 64, 48, generator=seeded(0))}
    return job.sample(models, texts, steps=3), pipe(texts, **call).images


def of_kontext(job: Kontext, models: nn.ModuleDict, pipe: Any) -> tuple[Tensor, Any]:
    edits = job.held_edits[:2]
    texts = [edit.text for edit in edits]
    references = job.held_references
    shown = job.sample(models, texts, steps=3, guidance=2.0, references=references[:2])
    other = job.sample(models, texts, steps=3, guidance=2.0, references=references[2:4])
    assert (other.float() - shown.float()).abs().max() > 5
    before = torch.from_numpy(np.stack([render(edit.before) for edit in edits])) / 255
    call = sticker_kontext.CALL | FEW | UNGUIDED | {"latents": torch.randn(2, 64, 48, generator=seeded(0))}
    return shown, pipe(before.permute(0, 3, 1, 2), texts, **call).images


def of_dit(job: Dit, models: nn.ModuleDict, pipe: Any) -> tuple[Tensor, Any]:
    texts = list(CLASSES[:2])
    asked = pipe.get_label_ids(texts)
    assert not pipe.scheduler.config.clip_sample  # latents go beyond -1 and 1
    found = pipe(asked, generator=seeded(0), **sticker_dit.CALL, **FEW).images
    return job.sample(models, texts, steps=3), found


def of_wan(job: Wan, models: nn.ModuleDict, pipe: Any) -> tuple[Tensor, Any]:
    noise = torch.randn(1, *job.held.shape[1:], generator=seeded(0))
    found = pipe("a fox on grass", latents=noise, **sticker_wan.CALL | FEW).frames
    return job.sample(models.eval(), ["a fox on grass"], steps=3), found


DRAWN: dict[Any, Callable[..., tuple[Tensor, Any]]] = {Flux: of_flux, Kontext: of_kontext, Dit: of_dit, Wan: of_wan}


@pytest.fixture(scope="module")
def make(folder: Path) -> Iterator[Callable[[Any], Any]]:
    """Make each training once, on few examples."""
    made: dict[Any, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sticker_wan, "HELD", 2)
        places = {Kontext: folder / "textless"}
        yield (lambda kind: made.get(kind) or made.setdefault(kind, kind(SETTINGS, places.get(kind, folder))))


def filled(job: Any) -> nn.ModuleDict:
    """Build models with weights in every gate, since gates of zero would hide most of it."""
    torch.manual_seed(1)
    models: nn.ModuleDict = job.build()
    for name, weight in models.named_parameters():
        if not weight.any() and "embedding_table" not in name:
            nn.init.normal_(weight, std=0.05)
    return models


@pytest.mark.parametrize("kind", DRAWN)
def test_the_pipeline_draws_what_training_showed(kind: Any, make: Any) -> None:
    job = make(kind)
    models = filled(job)
    pipe = job.pipeline(models)
    pipe.set_progress_bar_config(disable=True)
    shown, found = DRAWN[kind](job, models, pipe)
    drawn = torch.from_numpy(found)
    assert drawn.std() > 0.02 and shown.shape == drawn.shape
    assert len(shown) == 1 or not torch.equal(shown[0], shown[1])
    close = 1.5 if kind is Kontext else 1.0  # whose references are kept in float16
    assert (drawn * 255 - shown).abs().max() <= close


@pytest.mark.parametrize("kind", DRAWN)
def test_the_loss_is_the_same_for_the_same_seed_and_trains_every_part(kind: Any, make: Any) -> None:
    job = make(kind)
    models, drawn = filled(job), Draws(job)[0]
    losses = [job.loss(models, drawn, seeded(3)) for _ in range(2)]
    assert torch.equal(*losses) and losses[0] > 0.5
    losses[0].backward()
    still = [n for n, w in models.named_parameters() if w.grad is None or not w.grad.any()]
    assert still == []
    if kind is Kontext:
        changed = drawn | {"references": drawn["references"].flip(0)}
        assert not torch.equal(job.loss(models, changed, seeded(3)), losses[0])


def test_tables_hold_the_objects_the_empty_class_and_zeros(make: Any) -> None:
    dit = make(Dit)
    drawn = [label for step in range(2) for label in Draws(dit)[step]["asked"].tolist()]
    named = [scene.stickers[0].name for scene in dit.scenes]
    assert {CLASSES[label] for label in drawn if label != EMPTY} <= set(named)
    assert all(len(scene.stickers) == 1 for scene in dit.scenes)
    rng = np.random.default_rng(0)
    told = [dit.tell(dit.scenes[0], rng) for _ in range(500)]
    assert 0.05 < told.count("") / 500 < 0.15
    for block in dit.build()["transformer"].transformer_blocks:
        table = block.norm1.emb.class_embedder.embedding_table.weight
        assert table.shape[0] == EMPTY + 1 and not table[len(CLASSES) : EMPTY].any()
        assert table[: len(CLASSES)].any(1).all() and table[EMPTY].any()


def test_a_saved_pipeline_knows_the_names_of_its_classes(folder: Path, tmp_path: Path) -> None:
    fresh = Dit(SETTINGS, folder)  # saving converts weights in place
    size = save_pipeline(fresh.pipeline(fresh.build()), tmp_path / "dit", sticker_dit.CALL)
    loaded = load(directory=tmp_path / "dit")
    assert loaded.get_label_ids(list(CLASSES)) == list(range(len(CLASSES)))
    assert size < 12_000_000


def test_latents_are_scaled_alone_as_the_pipeline_takes_them(make: Any) -> None:
    job = make(Dit)
    assert job.autoencoder.config.shift_factor is None
    drawn = draw_scenes(SETTINGS.examples, SETTINGS.seed + 1, single=1.0)
    of_classes = [scene for scene in drawn if scene.stickers[0].name in CLASSES]
    assert 0 < len(of_classes) < len(drawn) and job.scenes == of_classes
    assert job.latents.shape == (len(of_classes), *sticker_dit.LATENT)
    assert job.latents.float().std() == pytest.approx(1, abs=0.1)


def test_known_words_keep_their_vectors_in_a_larger_vocabulary(make: Any) -> None:
    old, new = Encoder(), make(Kontext).encoder
    first, second = old.build()
    models = nn.ModuleDict({"text_encoder": first, "text_encoder_2": second}).eval()
    before = old.encode(models, old.ids(["a fox on grass"]))
    learn_words(dict(models.items()), old, new)
    after = new.encode(models, new.ids(["a fox on grass"]))
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    ids = new.ids(["replace the fox with an owl"])[1][0]
    unknown = new.t5.convert_tokens_to_ids("<unk>")
    assert unknown not in ids and int((ids != 0).sum()) == 7
