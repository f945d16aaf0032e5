"""VidKV's keys: the real spectrum, its signs, and the split of channels by range."""

import pytest
import torch

from diffcache.kv.codec.base import Exact, nbytes
from diffcache.kv.codec.fourier import FourierSigns, RangeSplit, real_fourier
from diffcache.kv.codec.quant import GroupQuant


@pytest.mark.parametrize("length", [2, 3, 4, 7, 8, 32])
def test_basis_is_orthonormal_and_the_transform(length: int) -> None:
    basis = real_fourier(length)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(length, dtype=torch.float64))
    signal = torch.randn(length, dtype=torch.float64)
    wanted = torch.fft.rfft(signal, norm="ortho")
    found = basis @ signal
    torch.testing.assert_close(found[0], wanted[0].real)
    for frequency in range(1, (length + 1) // 2):
        pair = found[2 * frequency - 1], found[2 * frequency]
        torch.testing.assert_close(pair[0], wanted[frequency].real * 2**0.5)
        torch.testing.assert_close(pair[1], -wanted[frequency].imag * 2**0.5)
    if length % 2 == 0:
        torch.testing.assert_close(found[-1], wanted[-1].real)


def test_signs_equal_a_loop() -> None:
    x, group = torch.randn(2, 2, 12, 5), 4
    found = FourierSigns(group).encode(x).decode()
    basis = real_fourier(group).float()
    for b in range(2):
        for h in range(2):
            for start in range(0, 12, group):
                for c in range(5):
                    signal = x[b, h, start : start + group, c]
                    rest = basis[1:] @ signal
                    scale = rest.abs().mean()
                    coded = scale * torch.where(rest >= 0, 1.0, -1.0)
                    wanted = signal.mean() + coded @ basis[1:]
                    torch.testing.assert_close(found[b, h, start : start + group, c], wanted, rtol=1e-3, atol=2e-3)


def test_bytes_are_a_bit_and_two_halves_a_group() -> None:
    x = torch.randn(1, 4, 128, 64).half()
    groups = 4 * 4
    assert nbytes(FourierSigns(32).encode(x)) == groups * (31 * 8 + 2 * 2 * 64)


def test_whole_groups_slide_out() -> None:
    payload = FourierSigns(4).encode(torch.randn(1, 2, 16, 8))
    slid = payload.take(torch.arange(4, 16).expand(1, 2, -1))
    assert slid.at is None and nbytes(slid) == nbytes(payload) * 3 // 4
    some = payload.take(torch.tensor([[[1, 2], [13, 15]]]))
    assert some.signs.shape[2] == 1 and some.at is not None


def test_the_widest_channels_are_coded_finer() -> None:
    x = torch.randn(1, 2, 32, 8)
    x[:, 0, :, [1, 6]] *= 50
    x[:, 1, :, [0, 3]] *= 50
    payload = RangeSplit(0.25, Exact(), FourierSigns(32)).encode(x)
    found = payload.decode()
    assert torch.equal(found[:, 0, :, [1, 6]], x[:, 0, :, [1, 6]])
    assert torch.equal(found[:, 1, :, [0, 3]], x[:, 1, :, [0, 3]])
    assert not torch.equal(found[:, 1, :, 1], x[:, 1, :, 1])
    ranges = (x.amax(2) - x.amin(2)).argsort(-1, descending=True)
    assert torch.equal(payload.order.values[:, :, 0].long(), ranges)


def test_slots_are_a_multiple_of_both() -> None:
    assert RangeSplit(0.5, GroupQuant(2, "tokens", 6), FourierSigns(4)).multiple == 12
