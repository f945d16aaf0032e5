"""Host time of one step of each policy beside plain forwards of as many rows, in one process.

After every call of a policy's model a twin without a cache runs on as many tokens as that computed,
in the mean over layers, so that both meet the same state of the machine. `call` is the time of the
wrapped model's call by that forward's; `step` that of the whole step, with the policy's plan and
the sampler. Attention of the rows to all that is held is the policy's, and no part of the plain
forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import Context
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.record import TOKEN_LAYERS
from diffcache.dllm import Decoding, RowPlan
from diffcache.eval.cost.interleave import summary
from diffcache.eval.record import Setting
from diffcache.eval.workshop.dllm.measure import runners
from diffcache.eval.workshop.dllm.rows import Row, rows
from diffcache.eval.workshop.small.chain import HELD_OUT, WORLDS, draw
from diffcache.pipelines.diffusion_lm import can_be_compiled
from diffcache.targets import handle_of

NAMES = (
    "uncached",
    "dKV-Cache decode, every 8",
    "dKV-Cache PD, every 4",
    "Fast-dLLM dual",
    "FreeCache, commit forward",
    "dLLM-Cache 100/7, a quarter",
    "d2Cache",
    "Window-Diffusion",
    "Elastic-Cache, never",
    "Elastic-Cache, head axis 0.9",
    "Elastic-Cache, key axis 0.9",
)
MODEL = "chain-llada"


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that notes the CPU seconds of its calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = function(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return out

    return run


@torch.no_grad()
def answer(runner: Any, prompts: Tensor, twin: nn.Module) -> dict[str, float]:
    """Return ratios of an answer to prompts, int64 `[B, P]`, its mean rows a step, its seconds without the twin's."""
    lm, masked, outside = runner.lm, runner.lm.masked, Context()
    calls: list[float] = []
    plain: list[float] = []
    counts: list[int] = []
    own = timed(masked.logits, calls)

    def logits(decoding: Decoding, plan: RowPlan, is_wrapped: bool) -> Tensor:
        found: Tensor = own(decoding, plan, is_wrapped)
        counts.append(_computed(lm, decoding.ids) if is_wrapped else decoding.ids.shape[1])
        some = decoding.ids[:, : counts[-1]]
        timed(outside.run, plain)(twin, input_ids=some, use_cache=False)
        return found

    masked.logits = logits
    start = time.process_time()
    try:
        runner.answer(prompts)
    finally:
        del masked.logits
    seconds = time.process_time() - start - sum(plain)
    return {"call": sum(calls) / sum(plain), "step": seconds / sum(plain), "rows": fmean(counts), "seconds": seconds}


def _computed(lm: Any, ids: Tensor) -> int:
    """Return the rows of a sequence that the last call of a wrapped model computed in a layer."""
    record = handle_of(lm.model).last.calls[-1]
    computed, _ = record.counts[TOKEN_LAYERS]
    layers = int(lm.model.config.num_hidden_layers)
    return max(round(computed / ids.shape[0] / layers), 1)


def measure(
    setting: Setting, *, rounds: int = 16, size: int = 1, compiled: bool = False, named: Sequence[str] = NAMES
) -> dict[str, Any]:
    """Measure the steps of the named policies in turn, the uncached one first, in answers to batches of a size.

    If asked, forwards of some rows are compiled, beside a plain one that is not; policies that do not take
    that are left out.
    """
    generator = torch.Generator().manual_seed(HELD_OUT + 2)
    prompts = draw((rounds + 1) * size, WORLDS[MODEL], generator).prompts
    known = {row.name: row for row in rows("chain-llada-probe")}
    chosen = [known[name] for name in named]
    found = runners(MODEL, [Row("plain"), *chosen], setting)
    twin = found.pop("plain").lm.model
    if compiled:
        for name, runner in list(found.items()):
            policy = runner.lm.policy
            runner.lm.compiled = can_be_compiled(policy)
            if policy is not None and not runner.lm.compiled:
                del found[name]
    told: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    for batch in prompts.to(setting.device).split(size):
        for name, runner in found.items():
            told[name].append(answer(runner, batch, twin))
    stock = [one["seconds"] for one in told["uncached"][1:]]
    made = []
    for name, answers in told.items():
        timed_ones = answers[1:]  # the first checks the model
        faster = [base / one["seconds"] for base, one in zip(stock, timed_ones, strict=True)]
        made.append(
            {
                "name": name,
                "rows": fmean(one["rows"] for one in timed_ones),
                "call_ratio": summary([one["call"] for one in timed_ones]),
                "step_ratio": summary([one["step"] for one in timed_ones]),
                "faster": summary(faster),
            }
        )
    return {
        "shapes": {"model": MODEL, "batch": size, "device": setting.device.type},
        "rounds": rounds,
        "clock": "CPU time of the process",
        "rows": made,
    }
