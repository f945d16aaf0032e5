"""Decoded codes against the algorithms of their authors' code, grids in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.held import Pair
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.quantized import gear, kivi, rotatekv, zipcache
from tests.kv.official.prompt import Prompt, rows


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
    text = Prompt(tokens)
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
