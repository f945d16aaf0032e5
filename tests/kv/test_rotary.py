from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from diffcache.kv.rotary import Rotary
from diffcache.kv.rotary_nd import RotaryND

SHAPE = (2, 3, 7, 32)  # B, H, S, D
POS = torch.tensor([0, 1, 5, 17, 40, 63, 90])


def _x(dtype=torch.float64, shape=SHAPE, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def _matrix(rotation, pos, size):
    """The rotation as an explicit matrix of 2x2 blocks, one channel and position at a time."""
    out = torch.eye(size, dtype=torch.float64)
    pairs = rotation.inv_freq.shape[0]
    axes = getattr(rotation, "axes", (None,) * pairs)
    for i, (freq, axis) in enumerate(zip(rotation.inv_freq.double().tolist(), axes, strict=True)):
        a = rotation.start + (2 * i if rotation.interleaved else i)
        b = a + (1 if rotation.interleaved else pairs)
        angle = freq * float(pos if axis is None else pos[axis])
        cos, sin = math.cos(angle) * rotation.scale, math.sin(angle) * rotation.scale
        out[a, a], out[a, b], out[b, a], out[b, b] = cos, -sin, sin, cos
    return out


ONE = [
    Rotary.default(10000.0, 32),
    Rotary.default(500.0, 32, interleaved=True),
    Rotary.default(10000.0, 12),
    Rotary(Rotary.default(100.0, 8).inv_freq, 1.3, True, 24),
    Rotary(-Rotary.default(100.0, 16).inv_freq.double(), 0.7, start=5),
]
MANY = [
    RotaryND.sections((12, 10, 10)),
    RotaryND.sections((8, 8), theta=(10000.0, 100.0)),
    RotaryND.mrope(Rotary.default(10000.0, 32).inv_freq, (4, 6, 6)),
    RotaryND.mrope(Rotary.default(10000.0, 32).inv_freq, (6, 5, 5), scale=1.2, alternate=True),
]


def _pos(rotation, seed=1):
    if not isinstance(rotation, RotaryND):
        return POS
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (SHAPE[2], rotation.count), generator=random)


@pytest.mark.parametrize("rotation", ONE + MANY)
class TestVerbs:
    def test_turns_each_pair_by_its_own_block(self, rotation):
        x, pos = _x(), _pos(rotation)
        blocks = torch.stack([_matrix(rotation, p, SHAPE[-1]) for p in pos])
        want = torch.einsum("sij,bhsj->bhsi", blocks, x)
        torch.testing.assert_close(rotation.rotate(x, pos), want, rtol=0, atol=1e-12)

    def test_unrotate_is_the_inverse(self, rotation):
        x, pos = _x(), _pos(rotation)
        back = rotation.unrotate(rotation.rotate(x, pos), pos)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-13)
        assert not torch.allclose(rotation.rotate(x, pos), x)

    @pytest.mark.parametrize(
        ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
    )
    def test_shift_moves_rotated_keys(self, rotation, dtype, close):
        x, pos = _x(dtype), _pos(rotation)
        delta = _pos(rotation, seed=2) - 30
        moved = rotation.shift(rotation.rotate(x, pos), delta)
        want = rotation.rotate(x, pos + delta)
        assert moved.dtype is dtype
        wide = (moved.double() - want.double()).norm() / want.double().norm()
        assert wide < close

    def test_positions_by_row_and_head(self, rotation):
        x, pos = _x(), _pos(rotation)
        tail = pos.shape[1:]
        rows = torch.stack((pos, pos.flip(0)))
        each = torch.stack([rotation.rotate(x, p)[b] for b, p in enumerate(rows)])
        shared = rotation.rotate(x, rows[:, None])
        heads = rotation.rotate(x, rows[:, None].expand(2, 3, *pos.shape[:1], *tail))
        assert torch.equal(shared, each)
        assert torch.equal(heads, each)

    def test_one_position_for_all_slots(self, rotation):
        x, pos = _x(), _pos(rotation)[3]
        whole = pos.expand(SHAPE[2], *pos.shape)
        assert torch.equal(rotation.rotate(x, pos), rotation.rotate(x, whole))
        assert torch.equal(rotation.rotate(x, pos.tolist()), rotation.rotate(x, whole))

    def test_float_positions(self, rotation):
        x, pos = _x(), _pos(rotation)
        twice = rotation.shift(rotation.rotate(x, pos - 0.5), torch.full_like(pos[:1], 1) * 0.5)
        torch.testing.assert_close(twice, rotation.rotate(x, pos), rtol=0, atol=1e-12)

    def test_keeps_dtype_and_passes_gradients(self, rotation):
        x = _x(torch.float16).requires_grad_()
        out = rotation.rotate(x, _pos(rotation))
        assert out.dtype is torch.float16
        out.float().sum().backward()
        assert torch.isfinite(x.grad).all()

    def test_rejects_shapes(self, rotation):
        pos = _pos(rotation)
        with pytest.raises(ValueError, match=r"x must be \[B, H, S, D\] floats with D >="):
            rotation.rotate(_x(shape=(2, 3, 7, 4)), pos)
        with pytest.raises(ValueError, match=r"x must be"):
            rotation.rotate(_x(shape=(3, 7, 32)), pos)
        with pytest.raises(ValueError, match=r"do not fit x of \[2, 3, 7, 32\]: use \[S\]"):
            rotation.rotate(_x(), pos[:5])
        with pytest.raises(ValueError, match=r"positions of \[2, 7\] do not fit"):
            rotation.rotate(_x(), torch.stack((pos, pos)))


def test_channels_outside_pass_through():
    x = _x(torch.float32)
    out = Rotary(Rotary.default(100.0, 8).inv_freq, 2.0, start=10).rotate(x, POS)
    assert torch.equal(out[..., :10], x[..., :10])
    assert torch.equal(out[..., 18:], x[..., 18:])


def test_no_frequencies_is_no_rotation():
    x = _x(torch.bfloat16)
    none = Rotary.default(10000.0, 0)
    assert torch.equal(none.rotate(x, POS), x)
    assert torch.equal(none.shift(x, 4), x)


def test_shift_along_one_axis_leaves_the_others_bit_for_bit():
    wan = RotaryND.sections((12, 10, 10))
    x = wan.rotate(_x(torch.bfloat16), _pos(wan))
    moved = wan.shift(x, (9, 0, 0))
    assert torch.equal(moved[..., 12:], x[..., 12:])
    assert not torch.equal(moved[..., :12], x[..., :12])


def test_a_grid_gives_each_token_its_place():
    x = torch.randn(1, 1, 24, 24, dtype=torch.float64)
    t, h, w = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    plain = RotaryND.sections((8, 8, 8))
    made = replace(plain, grid=(3, 4)).rotate(x, torch.arange(24))
    assert torch.equal(made, plain.rotate(x, torch.stack([t, h, w], -1).view(-1, 3)))
    with pytest.raises(ValueError, match=r"grid=\(3,\): must have the sizes of the last 2 axes"):
        replace(plain, grid=(3,))


def test_logits_depend_on_differences_only():
    rotary = Rotary(Rotary.default(10000.0, 32).inv_freq, 1.1)
    q, k = _x(seed=3), _x(seed=4)
    logits = rotary.rotate(q, POS) @ rotary.rotate(k, POS).mT
    later = rotary.rotate(q, POS + 1000) @ rotary.rotate(k, POS + 1000).mT
    torch.testing.assert_close(later, logits, rtol=0, atol=1e-10)


def test_shift_keeps_the_scale_of_rotated_keys():
    rotary = Rotary(Rotary.default(10000.0, 32).inv_freq, 1.5)
    x = _x()
    moved = rotary.shift(rotary.rotate(x, POS), 12)
    torch.testing.assert_close(moved.norm(dim=-1), 1.5 * x.norm(dim=-1))


def test_float32_errs_as_the_angle_does():
    """At position p an angle is off by half a unit of the last place of p, so that much is lost."""
    rotary = Rotary.default(10000.0, 32)
    x, pos = _x(torch.float32), POS + 100_000
    moved = rotary.shift(rotary.rotate(x, pos), -50_000)
    off = (moved - rotary.rotate(x, pos - 50_000)).norm() / x.norm()
    assert 1e-5 < off < 150_000 * 2**-24 * 2
    exact = Rotary(rotary.inv_freq.double())
    moved = exact.shift(exact.rotate(x, pos), -50_000)
    torch.testing.assert_close(moved, exact.rotate(x, pos - 50_000), rtol=0, atol=2e-6)


@pytest.mark.parametrize("distance", [16, 64, 256])
def test_merging_after_rotation_loses_norm(distance):
    """Two equal keys d apart average to cos(d * freq / 2) of each pair; before rotation to all."""
    rotary = Rotary.default(10000.0, 32)
    key = torch.nn.functional.normalize(_x(shape=(1, 1, 1, 32)), dim=-1)
    pair = key.expand(1, 1, 2, 32)
    turned = rotary.rotate(pair, torch.tensor([100, 100 + distance]))
    half = torch.cos(distance * rotary.inv_freq.double() / 2).repeat(2)
    merged = turned.mean(2).norm().item()
    assert merged == pytest.approx((key * half).norm().item(), abs=1e-12)
    assert merged < 0.95
    plain = rotary.unrotate(turned, torch.tensor([100, 100 + distance])).mean(2)
    assert plain.norm().item() == pytest.approx(1.0, abs=1e-12)


def test_merging_loses_more_the_further_apart():
    """In heads of 128, two equal keys keep the root mean square of the cosines of their pairs."""
    rotary = Rotary.default(10000.0, 128)
    keys = _x(shape=(1, 400, 1, 128)).expand(1, 400, 2, 128)
    kept = []
    for distance in (16, 64, 256):
        merged = rotary.rotate(keys, torch.tensor([0, distance])).mean(2)
        kept.append((merged.norm() / keys[:, :, 0].norm()).item())
        cosines = [math.cos(distance * 10000 ** (-i / 64) / 2) for i in range(64)]
        assert kept[-1] == pytest.approx(math.hypot(*cosines) / 8, abs=0.01)
    assert kept == pytest.approx([0.900, 0.859, 0.813], abs=0.01)


class TestWan:
    """Against diffusers: its tables, and the function inside its attention processor."""

    def _theirs(self, x, frames, height, width):
        from diffusers.models.transformers import transformer_wan as wan

        rope = wan.WanRotaryPosEmbed(x.shape[-1], (1, 1, 1), 1024)
        tables = rope(torch.empty(1, 1, frames, height, width))
        seen = []

        def fake(query, key, value, **kwargs):
            seen.append(key)
            return value

        heads, size = x.shape[1], x.shape[3]
        attention = wan.WanAttention(heads * size, heads, size, processor=wan.WanAttnProcessor())
        for layer in (attention.to_q, attention.to_k, attention.to_v):
            torch.nn.init.eye_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        attention.norm_q, attention.norm_k = torch.nn.Identity(), torch.nn.Identity()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(wan, "dispatch_attention_fn", fake)
            attention(x.transpose(1, 2).flatten(2), rotary_emb=tables)
        return seen[0].transpose(1, 2)

    @pytest.mark.parametrize(
        ("size", "grid"), [(128, (5, 3, 4)), (32, (5, 3, 4)), (128, (900, 1, 1))]
    )
    def test_equals(self, size, grid):
        axis = torch.cartesian_prod(*(torch.arange(n) for n in grid))[-64:]
        x = _x(torch.float32, (1, 2, math.prod(grid), size))
        side = 2 * (size // 6)
        ours = RotaryND.sections((size - 2 * side, side, side)).rotate(x[:, :, -len(axis) :], axis)
        theirs = self._theirs(x, *grid)[:, :, -len(axis) :]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        if size == 128:
            assert (size - 2 * side, side, side) == (44, 42, 42)
