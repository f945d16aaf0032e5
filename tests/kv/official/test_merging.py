"""Kept and merged slots against the algorithms of their authors' code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from diffcache.kv.recipes.merging import d2o, elastic_cache, look_m
from tests.kv.official.prompt import Prompt, best, held, rows


def nearest(k: Tensor, gone: list[int], kept: list[int]) -> tuple[list[float], list[int]]:
    """Return the highest cosine of every slot that goes with those that stay, and with which."""
    found = [cosine_similarity(k[slot], k[kept], dim=-1).max(0) for slot in gone]
    return [float(one.values) for one in found], [kept[int(one.indices)] for one in found]


def split(score: list[float], sinks: int, size: int, recent: int) -> list[int]:
    """Return the first tokens, the heaviest of the others, and the latest."""
    early = [float("inf")] * sinks + score[sinks : len(score) - recent]
    return [*best(early, size - recent), *range(len(score) - recent, len(score))]


def test_official_d2o() -> None:
    """Slots kept of a prompt and what they take over, in `"official"` mode."""
    layers, heads, prompt, size = 5, 3, 50, 24
    text = Prompt(prompt, layers=layers, heads=heads)
    store = text.after(d2o(size, recent=0.25, mode="official"))
    mass = [text.attention(layer)[:, 0].sum(1) for layer in range(layers)]
    spread = []
    for column in mass:
        variance = column.var(-1)
        low, high = variance.min(), variance.max()
        spread.append(float(((variance - low) / (high - low + 1e-6)).mean()))
    weights = torch.softmax(-torch.tensor(spread), 0)
    ratios = (weights * layers * size / prompt).clamp(0.01, 1.0)
    for layer in range(layers):
        if layer in (0, 1, layers - 1):
            assert held(store)[layer] == [list(range(prompt))] * heads
            continue
        many = int(ratios[layer] * prompt + 1e-4)
        recent = int(many * 0.25)
        kept = [split(row.tolist(), 4, many, recent) for row in mass[layer]]
        assert held(store)[layer] == kept
        gone = [[slot for slot in range(prompt) if slot not in stays] for stays in kept]
        k, v = text.k[layer, 0], text.v[layer, 0]
        match = [nearest(k[h], gone[h], kept[h]) for h in range(heads)]
        likeness = torch.tensor([values for values, _ in match])
        passes = likeness.mean(0) >= likeness.mean()
        assert passes.any() and not passes.all()
        for new, x in zip(rows(store, layer), (k, v), strict=True):
            for h in range(heads):
                total, count = x[h].clone(), torch.ones(prompt)
                for place, slot in enumerate(gone[h]):
                    if passes[place]:
                        total[match[h][1][place]] += likeness[h, place] * x[h, slot]
                        count[match[h][1][place]] += 1
                merged = (total / count[:, None])[kept[h]]
                torch.testing.assert_close(new[h], merged, rtol=1e-4, atol=1e-5)


def test_official_elastic_cache() -> None:
    """Slots kept of a prompt and what they take over, in `"official"` mode."""
    prompt, size, sinks = 40, 16, 3
    text = Prompt(prompt, heads=2)
    recipe = elastic_cache(size, sinks=sinks, recent=1, mode="official")
    store = text.after(recipe)
    score = text.attention(0)[:, 0].mean(0).sum(0)
    order = score[sinks : prompt - 1].argsort()
    forget = prompt - size
    middle = [place + sinks for place, value in enumerate(order.tolist()) if value > forget]
    thrown = [place for place, value in enumerate(order.tolist()) if value <= forget]
    kept = [*range(sinks), *middle, prompt - 1]
    assert held(store)[0] == [kept, kept] and len(kept) == size - 1
    for new, x in zip(rows(store, 0), (text.k[0, 0], text.v[0, 0]), strict=True):
        total, count = x.clone(), torch.ones(prompt)
        for slot in thrown:
            target = min(middle, key=lambda one: (abs(one - slot), one))
            total[:, target] += x[:, slot]
            count[target] += 1
        merged = (total / count[:, None])[:, kept]
        torch.testing.assert_close(new, merged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("images", [None, (5, 40)])
def test_official_look_m(images: tuple[int, int] | None) -> None:
    """Slots kept and what they take over, by pivot, and with `sinks=4` where nothing has a tag."""
    prompt, size = 50, 20
    text, recipe = Prompt(prompt, heads=2), look_m(size, sinks=4)
    image = range(*images) if images else range(0)
    if images:  # all text stays, and images within the budget
        text.tags = torch.tensor([slot in image for slot in range(prompt)], dtype=torch.int32)
        recipe = look_m(size, mode="official")
    store = text.after(recipe)
    for h in range(2):
        k = text.k[0, 0, h]
        score = text.attention(0)[h, 0].sum(0)
        score[list(image)] -= 65516
        kept = split(score.tolist(), 0 if images else 4, size, size // 2)
        if images:
            kept = sorted({*kept, *range(prompt)} - ({*image} - {*kept}))
        assert held(store)[0][h] == kept
        gone = [slot for slot in range(prompt) if slot not in kept]
        _, meets = nearest(k, gone, kept)
        for new, x in zip(rows(store, 0), (k, text.v[0, 0, h]), strict=True):
            total, count = x.clone(), torch.ones(prompt)
            for slot, target in zip(gone, meets, strict=True):
                total[target] += (x[slot] + x[target]) / 2
                count[target] += 1
            merged = (total / count[:, None])[kept]
            torch.testing.assert_close(new[h], merged, rtol=1e-4, atol=1e-5)
