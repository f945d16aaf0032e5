"""Recipes that drop nothing: every query reads the slots it asks for."""

from __future__ import annotations

from typing import Any

from diffcache.kv.attend import Groups
from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.learn.codebook import Codebook
from diffcache.kv.life.tiers import Tiers
from diffcache.kv.positions import Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieval.a2ats import KeyCodes
from diffcache.kv.retrieval.double_sparsity import Channels, LabelChannels
from diffcache.kv.retrieval.mpcache import MinMaxTree
from diffcache.kv.retrieval.offload import InTiers
from diffcache.kv.retrieval.probe_query import ProbeQuery
from diffcache.kv.retrieval.quest import Quest
from diffcache.kv.retrieval.rekv import Frames
from diffcache.kv.retrieval.sentence import Sentences
from diffcache.kv.retrieval.shadowkv import Landmarks, ShadowKeys
from diffcache.kv.retrieval.tidal import LayerReuse
from diffcache.kv.settings import Count, Size, Whole, check_room, checked


@checked
def quest(budget: Size = 1024, page: Count = 16, skip: int = 2, group: Groups = "max") -> Recipe:
    """Read the pages whose bounds allow the highest logits.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        page: Slots of a page.
        skip: First layers that read everything.
        group: Reduction over the query heads of a key-value head: `"mean"`, `"max"` or `"sum"`.

    Reference: Quest, arXiv 2406.10774, section 3.4, algorithm 1. Departure: budgets count slots,
    not pages, and the last `page` tokens are always read.
    """
    check_room(budget, {"page": page})
    chooser = Quest(budget, sinks=0, recent=page, group=group, skip=skip, page=page)
    return Recipe("quest", retrieve=chooser)


@checked
def mpcache_select(
    budget: Size = 1024, large: int = 32, small: Count = 16, alpha: float = 0.6, layers: int = 2
) -> Recipe:
    """Read small clusters within large ones, by a mix of bounds, alike in neighboring layers.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        large: Slots of a cluster of the first level.
        small: Slots of a cluster of the second level.
        alpha: Weight of the upper bound; dimensionless, 0 to 1.
        layers: Neighboring layers that share a choice.

    Reference: MPCache, arXiv 2501.06807, the part that looks at queries; the other, which drops
    slots once after the prompt, is `snapkv(0.75, kernel=1)`, to compose it with. Departure: the
    first two layers share a choice too, which the paper's do not.
    """
    check_room(budget, {"small": small})
    tree: dict[str, Any] = {"large": large, "small": small, "alpha": alpha, "layers": layers}
    chooser = MinMaxTree(budget, sinks=0, recent=small, group="mean", **tree)
    return Recipe("mpcache_select", retrieve=chooser)


@checked
def double_sparsity(
    channels: Channels,
    budget: Size = 0.0625,
    recent: int = 1,
    bits: int | None = None,
    *,
    sinks: int = 0,
    skip: int = 2,
) -> Recipe:
    """Read the tokens of the highest logits over a few label channels.

    Args:
        channels: Label channels of every head of every layer, chosen offline by
            `diffcache.kv.learn.label_channels`; the paper takes a sixteenth of them.
        budget: Slots a query reads, or a share of the tokens.
        recent: Last tokens that are always read.
        bits: Bits of the label cache and of the queries' labels; None keeps both exact, the paper
            takes 4.
        sinks: First tokens that are always read.
        skip: First layers that read everything.

    Reference: Double Sparsity, arXiv 2408.07092. Departures: the token itself is always read; the
    query heads of a key-value head choose together, where the official code lets each choose.
    """
    check_room(budget, {"sinks": sinks, "recent": recent})
    width = len(channels[0][0]) if channels and channels[0] else 1
    labels = None if bits is None else GroupQuant(bits, along="channels", group=width)
    kept: dict[str, Any] = {"sinks": sinks, "recent": recent, "skip": skip}
    chooser = LabelChannels(budget, group="mean", channels=channels, labels=labels, **kept)
    return Recipe("double_sparsity", retrieve=chooser)


@checked
def tidal_decode(budget: Size = 1024, select: tuple[int, ...] = (2, 9), recent: int = 1, *, sinks: int = 0) -> Recipe:
    """Let a few layers choose positions by full attention, and the others read the same ones.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        select: Layers that choose; those before the first read everything.
        recent: Last tokens that are always read.
        sinks: First tokens that are always read.

    Reference: TidalDecode, arXiv 2410.05076. Departures: the token itself is always read; the query
    heads of a key-value head choose together.
    """
    check_room(budget, {"sinks": sinks, "recent": recent})
    chooser = LayerReuse(budget, sinks=sinks, recent=recent, group="mean", select=select)
    return Recipe("tidal_decode", retrieve=chooser)


@checked
def sentence_kv(budget: Size = 1024, sinks: int = 32, recent: int = 32, block: Count = 32) -> Recipe:
    """Read the sentences whose mean key the queries since the last full stop agree with.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        sinks: First tokens that are always read.
        recent: Last tokens that are always read.
        block: Tokens that count as a sentence where none is known.

    Reference: SentenceKV, arXiv 2504.00970. Departures: what the paper drops after the prompt is
    left to a recipe that this one is composed with; what is generated counts as sentences of
    `block` tokens, and the first query of a sentence asks like the others, where the official code
    has it read everything; sentences are read whole or not at all; sentences of the prompt are the
    `tags` of the cache, see `diffcache.kv.retrieval.sentence.sentence_tags`.
    """
    check_room(budget, {"sinks": sinks, "recent": recent})
    chooser = Sentences(budget, sinks=sinks, recent=recent, group="mean", block=block)
    return Recipe("sentence_kv", retrieve=chooser)


@checked
def rekv(
    budget: Size = 12544, recent: Count = 15000, sinks: Whole = 4, block: Count = 196, tiers: Tiers | None = None
) -> Recipe:
    """Let frames of a video see the last tokens, and a question the frames it is about.

    Args:
        budget: Slots a query reads beside the last ones, or a share of the tokens: 64 frames.
        recent: Last tokens that are always read.
        sinks: First tokens that are always read.
        block: Tokens of a block that belongs to no frame, and of one in `tiers`.
        tiers: Tiers that hold all but the last tokens, the blocks used last on the device; None
            leaves them where they are.

    Reference: ReKV, arXiv 2503.00540. Frames are the `tags` of the cache, from 1 on.
    """
    if isinstance(budget, int):
        budget += recent + sinks
    chooser = Frames(budget, sinks=sinks, recent=recent, block=block)
    below = None if tiers is None else InTiers(tiers, block)
    codec = None if below is None else Pair(below, below, block=block, recent=recent)
    return Recipe("rekv", retrieve=chooser, codec=codec, space="pre", positions=Slot())


@checked
def probe_query(
    budget: Size = 2048, density: float = 0.95, block: Count = 16, sinks: int = 4, recent: int = 64
) -> Recipe:
    """Let the unusual queries of a chunk choose blocks, and tokens those that hold enough mass.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        density: Share of the mass of blocks that a generated token reads.
        block: Slots of a block.
        sinks: First tokens that are always read.
        recent: Last tokens that are always read.

    Reference: none; the formulas are ours, after the description of ActQKV, arXiv 2502.13542, see
    `diffcache.kv.retrieval.probe_query`.
    """
    check_room(budget, {"sinks": sinks, "recent": recent})
    chooser = ProbeQuery(budget, sinks=sinks, recent=recent, group="mean", block=block, density=density)
    return Recipe("probe_query", retrieve=chooser, space="pre")


@checked
def a2ats(
    budget: Size = 0.0625,
    codes: int = 256,
    far: int = 64,
    recent: int = 64,
    codebook: Codebook | None = None,
    *,
    sinks: int = 4,
) -> Recipe:
    """Read the tokens of the highest logits that a codebook of unrotated keys gives.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        codes: Vectors of a codebook that is fitted to the prompt.
        far: Distance at which far keys are met, in positions.
        recent: Last tokens that are always read.
        codebook: Codebook that was fitted beforehand; None fits one to each prompt.
        sinks: First tokens that are always read.

    Reference: A2ATS, arXiv 2502.12665. Departures: see `diffcache.kv.retrieval.a2ats`.
    """
    check_room(budget, {"sinks": sinks, "recent": recent})
    chooser = KeyCodes(budget, sinks=sinks, recent=recent, group="mean", codes=codes, far=far, codebook=codebook)
    return Recipe("a2ats", retrieve=chooser, space="pre")


@checked
def shadowkv(
    budget: Size = 2048, rank: int = 160, outliers: int = 48, block: int = 512, tiers: Tiers | None = None
) -> Recipe:
    """Hold keys in low rank and read the chunks of 8 whose mean key the query attends to.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        rank: Basis vectors of the keys of all heads of a token.
        outliers: Chunks that are always read and exact, as the last four are.
        block: A prompt with fewer tokens stays exact.
        tiers: Tiers that hold the values, in blocks of 64 slots; None leaves them where they are.

    Reference: ShadowKV, arXiv 2410.21465, section 4.1. Departures: chunks of tokens that are
    generated are chosen as well, where the paper always reads these tokens; the budget counts the
    outliers and the last chunks, on top of which the official one comes; outliers may be among the
    last chunks.
    """
    check_room(budget, {"8 * outliers": 8 * outliers, "last tokens": 32})
    values = Exact() if tiers is None else InTiers(tiers)
    chooser = Landmarks(budget, sinks=0, recent=32, group="max", outliers=outliers)
    codec = ShadowKeys(rank, outliers=outliers, block=block, values=values)
    return Recipe("shadowkv", retrieve=chooser, codec=codec, space="pre")
