"""Recipes that hold keys and values in smaller bases, or layers in one another's terms."""

from __future__ import annotations

from collections.abc import Sequence

from diffcache.kv.codec.base import Exact, TensorCodec
from diffcache.kv.codec.held import ByLayer, Pair
from diffcache.kv.codec.joined_layers import Single, Together
from diffcache.kv.codec.lowrank import StaticLowRank
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.remat import Deltas, Nothing, Projections, Rematerialise
from diffcache.kv.codec.shared import SharedBasis, SharedDirection
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.recipe import Recipe
from diffcache.kv.settings import Count, Mode, Whole, check_multiple, checked


@checked
def xkv(
    rank: int | float = 0.125,
    *,
    value_rank: int | float = 0.1875,
    layers: Count = 4,
    block: int = 1024,
    skip: Whole = 0,
) -> Recipe:
    """Factor unrotated keys, and values, of neighboring layers over tokens they share.

    Args:
        rank: Coordinates of the keys of a slot, or a share of the channels of all layers and heads
            together; the paper's 512 of 4096.
        value_rank: The same of the values; the paper's 768 of 4096.
        layers: Neighbors that share.
        block: Least tokens that are factored together, several times the rank; a prompt of at least
            as many is factored as a whole.
        skip: First layers that are left exact.

    Reference: xKV, arXiv 2503.18893, section 4. Departure: tokens that are generated are factored
    too, `block` at a time, where the paper leaves them exact.
    """
    codec = Together(SharedBasis(rank), SharedBasis(value_rank), layers, block, whole=True)
    return Recipe("xkv", codec=codec, space="pre", skip=skip)


@checked
def minicache(
    t: float = 0.6,
    *,
    keep: float = 0.05,
    bits: float | None = None,
    block: int = 64,
    skip: Whole = 0,
    mode: Mode = "paper",
) -> Recipe:
    """Have pairs of layers share the directions of keys and values, and keep their magnitudes.

    Args:
        t: Place of the direction between the layers, from 0 (the first's) to 1 (the second's).
        keep: Share of the tokens that are not merged.
        bits: Bits of a code of the directions; None leaves them exact.
        block: Least tokens that are merged together.
        skip: First layers that are left as they are; the paper leaves half of them.
        mode: Choice of tokens that are not merged, see `diffcache.kv.codec.shared.SharedDirection`.

    Reference: MiniCache, arXiv 2405.14366.
    """
    codec = SharedDirection(t, keep, _few(bits), mode)
    return Recipe("minicache", codec=Together(codec, codec, 2, block, whole=True), skip=skip)


@checked
def cskv(bases: Sequence[Bases], *, recent: int = 32, bits: float | None = None) -> Recipe:
    """Hold unrotated keys, and values, as coordinates in fitted bases, but for the last tokens.

    Args:
        bases: Bases of each layer, from `diffcache.kv.learn.cskv.fit`.
        recent: Last tokens that stay exact.
        bits: Bits of a code of the coordinates; None leaves them exact.

    Reference: CSKV, arXiv 2409.10593, section 2. Departure: with `bits` the bases are those that
    were fitted to exact coordinates, where the paper trains through the quantizer.
    """
    return Recipe("cskv", codec=_static(bases, _few(bits), _few(bits), 1, recent), space="pre")


@checked
def kv_heads(bases: Sequence[Bases], *, bits: float | None = None) -> Recipe:
    """Hold fewer key and value heads, and make the others of them when they are read.

    Args:
        bases: Bases of each layer, from `diffcache.kv.learn.kv_heads.fit`.
        bits: Bits of a code of the heads that are held; None leaves them exact.

    Reference: Effectively Compress KV Heads for LLM, arXiv 2406.07056: keys are made
    before they are rotated, in every forward. Departure: the bases are not fused into the weights,
    so that the model stays as it is; `diffcache.kv.to_mla` makes a model of fewer channels.
    """
    return Recipe("kv_heads", codec=_static(bases, _few(bits), _few(bits), 1), space="pre")


@checked
def rematerialised(
    projections: Sequence[Projections],
    bits: float | None = 4,
    *,
    group: int = 128,
    residual: Count = 32,
    layers: Count = 1,
) -> Recipe:
    """Hold the inputs of layers in few bits, and make keys and values of them when they are read.

    The cache must be given inputs in place of keys: `diffcache.kv.hf.layer_inputs.remat_cache_for`. It
    does not go with scorers, which look at keys. A model whose inputs have more channels than its
    keys and values together gains little.

    Args:
        projections: Key and value projections of each layer.
        bits: Bits of a code; None holds the inputs exact.
        group: Channels of a group.
        residual: Tokens that are coded at once.
        layers: Neighbors of which all but the first are held as differences; 1 for none.

    Reference: XQuant, arXiv 2508.10395 (one layer; differences are its XQuant-CL).
    """
    quant = Exact() if bits is None else GroupQuant(bits, "channels", group)
    codec = Together(Deltas(quant, quant), Single(Nothing()), layers, residual)
    if not len(projections):
        raise ValueError(
            "projections=(): must have one for each layer; diffcache.kv.hf.remat_cache_for(model) "
            "finds them and makes the cache"
        )
    return Recipe("rematerialised", codec=codec, retrieve=Rematerialise(tuple(projections)), space="pre")


@checked
def xquant_latent(bases: Sequence[Bases], bits: float = 4, *, group: Count = 32, residual: Count = 32) -> Recipe:
    """Hold, of models with grouped queries, the inputs of layers as their projections see them.

    Args:
        bases: Bases of each layer, from `diffcache.kv.learn.latents.latents`.
        bits: Bits of a code.
        group: Tokens of a group of keys, channels of one of values.
        residual: Tokens, a multiple of `group`, that are coded at once.

    Reference: XQuant, arXiv 2508.10395 (models with grouped queries).
    """
    check_multiple("residual", residual, group)
    keys, values = GroupQuant(bits, "tokens", group), GroupQuant(bits, "channels", group)
    return Recipe("xquant_latent", codec=_static(bases, keys, values, residual), space="pre")


def _static(
    bases: Sequence[Bases], keys: TensorCodec | None, values: TensorCodec | None, block: int, recent: int = 0
) -> ByLayer:
    """Return a codec of coordinates in the bases of each layer, which are coded themselves."""
    return ByLayer(
        tuple(
            Pair(
                StaticLowRank(each.key_down, each.key_up, keys),
                StaticLowRank(each.value_down, each.value_up, values),
                block,
                recent,
            )
            for each in bases
        )
    )


def _few(bits: float | None) -> TensorCodec | None:
    return None if bits is None else GroupQuant(bits, "channels")
