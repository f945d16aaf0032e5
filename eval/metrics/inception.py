"""Real Inception features: for FID, Inception score, KID, precision, recall, density, coverage.

Two conventions, whose numbers must not be compared with each other:

- `torch-fidelity`: the network converted from TensorFlow (2015-12-05), with that graph's own
  bilinear resize to 299 x 299 without antialiasing, as in the evaluations of Heusel et al. (arXiv
  1706.08500) and of torch-fidelity. It equals torchmetrics with `antialias=False`; torchmetrics'
  default resizes with antialiasing.
- `clean`: clean-fid's antialiased bicubic resize in float32 by Pillow and its torchscript copy of
  the network (Parmar et al., arXiv 2104.11222). It has features only, so no Inception score.

Pictures go in as the bytes they are stored as; there is no second rounding.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval.metrics import weight_files
from diffcache.eval.metrics.pixels import check_pictures

DIMENSIONS = 2048
_RESIZE = {
    "torch-fidelity": "bilinear to 299 x 299 as in TensorFlow 1, no antialiasing",
    "clean": "antialiased bicubic to 299 x 299 by Pillow, not rounded",
}


CONVENTIONS = tuple(_RESIZE)


class MissingPackageError(MissingError, ImportError):
    """A library that a metric needs is not installed, or is installed and cannot be imported."""


@dataclass(frozen=True)
class Features:
    """Features of pictures by the network."""

    pool: Tensor  # float32 [N, 2048], for distances
    # float32 [N, 1008] without the bias of the last layer, for the Inception score; None under the clean convention
    logits: Tensor | None

    def probabilities(self) -> Tensor:
        """Return class probabilities, float64 [N, 1008]; raises ValueError if there are no logits."""
        if self.logits is None:
            raise ValueError(
                "the clean convention has no logits: use convention='torch-fidelity' for the Inception score"
            )
        return self.logits.double().softmax(dim=1)


@dataclass(frozen=True)
class Inception:
    """An Inception network that can be called with pictures."""

    convention: str  # way of resizing and copy of the network: `torch-fidelity` or `clean`
    sha256: str  # SHA-256 of the weight file, hexadecimal
    network: Callable[[Tensor], Features]  # uint8 [N, 3, H, W] on the device -> features
    device: torch.device  # device of the network
    batch_size: int = 32  # pictures at once

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Features:
        """Return the features of pictures, on the CPU.

        Args:
            pictures: uint8 [N, 3, H, W].

        Raises:
            ValueError: If they are of another shape or type.
        """
        check_pictures(pictures)
        found = [self.network(part.to(self.device)) for part in pictures.split(self.batch_size)]
        logits = [part.logits.cpu() for part in found if part.logits is not None]
        return Features(torch.cat([part.pool.cpu() for part in found]), torch.cat(logits) if logits else None)

    def entry(self) -> dict[str, str]:
        """Return the back end's entry in a record."""
        return {
            "backend": "real",
            "extractor": "inception-v3 2015-12-05",
            "sha256": self.sha256,
            "convention": self.convention,
            "resize": _RESIZE[self.convention],
        }


def load(
    path: str | Path | None = None, convention: str = "torch-fidelity", device: str | torch.device = "cpu"
) -> Inception:
    """Load the network of a convention; nothing is downloaded.

    Args:
        path: Weight file, None to look in the usual places (`diffcache.eval.metrics.weight_files.find`).
        convention: `torch-fidelity` or `clean`.
        device: Device of the network.

    Raises:
        ValueError: If there is no such convention, or the clean weights have another file name.
        MissingWeightsError: If the weight file is not found.
        WrongWeightsError: If it is another one.
        MissingPackageError: If torch-fidelity and torchvision, or clean-fid, cannot be imported.
    """
    if convention not in _RESIZE:
        raise ValueError(f"convention={convention!r}: must be one of {', '.join(_RESIZE)}")
    place = torch.device(device)
    if convention == "clean":
        file = weight_files.find("inception-clean", path)
        network = _clean(file, place)
    else:
        file = weight_files.find("inception", path)
        network = _fidelity(file, place)
    return Inception(convention, weight_files.sha256(file), network, place)


_NAMES = {"cleanfid": "clean-fid"}  # on the package index, where it differs


def load_package(name: str, extra: str) -> ModuleType:
    """Import a library that only some metrics need.

    `extra` of diffcache holds it; empty for one that none holds. Raises MissingPackageError if it is not installed,
    or raises on import, as a torchvision built for another torch does.
    """
    top = name.partition(".")[0]
    remedy = f"pip install 'diffcache[{extra}]'" if extra else f"pip install {_NAMES.get(top, top)}"
    if importlib.util.find_spec(top) is None:
        raise MissingPackageError(f"{top} is not installed: {remedy}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{name} needs {error.name}: {remedy}") from error
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise MissingPackageError(
            f"{name} is installed and cannot be imported ({type(error).__name__}: {reason}): "
            "install versions of it and of what it imports that fit the installed torch"
        ) from error


def _fidelity(file: Path, device: torch.device) -> Callable[[Tensor], Features]:
    module = load_package("torch_fidelity.feature_extractor_inceptionv3", "fid")
    wanted = ["2048", "logits_unbiased"]
    network = module.FeatureExtractorInceptionV3(
        "inception-v3-compat", wanted, feature_extractor_weights_path=str(file)
    )
    network = network.eval().to(device)

    def features(pictures: Tensor) -> Features:
        pool, logits = network(pictures)
        return Features(pool, logits)

    return features


def _clean(file: Path, device: torch.device) -> Callable[[Tensor], Features]:
    expected = weight_files.WEIGHTS["inception-clean"].file
    if file.name != expected:
        raise ValueError(f"{file}: clean-fid opens its weights by name; call the file {expected}")
    resize = load_package("cleanfid.resize", "").build_resizer("clean")
    wrapper = load_package("cleanfid.inception_torchscript", "").InceptionV3W
    network = wrapper(str(file.parent), download=False, resize_inside=False).eval().to(device)

    def features(pictures: Tensor) -> Features:
        arrays = [resize(picture.permute(1, 2, 0).cpu().numpy()) for picture in pictures]
        resized = torch.stack([torch.from_numpy(array).permute(2, 0, 1) for array in arrays])
        return Features(network(resized.to(device)), None)

    return features
