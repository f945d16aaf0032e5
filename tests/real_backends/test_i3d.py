"""I3D on a file that stands for the published one and shows how it is called."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diffcache.eval.metrics import i3d, weights
from tests.real_backends.files import accept, pictures


class FakeI3D(nn.Module):
    """Called as StyleGAN-V's torchscript is; its features show how."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        flags = float(rescale) + 2 * float(resize) + 4 * float(return_features)
        found = torch.zeros(x.shape[0], self.width)
        found[:, 0] = flags
        found[:, 1] = x[:, 0, 1].mean(dim=(1, 2))
        found[:, 2] = float(x.shape[2])
        return found


def i3d_file(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int = 400) -> Path:
    file = folder / "i3d_torchscript.pt"
    torch.jit.script(FakeI3D(width)).save(str(file))
    accept(monkeypatch, "i3d", file)
    return file


def test_i3d_is_called_as_stylegan_v_calls_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = i3d.I3D(i3d_file(monkeypatch, tmp_path))
    films = [pictures(16, 8, 8, seed=seed) for seed in range(5)]
    found = network.features(films, batch_size=2)
    assert found.shape == (5, 400)
    assert found[:, 0].tolist() == [7.0] * 5  # rescale, resize and return_features, all of them
    expected = [film[1, 0].float().mean().item() for film in films]  # red of the second frame
    assert found[:, 1].tolist() == pytest.approx(expected)
    assert found[:, 2].tolist() == [16.0] * 5
    assert network.entry()["sha256"] == weights.sha256(tmp_path / "i3d_torchscript.pt")


def test_i3d_refuses_films_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = i3d.I3D(i3d_file(monkeypatch, tmp_path))
    with pytest.raises(ValueError, match="there are none"):
        network.features([])
    with pytest.raises(ValueError, match="film 1 is"):
        network.features([pictures(16, 8, 8), pictures(17, 8, 8)])
    with pytest.raises(ValueError, match="9 frames: FVD needs films of 10"):
        network.features([pictures(9, 8, 8)])
    other = i3d.I3D(i3d_file(monkeypatch, tmp_path, width=5))
    with pytest.raises(ValueError, match=r"returned \[1, 5\], not \[1, 400\]"):
        other.features([pictures(10, 8, 8)])
