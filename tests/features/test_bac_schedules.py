"""BAC's schedules, against brute force, and their union, by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffcache.features.bac import BAC, METRICS, bubble, is_feed_forward, layer_of, widest
from tests.features.bac_policy import SITES, STEPS, random_pairs, tables


@pytest.mark.parametrize("objective", ["anchor", "adjacent"])
@pytest.mark.parametrize("metric", METRICS)
def test_schedule_equals_brute_force(objective, metric):
    """Every schedule of a size is scored by the definition; cosine is maximised, all else not."""
    best = max if metric == "cosine" else min
    for seed, count in itertools.product(range(4), (1, 2, 3, 5)):
        pairs = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))
        scores = {}
        for inner in itertools.combinations(range(1, 8), count - 1):
            starts = (0, *inner)
            score = 0.0
            for step in range(8):
                anchor = max(s for s in starts if s <= step)
                if objective == "anchor":
                    score += float(pairs[anchor, step])
                elif step > anchor:
                    score += float(pairs[step - 1, step])
            scores[starts] = score
        made = BAC(count, metric, objective, 0).starts(pairs)
        assert scores[tuple(made)] == pytest.approx(best(scores.values()), abs=1e-6)
        assert len(made) == count


@pytest.mark.parametrize("objective", ["anchor", "adjacent"])
def test_steps_that_are_all_alike_are_computed_first(objective):
    """The programme keeps the smallest of equal starts."""
    for count in (1, 4, 20):
        made = BAC(count, objective=objective, union=0).starts(torch.full((20, 20), 0.7))
        assert made == list(range(count))


def test_blocks_of_alike_steps_are_found():
    """With as many segments as blocks, segments are the blocks."""
    alike = torch.block_diag(torch.ones(3, 3), torch.ones(1, 1), torch.ones(5, 5), torch.ones(3, 3))
    for metric in METRICS:
        pairs = alike if metric == "cosine" else 1 - alike
        assert BAC(4, metric, union=0).starts(pairs) == [0, 3, 4, 9]


def test_union_by_hand():
    """A site takes the steps of its own and deeper feed-forwards, enlarged ones included."""
    given = {
        "l.0.attn": (0, 1), "l.0.ff": (0, 2), "l.1.attn": (0, 3), "l.1.ff": (0, 4), "l.2.ff": (0, 5)
    }  # fmt: skip
    assert bubble(given, []) == given
    assert bubble(given, ["l.1.attn"]) == given | {"l.1.attn": (0, 3, 4, 5)}
    assert bubble(given, ["l.2.ff"]) == given
    made = bubble(given, ["l.0.attn", "l.0.ff"])
    assert made == given | {"l.0.attn": (0, 1, 2, 4, 5), "l.0.ff": (0, 2, 4, 5)}
    # a chosen feed-forward, already enlarged, is seen by those after it in its layer
    swapped = {"l.0.ff": (0, 2), "l.0.attn": (0, 1), "l.1.ff": (0, 4)}
    assert bubble(swapped, list(swapped))["l.0.attn"] == (0, 1, 2, 4)


def test_union_never_removes_and_is_idempotent():
    """Random schedules, every number of chosen sites."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        given = {
            site: (0, *(torch.randperm(19, generator=generator)[:4] + 1).sort().values.tolist())
            for site in SITES
        }
        for count in range(len(SITES) + 1):
            chosen = SITES[:count]
            made = bubble(given, chosen)
            assert all(set(given[site]) <= set(made[site]) for site in SITES)
            assert all(made[site] == given[site] for site in SITES[count:])
            assert bubble(made, chosen) == made


def test_widest_takes_the_largest_shift():
    """Of equal ones the first."""
    assert widest({"a": 1.0, "b": 3.0, "c": 3.0, "d": 2.0}, 3) == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("site", "layer", "feeds"),
    [
        ("decoder.layers.10.self_attn", "decoder.layers.10", False),
        ("decoder.layers.0.linear2", "decoder.layers.0", True),
        ("single_transformer_blocks.3.proj_out", "single_transformer_blocks.3", True),
        ("blocks.1.ffn", "blocks.1", True),
        ("blocks.1.attn2", "blocks.1", False),
        ("down_blocks.0.attentions.1", "down_blocks.0", False),
        ("blocks.4.ff_context", "blocks.4", True),
    ],
)
def test_names_of_sites(site, layer, feeds):
    """A path tells whether a module is a feed-forward, and its layer."""
    assert layer_of(site) == layer
    assert is_feed_forward(site) is feeds


def test_official_forces_the_last_step_and_leaves_a_single_union_out():
    """The two things the official code does that the paper does not say."""
    made = BAC(3, union=1, tables=tables(random_pairs(0))).schedules()
    official = BAC(3, union=1, official=True, tables=tables(random_pairs(0))).schedules()
    plain = BAC(3, union=0, tables=tables(random_pairs(0))).schedules()
    assert official == {site: tuple(sorted({*u, STEPS - 1})) for site, u in plain.items()}
    assert len(made[SITES[0]]) > 3  # the widest site took the feed-forwards' steps
    assert made == bubble(plain, SITES[:1])
