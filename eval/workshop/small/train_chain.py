"""Train and export the small language models that trace an automaton.

    python -m diffcache.eval.workshop.small.train_chain --models chain-llada

What was easy to get wrong: a block decoder asks for states of a kind that masks at random do not
show, an answer that is clean up to some point and masked from there on. So half of the rows are
such. The weight `1 / p` of the diffusion loss lets rows of few masks dominate, so it is tamed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from diffcache.eval.workshop.small.chain import MASK, WORLDS, World, draw
from diffcache.eval.workshop.small.chain_llada import (
    BLOCKS,
    SIZES,
    build_model,
    build_tokenizer,
)
from diffcache.eval.workshop.small.course import Course, Plan, train
from diffcache.eval.workshop.small.diffusion import record_accuracies
from diffcache.eval.workshop.small.loop import Log, training_parser
from diffcache.eval.workshop.small.train_recall import change
from diffcache.files import write_json
from diffcache.pipelines.shipped_models import MODELS

BATCH = 32  # sequences in a step
WINDOW = 32  # tokens of a block that is partly decided
TAMED = 4  # masks that are added to those of a row, in its weight
# Every step draws new samples; `shuffled` is given one example.
COURSES = {
    "chain-llada": Course("chain-llada", 1, 2000, batch=1, decay=0.99, rate=2.5e-3),
    "chain-llada-probe": Course("chain-llada-probe", 1, 1500, batch=1, decay=0.99, rate=2.5e-3),
    "chain-llada-walk": Course("chain-llada-walk", 1, 1300, batch=1, decay=0.99, rate=2.5e-3),
    "chain-guide": Course("chain-guide", 1, 800, batch=1, decay=0.99, rate=2.5e-3),
}
STAGES = ("train", "export")
RUN = "python -m diffcache.eval.workshop.small.train_chain"


def masks(count: int, world: World, generator: torch.Generator) -> Tensor:
    """Draw which tokens of answers are masked: half of them anywhere, half as a block decoder does.

    Args:
        count: Number of answers.
        world: Task.
        generator: Generator on the CPU.

    Returns:
        bool `[count, N]`.
    """
    share = torch.rand(count, 1, generator=generator)
    masked = torch.rand(count, world.length, generator=generator) < share
    cut = torch.randint(world.length, (count, 1), generator=generator)
    at = torch.arange(world.length)
    later = (at >= cut) & (masked | (at >= cut + WINDOW))
    return torch.where(torch.arange(count)[:, None] % 2 == 0, masked, later)


class Step:
    """One training step's loss; the accuracy at the frontier goes to a log of its own."""

    def __init__(self, name: str, model: LlamaForCausalLM, log: Log, plan: Plan) -> None:
        self.model: Callable[..., Any] = torch.compile(model) if plan.compiled else model
        self.world, self.log, self.seed = WORLDS[name], log, plan.seed
        self.is_guide = name not in BLOCKS

    def __call__(self, _: Tensor, index: int, progress: float) -> Tensor:
        """Return the weighted cross-entropy of a step's samples."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        batch = draw(BATCH, self.world, generator)
        n = self.world.length
        if self.is_guide:
            masked = torch.ones_like(batch.answers, dtype=torch.bool)
            logits = self.model(input_ids=batch.ids[:, :-1], use_cache=False).logits[:, -n:]
        else:
            masked = masks(BATCH, self.world, generator)
            shown = batch.answers.masked_fill(masked, MASK)
            given = torch.cat([batch.prompts, shown], 1)
            logits = self.model(input_ids=given, use_cache=False).logits[:, -n:]
        if index and index % 50 == 0:  # the step 0 is also taken to compile
            self.note(index, logits, batch.answers, masked)
        error = cross_entropy(logits.float().mT, batch.answers, reduction="none")
        return ((error * masked).sum(1) / (masked.sum(1) + TAMED)).mean()

    def note(self, index: int, logits: Tensor, answers: Tensor, masked: Tensor) -> None:
        """Write the accuracy of masked tokens, and of those whose left neighbor is known."""
        known = torch.ones_like(masked)
        if not self.is_guide:
            known[:, 1:] = ~masked[:, :-1]
        right = (logits.argmax(-1) == answers).float()
        every, first = right[masked].mean().item(), right[masked & known].mean().item()
        self.log.write(step=index, masked=every, frontier=first)


def fit(name: str, out: Path, plan: Plan, course: Course | None = None) -> LlamaForCausalLM:
    """Train a model and return it with averaged weights, in float32.

    Args:
        name: Name of a model, as in `SIZES`.
        out: Folder; gets `accuracy.jsonl` and the files of `course.train`.
        plan: Plan of the training.
        course: Settings of the training, its rate among them; None for those of the model.
    """
    torch.manual_seed(plan.seed)
    model = build_model(name)
    log = Log(out / "accuracy.jsonl", resume=plan.resume)
    step = Step(name, model, log, plan)
    train(out, nn.ModuleDict({"model": model}), step, course or COURSES[name], plan)
    return model


def assemble(name: str, out: Path) -> LlamaForCausalLM:
    """Put a model together from a training folder, in float32, with averaged weights."""
    model = build_model(name)
    weights = nn.ModuleDict({"model": model})
    weights.load_state_dict(load_file(out / f"{name}.safetensors"))
    return model


def export(name: str, out: Path, directory: Path | None = None) -> int:
    """Save model and tokenizer; files are replaced one by one, each whole.

    Args:
        name: Name of a model, as in `SIZES`.
        out: Training folder.
        directory: Directory for `from_pretrained`, whose other files stay; None for that of the
            shipped models.

    Returns:
        The size of the directory in bytes.
    """
    directory = MODELS / name if directory is None else directory
    part = directory.with_name(f".{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model = assemble(name, out)
    nn.Module.to(model, torch.bfloat16).save_pretrained(part)
    build_tokenizer(WORLDS[name]).save_pretrained(part)
    # transformers loads in the dtype of the configuration; bfloat16 is for the file alone.
    change(part / "config.json", dtype="float32")
    change(part / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if name in BLOCKS:
        (part / "generation_config.json").unlink()  # no masked model generates word by word
        call = {"length": WORLDS[name].length, "block": BLOCKS[name]}
        write_json(part / "diffcache.json", {"call": call})
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(part.iterdir()):
        file.chmod(0o644)
        file.replace(directory / file.name)
    part.rmdir()
    return sum(path.stat().st_size for path in directory.iterdir())


def keep(name: str, out: Path, seed: int, updates: int) -> dict[str, Any]:
    """Write the training record, with the accuracies that were seen on the way.

    Args:
        name: Name of a model, as in `SIZES`.
        out: Training folder.
        seed: Seed that was used.
        updates: Steps of the whole run.
    """
    path = MODELS.parent / "bench" / f"{name}-training.json"
    command = f"{RUN} --models {name} --seed {seed} --updates {updates}"
    return record_accuracies(out, name, path, build_model(name), seed=seed, command=command)


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = training_parser(
        "train_chain",
        "Train and export language models that trace automata, on a CPU.",
        out="out",
        updates=0,
        stages=STAGES,
        compiles=True,
    )
    made.add_argument("--models", nargs="+", choices=SIZES, default=SIZES, help="which models")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    for name in chosen.models:
        out, updates = chosen.out / name, chosen.updates or COURSES[name].steps
        if "train" in chosen.stages:
            out.mkdir(parents=True, exist_ok=True)
            settings = (chosen.seed, updates, chosen.resume, not chosen.eager)
            fit(name, out, Plan(*settings, minutes=chosen.minutes))
        if "export" in chosen.stages:
            size = export(name, out)
            done = keep(name, out, chosen.seed, updates)
            print(f"{name}: exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
