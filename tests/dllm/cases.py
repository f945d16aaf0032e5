"""The policies that are tested: one place to add to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from diffcache.dllm import (
    D2Cache,
    Decoding,
    DKVCache,
    DLLMCache,
    ElasticCache,
    FastDLLM,
    FreeCache,
    Policy,
    Sampler,
    Schedule,
    Threshold,
    Uncached,
    WindowDiffusion,
)
from tests.dllm.toys import Noted, bidirectional, prompts, trace

LENGTHS = (9, 5)  # of the prompts
LONGEST, ANSWER, BLOCK = max(LENGTHS), 16, 8
WIDTH = LONGEST + ANSWER
SCHEDULE = Schedule(ANSWER, BLOCK)
WINDOW = Schedule(ANSWER, None, window=5)
AT_ONCE = Schedule(ANSWER, None, 1)
CONFIDENT, RANDOM = Sampler(), Sampler(by="random")


@dataclass(frozen=True)
class Case:
    """A policy as it is decoded with.

    Attributes:
        policy: The policy.
        sampler: Sampler.
        schedule: Schedule.
        freezes_masks: Whether it keeps, against the law, what was computed of a mask.
        hides: Whether it leaves positions out of sight.
        computes_its_plan: Whether each layer computes the rows of the plan, no more and no fewer;
            others have their counts and oracle in a file of their own.
    """

    policy: Policy
    sampler: Sampler = CONFIDENT
    schedule: Schedule = SCHEDULE
    freezes_masks: bool = False
    hides: bool = False
    computes_its_plan: bool = True


CASES = {
    "decode": Case(DKVCache(every=4)),
    "decode, no delay": Case(DKVCache(every=4, delay=False), freezes_masks=True),
    "greedy": Case(DKVCache("greedy", every=3, window=2), RANDOM, Schedule(ANSWER, BLOCK, 8)),
    "greedy, previous": Case(DKVCache("greedy", every=3, window=3, center="previous"), RANDOM),
    "prefill": Case(DKVCache("prefill")),
    "pd": Case(DKVCache("pd", every=4)),
    "prefix": Case(FastDLLM()),
    "dual": Case(FastDLLM(dual=True)),
    "free": Case(FreeCache(), freezes_masks=True),
    "free, commit": Case(FreeCache(commit=True)),
    "window": Case(WindowDiffusion(ANSWER, 5), schedule=WINDOW),
    "window, narrow": Case(WindowDiffusion(7, 6), schedule=WINDOW, hides=True),
    "dllm": Case(DLLMCache(5, 3), computes_its_plan=False),
    "dllm, half": Case(DLLMCache(3, 8, 0.5), computes_its_plan=False),
    "elastic": Case(ElasticCache(0.8), schedule=WINDOW, computes_its_plan=False),
    "elastic, keys": Case(ElasticCache(0.5, "key", 2), CONFIDENT, WINDOW, computes_its_plan=False),
    "d2": Case(D2Cache(3, 2.0, 0.3, 3), computes_its_plan=False),
    "d2, wide": Case(D2Cache(9, inflate_w=0), schedule=WINDOW, computes_its_plan=False),
}
ROW_PLANS = [name for name, case in CASES.items() if case.computes_its_plan]

LIMITS = {  # where a policy computes everything
    "all rows": Case(Uncached()),
    "decode, every step": Case(DKVCache(every=1)),
    "decode, every step, threshold": Case(DKVCache(every=1), Sampler(rule=Threshold(0.3))),
    "decode, blocks of two steps": Case(DKVCache(every=9), schedule=Schedule(ANSWER, BLOCK, 4)),
    "decode, threshold 0": Case(DKVCache(), Sampler(rule=Threshold(0))),
    "greedy, every step": Case(DKVCache("greedy", every=1), RANDOM),
    "prefill, a step": Case(DKVCache("prefill"), schedule=AT_ONCE),
    "pd, a step": Case(DKVCache("pd"), schedule=AT_ONCE),
    "prefix, blocks of a step": Case(FastDLLM(), schedule=Schedule(ANSWER, BLOCK, 2)),
    "dual, threshold 0": Case(FastDLLM(dual=True), Sampler(rule=Threshold(0))),
    "free, a step": Case(FreeCache(), schedule=AT_ONCE),
    "dllm, every step": Case(DLLMCache(1, 1, 0.3)),
    "dllm, every step, no rows": Case(DLLMCache(1, 1, 0)),
    "window, every step": Case(WindowDiffusion(7, 1), schedule=WINDOW),
    "d2, a step": Case(D2Cache(), schedule=AT_ONCE),
    "elastic, all rows": Case(ElasticCache(force_full=True), schedule=WINDOW),
}


@cache
def model() -> Any:
    """Return the model, in float64."""
    return bidirectional()


@cache
def traced(name: str) -> tuple[Decoding, list[Noted]]:
    """Return the decoding of a case, of both prompts together, and its steps."""
    case = CASES[name]
    return trace(model(), case.policy, prompts(*LENGTHS), case.schedule, case.sampler)
