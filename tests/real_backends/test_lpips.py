"""LPIPS on random weights of the form of those published.

No published file is here; the loader is given a file it must take for the real one, and what it
returns is compared with the definition written out, or with the library where it is installed.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.metrics import lpips, weights
from tests.real_backends.files import accept, pictures

SIZES = [(64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3)]
PLACES = [0, 3, 6, 8, 10]


def alexnet() -> dict[str, Tensor]:
    """Return random weights under the names of torchvision's file."""
    state = {}
    for place, (out, into, side) in zip(PLACES, SIZES, strict=True):
        state[f"features.{place}.weight"] = torch.randn(out, into, side, side) / (into * side**2) ** 0.5
        state[f"features.{place}.bias"] = torch.randn(out) / 10
    state["classifier.1.weight"] = torch.zeros(2, 2)
    return state


def written_out(state: dict[str, Tensor], heads: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
    """LPIPS of one pair by its formula, in float64."""

    def maps(picture: Tensor) -> list[Tensor]:
        x = picture[None].double() / 127.5 - 1
        shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        x = (x - shift.double().view(1, 3, 1, 1)) / scale.double().view(1, 3, 1, 1)
        found = []
        for level, (place, stride, padding) in enumerate(zip(PLACES, (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), strict=True)):
            if level in (1, 2):
                x = functional.max_pool2d(x, 3, 2)
            weight, bias = (state[f"features.{place}.{kind}"].double() for kind in ("weight", "bias"))
            x = functional.conv2d(x, weight, bias, stride=stride, padding=padding).clamp(min=0)
            found.append(x)
        return found

    total = torch.zeros((), dtype=torch.float64)
    for level, (one, other) in enumerate(zip(maps(a), maps(b), strict=True)):
        weight = heads[f"lin{level}.model.1.weight"].double().flatten()
        for y in range(one.shape[2]):
            for x in range(one.shape[3]):
                u, v = one[0, :, y, x], other[0, :, y, x]
                u, v = u / (u.square().sum() + 1e-8).sqrt(), v / (v.square().sum() + 1e-8).sqrt()
                total = total + (weight * (u - v) ** 2).sum() / (one.shape[2] * one.shape[3])
    return total


def test_lpips_is_its_formula(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = alexnet()
    file = tmp_path / "alexnet.pth"
    torch.save(state, file)
    with pytest.raises(weights.WrongWeightsError, match="is not alexnet-owt"):
        lpips.load(file)
    accept(monkeypatch, "alexnet", file)
    network = lpips.load(file)
    heads = torch.load(lpips.heads_file(), map_location="cpu", weights_only=True)
    a, b = pictures(3), pictures(3, seed=1)
    found = network.distances(a, b, batch_size=2)
    expected = torch.stack([written_out(state, heads, *pair) for pair in zip(a, b, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert found.min() > 0.01
    assert network.distances(a, a).abs().max() == 0
    assert network.entry()["sha256"] == weights.sha256(file)


def test_lpips_heads_are_those_of_version_0_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert weights.sha256(lpips.heads_file()) == lpips.HEADS_SHA256
    file = tmp_path / "alexnet.pth"
    torch.save(alexnet(), file)
    accept(monkeypatch, "alexnet", file)
    monkeypatch.setattr(lpips, "HEADS_SHA256", "0" * 64)
    with pytest.raises(weights.WrongWeightsError, match="another version of torchmetrics"):
        lpips.load(file)
