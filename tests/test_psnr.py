"""The one PSNR: closed forms of every range, the cap, masks, and that nothing computes another."""

import math
from pathlib import Path

import pytest
import torch

from diffcache.psnr import CAP, psnr

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("one", "other", "span", "expected"),
    [
        (torch.full((1, 3, 4, 4), 100, dtype=torch.uint8), 110, None, 20 * math.log10(25.5)),
        (torch.full((1, 3, 4, 4), 250, dtype=torch.uint8), 5, None, 20 * math.log10(255 / 245)),
        (torch.full((1, 5), 0.5), 0.6, None, 20.0),
        (torch.full((1, 5), -0.5), -0.3, 2.0, 20.0),
    ],
)
def test_a_constant_error_has_the_closed_form(one, other, span, expected) -> None:
    found = psnr(one, torch.full_like(one, other), span=span)
    assert found.dtype == torch.float64 and found.shape == (1,)
    assert float(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [None, 2.0])
def test_equal_samples_are_at_the_cap_whatever_their_range(dtype, span) -> None:
    one = torch.ones(2, 3, 4, 4, dtype=dtype)
    assert psnr(one, one.clone(), span=span).tolist() == [CAP, CAP] == [100.0, 100.0]


def test_a_mask_leaves_values_out_and_a_sample_without_any_is_at_the_cap() -> None:
    one = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    other = one.clone()
    other[:, :, 0] = 200
    other[:, :, 1:] = 10
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 1:] = True
    assert psnr(one, other, mask=mask).tolist() == pytest.approx([20 * math.log10(25.5), CAP])


def test_there_is_one_formula() -> None:
    texts = {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for top in ("diffcache", "eval", "kernels", "pipelines")
        for file in (ROOT / top).rglob("*.py")
    }
    assert [name for name, text in texts.items() if "10 * " in text and "log10(" in text] == ["diffcache/psnr.py"]
