"""Recipes that hold keys and values in few bits, or few elements of them."""

from __future__ import annotations

from torch import Tensor

from diffcache.kv.budget import Uniform
from diffcache.kv.codec.base import TensorCodec
from diffcache.kv.codec.fourier import FourierSigns, RangeSplit
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.joined_heads import JoinHeads
from diffcache.kv.codec.joined_layers import Together
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.residual import Gear
from diffcache.kv.codec.rotate import rotatekv as rotated
from diffcache.kv.codec.rotate import rotatekv_grid
from diffcache.kv.codec.scaled import ChannelSeparable
from diffcache.kv.codec.shared import SharedCodes
from diffcache.kv.codec.sparse import BitmapSparse
from diffcache.kv.codec.stairs import BalancedRung, Stair
from diffcache.kv.plan import ByAge, Demote
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.history import Salience
from diffcache.kv.score.recency import Recency
from diffcache.kv.score.revised import WithQueries
from diffcache.kv.settings import Bits, Count, Mode, Share, Size, SomeShare, Whole, check_multiple, checked
from diffcache.kv.trigger import EveryStep


@checked
def kivi(bits: float = 2, *, group: Count = 32, residual: Count = 128) -> Recipe:
    """Quantize keys per channel in groups of tokens, and values per token in groups of channels.

    Keys stay exact until `residual` of them have come, and are then coded all at once; values are
    coded one by one as they leave the last `residual` tokens.

    Args:
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        group: Tokens of a group of keys, channels of a group of values.
        residual: Tokens, a multiple of `group`.

    Reference: KIVI, arXiv 2402.02750, section 3.3 and algorithm 1.
    """
    check_multiple("residual", residual, group)
    keys, values = GroupQuant(bits, "tokens", group), GroupQuant(bits, "channels", group)
    return Recipe("kivi", codec=Pair(keys, values, residual, slide=True))


@checked
def gear(bits: float = 2, *, group: Count = 32, rank: int = 4, outliers: float = 0.02, buffer: Count = 64) -> Recipe:
    """Quantize, keep outliers apart, and add a low rank of what is still missing.

    Args:
        bits: Bits of a code.
        group: Tokens of a group of keys, channels of a group of values.
        rank: Vectors of the low rank of each head.
        outliers: Share of a vector that is kept exactly.
        buffer: Tokens that are coded at once, a multiple of `group`; a prompt is coded whole.

    Reference: GEAR, arXiv 2403.05527. Departures: tokens that are generated get the same rank as
    the prompt, where the paper gives them 2; outliers are the same share of a token and of a
    channel, each within a head, where the official code takes them of all heads together.
    """
    check_multiple("buffer", buffer, group)
    keys = Gear(bits, "tokens", group, outliers, rank)
    values = Gear(bits, "channels", group, outliers, rank)
    return Recipe("gear", codec=Pair(keys, values, buffer, whole=True))


@checked
def zipcache(
    budget: SomeShare = 0.6, *, high: Bits = 4, low: Bits = 2, every: int = 100, probes: SomeShare = 0.1
) -> Recipe:
    """Hold tokens that probes attend to in more bits than the others.

    Args:
        budget: Share of the tokens that are held in `high` bits.
        high: Bits of these.
        low: Bits of the others.
        every: Tokens that stay exact before they are coded together.
        probes: Share of the queries that salience is taken from.

    Reference: ZipCache, arXiv 2405.14256. Departures: what is coded stays as it is, where the
    paper codes everything anew every 100 tokens; channels of values are scaled by the tokens of
    one precision, where the official code takes those of both; probes are spread and not drawn.
    """
    rungs = []
    for bits in (high, low):
        values = JoinHeads(ChannelSeparable(GroupQuant(bits, "channels", None)))
        rungs.append(Pair(GroupQuant(bits, "tokens", None), values, 1))
    score, budgets = Salience(probes), Uniform(float(budget))
    plan, trigger = Demote(top=1, rest=2, fresh=True), EveryStep(every)
    return Recipe("zipcache", score, budgets, plan, ladder=tuple(rungs), trigger=trigger)


@checked
def mikv(budget: Size = 0.2, *, bits: float = 2, group: int = 32, queries: Count = 32, every: int = 16) -> Recipe:
    """Hold in few bits what H2O would drop.

    Args:
        budget: Slots of a row that stay exact, half of them the latest, or a share of the tokens.
        bits: Bits of a code of the other slots.
        group: Channels of a group.
        queries: Last queries that channels are balanced against.
        every: Tokens from one time to the next.

    Reference: MiKV, arXiv 2402.18096. Departure: channels are balanced against the
    last queries rather than all.
    """
    quant = GroupQuant(bits, "channels", group)
    score, plan = WithQueries(queries), Demote(recent=0.5)
    rungs = (BalancedRung(Pair(quant, quant, 1)),)
    return Recipe("mikv", score, Uniform(budget), plan, ladder=rungs, trigger=EveryStep(every))


@checked
def rotatekv(
    bits: float = 2,
    *,
    group: int = 32,
    heads: Count = 1,
    sinks: int = 4,
    recent: int = 32,
    order: Tensor | None = None,
    mode: Mode = "paper",
) -> Recipe:
    """Reorder and rotate the channels of unrotated keys over several heads, then quantize tokens.

    Args:
        bits: Bits of a code.
        group: Channels of a group.
        heads: Key-value heads that are rotated together, a divisor of H.
        sinks: First tokens that stay exact.
        recent: Last tokens that stay exact.
        order: Calibrated order of the `heads * D` channels; None fits it to every block.
        mode: The grid, see `diffcache.kv.codec.rotate.rotatekv_grid`.

    Reference: RotateKV, arXiv 2501.16383. Departures: the tokens of massive activations
    are taken to be the first, where the paper finds them in the input of a layer; ranges are not
    clipped; without `order` the channels are reordered anew in every block.
    """
    keys = rotated(bits, group, heads, order, mode)
    values = rotatekv_grid(bits, group, mode)
    codec = Pair(keys, values, max(recent, 1), recent, whole=True, sinks=sinks)
    return Recipe("rotatekv", codec=codec, space="pre")


@checked
def vidkv(*, wide: Share = 0.5, value_bits: Bits = 1.58, group: Count = 32, residual: Count = 128) -> Recipe:
    """Hold keys in 1.5 bits, by the spectrum of their calm channels, and values in 1.58 bits.

    Args:
        wide: Share of the key channels, those of the widest range, that get two bits; the others
            get one bit of their spectrum.
        value_bits: 1.58, three values a channel, or 2.
        group: Tokens of a group.
        residual: Tokens, a multiple of `group`, that are coded at once.

    Reference: VidKV, arXiv 2503.16257, sections 4.2 and 4.3. Departures: all visual tokens are held
    alike, where the paper can give those that text attends to two bits; the three values lie evenly
    between the smallest and the largest of a group, where the paper's threshold is a share of the
    mean magnitude.
    """
    check_multiple("residual", residual, group)
    keys = RangeSplit(wide, GroupQuant(2, "tokens", group), FourierSigns(group))
    return Recipe("vidkv", codec=Pair(keys, GroupQuant(value_bits, "tokens", group), residual))


@checked
def xquant(
    bits: float = 2,
    *,
    group: Count = 32,
    residual: Count = 128,
    relax: float = 0.0,
    layers: Count = 2,
    skip: Whole = 0,
) -> Recipe:
    """Quantize as KIVI does; neighboring layers share their codes and keep their own scales.

    Args:
        bits: Bits of a code; with 1 bit draw the grid in with `relax`.
        group: Tokens of a group of keys, channels of a group of values.
        residual: Tokens, a multiple of `group`, that are coded at once.
        relax: Share of a group's range that the grid is drawn in at either end, below 0.5.
        layers: Neighbors that share.
        skip: First layers that are left exact.

    Reference: XQuant, arXiv 2510.11236. Departure: with `relax` codes are the nearest
    of the drawn-in grid, where the paper finds them on the whole range; at 1 bit that is the same.
    """
    check_multiple("residual", residual, group)
    keys, values = (
        SharedCodes(GroupQuant(bits, axis, group, relax=relax))
        for axis in ("tokens", "channels")  # type: Literal["tokens", "channels"]
    )
    return Recipe("xquant", codec=Together(keys, values, layers, residual), skip=skip)


@checked
def staircase(steps: tuple[int, ...] = (32, 128, 512), *, group: Count = 32) -> Recipe:
    """Hold tokens in ever fewer bits as they grow old: 8, 4, then 2, by shifting their codes.

    Args:
        steps: Ages in tokens at which bits are halved, the first from exact to 8; up to four.
        group: Tokens of a group of keys, which grow old together, and channels of one of values.

    Reference: none; the ages and the rungs are ours, the shift of codes is that of PM-KVQ, arXiv
    2505.18610.

    Raises:
        ValueError: If there are more steps than bits can be halved.
    """
    if not 1 <= len(steps) <= 4:
        raise ValueError(f"steps={steps}: give one to four ages, for 8, 4, 2 and 1 bits")
    rungs = tuple(Stair(8 >> number, group) for number in range(len(steps)))
    plan, trigger = ByAge(tuple(steps), group), EveryStep(group)
    return Recipe("staircase", Recency(), Uniform(1.0), plan, ladder=rungs, trigger=trigger)


@checked
def mustafar(sparsity: float = 0.7, *, recent: int = 32, bits: float | None = None, mode: Mode = "paper") -> Recipe:
    """Keep the largest elements of every key and value behind a bitmap.

    Args:
        sparsity: Share of the channels of a token that is pruned.
        recent: Last tokens that stay as they are.
        bits: Bits of a code of the elements that are kept; None leaves them exact.
        mode: Treatment of ties, see `diffcache.kv.codec.sparse.BitmapSparse`.

    Reference: Mustafar, arXiv 2505.22913.
    """
    inner: TensorCodec | None = None if bits is None else GroupQuant(bits, "channels", None)
    codec = BitmapSparse(sparsity, inner, mode)
    return Recipe("mustafar", codec=Pair(codec, codec, 1, recent))
