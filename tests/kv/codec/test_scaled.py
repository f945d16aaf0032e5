"""Scaled channels: ZipCache's separable values, MiKV's balancer."""

import torch

from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.scaled import Balanced, ChannelSeparable, balancer


def test_separable_keeps_zero_channels_and_blocks_apart() -> None:
    codec = ChannelSeparable(Exact())
    x = torch.randn(1, 1, 4, 3)
    x[..., 1] = 0
    first, second = codec.encode(x), codec.encode(x * 100)
    joined = codec.join([first, second])
    assert joined.factor.values.shape[2] == 2
    torch.testing.assert_close(joined.decode(), torch.cat([x, x * 100], 2))
    assert (joined.decode()[..., 1] == 0).all()


def test_balancer_by_definition() -> None:
    q, k = torch.randn(2, 3, 2, 5, 4), torch.randn(2, 3, 7, 4)
    found = balancer(q, k)
    for b in range(2):
        for h in range(3):
            for c in range(4):
                wanted = (q[b, h, :, :, c].abs().max() / k[b, h, :, c].abs().max()).sqrt()
                torch.testing.assert_close(found[b, h, c], wanted)
    k[..., 0] = 0
    assert (balancer(q, k)[..., 0] == 1).all()


def test_balanced_loses_nothing_without_quantization() -> None:
    k = torch.randn(2, 3, 7, 4)
    for shape in ((4,), (3, 4), (2, 3, 4), (1, 3, 1)):
        found = Balanced(Exact(), torch.rand(shape) + 0.1).encode(k).decode()
        torch.testing.assert_close(found, k, rtol=1e-6, atol=1e-6)


def test_balanced_equals_scaling_queries_instead() -> None:
    q, k = torch.randn(1, 2, 1, 5, 16), torch.randn(1, 2, 32, 16)
    factor, quant = balancer(q, k), GroupQuant(4, "channels", None)
    ours = q[:, :, 0] @ Balanced(quant, factor).encode(k).decode().mT
    paper = (q[:, :, 0] / factor[:, :, None]) @ quant.encode(k * factor[:, :, None]).decode().mT
    torch.testing.assert_close(ours, paper, rtol=1e-3, atol=1e-3)


def test_one_factor_is_stored_once() -> None:
    codec = Balanced(GroupQuant(2, "channels", 4), torch.rand(3, 4) + 0.5)
    joined = codec.join([codec.encode(torch.randn(2, 3, s, 4)) for s in (5, 6)])
    assert joined.factor.values.shape[2] == 1 and joined.factor.of is None
