"""The numbers of kvpress that our scores are held to: complete, and what their formulas say.

The references below are written from the formulas, on the stored queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffcache.eval.kv.peer import installed
from tests.kv.kvpress_oracle import ALL as PRESSES
from tests.kv.kvpress_oracle import CONTEXT, SCORERS
from tests.kv.kvpress_presses import (
    GOLDEN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    ROWS,
    SIZE,
    TOKENS,
    golden,
)

RATIOS = {50: 0.5, 75: 0.75}
EXTRA = {"finch": TOKENS, "kvzip": CONTEXT, "kvzip_plus": CONTEXT}
RAGGED = ("adakv_snapkv", "critical_adakv_snapkv", "duo", "lukv")
OTHER_COUNT = (*RAGGED, "pyramidkv_beta2", "pyramidkv_beta20", "chunkkv_snapkv", "chunk_keydiff")


def stored(name: str) -> Tensor:
    tensors, _ = golden()
    return tensors[name]


def attention() -> Tensor:
    """Return causal attention weights [L, B, H, G, S, S] of the stored queries and keys."""
    q = stored("q").unflatten(2, (HEADS, GROUPS)).double()
    k = stored("k")[:, :, :, None].double()
    late = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    logits: Tensor = q @ k.mT / math.sqrt(SIZE)
    return logits.masked_fill(late, -math.inf).softmax(-1)


def protect(scores: Tensor, last: int) -> Tensor:
    """Append `last` slots that score one more than the best of their layer and row."""
    top = scores.amax((2, 3), keepdim=True) + 1
    return torch.cat([scores, top.expand(-1, -1, HEADS, last)], -1)


def knorm() -> Tensor:
    return -stored("k").double().square().sum(-1).sqrt()


def keydiff() -> Tensor:
    k = stored("k").double()
    unit = k / k.square().sum(-1, keepdim=True).sqrt()
    anchor = unit.mean(3, keepdim=True)
    return -(unit * anchor).sum(-1) / anchor.square().sum(-1).sqrt()


def snapkv(window: int = 8, kernel: int = 5) -> Tensor:
    seen = attention()[..., -window:, :-window].mean(-2)
    around = torch.nn.functional.pad(seen, (kernel // 2, kernel // 2)).unfold(-1, kernel, 1)
    return protect(around.sum(-1).div(kernel).mean(3), window)


def tova() -> Tensor:
    last = attention()[..., -1, :-1].mean((2, 3))
    return protect(last[:, :, None].expand(-1, -1, HEADS, -1), 1)


def observed_attention() -> Tensor:
    seen_by = torch.arange(TOKENS, 0, -1)
    return attention().sum(-2).div(seen_by).mean(3)


REFERENCES: dict[str, Callable[[], Tensor]] = {
    "knorm": knorm,
    "keydiff": keydiff,
    "snapkv": snapkv,
    "tova": tova,
    "observed_attention": observed_attention,
}


def test_the_file_is_small_and_says_where_its_numbers_come_from() -> None:
    about = golden()[1]
    assert GOLDEN.stat().st_size <= 300_000
    assert "NVIDIA" in about["attribution"] and "Apache-2.0" in about["attribution"]
    assert about["licence"] == "Apache-2.0" and about["kvpress"] == "0.5.5"
    assert about["presses"].keys() == PRESSES.keys()
    for name, spec in PRESSES.items():
        found = about["presses"][name]
        assert (found["class"], found["base"]) == (spec.cls, spec.base)
        assert name == "duo" or found["settings"] == spec.settings


def test_inputs_have_their_shapes() -> None:
    lead = (LAYERS, ROWS)
    shapes = {
        "q": (*lead, HEADS * GROUPS, TOKENS, SIZE),
        "k": (*lead, HEADS, TOKENS, SIZE),
        "v": (*lead, HEADS, TOKENS, SIZE),
        "wo": (LAYERS, HIDDEN, HEADS * GROUPS * SIZE),
        "hidden_norm": (*lead, TOKENS),
        "inv_freq": (SIZE // 2,),
        "qfilter": (LAYERS, HEADS, SIZE),
        "sketch": (HEADS, SIZE, 12),
        "budgets": (2, LAYERS, HEADS),
    }
    for name, shape in shapes.items():
        assert stored(name).shape == shape and stored(name).isfinite().all(), name


def test_every_scorer_has_finite_scores_and_nothing_is_left_over() -> None:
    tensors, about = golden()
    scores = {f"score.{name}": TOKENS for name in SCORERS}
    scores |= {f"score.{name}": slots for name, slots in EXTRA.items()}
    for name, slots in scores.items():
        assert tensors[name].shape == (LAYERS, ROWS, HEADS, slots), name
        assert tensors[name].dtype == torch.float32 and tensors[name].isfinite().all(), name
        assert (tensors[name].std(-1) > 0).all(), name
    kept = {f"kept.{name}.{percent}" for name in PRESSES for percent in RATIOS}
    found = {name for name in tensors if name.startswith(("score.", "kept."))}
    assert found == scores.keys() | kept - set(about["tied"])


@pytest.mark.parametrize("percent", RATIOS)
@pytest.mark.parametrize("name", PRESSES)
def test_kept_sets_have_the_sizes_of_their_rule(name: str, percent: int) -> None:
    kept = stored(f"kept.{name}.{percent}")
    assert kept.dtype == torch.bool and kept.shape == (LAYERS, ROWS, HEADS, TOKENS)
    n = int(TOKENS * (1 - RATIOS[percent]))
    counts = kept.sum(-1)
    if name not in OTHER_COUNT:
        assert (counts == n).all()
    elif name.endswith("adakv_snapkv"):
        assert (counts.sum(-1) == n * HEADS).all() and (counts >= int(0.2 * n)).all()
        assert counts.unique().numel() > 1  # otherwise it says nothing about ragged heads
    elif name not in RAGGED:
        assert (counts == counts[:, :1, :1]).all()  # only layers differ, if any do


@pytest.mark.parametrize("name", ["knorm", "snapkv", "expected_attention", "cap", "qfilter"])
@pytest.mark.parametrize("percent", RATIOS)
def test_kept_slots_are_the_best(name: str, percent: int) -> None:
    scores, kept = stored(f"score.{name}"), stored(f"kept.{name}.{percent}")
    worst = scores.masked_fill(~kept, math.inf).amin(-1)
    assert (worst > scores.masked_fill(kept, -math.inf).amax(-1)).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_scores_are_what_the_formula_says(name: str) -> None:
    got, want = stored(f"score.{name}").double(), REFERENCES[name]()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_changed_values_and_keys_are_only_those_of_kept_slots() -> None:
    n = int(TOKENS * 0.25)
    kept = stored("kept.merged_snapkv.75")
    values = stored("v")[kept].unflatten(0, (LAYERS, ROWS, HEADS, n))
    merged = stored("values.merged_snapkv.75")
    same = (merged == values).all(-1)
    assert merged.shape == values.shape and same.any() and not same.all()
    keys = stored("k")[stored("kept.rerotated_knorm.75")].unflatten(0, (LAYERS, ROWS, HEADS, n))
    turned = stored("keys.rerotated_knorm.75")
    torch.testing.assert_close(turned.norm(dim=-1), keys.norm(dim=-1))  # a rotation keeps norms
    for percent in RATIOS:
        channels = stored(f"channels.think.{percent}")
        assert (channels.sum(-1) == SIZE - int(SIZE * RATIOS[percent])).all()


@pytest.mark.skipif(installed() is None, reason="kvpress is not installed")
def test_kvpress_still_says_the_same() -> None:
    from tests.kv.make_kvpress_golden import make

    tensors, _ = make()
    assert tensors.keys() == golden()[0].keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, stored(name), rtol=1e-4, atol=1e-6, msg=name)
