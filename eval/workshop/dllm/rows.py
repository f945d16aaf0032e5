"""The rows of the table of diffusion language models: policies, and how they decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from diffcache.dllm import Credit, Dynamic, Hierarchical, Policy, Quota, Sampler, Schedule, SlowFast, Threshold
from diffcache.dllm.guided import Guided
from diffcache.dllm.rules import Rule
from diffcache.eval.methods import parse_method
from diffcache.eval.workshop.small.chain import CAUSAL, GUIDES

Settings = dict[str, Any]
Role = Literal["cache", "baseline", "control"]
MANY = 0.9  # the papers' threshold of parallel decoding


@dataclass(frozen=True)
class Row:
    """A way to decode."""

    name: str  # name in the table
    policy: str = ""  # policy as a command line writes it; "" for a model that is not wrapped
    against: str = "uncached"  # name of the uncached row that decodes in the same order
    role: Role = "cache"  # `cache`; `baseline`, without any; or `control`, which must lose
    threshold: float | None = None  # confidence of parallel decoding; None for a fixed number of tokens a step
    rule: Rule | None = None  # rule of commits in place of a number or a threshold; None for one of these
    share: float = 1.0  # forwards, as a share of the tokens
    block: int | None = None  # tokens of a block; None for the world's, 0 for one block
    window: int | None = None  # masks of a sliding window; None for whole blocks
    by: Literal["confidence", "random"] = "confidence"  # sign by which the next token is told
    guided: bool = False  # whether a small autoregressive model judges what is decided
    alone: bool = False  # whether that model answers by itself, one token after the other

    def made(self) -> Policy | None:
        """Return the policy, None for a model that is not wrapped."""
        if not self.policy:
            return None
        policy = parse_method(self.policy)
        assert isinstance(policy, Policy), self.policy
        return policy

    def schedule(self, length: int, block: int) -> Schedule:
        """Return how an answer of some tokens is decoded in a world with blocks."""
        size = block if self.block is None else self.block
        return Schedule(length, size or None, round(length * self.share), window=self.window)

    def sampler(self) -> Sampler:
        """Return how tokens are chosen."""
        rule: Rule = Quota() if self.threshold is None else Threshold(self.threshold)
        if self.guided:
            rule = Guided()
        return Sampler(by=self.by, rule=self.rule or rule)


def rows(model: str) -> list[Row]:
    """Return all rows of a shipped model, every uncached one before those that are compared with it."""
    if model in CAUSAL:
        return _causal_rows()
    many: Settings = {"threshold": MANY, "against": "uncached, threshold 0.9"}
    slide: Settings = {"block": 0, "window": 16, "against": "uncached, sliding window"}
    both: Settings = {"block": 0, "window": 16, "threshold": MANY}
    drawn: Settings = {"by": "random", "against": "uncached, random order"}
    small: Settings = {"block": 8, "against": "uncached, blocks of 8"}
    found = [
        _plain("uncached"),
        _plain("uncached, half the steps", share=0.5),
        _plain("uncached, a quarter of the steps", share=0.25),
        _plain("uncached, an eighth of the steps", share=0.125),
        _plain("uncached, threshold 0.9", threshold=MANY),
        _plain("uncached, hierarchical commits", rule=Hierarchical()),
        _plain("uncached, credit", rule=Credit()),
        _plain("uncached, SlowFast", rule=SlowFast(), block=0),
        _plain("uncached, sliding window", block=0, window=16),
        _plain("uncached, sliding window, threshold 0.9", **both),
        Row("dKV-Cache decode, every 8", "dkv-cache:every=8"),
        Row("dKV-Cache decode, threshold 0.9", "dkv-cache:every=8", **many),
        Row("dKV-Cache PD, every 4", "dkv-cache:variant=pd"),
        Row("dKV-Cache, no delay", "dkv-cache:every=8,delay=False", role="control"),
        Row("Fast-dLLM dual", "fast-dllm:dual=True"),
        Row("Fast-dLLM dual, threshold 0.9", "fast-dllm:dual=True", **many),
        Row("FreeCache", "free-cache"),
        Row("FreeCache, commit forward", "free-cache:commit=True"),
        Row("dLLM-Cache 100/7, a quarter", "dllm-cache:prompt_every=100"),
        Row("Sparse-dLLM", "sparse-dllm"),
        Row("EntropyCache", "entropy-cache"),
        Row("DPad", "dpad"),
        Row("DPad, dual", "dpad:cache=dual"),
        Row("vicinity of 4", "vicinity:before=4,after=4,warmup=1"),
        Row("d2Cache", "d2cache"),
        Row("Window-Diffusion", "window-diffusion", **slide),
        Row("Elastic-Cache, never", "elastic:gamma=-1", **slide),
        Row("Elastic-Cache, head axis 0.8", "elastic:gamma=0.8", **slide),
        Row("Elastic-Cache, key axis 0.9", "elastic:gamma=0.9,similarity=key", **slide),
        Row(
            "Elastic-Cache, key axis 0.9, threshold 0.9",
            "elastic:gamma=0.9,similarity=key",
            against="uncached, sliding window, threshold 0.9",
            **both,
        ),
    ]
    if model != "chain-llada":  # on which an answer takes ten times as long
        found += [
            _plain("uncached, blocks of 8", block=8),
            _plain("uncached, random order", by="random"),
            *[Row(f"dKV-Cache decode, every {n}", f"dkv-cache:every={n}") for n in (2, 32)],
            Row("dKV-Cache prefill", "dkv-cache:variant=prefill"),
            Row("dKV-Cache greedy", "dkv-cache:variant=greedy", **drawn),
            Row("Fast-dLLM prefix", "fast-dllm"),
            Row("FreeCache, blocks of 8", "free-cache", role="control", **small),
            Row("FreeCache, commit forward, blocks of 8", "free-cache:commit=True", **small),
            Row("dLLM-Cache 25/8, none", "dllm-cache:prompt_every=25,answer_every=8,ratio=0", role="control"),
            Row("Elastic-Cache, head axis 0.9", "elastic:gamma=0.9", **slide),
            Row("Elastic-Cache, key axis 0.99", "elastic:gamma=0.99,similarity=key", **slide),
            Row("Elastic-Cache, always", "elastic:gamma=2", **slide),
        ]
    if model in GUIDES:
        base = "uncached, guided"
        found += [
            _plain("the guide alone", alone=True),
            _plain(base, guided=True),
            Row("FreeCache, commit forward, guided", "free-cache:commit=True", base, guided=True),
            Row("Fast-dLLM dual, guided", "fast-dllm:dual=True", base, guided=True),
        ]
    return found


def _causal_rows() -> list[Row]:
    """Return the rows of a model whose attention is causal over blocks, which are those it decodes."""
    many: Settings = {"threshold": MANY, "against": "uncached, threshold 0.9"}
    found = [
        _plain("uncached"),
        _plain("uncached, half the steps", share=0.5),
        _plain("uncached, a quarter of the steps", share=0.25),
        _plain("uncached, threshold 0.9", threshold=MANY),
        _plain("uncached, hierarchical commits", rule=Hierarchical()),
        _plain("uncached, credit", rule=Credit()),
        _plain("uncached, commits of LLaDA2", rule=Dynamic(0.7)),
        Row("block cache", "block-cache"),
        Row("block cache, threshold 0.9", "block-cache", **many),
        Row("dKV-Cache decode, every 8", "dkv-cache:every=8"),
        Row("dKV-Cache decode, threshold 0.9", "dkv-cache:every=8", **many),
        Row("dKV-Cache PD, every 4", "dkv-cache:variant=pd"),
        Row("dKV-Cache, no delay", "dkv-cache:every=8,delay=False", role="control"),
    ]
    return [replace(row, block=0) for row in found]


def _plain(name: str, **settings: Any) -> Row:
    """Return a row without a cache."""
    return Row(name, role="baseline", **settings)
