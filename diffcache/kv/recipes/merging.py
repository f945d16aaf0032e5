"""Recipes that merge what they evict, or keep what differs."""

from __future__ import annotations

from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import AdaHead
from diffcache.kv.merging.chelsea import SoftMatching
from diffcache.kv.merging.d2o import DenseLayers, Density, EmaMerge
from diffcache.kv.merging.diversity import Anchor, Diversity
from diffcache.kv.merging.elastic import BucketMerge, SingleArgsort
from diffcache.kv.merging.ems import ZeroClassMerge
from diffcache.kv.merging.kvmerger import ContiguousMerge
from diffcache.kv.merging.lococo import ConvolutionMerge, MixWeights
from diffcache.kv.merging.look_m import AllText, NearestMerge, TextFirst, Way
from diffcache.kv.plan import FixedSlot, Planner, RecentShare, TopK
from diffcache.kv.recipe import Recipe, Space
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.history import GlobalLocal
from diffcache.kv.score.learned import Retained, RetainingHeads
from diffcache.kv.score.recency import Recency
from diffcache.kv.score.revised import Shared
from diffcache.kv.settings import Count, Mode, Share, Size, Whole, checked
from diffcache.kv.trigger import EveryStep


@checked
def d2o(
    budget: Size = 0.2, *, recent: Share = 0.25, beta: float | None = None, mode: Mode = "paper", space: Space = "post"
) -> Recipe:
    """Evict as H2O does, recall what is like something kept, give even layers more slots.

    Args:
        budget: Slots of a row, averaged over layers, or a share of the tokens it has seen.
        recent: Share of the budget that goes to the latest tokens.
        beta: Weight of the newest likeness in the threshold; 0.7, or 0.5 in official mode.
        mode: `"official"` weighs by the cosine itself, gates by the mean over heads, keeps the
            first 4 tokens and never evicts from layers 0, 1 and the last, so that more is held.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.

    Reference: D2O, arXiv 2406.13035. Departures: variances of layers are divided by their mean, and
    layers share out an exact total, in `"paper"` mode; a budget that is a share grows with what is
    generated; the token being computed comes on top of the budget; a prompt is evicted before the
    first token after it, where the official code lets that attend first.
    """
    official = mode == "official"
    if beta is None:
        beta = 0.5 if official else 0.7
    score = Density(Mass(), mode)
    budgets = DenseLayers(budget, mode=mode)
    plan = RecentShare(recent, sinks=4 if official else 0)
    merger = EmaMerge(beta, mode, space)
    return Recipe("d2o", score, budgets, plan, merger, trigger=EveryStep(), space=space)


@checked
def ems(
    budget: Size = 256,
    *,
    window: Count = 32,
    floor: float = 0.2,
    reach: float = 1.0,
    threshold: float = 0.6,
    space: Space = "post",
) -> Recipe:
    """Evict the worst of the prompt, merge the next better into centers, those unlike any vanish.

    Args:
        budget: Slots of a row, averaged over the heads of a layer, or a share of the tokens.
        window: Last queries that are looked at, and whose slots stay.
        floor: Share of the budget that every head keeps.
        reach: Candidates for merging for each slot that is kept.
        threshold: Cosine below which a candidate belongs to the zero class.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.

    Reference: EMS, arXiv 2412.08521. Departures: see `diffcache.kv.merging.ems` and
    `diffcache.kv.score.history.GlobalLocal`.
    """
    score = GlobalLocal(window)
    budgets = AdaHead(Uniform(budget), floor)
    merger = ZeroClassMerge(reach, threshold, space)
    return Recipe("ems", score, budgets, TopK(recent=window), merger, space=space)


@checked
def elastic_cache(
    budget: Size = 0.2,
    *,
    sinks: int = 1,
    recent: int = 1,
    distance: int = 25,
    mode: Mode = "paper",
    space: Space = "post",
) -> Recipe:
    """Average a prompt into its most attended slots; then drop at a fixed place at every step.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        sinks: First tokens of a prompt that are always kept.
        recent: Last tokens of a prompt that are always kept.
        distance: Distance from the end of a row, in slots, where one goes for every new token.
        mode: `"official"` takes slots for ranks, so that scores say nothing of what is kept, keeps
            a slot fewer, and merges slots that are `sinks` before those that go.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.

    Reference: Elastic Cache, arXiv 2407.18121. Departure: in `"official"` mode the slot that goes
    for each new token is counted from the end, where the official code goes on with the number that
    it had after the prompt.
    """
    score, trigger = Shared(Mass(), heads=True), EveryStep()
    at_distance, ends = FixedSlot(distance, sinks, recent), None
    plan: Planner = at_distance
    if mode == "official":
        plan, ends = SingleArgsort(at_distance), (sinks, recent)
    merger = BucketMerge(space=space, ends=ends)
    budgets = Uniform(budget)
    return Recipe("elastic_cache", score, budgets, plan, merger, trigger=trigger, space=space)


@checked
def look_m(
    budget: Size = 0.2,
    *,
    recent: Share = 0.5,
    merge: Way = "pivot",
    text: int = 0,
    mode: Mode = "paper",
    space: Space = "post",
    sinks: Whole = 0,
) -> Recipe:
    """Keep text before images after the prompt, and merge evicted images into what is kept.

    Tags say what a token is: `cache_for(model, recipe, tags=...)`. Those without one are text.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Share of the budget that goes to the latest tokens.
        merge: `"averaged"`, `"pivot"` or `"weighted"`.
        text: The tag of text.
        mode: `"official"` keeps all text, even where it is more than the budget.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.
        sinks: First tokens that are always kept: 4 in those classes of the official code that
            prefer no text, which this is in `"paper"` mode where nothing has a tag.

    Reference: LOOK-M, arXiv 2406.18139, sections 3.2 and 3.3.
    """
    score, merger = TextFirst(Mass(), text), NearestMerge(merge, space)
    plan: Planner = RecentShare(recent, sinks)
    if mode == "official":
        plan = AllText(plan, text)
    return Recipe("look_m", score, Uniform(budget), plan, merger, space=space)


@checked
def kvmerger(
    budget: Size = 0.5,
    *,
    threshold: float = 0.75,
    sinks: int = 4,
    recent: int = 32,
    count: bool = False,
    space: Space = "post",
) -> Recipe:
    """Merge runs of neighbors with similar keys in the prompt, weighted by a Gaussian kernel.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        threshold: Cosine of neighbors above which they may be merged.
        sinks: First tokens that are never merged.
        recent: Last tokens that are never merged.
        count: Have merged slots count as many times as they have members; the paper does not.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.

    Reference: KVMerger, arXiv 2407.08454. Departures: see
    `diffcache.kv.merging.kvmerger`.
    """
    plan = TopK(sinks, recent)
    merger = ContiguousMerge(threshold, sinks, recent, count, space)
    return Recipe("kvmerger", Mass(), Uniform(budget), plan, merger, space=space)


@checked
def chelsea(
    budget: Size = 0.2, *, chunk: int = 32, sinks: int = 4, recent: int = 32, every: int = 128, space: Space = "post"
) -> Recipe:
    """Cluster the keys of chunks by soft matching, and count the tokens of each centroid.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        chunk: Slots within which keys are matched.
        sinks: First tokens that are never merged.
        recent: Last tokens that are never merged.
        every: Tokens from one clustering to the next.
        space: `"pre"` holds and merges unrotated keys, which the paper does not.

    Reference: Chelsea, arXiv 2506.11418. Departures: see
    `diffcache.kv.merging.chelsea`.
    """
    budgets, plan, trigger = Uniform(budget), TopK(sinks, recent), EveryStep(every)
    merger = SoftMatching(chunk, sinks, recent, space=space)
    return Recipe("chelsea", Recency(), budgets, plan, merger, trigger=trigger, space=space)


@checked
def lococo(weights: MixWeights, budget: Size = 512, *, recent: int = 128, chunk: Count = 512) -> Recipe:
    """Mix a memory of fixed size from heavy hitters and all else, by a trained convolution.

    Args:
        weights: Weights from `diffcache.kv.learn.lococo.train`; they need `budget - recent`
            memory slots.
        budget: Slots of a row, or a share of the tokens it has seen.
        recent: Last tokens that stay as they are.
        chunk: Tokens from one time to the next.

    Reference: LoCoCo, arXiv 2406.05317. Departures: see `diffcache.kv.merging.lococo`.
    """
    plan, merger = TopK(recent=recent), ConvolutionMerge(weights, recent)
    return Recipe("lococo", Mass(), Uniform(budget), plan, merger, trigger=EveryStep(chunk))


@checked
def kvcrush(
    budget: Size = 0.3,
    *,
    share: float = 0.25,
    anchor: Anchor = "random",
    sinks: int = 4,
    recent: int = 32,
    mode: Mode = "paper",
) -> Recipe:
    """Keep the most attended slots of the prompt, and some of the others that differ.

    Args:
        budget: Slots of a row, or a share of the tokens it has seen.
        share: Share of the budget that goes to slots that differ, 0 to 1.
        anchor: Vector that distances are taken to, see `diffcache.kv.merging.diversity.Diversity`.
        sinks: First tokens that are always kept.
        recent: Last tokens that are always kept.
        mode: `"official"` works on blocks of 16 tokens, each head by itself, as OpenVINO GenAI.

    Reference: KVCrush, arXiv 2503.00022.
    """
    plan = Diversity(share, anchor, mode, sinks=sinks, recent=recent)
    return Recipe("kvcrush", Mass(), Uniform(budget), plan)


@checked
def locret(heads: RetainingHeads, budget: Size = 6000, *, stabilizers: Whole = 2500, chunk: Count = 3072) -> Recipe:
    """Score tokens once, as they are written, by trained heads; evict after each chunk.

    Args:
        heads: Networks that `diffcache.kv.learn.locret.train` returned.
        budget: Slots of a row, or a share of the tokens it has seen.
        stabilizers: Last tokens that are always kept.
        chunk: Tokens from one eviction to the next; feed the prompt in chunks of as many
            (`prefill_chunk_size` of `generate`).

    Reference: Locret, arXiv 2410.01805, section 3.4. Departure: keys keep the positions they had,
    where the paper numbers what is left anew from the first.
    """
    plan = TopK(recent=stabilizers)
    return Recipe("locret", Retained(heads), Uniform(budget), plan, trigger=EveryStep(chunk))
