"""Slots that are kept, merged and read, and decoded codes, against the algorithms of authors' code.

The references are written from the algorithms of the authors' code, on plain tensors and lists. A
test is called `test_official_` and the name of its recipe, and the first paragraph of its docstring
says in `docs/kv.md` what it compares.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from diffcache.kv.codec.held import Pair
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv, cake, h2o, pyramidkv, scalekv, snapkv
from diffcache.kv.recipes.merging import d2o, elastic_cache, look_m
from diffcache.kv.recipes.quantized import gear, kivi, rotatekv, zipcache
from diffcache.kv.recipes.retrieval import double_sparsity, sentence_kv, tidal_decode
from diffcache.kv.store import KVStore
from tests.kv.eviction.plain import SIZE, Text

Kept = list[list[list[int]]]  # of each layer and head, the positions that are held


def drawn(tokens: int, layers: int = 1, heads: int = 2, groups: int = 1) -> Text:
    """Return one text whose layers and heads differ in how sharply they attend."""
    return Text(tokens, layers=layers, heads=heads, groups=groups, sharp=True)


def held(store: KVStore) -> Kept:
    """Return the positions that a store holds."""
    found = []
    for layer in store.layers:
        slots = layer.read()
        pos = slots.pos.expand(slots.k.shape[:3])[0]
        found.append([sorted(head[head >= 0].tolist()) for head in pos])
    return found


def rows(store: KVStore, layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer in order of position, [H, S, D]."""
    slots = store.layers[layer].read()
    pos = slots.pos.expand(slots.k.shape[:3])[0]
    order = pos.argsort(-1)[..., None].expand(-1, -1, SIZE)
    return slots.k[0].gather(1, order), slots.v[0].gather(1, order)


def pool(row: list[float], kernel: int, how: str) -> list[float]:
    """Pool over neighbors; beyond the ends there is nothing, which counts in the average as 0."""
    near = [row[max(place - kernel // 2, 0) : place + kernel // 2 + 1] for place in range(len(row))]
    return [max(few) if how == "max" else sum(few) / kernel for few in near]


def best(row: list[float], count: int) -> list[int]:
    """Return the places of the highest numbers, of equals (which topk leaves open) the later."""
    return sorted(sorted(range(len(row)), key=lambda place: (-row[place], -place))[:count])


WINDOW = 8


def windowed(text: Text, layer: int, kernel: int = 5, pooling: str = "avg", groups: str = "mean") -> list[list[float]]:
    """Return what the last queries attend to before them: query heads reduced, then pooled."""
    seen = text.attention(layer=layer)[..., -WINDOW:, :-WINDOW].mean(2)
    seen = seen.amax(1) if groups == "max" else seen.mean(1)
    return [pool(row.tolist(), kernel, pooling) for row in seen]


@pytest.mark.parametrize(("pooling", "groups"), [("avg", "mean"), ("max", "max"), ("avg", "max")])
def test_official_snapkv(pooling: Any, groups: Any) -> None:
    """Slots kept, with each way of pooling and of reducing query heads."""
    text = drawn(70, groups=3)
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
    text = drawn(tokens, layers=layers)
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
    text = drawn(tokens, layers=layers, groups=2)
    found = held(text.after(cake(size, window=WINDOW, gamma=200.0, tau1=tau1, tau2=tau2)))
    preferences, scores = [], []
    for layer in range(layers):
        seen = text.attention(layer=layer)[..., -WINDOW:, :-WINDOW]
        entropy = -(seen * (seen + 1e-10).log()).sum()
        preferences.append(float(entropy ** (1 / tau1) * seen.var(2).sum() ** (1 / tau2)))
        row = (seen.mean(2) + 200 * seen.var(2)).flatten(0, 1)
        pooled = [torch.tensor(pool(one.tolist(), 5, "avg")) for one in row]
        scores.append(torch.stack(pooled).unflatten(0, (2, 2)).mean(1))
    counts = shares(preferences, size - WINDOW, layers, tokens - WINDOW)
    assert len(set(counts)) > 2
    tail = list(range(tokens - WINDOW, tokens))
    for kept, score, count in zip(found, scores, counts, strict=True):
        assert kept == [best(head.tolist(), count) + tail for head in score]


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.5, 0.9])
def test_official_adakv(floor: float) -> None:
    """Budgets and slots kept, with `safeguard="blend"` over SnapKV pooled as in the code."""
    text = drawn(90, heads=4, groups=2)
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
    text, size, prompt = drawn(60), 12, 40
    found = held(text.after(h2o(size), prompt=prompt))
    logits = text.logits()[:, 0]
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
    text = drawn(tokens, heads=3)
    store = text.after(scalekv(size, scales=scales, mode="official"), prompt=4 + side * side)
    patch = side // 4
    places = [i * patch + (patch - 1) // 2 for i in range(4)]
    asked = [earlier + row * side + column for row in places for column in places]
    logits = text.logits(mask=False)[:, 0]
    for head in range(3):
        score = logits[head, asked].sum(0)
        score[asked] = float("-inf")
        pooled = torch.tensor(pool(score.tolist(), 5, "max"))
        pooled[asked] = float("-inf")
        wanted = sorted(asked + best(pooled.tolist(), size - 16))
        assert held(store)[0][head] == wanted


def rounded(x: Tensor, axis: int, bits: int) -> Tensor:
    """Round to a grid between the least and the largest along an axis."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


def pair(recipe: Recipe) -> Pair:
    assert isinstance(recipe.codec, Pair)
    return recipe.codec


@pytest.mark.parametrize(("bits", "tokens"), [(2, 35), (4, 35), (4, 22), (4, 25), (4, 47)])
def test_official_kivi(bits: int, tokens: int) -> None:
    """Keys and values as read, after a prompt and single tokens."""
    group, rest, prompt = 4, 8, 21
    text = drawn(tokens)
    found = rows(text.after(kivi(bits, group=group, residual=rest), prompt=prompt), 0)
    k, v = text.k[0, 0], text.v[0, 0]
    coded = tokens - tokens % rest
    keys = rounded(k[:, :coded].unflatten(1, (-1, group)), 2, bits).flatten(1, 2)
    values = rounded(v[:, : tokens - rest].unflatten(2, (-1, group)), 3, bits).flatten(2)
    torch.testing.assert_close(found[0], torch.cat([keys, k[:, coded:]], 1))
    torch.testing.assert_close(found[1], torch.cat([values, v[:, tokens - rest :]], 1))


@pytest.mark.parametrize(("part", "axis"), [("keys", 0), ("values", 1)])
def test_official_gear(part: str, axis: int) -> None:
    """Compare codes and outliers of one head; the low rank starts from other numbers."""
    size, group, share = 40, 8, 0.1
    x = torch.randn(size, size) * 2 + 5
    few = int(size * share / 2)
    smooth, mean = x.clone(), x.mean(axis, keepdim=True).expand_as(x)
    order = x.argsort(axis)
    ends = torch.cat([order.narrow(axis, 0, few), order.narrow(axis, size - few, few)], axis)
    smooth.scatter_(axis, ends, mean.gather(axis, ends))
    wanted = rounded(smooth.unflatten(axis, (-1, group)), axis + 1, 2).flatten(axis, axis + 1)
    wanted.scatter_(axis, ends, x.gather(axis, ends))
    codec = getattr(pair(gear(2, group=group, rank=0, outliers=share)), part)
    torch.testing.assert_close(codec.encode(x[None, None]).decode()[0, 0], wanted)
    codec = getattr(pair(gear(2, group=group, rank=4, outliers=share)), part)
    error = x - wanted
    low = codec.encode(x[None, None]).decode()[0, 0] - wanted
    assert torch.linalg.matrix_rank(low, rtol=1e-4) == 4 and low.norm() > 0.3 * error.norm()
    torch.testing.assert_close(low.mT @ (error - low), torch.zeros_like(low), rtol=0, atol=1e-2)


@pytest.mark.parametrize("level", [0, 1])
def test_official_zipcache(level: int) -> None:
    """Keys and values as read, of tokens of one precision; not which these are."""
    heads, count, size, bits = 4, 30, 8, (4, 2)[level]
    x = torch.randn(1, heads, count, size) * torch.arange(1.0, 1 + heads).view(1, heads, 1, 1)
    rung = zipcache(0.5).ladder[level]
    assert isinstance(rung, Pair)
    torch.testing.assert_close(rung.keys.encode(x).decode(), rounded(x, 2, bits))
    together = x[0].transpose(0, 1).flatten(1)  # [tokens, heads * size]
    scale = together.abs().amax(0).sqrt().half().float()
    values = rounded(together / scale, 1, bits) * scale
    wanted = values.unflatten(1, (heads, size)).transpose(0, 1)[None]
    torch.testing.assert_close(rung.values.encode(x).decode(), wanted)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Round to bits ** 2 - 1 widths of the range, 0 being a whole number of them from its end."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (bits**2 - 1)
    zero = (-low / scale).round()
    return scale * (((x / scale).round() + zero).clamp(0, 2**bits - 1) - zero)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_official_rotatekv(bits: int) -> None:
    """Keys and values as read, without clipping, in `"official"` mode."""
    group, size = 8, 32
    x = torch.randn(1, 2, 50, size, dtype=torch.float64)
    turn = torch.ones(1, 1, dtype=torch.float64)
    while len(turn) < size:
        turn = torch.kron(torch.tensor([[1.0, 1], [1, -1]]).double(), turn) / 2**0.5
    order = torch.randperm(size)
    codec = pair(rotatekv(bits, group=group, order=order, mode="official"))

    def grid(y: Tensor) -> Tensor:
        return shifted(y.unflatten(3, (-1, group)), bits).flatten(3)

    sorted_ = torch.empty_like(x)
    sorted_[..., order] = grid(x[..., order] @ turn) @ turn.mT
    for found, wanted in ((codec.keys.encode(x).decode(), sorted_), (codec.values.encode(x).decode(), grid(x))):
        # Scales are stored in half precision, so that a few codes next to a tie are the other one.
        close = (found - wanted).norm(dim=-1) < 0.01 * x.norm(dim=-1)
        assert close.double().mean() > 0.95


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
    text = drawn(prompt, layers=layers, heads=heads)
    store = text.after(d2o(size, recent=0.25, mode="official"))
    mass = [text.attention(layer=layer)[:, 0].sum(1) for layer in range(layers)]
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
    text = drawn(prompt, heads=2)
    recipe = elastic_cache(size, sinks=sinks, recent=1, mode="official")
    store = text.after(recipe)
    score = text.attention()[:, 0].mean(0).sum(0)
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
    text, recipe = drawn(prompt, heads=2), look_m(size, sinks=4)
    image = range(*images) if images else range(0)
    if images:  # all text stays, and images within the budget
        text.tags = torch.tensor([slot in image for slot in range(prompt)], dtype=torch.int32)
        recipe = look_m(size, mode="official")
    store = text.after(recipe)
    for h in range(2):
        k = text.k[0, 0, h]
        score = text.attention()[h, 0].sum(0)
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


def last(text: Text, recipe: Recipe, prompt: int) -> list[Tensor]:
    """Return what the last query of every layer gets, [H, D], tokens coming one by one."""
    store = KVStore(text.layers, recipe)
    edges = [0, prompt, *range(prompt + 1, text.tokens + 1)]
    for start, stop in pairwise(edges):
        found = text.feed(store, start, stop)
    return [out[0, :, -1] for out in found]


def read(text: Text, layer: int, head: int, slots: list[int]) -> Tensor:
    """Return what the last query gets of some slots."""
    weight = text.logits(layer=layer)[head, 0, -1, slots].softmax(-1)
    return weight @ text.v[layer, 0, head, slots]


def coded(x: Tensor) -> Tensor:
    """Round a vector to four bits between its ends."""
    low, span = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    scale = (span / 15).half().float()
    return ((x - low.half()) / scale).round().clamp(0, 15) * scale + low.half()


@pytest.mark.parametrize("bits", [None, 4])
def test_official_double_sparsity(bits: int | None) -> None:
    """Slots read beside the token itself, one query head to a key-value head."""
    text, size = drawn(60, layers=4), 12
    channels = ((0, 2, 5), (1, 6, 7))
    found = last(text, double_sparsity((channels,) * 4, size, bits=bits), 50)
    for layer in range(4):
        for head in range(2):
            q = text.q[layer, 0, head, -1, channels[head]]
            k = text.k[layer, 0, head][:, channels[head]]
            if bits:
                q, k = coded(q), coded(k)
            few = (k @ q)[:-1].topk(size - 1).indices.tolist()
            slots = list(range(60)) if layer < 2 else [*few, 59]
            torch.testing.assert_close(found[layer][head], read(text, layer, head, slots))


def test_official_tidal_decode() -> None:
    """Slots read beside the token itself, one query head to a key-value head."""
    text, size = drawn(60, layers=5), 12
    found = last(text, tidal_decode(size, select=(1, 3)), 50)
    for layer in range(5):
        lead = {2: 1, 4: 3}.get(layer)
        for head in range(2):
            slots = list(range(60))
            if lead is not None:
                best = text.logits(layer=lead)[head, 0, -1, :-1].topk(size - 1).indices
                slots = [*best.tolist(), 59]
            torch.testing.assert_close(found[layer][head], read(text, layer, head, slots))


@pytest.mark.parametrize("tokens", [52, 55, 56, 58])
def test_official_sentence_kv(tokens: int) -> None:
    """The query and the order of sentences, without the pruning of the prompt."""
    prompt, sinks, recent, block, size = 48, 2, 4, 8, 24
    text = drawn(tokens)
    tags = torch.zeros(tokens, dtype=torch.int32)
    tags[:prompt] = torch.arange(prompt) // 6 + 1
    recipe = sentence_kv(size, sinks=sinks, recent=recent, block=block)
    text.tags = tags
    (found,) = last(text, recipe, prompt)
    sentences = [list(range(start, start + 6)) for start in range(0, prompt, 6)]
    sentences += [list(range(start, min(start + block, tokens))) for start in range(prompt, tokens, block)]
    since = prompt + (tokens - 1 - prompt) // block * block
    for head in range(2):
        k = text.k[0, 0, head]
        asked = text.q[0, 0, head, since:].mean(0)
        ranked = sorted(sentences, key=lambda one: -float(k[one].mean(0) @ asked))
        always = {*range(sinks), *range(tokens - recent, tokens)}
        room, slots = size - len(always), set(always)
        for sentence in ranked:
            fresh = [slot for slot in sentence if slot not in always]
            if len(fresh) > room:
                break
            room -= len(fresh)
            slots |= set(fresh)
        torch.testing.assert_close(found[head], read(text, 0, head, sorted(slots)))
