"""Recipes that keep first and latest tokens, in all heads or in those that need no more."""

from __future__ import annotations

from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import Heads, HeadTable
from diffcache.kv.merge import Compensation
from diffcache.kv.plan import TopK
from diffcache.kv.positions import Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.recency import Recency
from diffcache.kv.settings import Size, Whole, checked
from diffcache.kv.trigger import EveryStep


@checked
def streaming_llm(budget: Size = 516, *, sinks: int = 4, rotate: bool = True, every: int = 1) -> Recipe:
    """Keep the first tokens and the latest, and let positions follow one another.

    Args:
        budget: Slots of a row, the first tokens among them, or a share of the tokens it has seen.
        sinks: First tokens.
        rotate: Rotate keys by their place in the cache, as the paper does; False keeps the
            positions they had in the text, and works without rotary embeddings.
        every: Tokens from one eviction to the next.

    Reference: StreamingLLM, arXiv 2309.17453, section 3.2. Departure: the token being computed
    comes on top of the budget; a prompt is read whole before anything is dropped. Where frequencies
    vary with the length (dynamic NTK, LongRoPE) all keys are rotated by those of now, while caches of
    transformers keep each as it was written: the two then differ even if nothing is dropped.
    """
    plan, trigger, positions = TopK(sinks=sinks), EveryStep(every), Slot() if rotate else None
    budgets = Uniform(budget)
    return Recipe("streaming_llm", Recency(), budgets, plan, trigger=trigger, positions=positions)


@checked
def duo_attention(heads: Heads, budget: Size = 320, *, sinks: int = 64, every: int = 1) -> Recipe:
    """Keep everything in retrieval heads, and first and latest tokens in the others.

    Args:
        heads: True for retrieval heads, by layer and key-value head, as
            `diffcache.kv.learn.duo.retrieval_heads` learns it.
        budget: Slots of another head, its first tokens among them, or a share of the tokens.
        sinks: First tokens.
        every: Tokens from one eviction to the next.

    Reference: DuoAttention, arXiv 2410.10819, section 2. Departure: a prompt is read whole by all
    heads before anything is dropped.
    """
    budgets = HeadTable(heads, budget)
    return Recipe("duo_attention", Recency(), budgets, TopK(sinks=sinks), trigger=EveryStep(every))


@checked
def razor_attention(
    heads: Heads, budget: Size = 0.2, *, least: int = 4000, sinks: Whole = 4, every: int = 1
) -> Recipe:
    """Keep everything in retrieval heads; in the others one slot stands for what is dropped.

    Args:
        heads: True for retrieval heads, by layer and key-value head, as
            `diffcache.kv.learn.razor.retrieval_heads` finds it.
        budget: Latest slots of another head, or a share of the tokens it has seen.
        least: Latest slots of another head at least.
        sinks: First tokens, on top of those.
        every: Tokens from one eviction to the next.

    Reference: RazorAttention, arXiv 2407.15891. Departure: keys are
    averaged as they are rotated, which shortens those of tokens far apart.
    """
    budgets, plan = HeadTable(heads, budget, least, sinks), TopK(sinks=sinks)
    trigger = EveryStep(every)
    return Recipe("razor_attention", Recency(), budgets, plan, Compensation(), trigger=trigger)
