"""Right answers of a diffusion language model with each cache, and the time they take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import diffcache
from diffcache.eval.cost.interleave import Call, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.record import Progress, Setting, values
from diffcache.eval.workshop.dllm.rows import Row
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small.chain import HELD_OUT, WORLDS, ChainBatch, draw, is_exact
from diffcache.eval.workshop.small.chain_llada import BLOCKS, GUIDES, load
from diffcache.pipelines.diffusion_lm import Answer, DiffusionLM

BATCH = 8  # of those that are timed, beside one
JUDGED = 40  # answers that are decoded at once to be judged
_TIMED = 1  # seed of the prompts that are timed, after HELD_OUT


@dataclass
class Runner:
    """A model with one way to decode, of its own.

    Attributes:
        row: The way.
        lm: Model, wrapped where the row says so.
        length: Tokens of an answer.
        block: Tokens of a block of the world.
        told: Cost of each call: forwards, rows of all layers (a guide's too), most bytes held.
    """

    row: Row
    lm: DiffusionLM
    length: int
    block: int
    told: list[tuple[int, int, int]] = field(default_factory=list)

    def answer(self, prompts: Tensor) -> Answer:
        """Return the answers to prompts, int64 `[B, P]`."""
        if self.row.alone:
            return self._alone(prompts)
        return self.lm.generate(prompts, self.row.schedule(self.length, self.block), self.row.sampler())

    @torch.no_grad()
    def _alone(self, prompts: Tensor) -> Answer:
        """Return the most probable answers of the guide."""
        guide: Any = self.lm.guide
        ids = guide.generate(prompts, max_new_tokens=self.length, do_sample=False)
        rows = len(ids) * (ids.shape[1] - 1)  # nothing comes after the last token
        return Answer(ids[:, prompts.shape[1] :], None, self.length, 0, None, rows)

    def note(self, prompts: Tensor) -> None:
        """Answer, and note what it took."""
        answer = self.answer(prompts)
        config: Any = self.lm.model.config
        whole = answer.rows * int(config.num_hidden_layers)
        report = answer.report
        computed, held = (whole, 0) if report is None else (report.computed, report.peak_bytes)
        if self.lm.guide is not None:
            guide: Any = self.lm.guide.config
            computed += answer.guide_rows * int(guide.num_hidden_layers)
        self.told.append((answer.forwards, computed, held))


def runners(model: str, chosen: Sequence[Row], setting: Setting) -> dict[str, Runner]:
    """Return a runner for each row of a shipped model.

    Args:
        model: Name of a shipped model, in `BLOCKS`.
        chosen: Rows.
        setting: Device and dtype.
    """
    base = load(model, setting.dtype).to(setting.device)
    guide = None
    if any(row.guided or row.alone for row in chosen):
        guide = load(GUIDES[model], setting.dtype).to(setting.device)
    return runners_of(base, chosen, WORLDS[model].length, BLOCKS[model], guide)


def runners_of(
    base: LlamaForCausalLM, chosen: Sequence[Row], length: int, block: int, guide: LlamaForCausalLM | None = None
) -> dict[str, Runner]:
    """Return a runner for each row, whose models share their weights.

    Args:
        base: Model, whose configuration names the mask.
        chosen: Rows.
        length: Tokens of an answer.
        block: Tokens of a block.
        guide: Autoregressive model of the rows that are guided.
    """
    shared = {id(weight): weight for weight in base.parameters()}
    found = {}
    for row in chosen:
        own = copy.deepcopy(base, dict(shared))
        policy = row.made()
        if policy is not None:
            diffcache.wrap(own, policy)
        lm = DiffusionLM(own, guide=guide if row.guided or row.alone else None)
        found[row.name] = Runner(row, lm, length, block)
    return found


def quality(
    found: Mapping[str, Runner], model: str, samples: int, seed: int, kept: Parts, progress: Progress | None
) -> dict[str, Tensor]:
    """Return which answers are right from the first token to the last, bool `[samples]` by row.

    Args:
        found: Runners by row.
        model: Name of the model.
        samples: Prompts, the same for every row.
        seed: Seed of the draw, which no training reached.
        kept: Rows that were judged before.
        progress: Callback for the progress, given (rows done, rows in all, name of the next).
    """
    generator = torch.Generator().manual_seed(HELD_OUT + seed)
    batch = draw(samples, WORLDS[model], generator)
    hits = {}
    for number, (name, runner) in enumerate(found.items()):
        if progress is not None:
            progress(number, len(found), name)
        hits[name] = torch.tensor(kept.take(f"answers: {name}", partial(_hits, runner, batch)))
    return hits


def _hits(runner: Runner, batch: ChainBatch) -> list[bool]:
    device = runner.lm.model.device
    made = [runner.answer(part.to(device)).ids.cpu() for part in batch.prompts.split(JUDGED)]
    right: list[bool] = is_exact(torch.cat(made), batch).tolist()
    return right


def timing(found: Mapping[str, Runner], prompts: Tensor, size: int, setting: Setting) -> dict[str, dict[str, Any]]:
    """Return seconds, forwards, token-layers and bytes of a batch by row; rows take turns.

    Args:
        found: Runners by row.
        prompts: Tokens, int64 `[(rounds + 1) * size, P]`, the first batch untimed.
        size: Prompts of a batch.
        setting: Device and dtype.
    """
    batches = prompts.to(setting.device).split(size)

    def turn(runner: Runner) -> Callable[[], None]:
        runner.told = []
        return lambda: runner.note(batches[len(runner.told)])

    calls: dict[str, Call | Turn] = {name: turn(runner) for name, runner in found.items()}
    seconds = take_turns(calls, len(batches) - 1, 1, setting).own(setting)
    stock = next(iter(found))
    told = {}
    for name, runner in found.items():
        ratios = [base / own for base, own in zip(seconds[stock], seconds[name], strict=True)]
        forwards, computed, held = zip(*runner.told[1:], strict=True)
        told[name] = {
            "seconds": summary([value / size for value in seconds[name]]),
            "faster": summary(ratios),
            "forwards": fmean(forwards),
            "token_layers": fmean(computed) / size,
            "held_bytes": max(held),
        }
    return told


@torch.no_grad()
def measure_model(
    model: str, chosen: Sequence[Row], setting: Setting, *, samples: int, rounds: int, seed: int = 0, kept: Parts
) -> list[dict[str, Any]]:
    """Return what every row measured on one model.

    Args:
        model: Name of a shipped model, in `BLOCKS`.
        chosen: Rows, the uncached one first.
        setting: Device and dtype, and where the progress is told.
        samples: Prompts whose answers are judged.
        rounds: Timed batches of one prompt; a quarter as many of `BATCH` prompts.
        seed: Seed of the prompts.
        kept: Rows that were judged before.
    """
    found = runners(model, chosen, setting)
    hits = quality(found, model, samples, seed, kept, setting.progress)
    times = {}
    for size, count in ((1, rounds), (BATCH, max(1, rounds // 4))):
        generator = torch.Generator().manual_seed(HELD_OUT + _TIMED)
        prompts = draw(size * (count + 1), WORLDS[model], generator).prompts
        times[size] = timing(found, prompts, size, setting)
    made = []
    for row in chosen:
        lost = share_change(hits[row.against], hits[row.name])
        made.append(
            {
                "name": row.name,
                "policy": row.policy,
                "role": row.role,
                "against": row.against,
                "threshold": row.threshold,
                "exact_match": share_interval(hits[row.name]).to_dict(),
                "values": values(hits[row.name]),
                "change": None if row.against == row.name else lost.to_dict(),
                **{f"batch_{size}": told[row.name] for size, told in times.items()},
            }
        )
    return made
