"""The training of the small causal video model: it sees in one pass what a rollout will show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffcache.eval.workshop.small import train_causal
from diffcache.eval.workshop.small.causal_step import ChunkAttention, Held, draw_held, predict
from diffcache.eval.workshop.small.course import Plan
from diffcache.pipelines.small import causal
from diffcache.pipelines.small.causal_scenes import CHUNK, HELD_OUT, SIZE, draw
from diffcache.video import FewSteps, FullHistory, VideoPolicy, Window

CHUNKS = 5


def strong(layers: int = 2) -> causal.ShapesCausal:
    """Return a model whose tokens depend on each other strongly."""
    model = causal.build()
    torch.manual_seed(0)
    transformer = causal.build_transformer(layers=layers)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    return causal.ShapesCausal(transformer.eval(), model.text_encoder, model.tokenizer)


@pytest.mark.parametrize(
    ("held", "policy"),
    [
        (Held(), FullHistory()),
        (Held(6), Window(6, sinks=0)),
        (Held(3, True), Window(3, sinks=3)),
        (Held(6, True), Window(6, sinks=3)),
    ],
    ids=["all", "window", "sinks", "sinks and window"],
)
@torch.no_grad()
def test_one_pass_equals_a_rollout(held: Held, policy: VideoPolicy) -> None:
    """Chunks of one pass, noisy after clean ones, equal those of a session with the cache."""
    model, generator = strong(), torch.Generator().manual_seed(0)
    clips = draw(2, CHUNKS * CHUNK, generator, switched=1.0)
    film, text = clips.film(), train_causal.text_table(model)[clips.shapes, clips.colors]
    levels = train_causal.draw_levels(1, CHUNKS * CHUNK, generator).expand(2, -1)
    noisy = film + levels[:, None, :, None, None] * torch.randn(film.shape, generator=generator)

    made = []
    with model.video() as video:
        session = video.session(text[:, 0], size=(SIZE, SIZE), policy=policy)
        for start in range(0, CHUNKS * CHUNK, CHUNK):
            own = slice(start, start + CHUNK)
            session.prompt = text[:, start]
            with session.chunk(CHUNK):
                made.append(session._velocity(noisy[:, :, own], 1000 * levels[0, start].item()))
                session._commit(film[:, :, own])

    attention = ChunkAttention(model.transformer, (4, 4))
    attention.frames = CHUNKS * CHUNK
    for block in model.transformer.blocks:
        block.attn1.set_processor(attention)
    outs = {}
    for kind in (held, Held(3)):
        attention.held = kind
        outs[kind] = predict(model.transformer, film, noisy, levels, text)
    assert torch.allclose(outs[held], torch.cat(made, 2), atol=1e-5)
    assert (outs[held] - outs[Held(3)]).abs().max() > 1e-2  # the cache matters


def test_a_step_trains_every_weight_and_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight goes without a gradient once the two that start at zero have moved."""
    monkeypatch.setattr(train_causal, "BATCH", 1)
    monkeypatch.setattr(train_causal, "FRAMES", 2 * CHUNK)
    torch.manual_seed(0)
    model = causal.build()
    step = train_causal.Step(model, Plan())
    with torch.no_grad():
        model.transformer.proj_out.weight.normal_(std=0.1)
        model.transformer.condition_embedder.time_proj.weight.normal_(std=0.1)
    one, again, other = (step(torch.zeros(1), index, 0.0) for index in (3, 3, 4))
    assert one.item() == again.item() != other.item()
    one.backward()
    dead = [name for name, weight in model.transformer.named_parameters()
            if weight.grad is None or not weight.grad.any()]  # fmt: skip
    assert dead == []
    assert all(weight.grad is None for weight in model.text_encoder.parameters())


def test_half_of_the_steps_hold_all_and_most_chunks_have_a_level_of_the_sampler() -> None:
    generator = torch.Generator().manual_seed(HELD_OUT)
    kinds = [draw_held(generator) for _ in range(400)]
    assert 160 < sum(kind == Held() for kind in kinds) < 240
    assert 60 < sum(kind.sinks for kind in kinds) < 140
    levels = train_causal.draw_levels(100, 24, generator)
    assert torch.equal(levels, levels[:, ::CHUNK].repeat_interleave(CHUNK, 1))
    of_sampler = torch.isin(levels, torch.tensor(causal.SAMPLER.levels)).float().mean().item()
    assert of_sampler == pytest.approx(0.6, abs=0.06)
    film = draw(2, 3, generator).film()
    assert train_causal.weighted_error(film, film) == 0
    assert train_causal.weighted_error(film + 0.1, film) > 0.01  # more than the plain error


def test_a_training_is_exported_and_rolls_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_causal, "BATCH", 1)
    monkeypatch.setattr(train_causal, "FRAMES", 2 * CHUNK)
    made = train_causal.fit(tmp_path, Plan(steps=2, compiled=False))
    size = train_causal.export(tmp_path, tmp_path / "out")
    assert size < 6_000_000
    model = causal.load(tmp_path / "out")
    for one, other in zip(
        made.transformer.parameters(), model.transformer.parameters(), strict=True
    ):
        assert torch.equal(one.detach().bfloat16().float(), other)
    with model.video() as video:
        session = video.session(model.embed(["a red ring"]), **causal.CALL)
        session.take(draw(1, CHUNK, torch.Generator().manual_seed(1)).film())
        assert session.next().shape == (1, 3, CHUNK, SIZE, SIZE)
    with pytest.raises(ValueError, match="prompt='a red dog': must name one of square"):
        model.embed(["a red dog"])


def test_a_sampler_takes_clean_chunks_as_they_are() -> None:
    x, predicted = torch.randn(2, 1, 3, 3, 6, 6).unbind()
    assert torch.equal(causal.SAMPLER.clean(x, predicted, 1), predicted)
    velocity = FewSteps(timesteps=(1000, 500), shift=1.0)
    assert torch.equal(velocity.clean(x, predicted, 1), x - 0.5 * predicted)
