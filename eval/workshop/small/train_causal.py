"""Train and export the small causal video model.

    python -m diffcache.eval.workshop.small.train_causal --out out/shapes-causal

Flow matching with a noise level for every chunk, each chunk given the clean frames before it. The
history is disturbed a little, as the frames of a rollout are. Half of the clips are trained with
the windows and sinks of a cache; in a quarter of them the prompt changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.causal_step import ChunkAttention, draw_held, predict
from diffcache.eval.workshop.small.course import Course, Plan, train
from diffcache.eval.workshop.small.diffusion import record
from diffcache.eval.workshop.small.loop import training_parser
from diffcache.files import write_json
from diffcache.pipelines.small import causal_scenes as scenes
from diffcache.pipelines.small.causal import CALL, DIRECTORY, SAMPLER, ShapesCausal, build
from diffcache.pipelines.small.causal_scenes import CHUNK, FRAMES, SIZE, draw

BATCH = 4  # clips in a step
DISTURBED = 0.1  # most noise on the history, whose noise level is said to be 0
SWITCHED = 0.25  # share of clips whose prompt changes
OBJECT = 4.0  # weight that pixels of the shape have on top of that of all pixels
# Every step draws new samples; `shuffled` is given one example.
COURSE = Course(
    "transformer", 1, 4000, batch=1, decay=0.995, rate=2e-3, save_every=100, muon=0.02
)  # fmt: skip
STAGES = ("train", "export", "record")
RUN = "python -m diffcache.eval.workshop.small.train_causal"


class Step:
    """One training step's loss."""

    def __init__(self, model: ShapesCausal, plan: Plan) -> None:
        self.transformer: Callable[..., Any] = model.transformer
        self.seed = plan.seed
        _, height, width = model.transformer.config.patch_size
        self.attention = ChunkAttention(model.transformer, (SIZE // height, SIZE // width))
        for block in model.transformer.blocks:
            block.attn1.set_processor(self.attention)
        self.texts = text_table(model)

    def __call__(self, _: Tensor, index: int, progress: float) -> Tensor:
        """Return the weighted error of the clean frames that are predicted."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        clips = draw(BATCH, FRAMES, generator, switched=SWITCHED)
        self.attention.frames, self.attention.held = FRAMES, draw_held(generator)
        film = clips.film()
        levels = draw_levels(BATCH, FRAMES, generator)
        noise, disturbance = (torch.randn(film.shape, generator=generator) for _ in range(2))
        depth = DISTURBED * torch.rand(BATCH, 1, 1, 1, 1, generator=generator)
        level = levels[:, None, :, None, None]
        found = predict(
            self.transformer, film + depth * disturbance, film + level * (noise - film),
            levels, self.texts[clips.shapes, clips.colors],
        )  # fmt: skip
        return weighted_error(found, film)


def weighted_error(found: Tensor, film: Tensor) -> Tensor:
    """Return the mean square error, in which pixels that show the shape count more."""
    colored = scenes.chroma(film).square().sum(1, keepdim=True).sqrt() / scenes.CHROMA
    error: Tensor = ((1 + OBJECT * colored) * (found.float() - film).square()).mean()
    return error


def text_table(model: ShapesCausal) -> Tensor:
    """Return the embeddings of all prompts, `[shapes, colors, S, E]`."""
    prompts = [
        scenes.prompt(shape, color)
        for shape in range(len(scenes.SHAPES)) for color in range(len(scenes.COLORS))
    ]  # fmt: skip
    found: Tensor = model.embed(prompts).unflatten(0, (len(scenes.SHAPES), -1))
    return found


def draw_levels(count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Draw the noise level of every frame, `[B, F]`, the same for the frames of a chunk.

    Three in ten chunks are all noise, which the history alone tells more of; three have a level of
    the sampler.

    Args:
        count: Number of clips.
        frames: Frames of each.
        generator: Generator on the CPU.
    """
    shape = (count, frames // CHUNK)
    levels = torch.tensor(SAMPLER.levels)
    of_sampler = levels[torch.randint(len(levels), shape, generator=generator)]
    found = torch.rand(shape, generator=generator)
    kind = torch.rand(shape, generator=generator)
    found = torch.where(kind < 0.6, of_sampler, found)
    return torch.where(kind < 0.3, levels[0], found).repeat_interleave(CHUNK, 1)


def fit(out: Path, plan: Plan) -> ShapesCausal:
    """Train the transformer and return the model with averaged weights, in float32.

    Args:
        out: Folder; gets the files of `course.train`.
        plan: Seed, steps and time limit.
    """
    torch.manual_seed(plan.seed)
    model = build()
    step = Step(model, plan)
    if plan.compiled:
        step.transformer = torch.compile(model.transformer)
    train(out, nn.ModuleDict({"transformer": model.transformer}), step, COURSE, plan)
    return model


def export(out: Path, directory: Path = DIRECTORY) -> int:
    """Save the model with averaged weights, in bfloat16; what else a directory holds stays.

    Args:
        out: Training folder.
        directory: Directory for `causal.load`.

    Returns:
        The size of the directory in bytes.
    """
    model = build()
    weights = nn.ModuleDict({"transformer": model.transformer})
    weights.load_state_dict(load_file(out / f"{COURSE.name}.safetensors"))
    for name, part in (("transformer", model.transformer), ("text_encoder", model.text_encoder)):
        nn.Module.to(part, torch.bfloat16).save_pretrained(directory / name)
    model.tokenizer.save_pretrained(directory / "tokenizer")
    write_json(directory / "diffcache.json", {"call": CALL, "sampler": asdict(SAMPLER)})
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = training_parser(
        "train_causal",
        "Train and export the causal video model of shapes, on a CPU.",
        out="out/shapes-causal",
        updates=COURSE.steps,
        stages=STAGES,
        compiles=True,
    ).parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    settings = (chosen.seed, chosen.updates, chosen.resume, not chosen.eager)
    if "train" in chosen.stages:
        fit(chosen.out, Plan(*settings, minutes=chosen.minutes))
    if "export" in chosen.stages:
        print(f"exported {export(chosen.out) / 1e6:.2f} MB")
    if "record" in chosen.stages:
        command = (
            f"{RUN} --seed {chosen.seed} --updates {chosen.updates}" + " --eager" * chosen.eager
        )
        file = DIRECTORY.parents[1] / "bench" / f"{DIRECTORY.name}-training.json"
        record(chosen.out, COURSE.name, file, seed=chosen.seed, command=command)


if __name__ == "__main__":
    main()
