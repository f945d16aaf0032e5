"""Attention with int8 queries and keys: its error, and what it does to pictures."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffcache.errors import AttachError
from diffcache.eval.methods import make_row
from diffcache.kernels import int8
from diffcache.kernels.int8 import Int8Attention, attn_int8
from diffcache.pipelines.load import load
from diffcache.psnr import psnr


def drawn(dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 32, generator=random) for heads in (4, 2, 2))
    q[..., 3] *= 4  # channels of large numbers, as models have them
    return q.to(dtype), k.to(dtype), v.to(dtype)


def off(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_keys_with_a_common_offset_cost_nothing_and_would_without_smoothing() -> None:
    q, k, v = drawn(torch.float64)
    exact = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    far = k + 100 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    plain = attn_int8(q, k, v, 32**-0.5)
    assert off(plain, exact) < 0.03
    assert off(attn_int8(q, far, v, 32**-0.5), plain) < 1e-9
    rounded = int8._rounded(far, int8.KEYS)
    assert off(scaled_dot_product_attention(q, rounded, v, enable_gqa=True), exact) > 0.3


def test_what_is_no_number_spoils_its_block_and_nothing_is_hidden() -> None:
    for lost in (torch.nan, torch.inf):
        q, k, v = drawn()
        q[0, 0, 290, 0] = lost
        found = attn_int8(q, k, v, 0.2).isnan().all(-1)
        assert found[0, 0, 256:].all() and int(found.sum()) == 44
        k[0, 0, 0, 0] = lost
        assert attn_int8(q, k, v, 0.2)[:, :2].isnan().all()


def test_attention_inside_is_rounded_and_all_else_is_torch() -> None:
    q, k, v = drawn()
    plain = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    mask = torch.ones(300, 300, dtype=torch.bool)
    with Int8Attention(always=True) as mode:
        found = scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)
        assert torch.equal(found, attn_int8(q, k, v, 0.1))
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        scaled_dot_product_attention(q, k.clone().requires_grad_(), v, enable_gqa=True)
    assert (mode.taken, mode.left) == (1, 3)
    with Int8Attention() as mode, torch.no_grad():  # nothing was measured on a CPU
        assert torch.equal(scaled_dot_product_attention(q, k, v, enable_gqa=True), plain)
    assert (mode.taken, mode.left) == (0, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"k": shape} for shape in ((1, 3, 9, 8), (2, 2, 9, 8), (1, 2, 9, 4), (2, 9, 8))),
        *({"v": shape} for shape in ((1, 2, 8, 8), (1, 2, 9))),
        *({"k": (1, 2, 0, 8), "v": (1, 2, 0, 8)}, {}),
    ],
)
def test_what_does_not_go_together_is_refused_and_left_to_torch(sizes) -> None:
    shapes = {"q": (1, 4, 5, 8), "k": (1, 2, 9, 8), "v": (1, 2, 9, 8)} | sizes
    q, k, v = map(torch.zeros, shapes.values())
    q = q if sizes else q.double()
    with pytest.raises(ValueError, match=r"q, k, v: are torch.float\d\d .*; must be \[B, H"):
        attn_int8(q, k, v, 1.0)
    assert Int8Attention(always=True)._attend(q, k, v, enable_gqa=True) is None


def test_pictures_of_a_shipped_model_stay_as_they_were(monkeypatch) -> None:
    """The gate: at least GATE dB of plain attention, in the mean of pictures; docs/kernels.md."""
    (pipe, call), row = load("sticker-flux"), make_row("kernels/int8")
    given = call | {"prompt": ["a fox", "an owl on grass"], "num_inference_steps": 6}

    def draw():
        random = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        return pipe(**given, output_type="pt", generator=random).images

    plain = draw()
    with row.applied(pipe):
        found = draw()
    assert 30 < float(psnr(found, plain).mean()) < 100
    assert torch.equal(draw(), plain)
    monkeypatch.setattr(Int8Attention, "_attend", lambda *given, **named: None)
    with pytest.raises(AttachError, match="kernels/int8: .* has no attention without a mask"), row.applied(pipe):
        draw()
    assert torch.equal(draw(), plain)
