"""Recipes that drop slots by a score."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from diffcache.kv.attend import Groups
from diffcache.kv.budget import Steady, Uniform, WhenFull
from diffcache.kv.budgets.heads import AdaHead, Safeguard
from diffcache.kv.budgets.layers import Arithmetic, CDFLevel, EntropyVariance, LayerTable, Pyramid, Scheduled
from diffcache.kv.life.on_request import AfterProbe
from diffcache.kv.plan import FixedSlot, Planner, RecentShare, TopK, TwoStage, Windows
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import HeadVote, LastQuery, Mass, PatchCenters, Pooling, Window, WindowVariance
from diffcache.kv.score.compactor import Compactor
from diffcache.kv.score.expected_attention import Expected
from diffcache.kv.score.history import LowCount, NoisyMass, Recurrence
from diffcache.kv.score.most_attention import Asked
from diffcache.kv.score.recency import Chance
from diffcache.kv.score.revised import Shared
from diffcache.kv.score.vectors import KeyDifference, KeyNorm, Lag, NormProduct, ValueNorm
from diffcache.kv.settings import Count, Mode, Share, Size, Whole, checked
from diffcache.kv.trigger import EveryStep, Overflow


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
    return Recipe("knorm", KeyNorm(), Uniform(budget), TopK(recent=recent), skip=skip)


@checked
def keydiff(budget: Size = 0.5, *, recent: int = 0) -> Recipe:
    """Keep the keys that are least like the others after the prompt.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that are always kept.

    Reference: KeyDiff, arXiv 2504.15364.
    """
    return Recipe("keydiff", KeyDifference(), Uniform(budget), TopK(recent=recent))


@checked
def value_norm(budget: Size = 0.5, *, recent: int = 0) -> Recipe:
    """Keep the values of the largest norm after the prompt, for comparison.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that are always kept.

    Reference: none; half of what CriticalKV, arXiv 2502.03805, looks at.
    """
    return Recipe("value_norm", ValueNorm(), Uniform(budget), TopK(recent=recent))


@checked
def random(budget: Size = 0.5, *, seed: int = 0, recent: int = 0) -> Recipe:
    """Keep slots drawn at random after the prompt, for comparison.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        seed: Any integer.
        recent: Last tokens that are always kept.

    Reference: none; the baseline that every score has to beat.
    """
    return Recipe("random", Chance(seed), Uniform(budget), TopK(recent=recent))


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
    return Recipe("lagkv", Lag(lag, sinks), Uniform(budget), TopK(sinks=sinks))


@checked
def expected_attention(
    budget: Size = 0.5, *, queries: Count = 1024, future: int = 512, sinks: int = 4, epsilon: float = 0.0
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
    score = Expected(queries, future, sinks, epsilon=epsilon)
    return Recipe("expected_attention", score, Uniform(budget), TopK(sinks=sinks), space="pre")


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
    return Recipe("h2o", Mass(mean), Uniform(budget), RecentShare(recent), trigger=EveryStep(every))


@checked
def tova(budget: Size = 1024, *, every: int = 1) -> Recipe:
    """Keep what the newest query attends to, the same slots in all heads, at every step.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        every: Tokens from one eviction to the next.

    Reference: TOVA, Transformers are Multi-State RNNs, arXiv 2401.06104.
    """
    return Recipe("tova", LastQuery(), Uniform(budget), TopK(), trigger=EveryStep(every))


@checked
def snapkv(
    budget: Size = 1024, *, window: Count = 32, kernel: int = 5, pooling: Pooling = "avg", groups: Groups = "mean"
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
    return Recipe("snapkv", Window(window, kernel, pooling, groups), Uniform(budget), TopK())


@checked
def pyramidkv(
    budget: Size = 1024, *, beta: float = 20.0, window: Count = 8, kernel: int = 5, mode: Mode = "paper"
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
    return Recipe("pyramidkv", Window(window, kernel), budgets, TopK())


@checked
def cake(
    budget: Size = 1024, *, window: Count = 32, gamma: float = 200.0, tau1: float = 1.0, tau2: float = 1.0
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
    budgets = EntropyVariance(budget, window, tau1, tau2)
    return Recipe("cake", WindowVariance(window, gamma), budgets, TopK())


@checked
def adakv(
    budget: Size = 1024, *, floor: float = 0.2, safeguard: Safeguard = "blend", base: Recipe | None = None
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


@checked
def scissorhands(budget: Size = 1024, *, history: int = 400, recent: int = 10, drop: float = 0.5) -> Recipe:
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
        return Recipe("scissorhands", score, Uniform(budget), plan)
    left = budget - int(budget * drop)
    if left <= max(recent, 1):
        raise ValueError(
            f"budget={budget}, drop={drop}: leaves {left} slots; it must be 2 or more, and above "
            f"recent={recent}, which always stay: give a larger budget or a smaller drop"
        )
    return Recipe("scissorhands", score, WhenFull(left, budget), plan, trigger=Overflow(budget))


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
    score, plan = NoisyMass(temperature, increment, seed=seed), RecentShare(recent)
    return Recipe("keyformer", score, Uniform(budget), plan, trigger=EveryStep(every))


@checked
def lazy_eviction(budget: Size = 1024, *, lag: Count = 32, threshold: float = 1e-4) -> Recipe:
    """Drop, every `lag` tokens, those that are overdue to be attended to again.

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
    score = Recurrence(threshold)
    return Recipe("lazy_eviction", score, Uniform(budget), TopK(recent=lag), trigger=EveryStep(lag))


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
    score = Shared(Window(window, kernel=1), group)
    return Recipe("windowkv", score, Arithmetic(budget, group, beta), Windows(size, window, few))


@checked
def epicache(budget: Size = 1024, *, weights: tuple[float, ...] = (), sinks: int = 0) -> Recipe:
    """Keep what a text that is typical of an episode attends to, when asked to.

    Nothing is dropped by itself, and going on without is refused:
    `diffcache.kv.life.on_request.prefill_by_blocks` reads a conversation block by block and drops
    after each. Grouping a conversation into episodes, each with its text, is the caller's.

    Args:
        budget: Slots of a row in the average layer, or a share of the tokens it has seen.
        weights: Weight of each layer, from `diffcache.kv.learn.epicache.layer_weights`; empty has
            all layers get the same.
        sinks: First tokens that are always kept.

    Reference: EpiCache, arXiv 2509.17396. Departure: all heads of a layer hold as many slots, where
    the official code can also share them out among heads.
    """
    budgets = LayerTable(budget, weights)
    return Recipe("epicache", Asked(), budgets, TopK(sinks=sinks), trigger=AfterProbe())


@checked
def kvzip(budget: Size = 0.3, *, floor: float = 0.0, sinks: int = 4) -> Recipe:
    """Keep what is needed to repeat the prompt, when asked to.

    Nothing is dropped by itself, and going on without is refused:
    `diffcache.kv.life.on_request.compress_by_probe` runs the prompt once more on a fork and drops
    by what it attended to.

    Args:
        budget: Slots of the average head of a layer, or a share of the tokens it has seen.
        floor: Share of it that every head keeps.
        sinks: First tokens that are always kept.

    Reference: KVzip, arXiv 2505.23416. Departures: slots are shared out among the heads of a layer,
    and not among those of all layers; attention of the repeated prompt is over all that is held,
    where the official code has it over the first tokens, one chunk and its repetition.
    """
    budgets = AdaHead(Uniform(budget), floor)
    return Recipe("kvzip", Asked(), budgets, TopK(sinks=sinks), trigger=AfterProbe())


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
    return Recipe("curdkv", NormProduct(window, sinks), Uniform(budget), TopK(sinks=sinks))


@checked
def compactor(
    budget: Size = 0.5, *, blend: float | None = None, chunk: int = 256, queries: int = 4096, mode: Mode = "paper"
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
    return Recipe("compactor", score, Uniform(budget), TopK(), space="pre")


@checked
def prefixkv(
    budget: Size = 0.2, *, shares: tuple[float, ...] = (), sinks: int = 4, distance: Count = 25, mode: Mode = "paper"
) -> Recipe:
    """Keep in every layer the fewest slots that hold the same share of attention.

    Args:
        budget: Slots of a row in the average layer, or a share of the tokens it has seen.
        shares: Share that each layer keeps, from `diffcache.kv.learn.prefixkv.layer_shares`; empty
            finds it for every row as it comes.
        sinks: First tokens that are always kept, as is the last.
        distance: Distance from the end of the slot that each new token pushes out, if `"official"`.
        mode: `"paper"` drops once, after the prompt; `"official"` then drops, at each token, the
            slot at `distance`.

    Reference: PrefixKV, arXiv 2412.03409; the official code for the slot at a distance.
    Departure: in `"official"` mode one slot goes for each forward, however many tokens it brings.
    """
    official = mode == "official"
    share = LayerTable(budget, shares) if shares else CDFLevel(budget)
    plan: Planner = FixedSlot(distance, sinks, 1) if official else TopK(sinks, 1)
    budgets = Steady(share) if official else share
    trigger = EveryStep() if official else None
    return Recipe("prefixkv", Shared(Mass(), heads=True), budgets, plan, trigger=trigger)


@checked
def compresskv(
    budget: Size = 1024,
    *,
    heads: tuple[tuple[int, ...], ...] = (),
    weights: tuple[float, ...] = (),
    window: Count = 8,
    kernel: int = 5,
    least: int = 32,
) -> Recipe:
    """Keep what the few heads of a layer that retrieve meaning attend to.

    Args:
        budget: Slots of a row in the average layer, or a share of the tokens it has seen.
        heads: Numbers of the query heads of each layer that vote, four in the paper, from
            `diffcache.kv.learn.compresskv.top_heads`; empty has all vote.
        weights: Weight of each layer, from `diffcache.kv.learn.compresskv.layer_weights`; empty
            has all layers get the same.
        window: Last queries of the prompt, whose slots always stay.
        kernel: Neighboring slots whose average is taken, odd.
        least: Slots that every layer gets, if `budget` allows.

    Reference: CompressKV, arXiv 2508.02401. Departure: a layer may get all that it can use, where
    the paper gives none more than three times the average.
    """
    budgets = LayerTable(budget, weights, least)
    return Recipe("compresskv", HeadVote(heads, window, kernel), budgets, TopK())


@checked
def scalekv(
    budget: Size = 0.1,
    *,
    scales: tuple[tuple[int, int], ...],
    table: tuple[tuple[int, ...], ...] = (),
    prompt: int = 0,
    grid: Count = 4,
    mode: Mode = "paper",
) -> Recipe:
    """Keep, after each scale of a next-scale image model, what the middles of patches attend to.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen, where the table is empty.
        scales: Height and width of each token map, first to last.
        table: Slots of each layer after each scale, from
            `diffcache.kv.learn.scalekv.capacities`.
        prompt: Tokens that come before the first map.
        grid: Patches along each side of a map, of which the middles ask and are kept.
        mode: `"official"` scores by logits and not by attention, and pools by the largest.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3. Departures: queries are those that attention
    used, where the official code projects its own, unrotated ones; maps that are not square, or
    smaller than the grid, are cut like the others; a budget below the middles keeps the last of
    them; drafters are a fixed number of layers at each scale, see `diffcache.kv.learn.scalekv`.
    """
    sizes = tuple(height * width for height, width in scales)
    score = PatchCenters(scales, prompt, grid, mode=mode)
    budgets = Scheduled(budget, sizes, table, prompt)
    return Recipe("scalekv", score, budgets, TopK(), trigger=EveryStep(min(sizes, default=1)))


def _named(name: str, base: Recipe) -> str:
    return name if base.name in ("", "snapkv") else f"{name}({base.name})"
