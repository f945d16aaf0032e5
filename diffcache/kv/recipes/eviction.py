"""Recipes that drop slots by a score."""

from __future__ import annotations

from dataclasses import replace

from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import AdaHead, Safeguard
from diffcache.kv.budgets.layers import EntropyVariance, Pyramid
from diffcache.kv.plan import RecentShare, TopK, TwoStage
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import (
    Groups,
    LastQuery,
    Mass,
    Pooling,
    Window,
    WindowVariance,
)
from diffcache.kv.score.expected import Expected
from diffcache.kv.score.recency import Chance
from diffcache.kv.score.vectors import KeyDifference, KeyNorm, Lag, ValueNorm
from diffcache.kv.settings import Count, Mode, Share, Size, Whole, checked
from diffcache.kv.trigger import EveryStep


@checked
def knorm(budget: Size = 0.5, *, recent: int = 0, skip: Whole = 0) -> Recipe:
    """Keep the keys of the smallest norm after the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that are always kept.
        skip: First layers that are left as they are, of which the paper leaves two.

    Reference: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv
    2406.11430.
    """
    return Recipe(
        "knorm", score=KeyNorm(), budget=Uniform(budget), plan=TopK(recent=recent), skip=skip
    )


@checked
def keydiff(budget: Size = 0.5, *, recent: int = 0) -> Recipe:
    """Keep the keys that are least like the others after the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that are always kept.

    Reference: KeyDiff, arXiv 2504.15364.
    """
    return Recipe(
        "keydiff", score=KeyDifference(), budget=Uniform(budget), plan=TopK(recent=recent)
    )


@checked
def value_norm(budget: Size = 0.5, *, recent: int = 0) -> Recipe:
    """Keep the values of the largest norm after the prompt, for comparison.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that are always kept.

    Reference: none; half of what CriticalKV, arXiv 2502.03805, looks at.
    """
    return Recipe("value_norm", score=ValueNorm(), budget=Uniform(budget), plan=TopK(recent=recent))


@checked
def random(budget: Size = 0.5, *, seed: int = 0, recent: int = 0) -> Recipe:
    """Keep slots drawn at random after the prompt, for comparison.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        seed: Any integer.
        recent: Last tokens that are always kept.

    Reference: none; the baseline that every score has to beat.
    """
    return Recipe("random", score=Chance(seed), budget=Uniform(budget), plan=TopK(recent=recent))


@checked
def lagkv(budget: Size = 0.5, *, lag: int = 128, sinks: int = 4) -> Recipe:
    """Keep, in each partition of the prompt, what varies most in comparison with the next one.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        lag: Tokens of a partition.
        sinks: First tokens, which are always kept.

    Reference: LagKV, arXiv 2504.04704. Departure: the budget counts the first tokens
    and the last partitions, which stay, so that the others keep a smaller share than it says.
    """
    return Recipe("lagkv", score=Lag(lag, sinks), budget=Uniform(budget), plan=TopK(sinks=sinks))


@checked
def expected_attention(
    budget: Size = 0.5,
    *,
    queries: Count = 1024,
    future: int = 512,
    sinks: int = 4,
    epsilon: float = 0.0,
) -> Recipe:
    """Keep what queries to come are expected to attend to, judged by those of the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        queries: Last queries of the prompt that are looked at.
        future: Positions to come.
        sinks: First tokens, which are always kept.
        epsilon: Number added to the expected attention before the value's norm multiplies it.

    Reference: Expected Attention, arXiv 2510.00636. Departure: the last queries stand
    for all; keys are held before rotation and rotated when they are read.
    """
    return Recipe(
        "expected_attention",
        score=Expected(queries, future, sinks, epsilon=epsilon),
        budget=Uniform(budget),
        plan=TopK(sinks=sinks),
        space="pre",
    )


@checked
def h2o(budget: Size = 0.2, *, recent: Share = 0.5, mean: bool = False, every: int = 1) -> Recipe:
    """Keep the slots that got the most attention so far, and the latest, at every step.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Share of the budget that goes to the latest tokens.
        mean: Divide the attention by the queries that could see a slot, which the paper does not.
        every: Tokens from one eviction to the next.

    Reference: H2O, arXiv 2306.14048, section 4.1, algorithm 1. Departures: the query heads of a
    key-value head are averaged; the token being computed comes on top of the budget; a
    budget that is a share grows with what is generated.
    """
    return Recipe(
        "h2o", score=Mass(mean), budget=Uniform(budget), plan=RecentShare(recent),
        trigger=EveryStep(every),
    )  # fmt: skip


@checked
def tova(budget: Size = 1024, *, every: int = 1) -> Recipe:
    """Keep what the newest query attends to, the same slots in all heads, at every step.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        every: Tokens from one eviction to the next.

    Reference: TOVA, Transformers are Multi-State RNNs, arXiv 2401.06104.
    """
    return Recipe(
        "tova", score=LastQuery(), budget=Uniform(budget), plan=TopK(), trigger=EveryStep(every)
    )


@checked
def snapkv(
    budget: Size = 1024,
    *,
    window: Count = 32,
    kernel: int = 5,
    pooling: Pooling = "avg",
    groups: Groups = "mean",
) -> Recipe:
    """Keep what the end of the prompt attends to, with its neighbors.

    Args:
        budget: Slots of a row, the window among them, or a share of the tokens it has seen.
        window: Last queries of the prompt, whose slots always stay.
        kernel: Neighboring slots that are pooled, odd.
        pooling: `"avg"` as in the official code, or `"max"`.
        groups: Reduction over the query heads of a key-value head: `"mean"`, `"max"` or `"sum"`.

    Reference: SnapKV, arXiv 2404.14469, section 4, listing 1. Departure: one set of slots for each
    key-value head, where the official code holds one for each query head.
    """
    return Recipe(
        "snapkv", score=Window(window, kernel, pooling, groups), budget=Uniform(budget), plan=TopK()
    )


@checked
def pyramidkv(
    budget: Size = 1024,
    *,
    beta: float = 20.0,
    window: Count = 8,
    kernel: int = 5,
    mode: Mode = "paper",
) -> Recipe:
    """Keep what the end of the prompt attends to, fewer slots the deeper the layer.

    Args:
        budget: Mean slots of a row, the window among them, or a share of the tokens it has seen.
        beta: Steepness of the pyramid, at least 1.
        window: Last queries of the prompt, whose slots always stay.
        kernel: Neighboring slots whose average is taken, odd.
        mode: `"official"` rounds budgets down by its own steps, and gives all layers of a short
            prompt the same, see `diffcache.kv.budgets.layers.Pyramid`.

    Reference: PyramidKV, arXiv 2406.02069, section 4.2. Departure: one set of slots for each
    key-value head, as in `snapkv`.
    """
    budgets = Pyramid(budget, beta, window, mode)
    return Recipe("pyramidkv", score=Window(window, kernel), budget=budgets, plan=TopK())


@checked
def cake(
    budget: Size = 1024,
    *,
    window: Count = 32,
    gamma: float = 200.0,
    tau1: float = 1.0,
    tau2: float = 1.0,
) -> Recipe:
    """Keep what the end of the prompt attends to or shifts to, more in layers that spread out.

    Args:
        budget: Mean slots of a row, the window among them, or a share of the tokens it has seen.
        window: Last queries of the prompt, whose slots always stay.
        gamma: Weight of the variance of attention; dimensionless.
        tau1: Temperature of a layer's entropy; the paper fits it to each model.
        tau2: Temperature of a layer's variance; the paper fits it to each model.

    Reference: CAKE, arXiv 2503.12491. Departures: all layers are shared out at once after the
    prompt, and not while it is read; a prompt that is longer than the budget by no more than its
    window is cut too, where the official code leaves it whole.
    """
    return Recipe(
        "cake",
        score=WindowVariance(window, gamma),
        budget=EntropyVariance(budget, window, tau1, tau2),
        plan=TopK(),
    )


@checked
def adakv(
    budget: Size = 1024,
    *,
    floor: float = 0.2,
    safeguard: Safeguard = "blend",
    base: Recipe | None = None,
) -> Recipe:
    """Share the slots of a layer out among its heads by their highest scores.

    Args:
        budget: Mean slots of a row, or a share of the tokens it has seen; not used with `base`.
        floor: Weight of the safeguard, from 0 to 1.
        safeguard: `"blend"` takes the weighted mean of what a head won and an even share, as the
            official code does; `"floor"` gives every head that part of an even share and has them
            win the rest, as kvpress does.
        base: Another recipe with a score that means the same in all heads; by default SnapKV.

    Raises:
        ValueError: If `base` drops nothing.

    Reference: Ada-KV, arXiv 2407.11550, algorithm 1. Departure: SnapKV averages over 5 slots here,
    where the official code takes the largest of 7.
    """
    base = base or snapkv(budget)
    if base.budget is None:
        raise ValueError(f"base={base.name!r}: drops nothing, so there is nothing to share out")
    return replace(base, name=_named("adakv", base), budget=AdaHead(base.budget, floor, safeguard))


@checked
def criticalkv(
    budget: Size = 1024, *, first: float = 0.5, epsilon: float = 1e-4, base: Recipe | None = None
) -> Recipe:
    """Keep half of the budget by attention, and half by attention times what values contribute.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen; not used with `base`.
        first: Share of it that goes by the score alone.
        epsilon: Number added to the score before it is multiplied; dimensionless.
        base: Another recipe with a score that is not negative; by default SnapKV. With Ada-KV it
            is CriticalAdaKV.

    Raises:
        ValueError: If `base` drops nothing, or keeps by more than its score.

    Reference: CriticalKV, arXiv 2502.03805, algorithm 1.
    """
    base = base or snapkv(budget)
    if base.plan != TopK():
        raise ValueError(
            f"base={base.name!r}: its plan is {base.plan!r}, and two stages replace a plan that "
            "keeps the highest scores and nothing else, TopK()"
        )
    return replace(base, name=_named("criticalkv", base), plan=TwoStage(first, epsilon))


def _named(name: str, base: Recipe) -> str:
    return name if base.name in ("", "snapkv") else f"{name}({base.name})"
