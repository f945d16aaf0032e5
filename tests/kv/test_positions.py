"""Position maps: frames get other numbers, and tokens keep their place in the grid."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import (
    Absolute,
    BlockRelativistic,
    Cyclic,
    PositionMap,
    Refresh,
    Slot,
)
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.rotary import Rotary
from diffcache.kv.rotary_nd import RotaryND

GRID, UNIT = (2, 3), 6
MAPS: dict[str, PositionMap | None] = {
    "none": None, "absolute": Absolute(), "slot": Slot(), "relativistic": BlockRelativistic(7),
    "refresh": Refresh(8, 3), "official refresh": Refresh(8, 3, official=True), "cyclic": Cyclic(5),
}  # fmt: skip


def number(name: str, frame: int, held: list[int]) -> int:
    """The number of one frame, written out from the papers."""
    newest = max(held)
    count = list(range(8))
    while len(count) <= newest:  # counting begins anew from 3 when it comes to 8
        count.append(3 if count[-1] == 7 else count[-1] + 1)
    if name == "slot":
        return newest - len({other for other in held if other > frame})
    if name == "relativistic":
        return frame if newest < 7 else max(frame - (newest - 6), 0)
    if name == "refresh":
        return max(count[newest] - (newest - frame), 0)
    if name == "official refresh":
        return count[frame]
    return frame % 5 if name == "cyclic" else frame


def turned(x: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    """Rotate [B, H, n, 12] by time, height and width, four channels each, pair by pair."""
    out = x.clone()
    for token, place in enumerate(places):
        for axis, pair in product(range(3), range(2)):
            angle = torch.tensor(place[axis] * 10000.0 ** (-pair / 2))
            one, two = x[:, :, token, 4 * axis + 2 * pair], x[:, :, token, 4 * axis + 2 * pair + 1]
            out[:, :, token, 4 * axis + 2 * pair] = one * angle.cos() - two * angle.sin()
            out[:, :, token, 4 * axis + 2 * pair + 1] = two * angle.cos() + one * angle.sin()
    return out


def at(token: int, name: str, held: list[int]) -> tuple[int, int, int]:
    row = token % UNIT
    return (number(name, token // UNIT, held), row // GRID[1], row % GRID[1])


@pytest.mark.parametrize("name", MAPS)
def test_a_token_sparse_keep_is_the_masked_recompute(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 2, 14 * UNIT, 12, generator=generator)
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=GRID)
    layer = KVLayer(rotary=rotary, positions=MAPS[name])
    layer.write(k[:, :, : 10 * UNIT], v[:, :, : 10 * UNIT])
    loose = [20, 21, 37, 50]  # between a frame of the first tokens and the last two frames
    kept = [*range(UNIT), *loose, *range(8 * UNIT, 10 * UNIT)]
    layer.replace(layer.read().gather(torch.tensor(kept).expand(2, 2, -1)))
    for first in (10, 12):  # two chunks, each written as noise and then as it is
        if first == 12:  # settled slots and new ones are numbered together
            layer.settle_tail()
        tokens = list(range(first * UNIT, (first + 2) * UNIT))
        layer.write(torch.ones_like(k[:, :, tokens]), v[:, :, tokens])
        run = range(layer.held - len(tokens), layer.held)
        layer.overwrite(run, k[:, :, tokens], v[:, :, tokens])
        kept += tokens
        asked = layer.rotate(q[:, :, tokens], torch.tensor(tokens))
        out = attend(Query(asked, tokens[0], 0.3, causal=False), layer.views())
        held = [token // UNIT for token in kept]
        there = turned(k[:, :, kept], [at(token, name, held) for token in kept])
        here = turned(q[:, :, tokens], [at(token, name, held) for token in tokens])
        wanted = (here @ there.mT * 0.3).softmax(-1) @ v[:, :, kept]
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        order = torch.randperm(len(kept), generator=generator)
        mixed = layer.fork()
        mixed.replace(layer.read().gather(order.expand(2, 2, -1)))
        again = attend(Query(asked, tokens[0], 0.3, causal=False), mixed.views())
        torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)


def test_rows_and_heads_that_hold_different_frames_are_numbered_apart() -> None:
    frames = torch.tensor([[[0, 4, 4, 9], [-1, -1, 7, 9]], [[0, 1, 2, 3], [3, 0, -1, 2]]])
    wanted = [[[7, 8, 8, 9], [0, 0, 8, 9]], [[0, 1, 2, 3], [3, 1, 0, 2]]]
    found = Slot().place(frames.clamp_min(0), frames)
    there = frames >= 0
    assert torch.equal(found[there], torch.tensor(wanted)[there])
    asked = Slot().place(torch.tensor([[[4, 11]]]), frames)
    assert asked.tolist() == [[[8, 11], [7, 11]], [[4, 11], [4, 11]]]


def test_maps_of_windows_without_first_frames_change_nothing_but_numbers() -> None:
    held = torch.arange(994, 1000)[None, None]
    for name in ("slot", "relativistic", "refresh"):
        found = MAPS[name].place(held, held) if name != "refresh" else Refresh().place(held, held)
        assert torch.equal(found.diff(), held.diff())
        assert name == "slot" or int(found.max()) < 50
    early = torch.arange(5)[None, None]
    for positions in (Slot(), BlockRelativistic(), Refresh(), Cyclic(33), Absolute()):
        assert torch.equal(positions.place(early, early), early)


def test_without_a_grid_tokens_are_numbered() -> None:
    rotary = Rotary.default(10000.0, 8)
    k, v = torch.randn(2, 2, 2, 20, 8)
    layer = KVLayer(rotary=rotary, positions=Slot())
    layer.write(k, v)
    keep = torch.tensor([0, 1, 15, 17, 19])
    layer.replace(layer.read().gather(keep.expand(2, 1, -1)))
    found = layer.views()[0].slots.k
    torch.testing.assert_close(found, rotary.rotate(k[:, :, keep], torch.arange(15, 20)))


def test_maps_go_where_they_can() -> None:
    both = snapkv() | Recipe(space="pre", positions=BlockRelativistic())
    assert both.positions == BlockRelativistic()
