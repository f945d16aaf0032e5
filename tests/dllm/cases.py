"""The policies that are tested: one place to add to."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from diffcache import dllm
from diffcache.dllm import D2Cache, DKVCache, DLLMCache, FastDLLM, FreeCache, Policy, Sampler, Schedule, Threshold
from diffcache.registry import rows_of
from tests.dllm.toys import Noted, bidirectional, prompts, trace

LENGTHS = (9, 5)  # of the prompts
LONGEST, ANSWER, BLOCK = max(LENGTHS), 16, 8
WIDTH = LONGEST + ANSWER
VALID = torch.arange(WIDTH) >= LONGEST - torch.tensor(LENGTHS)[:, None]  # False is padding
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


def of(name: str, *, off: bool = False) -> Policy:
    """Return a policy with the settings of its row."""
    row = rows_of("dllm")[name]
    return row.load()(**(row.off if off else row.skips))


CASES = {
    "decode": Case(of("dkv-cache")),
    "decode, no delay": Case(DKVCache(every=4, delay=False), freezes_masks=True),
    "greedy": Case(DKVCache("greedy", every=3, window=2), RANDOM, Schedule(ANSWER, BLOCK, 8)),
    "greedy, previous": Case(DKVCache("greedy", every=3, window=3, center="previous"), RANDOM),
    "prefill": Case(DKVCache("prefill")),
    "pd": Case(DKVCache("pd", every=4)),
    "prefix": Case(of("fast-dllm")),
    "dual": Case(FastDLLM(dual=True)),
    "free": Case(of("free-cache"), freezes_masks=True),
    "free, commit": Case(FreeCache(commit=True)),
    "window": Case(of("window-diffusion"), schedule=WINDOW),
    "dpad": Case(of("dpad"), hides=True),
    "window, narrow": Case(dllm.WindowDiffusion(7, 6), schedule=WINDOW, hides=True),
    "dllm": Case(of("dllm-cache"), computes_its_plan=False),
    "dllm, half": Case(DLLMCache(3, 8, 0.5), computes_its_plan=False),
    "elastic": Case(of("elastic"), schedule=WINDOW, computes_its_plan=False),
    "elastic, keys": Case(dllm.ElasticCache(0.5, "key", 2), CONFIDENT, WINDOW, computes_its_plan=False),
    "sparse": Case(of("sparse-dllm"), hides=True, computes_its_plan=False),
    "d2": Case(of("d2cache"), computes_its_plan=False),
    "d2, wide": Case(D2Cache(9, inflate_w=0), schedule=WINDOW, computes_its_plan=False),
}
# What has no line above is decoded as most are.
KNOWN = {case.policy.name for case in CASES.values()}
CASES |= {n: Case(of(n)) for n, row in rows_of("dllm").items() if row.skips is not None and n not in KNOWN}
ROW_PLANS = [name for name, case in CASES.items() if case.computes_its_plan]

LIMITS = {  # where a policy computes everything
    "all rows": Case(of("uncached", off=True)),
    "decode, every step": Case(of("dkv-cache", off=True)),
    "decode, every step, threshold": Case(DKVCache(every=1), Sampler(rule=Threshold(0.3))),
    "decode, blocks of two steps": Case(DKVCache(every=9), schedule=Schedule(ANSWER, BLOCK, 4)),
    "decode, threshold 0": Case(DKVCache(), Sampler(rule=Threshold(0))),
    "greedy, every step": Case(DKVCache("greedy", every=1), RANDOM),
    "prefill, a step": Case(DKVCache("prefill"), schedule=AT_ONCE),
    "pd, a step": Case(DKVCache("pd"), schedule=AT_ONCE),
    "prefix, blocks of a step": Case(FastDLLM(), schedule=Schedule(ANSWER, BLOCK, 2)),
    "dual, threshold 0": Case(FastDLLM(dual=True), Sampler(rule=Threshold(0))),
    "free, a step": Case(FreeCache(), schedule=AT_ONCE),
    "dllm, every step": Case(of("dllm-cache", off=True)),
    "dllm, every step, no rows": Case(DLLMCache(1, 1, 0)),
    "window, every step": Case(of("window-diffusion", off=True), schedule=WINDOW),
    "sparse, blocks of two steps": Case(of("sparse-dllm"), schedule=Schedule(ANSWER, BLOCK, 4)),
    "d2, a step": Case(D2Cache(), schedule=AT_ONCE),
    "elastic, all rows": Case(of("elastic", off=True), schedule=WINDOW),
}

KNOWN = {case.policy.name for case in LIMITS.values()}
LIMITS |= {n: Case(of(n, off=True)) for n, row in rows_of("dllm").items() if row.off is not None and n not in KNOWN}


@cache
def model(dtype: torch.dtype = torch.float64) -> Any:
    """Return the model."""
    return bidirectional(dtype)


@cache
def traced(name: str) -> tuple[dllm.Decoding, list[Noted]]:
    """Return the decoding of a case, of both prompts together, and its steps."""
    case = CASES[name]
    return trace(model(), case.policy, prompts(*LENGTHS), case.schedule, case.sampler)
