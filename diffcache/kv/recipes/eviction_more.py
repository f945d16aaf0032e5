"""Recipes that drop slots by statistics over time, whole windows and probes."""

from __future__ import annotations

from typing import Literal

from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import AdaHead
from diffcache.kv.budgets.layers import Arithmetic, LayerTable
from diffcache.kv.life.episodes import AfterProbe
from diffcache.kv.plan import RecentShare, TopK, Windows
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import Window
from diffcache.kv.score.compactor import Compactor
from diffcache.kv.score.history import LowCount, NoisyMass, Recurrence
from diffcache.kv.score.probe import Asked
from diffcache.kv.score.revised import Shared
from diffcache.kv.score.vectors import NormProduct
from diffcache.kv.settings import Count, Mode, Share, Size, checked
from diffcache.kv.trigger import EveryStep, Overflow


@checked
def scissorhands(
    budget: Size = 1024, *, history: int = 400, recent: int = 10, drop: float = 0.5
) -> Recipe:
    """Drop what queries keep overlooking, half of the cache at a time, whenever it is full.

    Args:
        budget: Slots of a row that are not exceeded before a token is computed; or a share of the
            tokens, of which that many stay after the prompt, once.
        history: Last queries that are counted.
        recent: Last tokens that are always kept.
        drop: Share of a full cache that is dropped, 0 to below 1.

    Raises:
        ValueError: If `drop` is out of range, or leaves no more than `recent`.

    Reference: Scissorhands, arXiv 2305.17118, section 4.1, algorithms 1 and 2. Departure: all
    layers get the same budget, where the paper gives later ones more.
    """
    if not 0 <= drop < 1:
        raise ValueError(f"drop={drop}: must be at least 0 and below 1")
    score, plan = LowCount(history), TopK(recent=recent)
    if isinstance(budget, float):
        return Recipe("scissorhands", score=score, budget=Uniform(budget), plan=plan)
    left = budget - int(budget * drop)
    if left <= max(recent, 1):
        raise ValueError(
            f"budget={budget}, drop={drop}: leaves {left} slots; it must be 2 or more, and above "
            f"recent={recent}, which always stay: give a larger budget or a smaller drop"
        )
    return Recipe(
        "scissorhands", score=score, budget=Uniform(left), plan=plan, trigger=Overflow(budget)
    )


@checked
def keyformer(
    budget: Size = 0.6,
    *,
    recent: Share = 0.3,
    temperature: float = 1.0,
    increment: float = 0.01,
    seed: int = 0,
    every: int = 1,
) -> Recipe:
    """Keep the most attention under noise, and the latest tokens, at every step.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Share of the budget that goes to the latest tokens.
        temperature: Temperature of the attention of the prompt, dimensionless.
        increment: Rise of the temperature at each generated token, dimensionless.
        seed: Seed of the noise.
        every: Tokens from one eviction to the next.

    Reference: Keyformer, arXiv 2403.09054, section 3.4, algorithm 1. Departures: a budget that is a
    share grows with what is generated, where the paper's is a share of the prompt; the temperature
    rises by a fixed step, as in the official code, where the paper's reaches 2 at the last token;
    the latest tokens are all kept, of which the official code drops the first; the token being
    computed comes on top of the budget.
    """
    return Recipe(
        "keyformer", score=NoisyMass(temperature, increment, seed=seed), budget=Uniform(budget),
        plan=RecentShare(recent), trigger=EveryStep(every),
    )  # fmt: skip


@checked
def lazy_eviction(budget: Size = 1024, *, lag: Count = 32, threshold: float = 1e-4) -> Recipe:
    """Drop, every so many steps, what is overdue to be attended to again.

    Args:
        budget: Slots of a row that are left by an eviction, or a share of the tokens it has seen.
        lag: Tokens from one eviction to the next; as many last tokens are always kept.
        threshold: Attention that counts as being attended to, 0 to 1.

    Raises:
        ValueError: If `budget` is not above `lag`.

    Reference: LazyEviction, arXiv 2506.15969. Departure: the lag is a number, where the paper takes
    it from intervals that it measures on samples; see `diffcache.kv.score.history.Recurrence`.
    """
    if isinstance(budget, int) and budget <= lag:
        raise ValueError(f"budget={budget}, lag={lag}: the budget must be above the lag")
    return Recipe(
        "lazy_eviction", score=Recurrence(threshold), budget=Uniform(budget),
        plan=TopK(recent=lag), trigger=EveryStep(lag),
    )  # fmt: skip


@checked
def windowkv(
    budget: Size = 1024,
    *,
    window: Count = 8,
    size: int = 8,
    task: Literal["aggregation", "localization"] = "localization",
    best: Count = 4,
    group: int = 4,
    beta: float = 2.0,
) -> Recipe:
    """Keep whole windows of the prompt, the same in all layers of a group.

    Args:
        budget: Slots of a row in the average layer, or a share of the tokens it has seen.
        window: Last queries of the prompt, whose slots always stay.
        size: Tokens of a window that is kept or dropped as a whole.
        task: Worth of a window: `"localization"` takes the mean of its tokens, `"aggregation"` the
            mean of its best ones.
        best: Number of best tokens of a window, for `"aggregation"`.
        group: Layers of a group.
        beta: Ratio of the average budget to the smallest one, at least 1.

    Reference: WindowKV, arXiv 2503.17922, section 2.2. Departures: the task is said here, and not
    found by a classifier; the budget counts the last queries' slots, which the official code adds
    to it; each key-value head keeps windows of its own; the paper's pyramid is
    steeper, with a `beta` of 14, and its groups are of 7 or 8 layers.
    """
    few = min(best, size) if task == "aggregation" else None
    return Recipe(
        "windowkv", score=Shared(Window(window, kernel=1), group),
        budget=Arithmetic(budget, group, beta), plan=Windows(size, window, few),
    )  # fmt: skip


@checked
def epicache(
    budget: Size = 1024,
    *,
    weights: tuple[float, ...] = (),
    sinks: int = 0,
) -> Recipe:
    """Keep what a text that is typical of an episode attends to, when asked to.

    Nothing is dropped by itself, and going on without is refused:
    `diffcache.kv.life.episodes.prefill_by_blocks` reads a conversation block by block and drops
    after each, and `Library` keeps a cache for each episode.

    Args:
        budget: Slots of a row in the average layer, or a share of the tokens it has seen.
        weights: Weight of each layer, from `diffcache.kv.learn.epicache.layer_weights`; empty has
            all layers get the same.
        sinks: First tokens that are always kept.

    Reference: EpiCache, arXiv 2509.17396. Departure: all heads of a layer hold as many slots, where
    the official code can also share them out among heads.
    """
    return Recipe(
        "epicache", score=Asked(), budget=LayerTable(budget, weights), plan=TopK(sinks=sinks),
        trigger=AfterProbe(),
    )  # fmt: skip


@checked
def kvzip(budget: Size = 0.3, *, floor: float = 0.0, sinks: int = 4) -> Recipe:
    """Keep what is needed to repeat the prompt, when asked to.

    Nothing is dropped by itself, and going on without is refused:
    `diffcache.kv.life.episodes.compress_by_probe` runs the prompt once more on a fork and drops by
    what it attended to.

    Args:
        budget: Slots of the average head of a layer, or a share of the tokens it has seen.
        floor: Share of it that every head keeps.
        sinks: First tokens that are always kept.

    Reference: KVzip, arXiv 2505.23416. Departures: slots are shared out among the heads of a layer,
    and not among those of all layers; attention of the repeated prompt is over all that is held,
    where the official code has it over the first tokens, one chunk and its repetition.
    """
    return Recipe(
        "kvzip", score=Asked(), budget=AdaHead(Uniform(budget), floor), plan=TopK(sinks=sinks),
        trigger=AfterProbe(),
    )  # fmt: skip


@checked
def curdkv(budget: Size = 0.5, *, window: Count = 16, sinks: int = 4) -> Recipe:
    """Keep keys and values whose norms stand out from those nearby, after the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        window: Tokens that are compared with each other.
        sinks: First tokens, which are always kept.

    Reference: CurDKV, arXiv 2509.15038. Departure: leverage is that of norms within a window, as in
    the official code and in kvpress, where a decomposition has singular vectors.
    """
    return Recipe(
        "curdkv", score=NormProduct(window, sinks), budget=Uniform(budget), plan=TopK(sinks=sinks)
    )


@checked
def compactor(
    budget: Size = 0.5,
    *,
    blend: float | None = None,
    chunk: int = 256,
    queries: int = 4096,
    mode: Mode = "paper",
) -> Recipe:
    """Keep keys that others do not span, and what chunks attend to within, after the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        blend: Weight of the first beside the second; None is the share that is dropped, or half
            where `budget` is a number of slots.
        chunk: Tokens that attend to each other.
        queries: Last queries of the prompt that are looked at.
        mode: `"official"` counts what is missing in the last chunk as keys and queries of zero.

    Reference: Compactor, arXiv 2507.08143.
    """
    if blend is None:
        blend = 1 - budget if isinstance(budget, float) else 0.5
    score = Compactor(blend, chunk=chunk, queries=queries, mode=mode)
    return Recipe("compactor", score=score, budget=Uniform(budget), plan=TopK(), space="pre")
