"""Recipes that drop slots by tables found beforehand."""

from __future__ import annotations

from diffcache.kv.budget import Steady
from diffcache.kv.budgets.layers import CDFLevel, LayerTable, Scheduled
from diffcache.kv.plan import FixedSlot, Planner, TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.heads import HeadVote
from diffcache.kv.score.patches import PatchCenters
from diffcache.kv.score.revised import Shared
from diffcache.kv.settings import Count, Mode, Size, checked
from diffcache.kv.trigger import EveryStep


@checked
def prefixkv(
    budget: Size = 0.2,
    *,
    shares: tuple[float, ...] = (),
    sinks: int = 4,
    distance: Count = 25,
    mode: Mode = "paper",
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
    return Recipe(
        "prefixkv", score=Shared(Mass(), heads=True),
        budget=Steady(share) if official else share, plan=plan,
        trigger=EveryStep() if official else None,
    )  # fmt: skip


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
    return Recipe(
        "compresskv", score=HeadVote(heads, window, kernel),
        budget=LayerTable(budget, weights, least), plan=TopK(),
    )  # fmt: skip


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
    return Recipe(
        "scalekv", score=PatchCenters(scales, prompt, grid, mode=mode),
        budget=Scheduled(budget, sizes, table, prompt), plan=TopK(),
        trigger=EveryStep(min(sizes, default=1)),
    )  # fmt: skip
