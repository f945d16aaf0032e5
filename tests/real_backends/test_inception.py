"""Inception on random weights of the form of those published.

No published file is here; the loader is given a file it must take for the real one, and what it
returns is compared with the definition written out, or with the library where it is installed.
"""

import dataclasses
import importlib.machinery
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from diffcache.eval.metrics import inception, weights
from tests.real_backends.files import accept, fake_module, pictures

POOL, CLASSES = 2048, 1008


class FakeExtractor(nn.Module):
    """Takes what torch-fidelity's extractor takes; its features show what it was called with."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path: str):
        super().__init__()
        assert features_list == ["2048", "logits_unbiased"]
        self.scale = torch.load(feature_extractor_weights_path, weights_only=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.dtype == torch.uint8 and not self.training
        mean = x.float().mean(dim=(1, 2, 3))[:, None] * self.scale
        return mean.expand(-1, POOL), torch.arange(CLASSES) / CLASSES * mean / 255


@pytest.fixture
def inception_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / weights.WEIGHTS["inception"].file
    torch.save(torch.tensor(2.0), file)
    accept(monkeypatch, "inception", file)
    return file


def test_inception_hands_on_the_very_bytes(monkeypatch: pytest.MonkeyPatch, inception_file: Path) -> None:
    fake_module(monkeypatch, "torch_fidelity")
    fake_module(monkeypatch, "torch_fidelity.feature_extractor_inceptionv3", FeatureExtractorInceptionV3=FakeExtractor)
    network = dataclasses.replace(inception.load(inception_file), batch_size=2)
    given = pictures(5)
    found = network(given)
    assert found.pool.shape == (5, POOL) and found.logits is not None
    torch.testing.assert_close(found.pool[:, 0], 2 * given.float().mean(dim=(1, 2, 3)))
    probabilities = found.probabilities()
    assert probabilities.dtype == torch.float64
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(probabilities.log().diff().mean(1), found.logits.double().diff().mean(1))
    assert network.entry()["convention"] == "torch-fidelity"
    with pytest.raises(ValueError, match="must be uint8"):
        network(given.float() / 255)
    with pytest.raises(ValueError, match="convention='cleaner': must be one of torch-fid"):
        inception.load(inception_file, "cleaner")


@pytest.mark.skipif(importlib.util.find_spec("torch_fidelity") is not None, reason="torch-fidelity is installed")
def test_inception_without_its_library_says_what_to_install(inception_file: Path) -> None:
    with pytest.raises(inception.MissingPackageError, match=r"diffcache\[fid\]"):
        inception.load(inception_file)


def test_inception_is_torch_fidelitys_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", exc_type=ImportError)
    extractor = module.FeatureExtractorInceptionV3
    plain = object.__new__(extractor)  # its weights are only known once it has them
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda *a, **k: {})
    monkeypatch.setattr(extractor, "load_state_dict", lambda self, state: None)
    plain.__init__("x", ["2048", "logits_unbiased"])
    monkeypatch.undo()
    file = tmp_path / weights.WEIGHTS["inception"].file
    torch.save(plain.state_dict(), file)
    accept(monkeypatch, "inception", file)
    found = inception.load(file)(pictures(2))
    pool, logits = plain(pictures(2))
    torch.testing.assert_close(found.pool, pool)
    torch.testing.assert_close(found.logits, logits)


class Layers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)[:, :2048]


class CleanNetwork(nn.Module):
    """Has the parts of clean-fid's wrapper: resized pictures from 0 to 255 in, features out."""

    def __init__(self, path: str, download: bool, resize_inside: bool) -> None:
        super().__init__()
        assert not download and not resize_inside
        self.layers = torch.jit.load(str(Path(path) / "inception-2015-12-05.pt"))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (3, 299, 299) and x.dtype == torch.float32
        return self.layers((x - 128) / 128)


def clean_resizer(mode: str) -> object:
    assert mode == "clean"

    def resize(array: np.ndarray) -> np.ndarray:
        bands = [Image.fromarray(array[..., band].astype(np.float32)) for band in range(3)]
        resized = [np.asarray(band.resize((299, 299), Image.Resampling.BICUBIC)) for band in bands]
        return np.stack(resized, axis=2).clip(0, 255)

    return resize


def test_the_clean_convention_goes_through_clean_fid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_module(monkeypatch, "cleanfid")
    fake_module(monkeypatch, "cleanfid.resize", build_resizer=clean_resizer)
    fake_module(monkeypatch, "cleanfid.inception_torchscript", InceptionV3W=CleanNetwork)
    file = tmp_path / "inception-2015-12-05.pt"
    torch.jit.script(Layers()).save(str(file))
    accept(monkeypatch, "inception-clean", file)
    network = inception.load(file, "clean")
    given = pictures(3)
    found = network(given)
    assert found.pool.shape == (3, 2048) and found.logits is None
    red = np.asarray(
        Image.fromarray(given[1, 0].numpy().astype(np.float32)).resize((299, 299), Image.Resampling.BICUBIC)
    )
    row = (torch.from_numpy(red.clip(0, 255)).flatten()[:2048] - 128) / 128
    torch.testing.assert_close(found.pool[1], row)
    with pytest.raises(ValueError, match="the clean convention has no logits"):
        found.probabilities()
    other = shutil.copy(file, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"call the file inception-2015-12-05\.pt"):
        inception.load(other, "clean")
