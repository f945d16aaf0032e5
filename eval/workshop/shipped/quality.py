"""Measure the shipped models: how many of their held-out samples are right in everything?

    python -m diffcache.eval.workshop.shipped.quality                      # all of them
    python -m diffcache.eval.workshop.shipped.quality sticker-flux --samples 256

A sample is right where the shipped judge, the task or the answer's key finds nothing wrong in
it. Records go to `assets/bench/<model>-quality.json`, samples of the models that draw to a labeled
picture beside the weights; `diffcache.eval.workshop.shipped.cards` puts the numbers into the model
cards.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffcache.command import Seed, Threads, script
from diffcache.dllm import Schedule
from diffcache.eval.metrics.intervals import mean_interval, share_interval
from diffcache.eval.record import FOLDER, Row, Setting, check, envelope, values
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.shipped.drawing import draw, draw_grid, draw_stickers
from diffcache.eval.workshop.small import (
    chain,
    sticker_dit,
    sticker_edits,
    sticker_flux,
    sticker_judge,
    sticker_kontext,
    sticker_wan,
)
from diffcache.eval.workshop.small.sticker_dit import CLASSES
from diffcache.eval.workshop.small.sticker_films import FILMED, sample_film
from diffcache.eval.workshop.small.sticker_flux import decode, encode
from diffcache.eval.workshop.small.sticker_judge import read_faults
from diffcache.eval.workshop.small.stickers import GROUNDS, held_out, held_out_captions, parse, with_article
from diffcache.eval.workshop.small.stickers import render as render_stickers
from diffcache.eval.workshop.video import rollouts
from diffcache.eval.workshop.video.rollouts import EVERY, Rollouts, frames_right, held_sentences
from diffcache.files import write_json
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.pipelines.policy import rollout
from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small import reach, recall, recall_llama
from diffcache.pipelines.small.recall import Task
from diffcache.pipelines.small.recall_llama import LENGTHS
from diffcache.video import FullHistory

Outcomes = Mapping[str, Tensor]  # name -> [N] or [N, Q]; `whole_right` first, `_db` are no shares
Numbers = Sequence[int]  # of the samples to make, out of all that are asked for
WHOLE = "whole_right"
OF = "of_"  # begins the keys of the films of one object
_OTHERS = 12  # films of each object that no held-out film shows
SETTING = Setting(torch.device("cpu"))
ALL: list[str] = []
_CHAINS, _TOKENS = 50, 8192  # prompts that are decoded together, tokens of a batch of contexts
_QUESTIONS = 64  # most outcomes of a sample that a record keeps


@dataclass(frozen=True)
class Model:
    """Measurement of a shipped model.

    Attributes:
        what: Samples that are right in everything, as a title.
        load: Returns the pipeline or model.
        measure: Takes it with steps, samples, seed and the numbers of the samples that are made;
            returns their outcomes.
        steps: Sampling steps, each a row; contexts of a language model, chunks of a stream.
        samples: Samples of a row.
        grid: Draws the picture of samples, None for models that draw none.
        unit: Unit of `steps`.
    """

    what: str
    load: Callable[[], Any]
    measure: Callable[[Any, Any, int, int, Numbers], Outcomes]
    steps: Sequence[Any] = (28, 50)
    samples: int = 256
    grid: Callable[[Any], Image.Image] | None = None
    unit: str = "steps"


def _of_stickers(pipe: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge pictures of held-out sentences, and those of one object and of two apart."""
    every = held_out_captions(samples, seed)
    texts = [every[number] for number in numbers]
    wrong = read_faults(texts, draw_stickers(pipe, texts, steps=steps, seeds=_seeds(seed, numbers)))
    right = torch.tensor([not faults for faults in wrong])
    alone = torch.tensor([len(parse(text)[0]) == 1 for text in texts])
    return {WHOLE: right, "right_of_one_object": right[alone], "right_of_two": right[~alone]}


def _seeds(seed: int, numbers: Numbers) -> list[int]:
    """Return the seeds of noise: sample i starts from that of `seed + i`."""
    return [seed + number for number in numbers]


def _of_sticker_classes(pipe: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge pictures of all classes in turn: one whole object of the class and no other."""
    labels, seeds = [number % len(CLASSES) for number in numbers], _seeds(seed, numbers)
    pictures = torch.from_numpy(draw(pipe, [labels], steps=steps, seeds=seeds, call=sticker_dit.CALL))
    return {WHOLE: right(pictures.permute(0, 3, 1, 2), labels) > 0}


def right(pictures: Tensor, labels: Sequence[int | str]) -> Tensor:
    """Reward pictures of one whole object of their class and no other with 1, float64 [N].

    Args:
        pictures: uint8 [N, 3, 64, 64].
        labels: Numbers of the classes.
    """
    texts = [with_article(CLASSES[int(label)]) for label in labels]
    return sticker_judge.right(pictures, texts)


@torch.no_grad()
def _of_sticker_edits(pipe: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge held-out edits, and what the autoencoder alone makes of the wanted pictures."""
    every = sticker_edits.draw_edits(samples, seed, held=True)
    edits = [every[number] for number in numbers]
    before, after = (
        np.stack([render_stickers(scene) for scene in side])
        for side in zip(*((edit.before, edit.after) for edit in edits), strict=True)
    )
    texts = [edit.text for edit in edits]
    made = draw_stickers(pipe, texts, steps=steps, seeds=_seeds(seed, numbers), before=before)
    latents = encode(pipe.vae, after).float()
    best = sticker_edits.judge(decode(pipe.vae, latents).numpy(), edits)
    found = sticker_edits.judge(made, edits)
    kinds = [edit.kind for edit in edits]
    for kind in sticker_edits.KINDS:
        if kind in kinds:
            found[f"target_right_{kind}"] = found["target_right"][[one == kind for one in kinds]]
    return {**found, "autoencoder_untouched_psnr_db": best["untouched_psnr_db"]}


def _of_films(pipe: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge films of held-out sentences, right where each of their frames is; and by object."""
    every = held_sentences(samples, seed)
    texts = [every[number] for number in numbers]
    right = frames_right(_films_of(pipe, texts, steps, _seeds(seed, numbers)), texts)
    found = {WHOLE: right.all(1), "frame_right": right}
    if len(numbers) < samples:
        return found
    more = _others(seed)
    others = frames_right(_films_of(pipe, more, steps, _seeds(seed, range(len(more)))), more)
    return {**found, **_by_object([*texts, *more], torch.cat([right, others]).all(1))}


def _others(seed: int) -> list[str]:
    """Return sentences of films of the objects that training saw on every ground, as many of each."""
    rng = np.random.default_rng([seed, 31_013])
    names = [name for name in FILMED if not any(held_out((name,), ground) for ground in GROUNDS)]
    return [sample_film(rng, objects=(name,)).caption_at(0) for name in names for _ in range(_OTHERS)]


def _by_object(texts: Sequence[str], right: Tensor) -> dict[str, Tensor]:
    """Return which films of each object are right."""
    names = [parse(text)[0][0] for text in texts]
    return {f"{OF}{name}": right[[each == name for each in names]] for name in FILMED if name in names}


def _films_of(pipe: Any, texts: list[str], steps: int, seeds: Numbers) -> NDArray[np.uint8]:
    return draw(pipe, [texts], steps=steps, seeds=seeds, call=sticker_wan.CALL, batch=8)


def _of_streams(pipe: Any, chunks: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge streams of held-out sentences with their whole history, by their last frame; and by object.

    Streams share their noise, so that a part is the beginning of all: as many chunks as numbers
    are of samples, and enough for a frame that is judged.
    """
    made = Rollouts(held_sentences(samples, seed), SETTING, seed, pipe)
    with made.video() as video:
        films = made.films(video, FullHistory(), max(-(-chunks * len(numbers) // samples), 4))
        right = frames_right(films[:, EVERY - 1 :: EVERY].numpy(), made.said)
        found = {WHOLE: right[:, -1], "frame_right": right, "right_after_a_second": right[:, 0]}
        if len(numbers) < samples:
            return found
        more = Rollouts(_others(seed), SETTING, seed + 1, pipe)
        last = more.films(video, FullHistory(), chunks)[:, EVERY - 1 :: EVERY][:, -1:]
        others = frames_right(last.numpy(), more.said)
    return {**found, **_by_object([*made.said, *more.said], torch.cat([right[:, -1], others[:, -1]]))}


def _of_reach(pipe: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge half of the episodes with the seed, half with the next: scenes of one may be easy."""
    halves, first = [], samples - samples // 2
    for half, count in enumerate((first, samples // 2)):
        scenes = reach.draw_scenes(count, reach.HELD_OUT + seed + half)
        own = [n - half * first for n in numbers if (n >= first) == bool(half)]
        episodes = reach.Reach(scenes, own)
        rollout(pipe, episodes, num_inference_steps=steps, seed=seed + half)
        halves.append((episodes.succeeded[own], episodes.touched[own]))
    right, touched = (torch.cat(column) for column in zip(*halves, strict=True))
    return {
        WHOLE: right,
        "touched": touched,
        **{f"right_of_seed_{seed + half}": each for half, (each, _) in enumerate(halves)},
    }


@torch.no_grad()
def _of_chain(name: str, model: Any, steps: int, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Judge traces of automata; a step is a forward, of which the guide has one a token."""
    world = chain.WORLDS[name]
    batch = chain.draw(samples, world, torch.Generator().manual_seed(chain.HELD_OUT + seed))
    own, found = list(numbers), []
    for prompts in batch.prompts[own].split(_CHAINS):
        if name in chain.BLOCKS:
            block = None if name in chain.CAUSAL else chain.BLOCKS[name]  # its own
            schedule = Schedule(world.length, block, steps)
            found.append(DiffusionLM(model).generate(prompts, schedule).ids)
        else:
            ids = model.generate(prompts, max_new_tokens=world.length, do_sample=False)
            found.append(ids[:, prompts.shape[1] :])
    right = torch.cat(found) == batch.answers[own]
    return {WHOLE: right.all(1), "token_right": right}


def _tasks() -> Sequence[Task]:
    """Return contexts half of facts, with at most 64, and one crowded.

    The first is that of the tables of key-value caches.
    """
    longer = 4097  # than what was trained on
    lengths = [513, *(length for length in (*LENGTHS, longer) if length not in (33, 513))]
    counts = [(length, min((length - 1) // recall.BLOCK // 2, 64)) for length in lengths]
    return [Task(length, facts, min(facts // 4, 8)) for length, facts in [*counts, (513, 115)]]


TASKS = _tasks()


@torch.no_grad()
def of_recall(model: Any, task: Task, samples: int, seed: int, numbers: Numbers) -> Outcomes:
    """Return which answers are right: in both values, in the first, in the second given the first.

    Args:
        model: Language model, with nothing dropped.
        task: Task to draw.
        samples: Contexts, drawn in groups of about 8192 tokens.
        seed: Seed of the draw, which no training reached.
        numbers: Numbers of the contexts that are asked about.
    """
    generator = torch.Generator().manual_seed(recall.HELD_OUT + seed)
    group = max(_TOKENS // (task.context + recall.BLOCK * task.queries), 1)
    hits = []
    for start in range(0, samples, group):
        batch = recall.draw(min(group, samples - start), task, generator)
        own = [number - start for number in numbers if 0 <= number - start < len(batch)]
        if not own:
            continue
        batch = batch.take(own)
        logits = model(batch.ids, use_cache=False).logits
        hits.append(recall.score(batch.answer_logits(logits), batch))
    right = torch.cat(hits)
    return {WHOLE: right.all(-1), "first_right": right[..., 0], "second_right": right[..., 1]}


def _sticker_grid(pipe: Any) -> Image.Image:
    texts = held_out_captions(24, 1)
    pictures = draw_stickers(pipe, texts, steps=28, seeds=range(24))
    return draw_grid(pictures[:, None], texts, scale=2, columns=6)


def _sticker_classes_grid(pipe: Any) -> Image.Image:
    every = range(2 * len(CLASSES))
    labels = [number % len(CLASSES) for number in every]
    pictures = draw(pipe, [labels], steps=28, seeds=every, call=sticker_dit.CALL)
    return draw_grid(pictures[:, None], [CLASSES[label] for label in labels], scale=2, columns=6)


def _sticker_edits_grid(pipe: Any) -> Image.Image:
    edits = sticker_edits.draw_edits(24, 0, held=True)
    before = np.stack([render_stickers(edit.before) for edit in edits])
    texts = [edit.text for edit in edits]
    made = draw_stickers(pipe, texts, steps=28, seeds=range(24), before=before)
    return draw_grid(np.stack([before, made], 1), texts, scale=2, columns=6)


def _films_grid(pipe: Any) -> Image.Image:
    texts = held_sentences(12, 1)
    return draw_grid(_films_of(pipe, texts, 28, range(12))[:, ::4], texts, scale=2, columns=2)


def _streams_grid(pipe: Any) -> Image.Image:
    made = Rollouts(held_sentences(12, 1), SETTING, 1, pipe)
    with made.video() as video:
        films = made.films(video, FullHistory(), 40)
    return draw_grid(films[:, 4 * EVERY - 1 :: 4 * EVERY].numpy(), made.said, scale=2, columns=2)


QUALITIES: Mapping[str, Model] = {
    "sticker-flux": Model("pictures", sticker_flux.load, _of_stickers, grid=_sticker_grid),
    "sticker-dit": Model("pictures", sticker_dit.load, _of_sticker_classes, (28,), 240, _sticker_classes_grid),
    "sticker-kontext": Model("edits", sticker_kontext.load, _of_sticker_edits, (28,), 128, _sticker_edits_grid),
    "sticker-wan": Model("films", sticker_wan.load, _of_films, (28,), 128, _films_grid),
    "sticker-causal": Model("films' last frames", rollouts.load, _of_streams, (40,), 64, _streams_grid, "chunks"),
    "reach-policy": Model("episodes", reach.load, _of_reach, (100,), 512),
    "recall-llama": Model("answers", recall_llama.load, of_recall, TASKS, 128),
    **{
        name: Model("traces", partial(chain.load, name), partial(_of_chain, name), (chain.WORLDS[name].length,), 400)
        for name in chain.SIZES
    },
}


def measure(name: str, samples: int, seed: int) -> dict[str, Any]:
    """Measure a model and return its record.

    Args:
        name: One of `QUALITIES`.
        samples: Samples of a row.
        seed: Seed of what is asked for and of the noise.
    """
    model, started = QUALITIES[name], time.monotonic()
    pipe = model.load()
    rows = []
    for steps in model.steps:
        begun, about = time.monotonic(), _about(model, steps)
        outcomes = model.measure(pipe, steps, samples, seed, range(samples))
        row = {
            "name": ", ".join(f"{value} {key}" for key, value in about.items()),
            **about,
            "samples": samples,
            "quality": {key: _interval(key, column) for key, column in outcomes.items()},
            "values": values_of(outcomes),
            "seconds_per_sample": round((time.monotonic() - begun) / samples, 4),
        }
        rows.append(row)
    body = {
        "seed": seed,
        "rounds": 1,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        "shapes": {
            "device": "cpu",
            "model": name,
            "what": model.what,
            "model_sha256": directory_sha256(MODELS / name),
        },
    }
    module = "diffcache.eval.workshop.shipped.quality"
    command = f"python -m {module} {name} --samples {samples} --seed {seed}"
    record = envelope(f"{name}-quality", SETTING, command, body)
    check(record)
    return record


def values_of(outcomes: Outcomes) -> dict[str, Any]:
    """Return the values of samples of all outcomes that each sample has, but for long answers."""
    kept = {key: each for key, each in outcomes.items() if len(each) == len(outcomes[WHOLE])}
    return {key: values(each) for key, each in kept.items() if each[0].numel() <= _QUESTIONS}


def again(record: Mapping[str, Any], row: Row, numbers: Numbers) -> Outcomes:
    """Make some samples of a row again; of streams, the beginning.

    Args:
        record: Record that `measure` returned.
        row: One of its rows.
        numbers: Numbers of the samples.
    """
    model = QUALITIES[record["shapes"]["model"]]
    (steps,) = [one for one in model.steps if _about(model, one).items() <= row.items()]
    made = model.measure(model.load(), steps, row["samples"], record["seed"], numbers)
    only = ("frame_right", "right_after_a_second") if model.unit == "chunks" else made
    return {key: made[key] for key in only if len(made[key]) == len(made[WHOLE])}


def _about(model: Model, steps: Any) -> dict[str, int]:
    if isinstance(steps, Task):
        return {"tokens": steps.context, "facts": steps.facts}
    return {model.unit: steps}


def _interval(key: str, column: Tensor) -> dict[str, Any]:
    if key.endswith("_db"):
        low, middle = column.double().quantile(0.05), column.double().median()
        found = mean_interval(column, bounds=(-math.inf, 100.0)).to_dict()
        return {**found, "median": float(middle), "p5": float(low)}
    return share_interval(column).to_dict()


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a model's record."""
    return folder / f"{name}-quality.json"


def quality(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"Of {', '.join(QUALITIES)} (all).")] = ALL,
    samples: Annotated[int | None, typer.Option(min=2, help="Samples of a row (default: the model's own).")] = None,
    seed: Seed = 0,
    threads: Threads = 1,
) -> None:
    """Measure how many held-out samples of shipped models are right."""
    for name in models:
        if name not in QUALITIES:
            raise ValueError(f"no quality of {name!r}; there are {', '.join(QUALITIES)}")
    torch.set_num_threads(threads)
    for name in models or QUALITIES:
        model = QUALITIES[name]
        record = measure(name, samples or model.samples, seed)
        write_json(file_of(name), record)
        for row in record["rows"]:
            whole = row["quality"][WHOLE]
            print(
                f"{name}, {row['name']}: {whole['value']:.1%} of {whole['n']} {model.what} right "
                f"({whole['low']:.1%} to {whole['high']:.1%})",
                flush=True,
            )
        if model.grid is not None:
            model.grid(model.load()).save(MODELS / name / "grid.png", optimize=True)


main = script(quality)

if __name__ == "__main__":
    sys.exit(main())
