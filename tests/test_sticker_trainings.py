"""Trainings of the sticker models: their pipelines draw what training showed, and every part learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diffcache.eval.workshop.small import sticker_flux, sticker_kontext, sticker_video_autoencoder, sticker_wan
from diffcache.eval.workshop.small.job import Settings, seeded
from diffcache.eval.workshop.small.sticker_autoencoder import build_autoencoder
from diffcache.eval.workshop.small.sticker_dit import CLASSES, Dit
from diffcache.eval.workshop.small.sticker_flux import Flux
from diffcache.eval.workshop.small.sticker_kontext import Kontext
from diffcache.eval.workshop.small.sticker_text import Encoder
from diffcache.eval.workshop.small.sticker_wan import Wan
from diffcache.eval.workshop.small.stickers import held_out_captions, render
from diffcache.eval.workshop.small.trainer import Draws

SETTINGS = Settings(steps=2, batch=4, examples=16)
FEW = {"num_inference_steps": 3, "output_type": "np"}


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


def said_of(job: Any) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Return arguments of a guided call, and what training says in each of the model's calls of a step."""
    if isinstance(job, Dit):
        texts = list(CLASSES[:2])
        return {"class_labels": [0, 1]}, [{"asked": job.ids([*texts, "", ""])}]
    texts = ["a fox on grass"] if isinstance(job, Wan) else held_out_captions(2)
    call: dict[str, Any] = {"prompt": texts, "negative_prompt": [""] * len(texts)}
    more = {}
    if isinstance(job, Kontext):
        edits, more = job.held_edits[:2], {"references": job.held["references"][:2]}
        call["prompt"] = texts = [edit.text for edit in edits]
        before = torch.from_numpy(np.stack([render(edit.before) for edit in edits])) / 255
        call["image"] = before.permute(0, 3, 1, 2)
    return call, [job.ids(said) | more for said in (texts, [""] * len(texts))]


def answer_of(job: Any, models: nn.ModuleDict, shown: Tensor, times: Tensor, said: dict[str, Tensor]) -> Tensor:
    """Return what training has the model answer."""
    found: Tensor
    if isinstance(job, Dit):
        found = job.predict(models, shown, times, said["asked"])
    elif isinstance(job, Wan):
        found = job.velocity(models, shown, times / 1000, said)
    else:
        found = job.velocity(models, shown[:, :64], times, said)
    return found


KINDS: tuple[Any, ...] = (Flux, Kontext, Dit, Wan)


@pytest.fixture(scope="module")
def make(folder: Path) -> Iterator[Callable[[Any], Any]]:
    """Make each training once, on few examples."""
    made: dict[Any, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (sticker_flux, sticker_kontext, sticker_wan):
            patch.setattr(module, "HELD", 2)
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


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_pipeline_shows_its_model_what_training_showed(kind: Any, make: Any) -> None:
    job = make(kind)
    models = filled(job).eval()
    pipe = job.pipeline(models)
    pipe.set_progress_bar_config(disable=True)
    asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
        asked.append((given.get("hidden_states", *args), given["timestep"], out[0]))

    hook = models["transformer"].register_forward_hook(note, with_kwargs=True)
    call, said = said_of(job)
    drawn = torch.from_numpy(pipe(**{**job.call, **FEW, **call}, generator=seeded(0))[0])
    hook.remove()
    assert len(asked) == 3 * len(said) and drawn.std() > 0.02
    assert len(drawn) == 1 or not torch.equal(drawn[0], drawn[1])
    for number, (shown, times, answer) in enumerate(asked):
        now = said[number % len(said)]
        wanted = answer_of(job, models, shown, times, now)
        torch.testing.assert_close(
            answer[:, : wanted.shape[1]], wanted, atol=0.02 if kind is Kontext else 1e-4, rtol=0
        )
        if kind is Kontext:  # whose references are kept in float16
            other = now | {"references": now["references"].flip(0)}
            assert (answer_of(job, models, shown, times, other) - wanted).abs().max() > 0.1
    clean, noise = torch.randn(2, 1, 4, generator=seeded(1))
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    if kind is Dit:
        assert not scheduler.config.clip_sample  # latents go beyond -1 and 1
        wanted = job.signal[7] * noise - job.noise[7] * clean
        torch.testing.assert_close(scheduler.get_velocity(clean, noise, torch.tensor([7])), wanted)
        return
    scheduler.set_timesteps(3)
    nearer = scheduler.step(noise - clean, scheduler.timesteps[0], noise).prev_sample
    torch.testing.assert_close(nearer, torch.lerp(clean, noise, scheduler.sigmas[1]))


def test_latents_are_decoded_as_the_pipeline_does(make: Any) -> None:
    job = make(Flux)
    pipe = job.pipeline(filled(job))
    call = {**job.call, **FEW, **said_of(job)[0]}
    packed, drawn = (pipe(**{**call, "output_type": kind}, generator=seeded(0)).images for kind in ("latent", "np"))
    latents = pipe._unpack_latents(packed, 64, 64, pipe.vae_scale_factor)
    assert (torch.from_numpy(drawn) * 255 - sticker_flux.decode(job.autoencoder, latents)).abs().max() <= 1


@pytest.mark.parametrize("kind", KINDS)
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
