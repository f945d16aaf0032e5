"""Slots that recipes keep, against the algorithms of their authors' code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffcache.kv.recipes.eviction import adakv, cake, h2o, pyramidkv, scalekv, snapkv
from tests.kv.official.prompt import Prompt, best, held, pool

WINDOW = 8


def windowed(
    text: Prompt, layer: int, kernel: int = 5, pooling: str = "avg", groups: str = "mean"
) -> list[list[float]]:
    """Return what the last queries attend to before them: query heads reduced, then pooled."""
    seen = text.attention(layer)[..., -WINDOW:, :-WINDOW].mean(2)
    seen = seen.amax(1) if groups == "max" else seen.mean(1)
    return [pool(row.tolist(), kernel, pooling) for row in seen]


@pytest.mark.parametrize(("pooling", "groups"), [("avg", "mean"), ("max", "max"), ("avg", "max")])
def test_official_snapkv(pooling: Any, groups: Any) -> None:
    """Slots kept, with each way of pooling and of reducing query heads."""
    text = Prompt(70, groups=3)
    recipe = snapkv(24, window=WINDOW, kernel=5, pooling=pooling, groups=groups)
    tail = list(range(70 - WINDOW, 70))
    scores = windowed(text, 0, 5, pooling, groups)
    assert held(text.after(recipe)) == [[best(row, 24 - WINDOW) + tail for row in scores]]


@pytest.mark.parametrize("tokens", [70, 130, 50])
def test_official_pyramidkv(tokens: int) -> None:
    """Budgets and slots kept, in `"official"` mode.

    130 tokens give steps that are rounded down, 70 a flatter pyramid, 50 the same for all layers.
    """
    layers, size, beta = 5, 40, 20
    text = Prompt(tokens, layers=layers)
    found = held(text.after(pyramidkv(size, beta=beta, window=WINDOW, mode="official")))
    spare = size - WINDOW
    least = spare // beta
    most = 2 * spare - least
    if most >= tokens - WINDOW:
        most = tokens - WINDOW
        least = 2 * spare - most
    for layer in range(layers):
        count = most - layer * ((most - least) // (layers - 1))
        if tokens < 2 * spare:
            count = spare
        tail = list(range(tokens - WINDOW, tokens))
        assert found[layer] == [best(row, count) + tail for row in windowed(text, layer)]


def shares(preferences: list[float], size: int, layers: int, room: int) -> list[int]:
    """Return what layers get beside their window; what one cannot use goes to all others alike."""
    total = size * layers
    slots = np.array([p / sum(preferences) * total for p in preferences], dtype=int)
    over = int(np.maximum(slots - room, 0).sum())
    slots = np.minimum(slots, room)
    for more in (over, total - int(slots.sum()) - over):
        open_ = [index for index in range(layers) if slots[index] < room]
        for place, index in enumerate(open_):
            slots[index] += more // len(open_) + (place < more % len(open_))
    return [min(int(count), room) for count in slots]


@pytest.mark.parametrize("size", [14, 40, 60])
def test_official_cake(size: int) -> None:
    """Budgets and slots kept, of prompts that the code compresses."""
    layers, tokens, tau1, tau2 = 4, 90, 1.6, 0.6
    text = Prompt(tokens, layers=layers, groups=2)
    found = held(text.after(cake(size, window=WINDOW, gamma=200.0, tau1=tau1, tau2=tau2)))
    preferences, scores = [], []
    for layer in range(layers):
        seen = text.attention(layer)[..., -WINDOW:, :-WINDOW]
        entropy = -(seen * (seen + 1e-10).log()).sum()
        preferences.append(float(entropy ** (1 / tau1) * seen.var(2).sum() ** (1 / tau2)))
        row = (seen.mean(2) + 200 * seen.var(2)).flatten(0, 1)
        pooled = [torch.tensor(pool(one.tolist(), 5, "avg")) for one in row]
        scores.append(torch.stack(pooled).unflatten(0, (2, 2)).mean(1))
    counts = shares(preferences, size - WINDOW, layers, tokens - WINDOW)
    assert len(set(counts)) > 2
    tail = list(range(tokens - WINDOW, tokens))
    assert found == [
        [best(head.tolist(), count) + tail for head in score] for score, count in zip(scores, counts, strict=True)
    ]


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.5, 0.9])
def test_official_adakv(floor: float) -> None:
    """Budgets and slots kept, with `safeguard="blend"` over SnapKV pooled as in the code."""
    text = Prompt(90, heads=4, groups=2)
    base = snapkv(32, window=WINDOW, kernel=7, pooling="max")
    found = held(text.after(adakv(floor=floor, base=base)))
    scores = windowed(text, 0, 7, "max")
    spare = 32 - WINDOW
    every = sorted(((value, head) for head, row in enumerate(scores) for value in row))[::-1]
    won = [sum(owner == head for _, owner in every[: 4 * spare]) for head in range(4)]
    assert max(won) > min(won)
    counts = [round(count * (1 - floor) + int(spare * floor)) for count in won]
    tail = list(range(90 - WINDOW, 90))
    assert found == [[best(row, count) + tail for row, count in zip(scores, counts, strict=True)]]


def test_official_h2o() -> None:
    """Slots kept after the prompt and after every token, one query head to a key-value head."""
    text, size, prompt = Prompt(60), 12, 40
    found = held(text.after(h2o(size), prompt=prompt))
    logits = text.logits(0)[:, 0]
    for head in range(2):
        score = logits[head, :prompt, :prompt].softmax(-1).sum(0).tolist()
        slots = list(range(prompt))
        for token in range(prompt, 61):
            few = best(score[: len(slots) - size // 2], size - size // 2)
            stay = [*few, *range(len(slots) - size // 2, len(slots))]
            slots, score = [slots[place] for place in stay], [score[place] for place in stay]
            if token == 60:
                break
            slots.append(token)
            attention = logits[head, token, slots].softmax(-1).tolist()
            score = [a + b for a, b in zip(attention, [*score, 0.0], strict=True)]
        assert found[0][head] == slots


@pytest.mark.parametrize("side", [8, 9])
def test_official_scalekv(side: int) -> None:
    """Slots kept of square maps, given the same queries, in `"official"` mode."""
    scales, size = ((2, 2), (side, side)), 40
    earlier, tokens = 4, 4 + side * side
    text = Prompt(tokens, heads=3)
    store = text.after(scalekv(size, scales=scales, mode="official"), prompt=4 + side * side)
    patch = side // 4
    places = [i * patch + (patch - 1) // 2 for i in range(4)]
    asked = [earlier + row * side + column for row in places for column in places]
    logits = text.logits(0, mask=False)[:, 0]
    for head in range(3):
        score = logits[head, asked].sum(0)
        score[asked] = float("-inf")
        pooled = torch.tensor(pool(score.tolist(), 5, "max"))
        pooled[asked] = float("-inf")
        wanted = sorted(asked + best(pooled.tolist(), size - 16))
        assert held(store)[0][head] == wanted
