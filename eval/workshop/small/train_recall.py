"""Train and export the small language model that recalls facts.

    python -m diffcache.eval.workshop.small.train_recall --out out/recall-llama

What was easy to get wrong: where every fact is asked for, the unused value gives the answer away,
so look-ups are learnt from repeated queries first. Repeated queries show earlier answers, so later
ones are distinct and few. A model of one length works at no other, so lengths are mixed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaForCausalLM

from diffcache.eval.workshop.small.course import Course, Plan, train
from diffcache.eval.workshop.small.diffusion import record_accuracies
from diffcache.eval.workshop.small.loop import Log, training_parser
from diffcache.files import write_json
from diffcache.pipelines.small.recall import (
    BLOCK,
    BOS,
    EOS,
    NK,
    PAD,
    RecallBatch,
    Task,
    draw,
    score,
)
from diffcache.pipelines.small.recall_llama import (
    ANSWER,
    DIRECTORY,
    build_model,
    build_tokenizer,
)

# every step draws new samples
COURSE = Course("recall", examples=1, steps=8920, batch=1, rate=1.5e-3)
TOKENS = 4096  # in a step
FIRST = ((0, 33), (1200, 65), (1800, 129))  # from which step on which context, queries repeated
REPEATED = 2500  # steps, before lengths are mixed
MIXED = (  # from which share of the run on which contexts, equally likely
    (0.0, (33, 65, 129, 193, 257, 321)),
    (0.25, (65, 129, 257, 385, 513, 769, 1025)),
    (0.5, (33, 65, 129, 257, 513, 769, 1025, 1025, 2049, 2049, 2049)),
)
STAGES = ("train", "export")
BENCH = DIRECTORY.parents[1] / "bench"
RUN = "python -m diffcache.eval.workshop.small.train_recall"


def choose(index: int, progress: float, rng: np.random.Generator) -> Task:
    """Return what a training step draws.

    Args:
        index: Index of the step.
        progress: Share of the run, 0 to 1.
        rng: Generator that chooses.
    """
    if index < REPEATED:
        context = max(length for begin, length in FIRST if index >= begin)
        return Task(context, facts=8 * context // 33, queries=6, repeat=True)
    lengths = [mixed for begin, mixed in MIXED if progress >= begin][-1]
    context = int(rng.choice(lengths))
    most = min((context - 1) // BLOCK, NK)
    facts = max(int(most * rng.uniform(0.2, 0.9)), 6)
    return Task(context, facts, queries=max(facts // 4, 2))


class Step:
    """One training step's loss; accuracies go to a log of their own."""

    def __init__(self, model: LlamaForCausalLM, log: Log, plan: Plan) -> None:
        self.model: Callable[..., Any] = torch.compile(model) if plan.compiled else model
        self.log, self.seed = log, plan.seed

    def __call__(self, _: Tensor, index: int, progress: float) -> Tensor:
        """Return the weighted cross-entropy of a step's samples."""
        seed = self.seed * 1_000_003 + index
        task = choose(index, progress, np.random.default_rng(seed))
        tokens = task.context + BLOCK * task.queries
        batch = draw(max(TOKENS // tokens, 1), task, torch.Generator().manual_seed(seed))
        logits = self.model(batch.ids, use_cache=False).logits.float()
        if index and index % 50 == 0:  # the step 0 is also taken to compile
            self.note(index, logits, batch)
        error = cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
        )
        weights = batch.weights[:, 1:].flatten()
        return (error * weights).sum() / weights.sum()

    def note(self, index: int, logits: Tensor, batch: RecallBatch) -> None:
        """Write how many answers of a step were right."""
        first, second = score(batch.answer_logits(logits), batch).float().mean((0, 1)).tolist()
        task = batch.task
        self.log.write(step=index, context=task.context, facts=task.facts, v1=first, v2=second)


def fit(out: Path, plan: Plan, course: Course = COURSE) -> LlamaForCausalLM:
    """Train the model and return it with averaged weights, in float32.

    Args:
        out: Folder; gets `accuracy.jsonl` and the files of `course.train`.
        plan: Settings of the run, as in `course.train`.
        course: Settings of the training: rate, and how often to save.
    """
    torch.manual_seed(plan.seed)
    model = build_model()
    log = Log(out / "accuracy.jsonl", resume=plan.resume)
    train(out, nn.ModuleDict({"model": model}), Step(model, log, plan), course, plan)
    return model


def assemble(out: Path) -> LlamaForCausalLM:
    """Put the model together from a training folder, in float32, with averaged weights."""
    model = build_model()
    weights = nn.ModuleDict({"model": model})
    weights.load_state_dict(load_file(out / f"{COURSE.name}.safetensors"))
    return model


def export(out: Path, directory: Path = DIRECTORY) -> int:
    """Save model and tokenizer; files are replaced one by one, each whole.

    Args:
        out: The training folder.
        directory: Directory for `from_pretrained`; its other files stay.

    Returns:
        The size of the directory in bytes.
    """
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model = assemble(out)
    marks = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    model.generation_config = GenerationConfig(**marks, **ANSWER)
    nn.Module.to(model, torch.bfloat16).save_pretrained(part)
    build_tokenizer().save_pretrained(part)
    # transformers loads in the dtype of the configuration; bfloat16 is for the file alone. Its
    # version 5 has a new name for the tokenizer's class, and knows the old one as well.
    change(part / "config.json", dtype="float32")
    change(part / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(part.iterdir()):
        file.chmod(0o644)
        file.replace(directory / file.name)
    part.rmdir()
    return sum(path.stat().st_size for path in directory.iterdir())


def change(path: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | values)


def keep(out: Path, seed: int, updates: int) -> dict[str, Any]:
    """Write the training record, with the accuracies that were seen on the way.

    Args:
        out: The training folder.
        seed: Seed that was used.
        updates: Number of training steps of the whole run.
    """
    path = BENCH / "recall-llama-training.json"
    command = f"{RUN} --seed {seed} --updates {updates}"
    return record_accuracies(out, COURSE.name, path, build_model(), seed=seed, command=command)


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    return training_parser(
        "train_recall",
        "Train and export the language model that recalls, on a CPU.",
        out="out/recall-llama",
        updates=COURSE.steps,
        stages=STAGES,
        compiles=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if "train" in chosen.stages:
        chosen.out.mkdir(parents=True, exist_ok=True)
        settings = (chosen.seed, chosen.updates, chosen.resume, not chosen.eager)
        fit(chosen.out, Plan(*settings, minutes=chosen.minutes))
    if "export" in chosen.stages:
        size = export(chosen.out)
        done = keep(chosen.out, chosen.seed, chosen.updates)
        print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
