"""The error of a cache on the trajectory of uncached decoding, apart from where it would lead.

A cache that decides one token otherwise decodes another text from there on, so that free answers
say little about how stale it is. Here the tokens are always those of the uncached run; each cache
is only asked what it would have said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import diffcache
from diffcache.attach.handle import Handle
from diffcache.dllm import ALL, Decoding, FedRows, Policy, RowPlan, Uncached
from diffcache.eval.record import Setting
from diffcache.eval.workshop.dllm.measure import runners
from diffcache.eval.workshop.dllm.rows import Row
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small.chain import HELD_OUT, MASK, WORLDS, draw
from diffcache.eval.workshop.small.chain_llada import BLOCKS
from diffcache.pipelines.guide import ModelGuide
from diffcache.targets import handle_of


@dataclass
class Errors:
    """Sums over the steps of trajectories.

    Attributes:
        same: Masks of the block whose most probable token is that of the uncached run.
        masks: Masks of the block that were computed.
        first: Steps at which the token that the uncached run committed has rank 0.
        commits: Commits.
        by_age: Steps since all rows were computed -> relative errors of keys and values.
    """

    same: int = 0
    masks: int = 0
    first: int = 0
    commits: int = 0
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
    model: str, chosen: Sequence[Row], setting: Setting, samples: int, kept: Parts, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the errors of every row that has a policy, by name.

    Args:
        model: Name of a shipped model.
        chosen: Rows; those that decode in the same order share a trajectory.
        setting: Device and dtype.
        samples: Prompts.
        kept: Rows that were replayed before.
        seed: Seed of the prompts, which no training reached.
    """
    generator = torch.Generator().manual_seed(HELD_OUT + seed)
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
