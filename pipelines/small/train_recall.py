"""Train, export and measure the small language model that recalls facts.

    python -m diffcache.pipelines.small.train_recall --out out/recall-llama

What was easy to get wrong: where every fact is asked for, the unused value gives the answer away,
so look-ups are learnt from repeated queries first. Repeated queries show earlier answers, so later
ones are distinct and few. A model of one length works at no other, so lengths are mixed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaForCausalLM

from diffcache.files import write_json
from diffcache.pipelines.small.course import Course, Plan, train
from diffcache.pipelines.small.diffusion import record
from diffcache.pipelines.small.export import thin
from diffcache.pipelines.small.loop import Log, training_parser
from diffcache.pipelines.small.measure import write_report
from diffcache.pipelines.small.measure_reach import wilson
from diffcache.pipelines.small.recall import (
    BLOCK,
    BOS,
    EOS,
    HELD_OUT,
    NK,
    PAD,
    SUCCESSORS,
    RecallBatch,
    Task,
    draw,
    filler_nats,
    score,
)
from diffcache.pipelines.small.recall_llama import (
    ANSWER,
    DIRECTORY,
    LENGTHS,
    build_model,
    build_tokenizer,
    load,
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
BEYOND = 4097  # measured, longer than what was trained on
STAGES = ("train", "export", "measure")
BENCH = DIRECTORY.parents[1] / "bench"
RUN = "python -m diffcache.pipelines.small.train_recall"


def choose(index: int, progress: float, rng: np.random.Generator) -> Task:
    """Return what a training step draws.

    Args:
        index: of the step.
        progress: share of the run, 0 to 1.
        rng: that chooses.
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
        out: folder; gets `accuracy.jsonl` and the files of `course.train`.
        plan: how to train.
        course: at which rate, and how often to save.
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
        out: the training folder.
        directory: where `from_pretrained` will look; what else it holds stays.

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


@torch.no_grad()
def measure(model: LlamaForCausalLM, task: Task, *, samples: int, seed: int) -> dict[str, Any]:
    """Measure how many whole answers are right, both tokens, and the perplexity of filler.

    The second token is asked after the right first one, so greedy generation gives the same whole
    answers.

    Args:
        model: in evaluation mode.
        task: what to draw.
        samples: how many, drawn in groups of about 8192 tokens.
        seed: of the draw; from `HELD_OUT` on for what was not trained on.
    """
    begin = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    group = max(2 * TOKENS // (task.context + BLOCK * task.queries), 1)
    right, marked, nats = [], [], []
    for start in range(0, samples, group):
        batch = draw(min(group, samples - start), task, generator)
        logits = model(batch.ids, use_cache=False).logits
        right.append(score(batch.answer_logits(logits), batch))
        marked.append(batch.asked_marks)
        nats.append(filler_nats(logits, batch))
    hits, marks = torch.cat(right), torch.cat(marked)
    whole = hits.all(-1)
    count, total = int(whole.sum()), whole.numel()
    return {
        "context": task.context,
        "facts": task.facts,
        "queries": task.queries,
        "odds": task.odds,
        "trained": task.context in LENGTHS,
        "samples": samples,
        "seed": seed,
        "recall": round(count / total, 4),
        "wilson_95": [round(end, 4) for end in wilson(count, total)],
        "lookup": share(hits[..., 0]),
        "copy": share(hits[..., 1]),
        "first_query": share(whole[:, 0]),
        "marked": share(whole[marks]),
        "unmarked": share(whole[~marks]),
        "filler_perplexity": round(float(torch.cat(nats).mean().exp()), 3),
        "seconds": round(time.monotonic() - begin, 1),
    }


def share(right: Tensor) -> float | None:
    """Return the share that is true, or nothing of nothing."""
    return round(float(right.float().mean()), 4) if right.numel() else None


def tasks() -> list[Task]:
    """Return what is measured: contexts half of facts, with at most 64, and one crowded."""
    lengths = [length for length in (*LENGTHS, BEYOND) if length > 33]
    counts = [(length, min((length - 1) // BLOCK // 2, 64)) for length in lengths]
    return [Task(length, facts, min(facts // 4, 8)) for length, facts in [*counts, (513, 115)]]


def judge(samples: int) -> None:
    """Measure the shipped model at every length and write the report."""
    model, runs = load(), []
    for task in tasks():
        count = samples if task.context in LENGTHS else max(samples // 8, 1)
        runs.append(measure(model, task, samples=count, seed=HELD_OUT))
        print(json.dumps(runs[-1]), flush=True)
    about = {
        "model": "recall-llama",
        "measure": "share of whole answers (both tokens right) to distinct queries, uncached; "
        "lookup and copy are of their first and second tokens",
        "dtype": "float32",
        "filler_perplexity_floor": SUCCESSORS,
    }
    write_report(BENCH / "recall-llama-quality.json", about, runs)


def keep(out: Path, seed: int, updates: int) -> dict[str, Any]:
    """Write the training record, with the accuracies that were seen on the way.

    Args:
        out: the training folder.
        seed: that was used.
        updates: of the whole run.
    """
    path = BENCH / "recall-llama-training.json"
    done = record(out, COURSE.name, f"{RUN} --seed {seed} --updates {updates}", path)
    rows = Log(out / "accuracy.jsonl", resume=True).rows()
    model = {"weights": sum(p.numel() for p in build_model().parameters())}
    done = {"model": done["model"], "seed": seed} | model | done | {"accuracy": thin(rows)}
    write_json(path, done)
    return done


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = training_parser(
        "train_recall",
        "Train, export and measure the language model that recalls, on a CPU.",
        out="out/recall-llama",
        updates=COURSE.steps,
        stages=STAGES,
    )
    made.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    made.add_argument("--samples", type=int, default=128, help="for each trained length")
    return made


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
    if "measure" in chosen.stages:
        judge(chosen.samples)


if __name__ == "__main__":
    main()
