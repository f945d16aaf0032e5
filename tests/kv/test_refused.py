"""Settings and tensors that do not go together, with the texts of their errors.

Ranges of single settings are in `tests/settings.txt`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffcache.kv.attend import Query, attend
from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import HeadTable
from diffcache.kv.budgets.layers import LayerTable, Scheduled
from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.bitstream import CacheGen
from diffcache.kv.codec.heads import JoinHeads
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.layers import Single, Together
from diffcache.kv.codec.lowrank import StaticLowRank
from diffcache.kv.codec.pack import pack, unpack
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.rotate import ChannelPermute, Hadamard, rotatekv
from diffcache.kv.codec.scaled import Balanced
from diffcache.kv.codec.shared import SharedCodes, SharedDirection
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn import (
    compresskv,
    cskv,
    duo,
    epicache,
    kv_heads,
    lococo,
    locret,
    prefixkv,
    razor,
    scalekv,
)
from diffcache.kv.learn.codebook import Codebook
from diffcache.kv.learn.label_channels import LabelCalibration
from diffcache.kv.life.pack import pack as packed
from diffcache.kv.life.prefix import PrefixTree, chain, time_to_live
from diffcache.kv.life.tiers import Tiers
from diffcache.kv.merging.d2o import Density
from diffcache.kv.merging.lococo import MixWeights
from diffcache.kv.merging.look_m import NearestMerge
from diffcache.kv.plan import ByAge, TopK
from diffcache.kv.positions import Cyclic, Refresh, Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv, criticalkv, h2o, knorm, snapkv
from diffcache.kv.recipes.eviction_more import scissorhands
from diffcache.kv.recipes.eviction_offline import scalekv as scalekv_recipe
from diffcache.kv.recipes.quantized import staircase
from diffcache.kv.recipes.streaming import duo_attention
from diffcache.kv.refresh import most_changed
from diffcache.kv.retrieval.sentence import sentence_tags
from diffcache.kv.score.heads import HeadVote
from diffcache.kv.score.learned import Retained, RetainingHeads
from diffcache.kv.score.patches import PatchCenters
from diffcache.kv.score.recency import Recency
from diffcache.kv.score.vectors import KeyNorm
from diffcache.kv.store import KVStore
from tests.kv.eviction_more.plain import Text, scores
from tests.kv.merging.rows import layer

torch.manual_seed(0)
TWO_LAYERS = GroupQuant(2, "tokens", 32)
STACK = torch.ones(1, 2, 6, 4)  # [B, H, S, D]
IDS = torch.tensor([[4, 9]])


def x(*shape: int) -> Tensor:
    return torch.ones(*shape)


def written(count: int = 4) -> KVStore:
    """Return a store of heads that are told apart, two for a group of two."""
    store = KVStore(1, razor.probe(6, groups=3))
    store.begin(count)
    store.layers[0].write(x(1, 2, count, 8), x(1, 2, count, 8))
    return store


# Parts of codecs.
CODECS: list[tuple[Callable[[], object], str]] = [
    (lambda: Exact(torch.int8), "dtype=torch.int8: must be a dtype of floats or None"),
    (lambda: GroupQuant(scale_dtype=torch.int8), "scale_dtype=torch.int8: must be a dtype of fl"),
    (lambda: GroupQuant(whole_zero=True, symmetric=True), "a symmetric grid has no smallest value"),
    (lambda: pack(torch.zeros(4, dtype=torch.uint8), 5), "bits=5: must be one of 1, 1.58, 2, 3, 4"),
    (
        lambda: unpack(torch.zeros(3, 2, dtype=torch.uint8), 2, 16),
        "packed has 2 bytes in its last axis: 16 numbers of 2 bits take 4",
    ),
    (lambda: StaticLowRank(x(4, 2), x(4, 2)), r"down has shape \[4, 2\] and up \[4, 2\]"),
    (
        lambda: StaticLowRank(x(12, 2), x(2, 12)).encode(x(1, 2, 3, 8)),
        "down has 12 rows: no multiple of D=8",
    ),
    (lambda: Hadamard(Exact()).encode(x(1, 1, 2, 15)), "no Hadamard block divides 15 channels"),
    (
        lambda: Hadamard(Exact(), block=16).encode(x(1, 1, 2, 24)),
        r"no Hadamard block divides 24 channels \(heads=1, block=16\)",
    ),
    (lambda: Hadamard(Exact(), heads=3).encode(x(1, 4, 2, 8)), "heads=3: must divide the 4 heads"),
    (lambda: ChannelPermute(Exact(), torch.tensor([0, 0, 1])), r"order must be \[D\] or \[H, D\]"),
    (
        lambda: ChannelPermute(Exact(), torch.arange(3)).encode(x(1, 1, 2, 4)),
        "x has 1 heads, 4 channels",
    ),
    (lambda: rotatekv(1, mode="official"), "bits=1: mode='official' has 2, 3 or 4"),
    (lambda: Balanced(Exact(), torch.tensor([1.0, 0.0])), "not above 0 and finite"),
    (lambda: Balanced(Exact(), x(1, 1, 1, 1)), "factor has shape"),
    (lambda: Balanced(Exact(), x(3)).encode(x(1, 2, 5, 4)), r"shape \[3\]: x needs \[1, 2, 4\]"),
    (lambda: SharedDirection().encode([x(2, 2, 8, 8)] * 3), "scope=2"),
    (
        lambda: Together(SharedCodes(TWO_LAYERS), Single(Exact()), 2, 48),
        "block=48: must be a multiple of 32",
    ),
    (lambda: Pair(Exact(), GroupQuant(2, "tokens", 8), 8, slide=True), "slide"),
    (lambda: Pair(TWO_LAYERS, Exact(), 48), "block=48: keys .* multiple of 32"),
    (lambda: JoinHeads(Exact(), 3).encode(x(1, 4, 2, 8)), "heads=3: must divide the 4 heads"),
    (lambda: CacheGen(levels=()), "levels="),
    (lambda: CacheGen(levels=(2.0,)), "levels="),
    (lambda: CacheGen(key_bins=((2, None),)), "key_bins"),
    (lambda: CacheGen(value_bins=((16, 3),)), "value_bins"),
]
# Scores, budgets, plans and recipes.
EVICTION: list[tuple[Callable[[], object], str]] = [
    (lambda: HeadTable(((True,), (True, False)), 4), "must be a table"),
    (lambda: HeadTable((), 4), "must be a table"),
    (lambda: duo_attention((), 8), "must be a table of layers"),
    (lambda: LayerTable(4, (0.0, 0.0)), "weights="),
    (lambda: Scheduled(4, ()), "scales="),
    (lambda: Scheduled(4, (3, 4), ((1,),)), r"table\[0\]"),
    (lambda: HeadVote(((),)), r"heads\[0\]"),
    (lambda: PatchCenters(()), "scales="),
    (lambda: scores(HeadVote(((9,),)), Text(12), [12]), "query heads"),
    (lambda: scalekv_recipe(scales=()), "scales="),
    (lambda: scissorhands(10), "leaves 5 slots"),
    (lambda: Density(Recency()), "must keep column sums"),
    (lambda: ByAge((4, 4)), "rise"),
    (lambda: ByAge(()), "rise"),
    (lambda: staircase(()), "one to four"),
    (lambda: adakv(base=Recipe("idle")), "base='idle': drops nothing"),
    (lambda: criticalkv(base=h2o()), "base='h2o': its plan is RecentShare"),
    (lambda: snapkv() | knorm(), "both set score"),
    (lambda: Refresh(5, 5), "back=5"),
    (
        lambda: Recipe(
            score=KeyNorm(), budget=Uniform(2), plan=TopK(), merge=NearestMerge("pivot", "pre")
        ),
        "needs space='pre'",
    ),
    (lambda: Recipe(positions=Cyclic(3)), "space='pre'"),
    (lambda: sentence_tags(IDS, ()), "ends is empty"),
    (lambda: most_changed(STACK, STACK, x(1, 6) > 0, 1.5), "share=1.5: must be at least 0"),
]
# The layer, and what stands beside a cache.
STORES: list[tuple[Callable[[], object], str]] = [
    (lambda: KVLayer().write(STACK, STACK[:, :, 1:]), r"k=\[1, 2, 6, 4\], v=\[1, 2, 5, 4\]"),
    (lambda: KVLayer(3).read(), "layer 3 is empty"),
    (lambda: KVLayer(positions=Slot()), "takes a rotary"),
    (lambda: KVLayer().rotate(x(1, 1, 1, 2), x(1)), "no rotary"),
    (lambda: attend(Query(STACK, 0, 1.0), []), "nothing to attend to"),
    (lambda: packed([torch.arange(5)], 4), "width=4"),
    (lambda: packed([]), "give prompts"),
    (lambda: packed([torch.arange(0)]), "give prompts"),
    (lambda: chain([1], "m", 0), "chunk=0"),
    (lambda: PrefixTree("m", 1, 0), "chunk=0"),
    (lambda: PrefixTree("m", -1), "budget_bytes=-1"),
    (lambda: PrefixTree("m", 10, 2).insert([1, 2, 3, 4], ["a"], [1]), "2 full chunks of 2; got 1"),
    (lambda: PrefixTree("m", 10, 2).pin([1, 2], -1), "seconds=-1"),
    (lambda: time_to_live([1.0], -1), "must be at least 0"),
    (lambda: Tiers(-1), "device_bytes=-1"),
]
# What is learned beforehand.
LEARNED: list[tuple[Callable[[], object], str]] = [
    (lambda: Codebook(x(1, 2, 4, 8), x(1, 2, 8, 3)), r"must be \[L, H, C, D\]"),
    (lambda: LabelCalibration().channels(2), "no queries were seen"),
    (lambda: MixWeights(x(2, 6, 9, 2), x(2, 6), x(2)), "2 taps"),
    (lambda: lococo.train(lococo.fresh(1, 4, 9, taps=3), [], steps=0), "steps=0"),
    (lambda: Retained(locret.fresh(1, 28, 2, width=8))(layer()), "no token was scored"),
    (lambda: RetainingHeads(x(1, 4, 8), x(1, 7, 2)), "second="),
    (lambda: locret.fresh(1, 28, 2, width=8)(STACK, STACK, STACK, 1), "layer 1 with 24 channels"),
    (lambda: locret.targets(locret.Sample(0, STACK, STACK, STACK, 6, 1.0)), "prompt=6"),
    (lambda: locret.train(locret.fresh(1, 28, 2, width=8), []), "0 samples"),
    (lambda: cskv.fit([], [[x(1)]], cskv.Fit(4)), "inputs_of"),
    (lambda: kv_heads.group_bases(x(3, 12), 4, 3), "groups=3"),
    (lambda: kv_heads.fit([(nn.Linear(2, 2), nn.Linear(2, 2))], [[]], 2, 1), "inputs_of"),
    (lambda: duo.retrieval_heads(x(1, 2), 2), "share=2: must be"),
    (lambda: razor.repeated_tokens(10, 5, 1), "times=1: must all be at least 2"),
    (
        lambda: written().attend(0, Query(x(1, 4, 4, 8), 0, 1.0)),
        "groups=3: this model has 2",
    ),
    (lambda: razor.head_scores(written()), "4 tokens were seen: no token is repeated"),
    (lambda: razor.head_scores(KVStore(1, Recipe("other"))), "must have the recipe of `probe`"),
    (lambda: razor.retrieval_heads(x(1, 4), x(1, 4), 3), "groups=3: must be two of"),
    (
        lambda: razor.retrieval_heads(x(1, 4), x(1, 4), echo_share=0),
        "echo_share=0: must be above 0",
    ),
    (lambda: prefixkv.layer_shares([], 0.2), "none"),
    (lambda: prefixkv.layer_shares([[x(1, 2, 6)]], 0.0), "share=0"),
    (lambda: prefixkv.layer_shares([[x(1, 2, 6)]], 2), "2"),
    (lambda: compresskv.top_heads(x(2, 3), 4), "count=4"),
    (lambda: compresskv.retrieval_score(x(3, 2, 10), 3, 11), "stop=11"),
    (lambda: compresskv.layer_weights([]), "at least one sample"),
    (lambda: compresskv.eviction_error(x(1, 2), x(2)), "shape|alike"),
    (lambda: epicache.layer_weights(x(1), -1), "sharpness=-1"),
    (lambda: scalekv.capacities(x(4, 2), 100, drafters=5), "drafters=5"),
    (lambda: scalekv.selectivity(x(2, 10), 11), "current=11"),
]


@pytest.mark.parametrize(("call", "said"), [*CODECS, *EVICTION, *STORES, *LEARNED])
def test_what_does_not_go_together_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
