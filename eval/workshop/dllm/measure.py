"""Caches of diffusion language models: right answers, rows and seconds, on the shipped models.

Every row decodes the same prompts, one token a step where no threshold is named. The row without a
cache that has the same threshold shows what parallel decoding brings; a cache is judged against the
uncached row that decodes in the same order.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import diffcache
from diffcache.attach.handle import Handle
from diffcache.dllm import ALL, Decoding, FedRows, Policy, RowPlan, Uncached
from diffcache.eval.cost.interleave import Call, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.record import Progress, Setting, values
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.dllm.rows import Row, rows
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small.chain import BLOCKS, CAUSAL, GUIDES, MASK, WORLDS, ChainBatch, draw, is_exact, load
from diffcache.pipelines.diffusion_lm import Answer, DiffusionLM
from diffcache.pipelines.guide import ModelGuide
from diffcache.pipelines.shipped_models import MODELS as SHIPPED
from diffcache.targets import handle_of

BATCH = 8  # of those that are timed, beside one
JUDGED = 40  # answers that are decoded at once to be judged
MODELS = tuple(BLOCKS)
SAMPLES, REPLAYED = 400, 4
FEWER = {"chain-llada": 128}  # its answers are 128 tokens and take ten times as long
# Seed of the prompts that are answered; the first of them are those of the first training step.
PROMPTS = 0
_TIMED = 1  # seed of the prompts that are timed


@dataclass
class Runner:
    """A model with one way to decode, of its own."""

    row: Row  # the way
    lm: DiffusionLM  # model, wrapped where the row says so
    length: int  # tokens of an answer
    block: int  # tokens of a block of the world
    # Cost of each call: forwards, rows of all layers (a guide's too), most bytes held
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
    """Return a runner for each row of a shipped model, whose models share their weights."""
    base = load(model, setting.dtype).to(setting.device)
    guide = None
    if any(row.guided or row.alone for row in chosen):
        guide = load(GUIDES[model], setting.dtype).to(setting.device)
    shared = {id(weight): weight for weight in base.parameters()}
    found = {}
    for row in chosen:
        own = copy.deepcopy(base, dict(shared))
        policy = row.made()
        if policy is not None:
            diffcache.wrap(own, policy)
        lm = DiffusionLM(own, guide=guide if row.guided or row.alone else None)
        found[row.name] = Runner(row, lm, WORLDS[model].length, BLOCKS[model])
    return found


def quality(
    found: Mapping[str, Runner], model: str, samples: int, kept: Parts, progress: Progress
) -> dict[str, Tensor]:
    """Return whether each answer to the same prompts is right in all of its tokens, bool `[samples]` by row."""
    generator = torch.Generator().manual_seed(PROMPTS)
    batch = draw(samples, WORLDS[model], generator)
    hits = {}
    for number, (name, runner) in enumerate(found.items()):
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

    Prompts are int64 `[(rounds + 1) * size, P]`, the first batch untimed.
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
def measure(
    setting: Setting,
    *,
    model: str = MODELS[0],
    rounds: int = 16,
    samples: int | None = None,
    named: Sequence[str] | None = None,
    unfinished: Path | None = None,
) -> dict[str, Any]:
    """Measure the rows of a shipped model, all or the named ones and those they are compared with, and their replay.

    `rounds` batches of one prompt are timed, and a quarter as many of `BATCH` prompts. By default 400 answers are
    judged, 128 of chain-llada. The file `unfinished` keeps judged rows until all is done.
    """
    if model not in MODELS:
        raise ValueError(f"no model {model!r}; there are {', '.join(MODELS)}")
    samples = samples or FEWER.get(model, SAMPLES)
    chosen = _chosen(model, named)
    digest = directory_sha256(SHIPPED / model)
    kept = Parts(unfinished, {"samples": samples, "dtype": str(setting.dtype), "model": digest})
    found = runners(model, chosen, setting)
    hits = quality(found, model, samples, kept, setting.progress)
    times = {}
    for size, count in ((1, rounds), (BATCH, max(1, rounds // 4))):
        generator = torch.Generator().manual_seed(_TIMED)
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
    return {
        "shapes": {"model": model, "samples": samples, "batch": BATCH, "block": BLOCKS[model]},
        "rounds": rounds,
        "rows": made,
        "replay": {} if model in CAUSAL else replay(model, chosen, setting, min(samples, REPLAYED), kept),
        "parts": kept.end(),
    }


def _chosen(model: str, named: Sequence[str] | None) -> list[Row]:
    """Return the named rows of a model, with those that they are compared with; ValueError for an unknown name."""
    known = {row.name: row for row in rows(model)}
    if named is None:
        return list(known.values())
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    wanted = {"uncached", *named, *(known[name].against for name in named)}
    return [row for name, row in known.items() if name in wanted]


# the error on one trajectory ------------------------------------------------------------------
#
# A cache that decides one token otherwise decodes another text from there on, so that free answers
# say little about how stale it is. Here the tokens are always those of the uncached run; each cache
# is only asked what it would have said.


@dataclass
class Errors:
    """Sums over the steps of trajectories."""

    same: int = 0  # masks of the block whose most probable token is that of the uncached run
    masks: int = 0  # masks of the block that were computed
    first: int = 0  # steps at which the token that the uncached run committed has rank 0
    commits: int = 0
    # Steps since all rows were computed -> relative errors of keys and values
    by_age: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def to_dict(self) -> dict[str, Any]:
        """Return the shares and the mean errors as plain data."""
        values = [value for found in self.by_age.values() for value in found]
        return {
            "same_argmax": self.same / self.masks,
            "same_commit": self.first / self.commits,
            "kv_error": sum(values) / len(values) if values else None,
            "kv_error_by_age": {age: sum(v) / len(v) for age, v in sorted(self.by_age.items())},
        }


@torch.no_grad()
def replay(
    model: str, chosen: Sequence[Row], setting: Setting, samples: int, kept: Parts
) -> dict[str, dict[str, Any]]:
    """Return the errors of every row with a policy, by name; rows that decode in one order share a trajectory."""
    generator = torch.Generator().manual_seed(PROMPTS)
    prompts = draw(samples, WORLDS[model], generator).prompts.to(setting.device)
    with_policy = [row for row in chosen if row.made() is not None]
    return {
        row.name: kept.take(f"replay: {row.name}", partial(_replayed, model, row, setting, prompts))
        for row in with_policy
    }


def _replayed(model: str, row: Row, setting: Setting, prompts: Tensor) -> dict[str, Any]:
    policy = row.made()
    assert policy is not None
    pair = runners(model, [Row("fresh", "", "fresh"), row], setting)
    fresh, cached = pair["fresh"].lm.model, pair[row.name].lm.model
    diffcache.wrap(fresh, Uncached())
    schedule = row.schedule(WORLDS[model].length, BLOCKS[model])
    errors = Errors()
    for prompt in prompts.split(1):
        model_of_guide = pair[row.name].lm.guide
        guide = None if model_of_guide is None else ModelGuide(model_of_guide)
        decoding = Decoding(prompt, schedule, row.sampler(), MASK, guide=guide)
        _follow(decoding, policy, fresh, cached, errors)
    return errors.to_dict()


def _follow(decoding: Decoding, policy: Policy, fresh: Any, cached: Any, errors: Errors) -> None:
    """Decode without a cache, and ask the cache at every step."""
    age, plan = 0, None
    with diffcache.run(fresh), diffcache.run(cached):
        while not decoding.is_finished:
            state = replace(decoding.state, last=plan)
            plan = policy.plan(state)
            true = _logits(fresh, state.ids, ALL)
            ours = _logits(cached, state.ids, plan)
            rows = plan.index(len(state.ids), state.width, state.ids.device)
            age = 0 if plan.rows is None else age + 1
            if policy.abilities() and isinstance(policy.abilities()[0], FedRows):
                errors.by_age[age] += _kv_errors(handle_of(fresh), handle_of(cached))
            open_rows = state.open.gather(1, rows)
            best, right = _best(ours), _best(true.gather(1, _wide(rows, true)))
            errors.same += int((best == right)[open_rows].sum())
            errors.masks += int(open_rows.sum())
            decoding.commit(true, ALL)
            made = decoding.state.changed.gather(1, rows)
            errors.first += int((best == decoding.ids.gather(1, rows))[made].sum())
            errors.commits += int(made.sum())


def _logits(model: Any, ids: Tensor, plan: RowPlan) -> Tensor:
    found: Tensor = model(input_ids=ids, row_plan=plan, use_cache=False).logits
    return found


def _best(logits: Tensor) -> Tensor:
    """Return the most probable token but the mask."""
    mask = torch.tensor([MASK], device=logits.device)
    return logits.index_fill(-1, mask, float("-inf")).argmax(-1)


def _wide(rows: Tensor, logits: Tensor) -> Tensor:
    return rows[..., None].expand(-1, -1, logits.shape[-1])


def _kv_errors(fresh: Handle, cached: Handle) -> Iterator[float]:
    """Yield the relative error of the keys, then the values, of each layer but the first."""
    true, ours = (list(handle.denoisers[0].tensors(handle.run())) for handle in (fresh, cached))
    for one, other in zip(true[2:], ours[2 : len(true)], strict=True):
        yield float((other - one).norm() / one.norm())
