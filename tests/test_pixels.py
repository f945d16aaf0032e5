"""Pixel metrics against torchmetrics, closed forms, limits and a few-line twin."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from diffcache.eval.metrics.pixels import both_ssim, ms_ssim, ms_ssim_variant, pooled_psnr, psnr, ssim, temporal_error
from tests.picture_files import normal

SIZES = [(64, 64), (47, 72), (100, 102), (176, 181)]  # 3, 3, 4 and 5 scales


def pair(height: int, width: int, count: int = 3, strength: float = 20) -> tuple[Tensor, Tensor]:
    """Return smooth pictures with a flat white corner, and the same with noise of growing size."""
    clean = interpolate(normal(count, 3, 8, 8), (height, width), mode="bicubic")
    clean = (clean * 60 + 128).clamp(0, 255)
    clean[..., : height // 3, : width // 3] = 255
    scale = strength * torch.arange(1, count + 1).view(-1, 1, 1, 1)
    other = clean + normal(count, 3, height, width, seed=1) * scale
    other[..., : height // 3, : width // 3] = 250
    return clean.round().to(torch.uint8), other.round().clamp(0, 255).to(torch.uint8)


def test_psnr_is_torchmetrics_per_picture_and_pooled() -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    a, b = pair(40, 56)
    x, y = a.double() / 255, b.double() / 255
    each = image.peak_signal_noise_ratio(x, y, data_range=1.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(psnr(a, b), each, rtol=1e-6, atol=0)
    pooled = image.peak_signal_noise_ratio(x, y, data_range=1.0)
    assert pooled_psnr(a, b) == pytest.approx(float(pooled), rel=1e-6)
    assert pooled_psnr(a, b) < float(psnr(a, b).mean())


def test_equal_pictures_have_the_cap() -> None:
    a, b = pair(24, 24)
    assert psnr(a, a).tolist() == [100.0] * 3 and pooled_psnr(a, a) == 100.0
    assert ssim(a, a).tolist() == pytest.approx([1.0] * 3, abs=1e-12)
    assert ms_ssim(a, a).tolist() == pytest.approx([1.0] * 3, abs=1e-12)
    assert (psnr(a, b) < 100).all() and (ssim(a, b) < 1).all() and (ms_ssim(a, b) < 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_ssim_and_ms_ssim_are_torchmetrics(size: tuple[int, int]) -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    a, b = pair(*size, count=1)
    x, y = a.double() / 255, b.double() / 255
    theirs = image.structural_similarity_index_measure(x, y, data_range=1.0, reduction="none")
    torch.testing.assert_close(ssim(a, b), theirs, rtol=1e-9, atol=0)
    scales = 5 if min(size) >= 176 else 4 if min(size) >= 99 else 3
    betas = torch.tensor([0.0448, 0.2856, 0.3001, 0.2363, 0.1333][:scales], dtype=torch.float64)
    betas = betas if scales == 5 else betas / betas.sum()
    theirs = image.multiscale_structural_similarity_index_measure(
        x, y, data_range=1.0, betas=tuple(betas.tolist()), reduction="none"
    )
    torch.testing.assert_close(ms_ssim(a, b), theirs, rtol=1e-6, atol=0)
    both = both_ssim(a, b)
    assert torch.equal(both[0], ssim(a, b)) and torch.equal(both[1], ms_ssim(a, b))


def test_opposite_pictures_have_ms_ssim_nothing_and_negative_ssim() -> None:
    a = (normal(2, 3, 64, 64) * 40 + 128).clamp(0, 255).to(torch.uint8)
    assert ms_ssim(a, 255 - a).tolist() == [0, 0]
    assert (ssim(a, 255 - a) < 0).all()


def test_many_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(48, 48, count=5)
    whole = [psnr(a, b), ssim(a, b), ms_ssim(a, b), temporal_error(a, b)]
    monkeypatch.setattr("diffcache.eval.metrics.pixels.VALUES_AT_ONCE", 2 * a[0].numel())
    parts = [psnr(a, b), ssim(a, b), ms_ssim(a, b), temporal_error(a, b)]
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


def test_ms_ssim_says_its_variant() -> None:
    assert ms_ssim_variant(176, 400) == "5 scales"
    assert ms_ssim_variant(64, 400) == "3 of 5 scales, weights rescaled"
    edges = {175: "4 of", 88: "4 of", 87: "3 of", 44: "3 of", 43: "2 of", 22: "2 of"}
    assert {side: ms_ssim_variant(400, side)[:4] for side in edges} == edges
    for side in (22, 44, 88):
        a, b = pair(side, side)
        assert ((ms_ssim(a, b) > 0) & (ms_ssim(a, b) < 1)).all()


def test_temporal_error_sees_flicker_and_not_a_constant_offset() -> None:
    film = torch.full((6, 3, 8, 8), 100, dtype=torch.uint8)
    flicker = film + torch.tensor([0, 4] * 3, dtype=torch.uint8).view(-1, 1, 1, 1)
    assert temporal_error(film, film) == 0 and temporal_error(film, film + 7) == 0
    assert temporal_error(film, flicker) == pytest.approx(4 / 255, rel=1e-12)
