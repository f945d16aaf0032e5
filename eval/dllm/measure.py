"""Right answers of a diffusion language model with each cache, and the time they take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import diffcache
from diffcache.eval.cost.interleave import Call, Progress, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.dllm.rows import Row
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.parts import Parts
from diffcache.eval.record import Setting
from diffcache.pipelines.diffusion_lm import Answer, DiffusionLM
from diffcache.pipelines.small.chain import HELD_OUT, MASK, WORLDS, ChainBatch, draw, is_exact
from diffcache.pipelines.small.chain_llada import BLOCKS, load

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
        told: Cost of each call: forwards, and rows of all layers.
    """

    row: Row
    lm: DiffusionLM
    length: int
    block: int
    told: list[tuple[int, int]] = field(default_factory=list)

    def answer(self, prompts: Tensor) -> Answer:
        """Return the answers to prompts, int64 `[B, P]`."""
        return self.lm.generate(
            prompts, self.row.schedule(self.length, self.block), self.row.sampler()
        )

    def note(self, prompts: Tensor) -> None:
        """Answer, and note what it took."""
        answer = self.answer(prompts)
        config: Any = self.lm.model.config
        whole = answer.rows * int(config.num_hidden_layers)
        computed = whole if answer.report is None else answer.report.computed
        self.told.append((answer.forwards, computed))


def runners(model: str, chosen: Sequence[Row], setting: Setting) -> dict[str, Runner]:
    """Return a runner for each row, whose models share their weights.

    Args:
        model: Name of a shipped model, in `BLOCKS`.
        chosen: Rows.
        setting: Device and dtype.
    """
    base = load(model, setting.dtype).to(setting.device)
    shared = {id(weight): weight for weight in base.parameters()}
    guide = None
    if any(row.guided for row in chosen):
        guide = load("chain-guide", setting.dtype).to(setting.device)
    found = {}
    for row in chosen:
        own = copy.deepcopy(base, dict(shared))
        policy = row.made()
        if policy is not None:
            diffcache.wrap(own, policy)
        lm = DiffusionLM(own, mask_id=MASK, guide=guide if row.guided else None)
        found[row.name] = Runner(row, lm, WORLDS[model].length, BLOCKS[model])
    return found


def quality(
    found: Mapping[str, Runner], model: str, samples: int, seed: int, kept: Parts,
    progress: Progress | None,
) -> dict[str, Tensor]:  # fmt: skip
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


def timing(
    found: Mapping[str, Runner], model: str, size: int, rounds: int, setting: Setting,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return seconds, forwards and token-layers of a batch by row; rows take turns.

    Args:
        found: Runners by row.
        model: Name of the model.
        size: Prompts of a batch.
        rounds: Batches that are timed.
        setting: Device and dtype.
        progress: Callback for the progress, given (turns done, turns in all, name of the next).
    """
    generator = torch.Generator().manual_seed(HELD_OUT + _TIMED)
    prompts = draw(size * (rounds + 1), WORLDS[model], generator).prompts.to(setting.device)
    batches = prompts.split(size)

    def turn(runner: Runner) -> Callable[[], None]:
        runner.told = []
        return lambda: runner.note(batches[len(runner.told)])

    calls: dict[str, Call | Turn] = {name: turn(runner) for name, runner in found.items()}
    taken = take_turns(calls, rounds, 1, setting, progress)
    is_alone = setting.device.type == "cpu" and torch.get_num_threads() == 1
    seconds = taken.cpu_seconds if is_alone else taken.seconds
    stock = next(iter(found))
    told = {}
    for name, runner in found.items():
        ratios = [base / own for base, own in zip(seconds[stock], seconds[name], strict=True)]
        forwards, computed = (
            sum(column) / (size * len(column)) for column in zip(*runner.told[1:], strict=True)
        )
        told[name] = {
            "seconds": summary([value / size for value in seconds[name]]),
            "faster": summary(ratios), "forwards": forwards * size, "token_layers": computed,
        }  # fmt: skip
    return told


@torch.no_grad()
def measure_model(
    model: str,
    chosen: Sequence[Row],
    setting: Setting,
    *,
    samples: int,
    rounds: int,
    seed: int = 0,
    kept: Parts,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Return what every row measured on one model.

    Args:
        model: Name of a shipped model, in `BLOCKS`.
        chosen: Rows, the uncached one first.
        setting: Device and dtype.
        samples: Prompts whose answers are judged.
        rounds: Timed batches of one prompt; a quarter as many of `BATCH` prompts.
        seed: Seed of the prompts.
        kept: Rows that were judged before.
        progress: Callback for the progress, given (turns done, turns in all, name of the next).
    """
    found = runners(model, chosen, setting)
    hits = quality(found, model, samples, seed, kept, progress)
    times = {
        size: timing(found, model, size, count, setting, progress)
        for size, count in ((1, rounds), (BATCH, max(1, rounds // 4)))
    }
    made = []
    for row in chosen:
        lost = share_change(hits[row.against], hits[row.name])
        made.append({
            "name": row.name, "policy": row.policy, "role": row.role, "against": row.against,
            "threshold": row.threshold, "exact_match": share_interval(hits[row.name]).to_dict(),
            "change": None if row.against == row.name else lost.to_dict(),
            **{f"batch_{size}": told[row.name] for size, told in times.items()},
        })  # fmt: skip
    return made
