"""Counting operations leaves results as they are, bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional

from diffcache.attach.flops import counted

MODES = [torch.inference_mode, torch.no_grad]


@pytest.fixture
def halved() -> Iterator[library.Library]:
    """An operation whose kernel on a CPU rounds otherwise than its body of other operations."""
    made = library.Library("diffcache_test_bits", "DEF")
    made.define("halve(Tensor x, Tensor[] more) -> Tensor")
    made.impl("halve", lambda x, more: x * 0.5 + 1e-3, "CompositeImplicitAutograd")
    made.impl("halve", lambda x, more: x * 0.5, "CPU")
    yield made
    made._destroy()


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.diffcache_test_bits.halve(x, [x])


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_of_the_device_runs_in_the_place_of_a_body(halved, mode):
    x = torch.arange(4.0)
    with mode():
        out, total = counted(Halve(), (x,), {})
    assert torch.equal(out, x * 0.5) and total == 0


def test_a_body_runs_on_a_device_without_a_kernel(halved):
    halved.define("double(Tensor x) -> Tensor")
    halved.impl("double", lambda x: x @ x, "CompositeImplicitAutograd")
    halved.impl("double", lambda x: x * 2, "CUDA")
    x = torch.eye(3)
    with torch.inference_mode():
        out, total = counted(Halve(), (x,), {}, call=torch.ops.diffcache_test_bits.double)
    assert torch.equal(out, x) and total == 2 * 3**3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "module",
    [
        nn.Upsample(scale_factor=1.7, mode="bilinear"),  # export has bodies in Python for these
        nn.Upsample(scale_factor=1.7, mode="bicubic"),
        nn.BatchNorm2d(4).eval(),
        nn.RMSNorm(15),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 3, 3),
    ],
    ids=lambda module: f"{type(module).__name__}-{getattr(module, 'mode', '')}".strip("-"),
)
def test_modules_return_the_bits_that_they_return_uncounted(module, mode):
    x = torch.randn(2, 4, 15, 15, generator=torch.Generator().manual_seed(0))
    with mode():
        expected = module(x)
        assert torch.equal(counted(module, (x,), {})[0], expected)


class Attention(nn.Module):
    """Two layers, one of them without a bias, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", [*MODES, torch.enable_grad])
def test_counts_are_the_same_in_every_mode(mode):
    module, x = Attention(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with mode():
        out, total = counted(module, (x,), {})
        assert torch.equal(out, module(x))
    layers, attention = 2 * 10 * 8 * (24 + 6), 2 * (2 * 2) * 5 * 5 * (4 + 4)
    assert total == layers + attention
