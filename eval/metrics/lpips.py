"""LPIPS with AlexNet, version 0.1, without torchvision.

The network is torchvision's AlexNet up to its last convolution; the learned heads are the ones that
torchmetrics ships. Zhang et al., arXiv 1801.03924, equation 1; feature maps are divided by the root
of their squared norm plus 1e-8, as in torchmetrics (the authors' package adds 1e-10 to the norm).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from diffcache.eval.metrics import weight_files
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.metrics.pixels import check_pairs

SMALLEST = 32  # pixels; AlexNet has nothing left of a smaller picture
HEADS_SHA256 = "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0"
_CHANNELS = (64, 192, 384, 256, 256)
_LEVELS = (1, 4, 7, 9, 11)  # places of the ReLUs whose outputs are compared
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_EPSILON = 1e-8


class LPIPS(nn.Module):
    """Perceptual distance of pairs of pictures.

    Args:
        alexnet: State of torchvision's AlexNet; its `classifier` is not used.
        heads: State of the five heads, `lin<i>.model.1.weight` [1, C, 1, 1].
        sha256: SHA-256 of the file with the AlexNet, for records.

    Raises:
        ValueError: If a weight is missing or of another shape.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, alexnet: Mapping[str, Tensor], heads: Mapping[str, Tensor], sha256: str = "") -> None:
        super().__init__()
        self.sha256 = sha256
        self.features = _features()
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in _CHANNELS)
        state = {k: v for k, v in alexnet.items() if k.startswith("features.")}
        try:
            state |= {f"heads.{i}.weight": heads[f"lin{i}.model.1.weight"] for i in range(5)}
            self.load_state_dict(state)
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"not the weights of AlexNet and of its LPIPS heads: {error}") from error
        self.register_buffer("shift", torch.tensor(_SHIFT).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(_SCALE).reshape(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def distances(self, a: Tensor, b: Tensor, batch_size: int = 32) -> Tensor:
        """Return the distance of each pair, float32 [N] on the CPU.

        Args:
            a: uint8 [N, 3, H, W].
            b: The same.
            batch_size: Pairs at once.

        Raises:
            ValueError: If the shapes differ, or pictures are smaller than 32 pixels.
        """
        check_pairs(a, b)
        if min(a.shape[2:]) < SMALLEST:
            raise ValueError(f"pictures of {a.shape[2]} x {a.shape[3]} pixels: LPIPS needs {SMALLEST} or more")
        parts = zip(a.split(batch_size), b.split(batch_size), strict=True)
        return torch.cat([self(one, other).cpu() for one, other in parts])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each pair, float32 [N]."""
        total = torch.zeros(len(a), device=self.shift.device)
        for head, one, other in zip(self.heads, self._maps(a), self._maps(b), strict=True):
            total = total + head((one - other) ** 2).mean(dim=(1, 2, 3))
        return total

    def _maps(self, pictures: Tensor) -> list[Tensor]:
        """Return the unit-normalized feature maps of the five levels."""
        x = 2 * (pictures.to(self.shift.device).float() / 255) - 1
        x = (x - self.shift) / self.scale
        found = []
        for place, layer in enumerate(self.features):
            x = layer(x)
            if place in _LEVELS:
                found.append(x / torch.sqrt(_EPSILON + (x**2).sum(dim=1, keepdim=True)))
        return found

    def entry(self) -> dict[str, str]:
        """Return the back end's entry in a record."""
        return {"backend": "real", "extractor": "alexnet, LPIPS v0.1", "sha256": self.sha256}


def load(path: str | Path | None = None, device: str | torch.device = "cpu") -> LPIPS:
    """Load the network and its heads; nothing is downloaded.

    Args:
        path: torchvision's AlexNet, None to look in the usual places.
        device: Device of the network.

    Raises:
        MissingWeightsError: If the AlexNet is not found.
        WrongWeightsError: If it, or the heads inside torchmetrics, are other ones.
        MissingPackageError: If torchmetrics is not installed.
    """
    file = weight_files.find("alexnet", path)
    heads = heads_file()
    if weight_files.sha256(heads) != HEADS_SHA256:
        raise weight_files.WrongWeightsError(
            f"{heads}: its sha256 must be {HEADS_SHA256} and is {weight_files.sha256(heads)}; install "
            "another version of torchmetrics"
        )
    alexnet, lins = (torch.load(f, map_location="cpu", weights_only=True) for f in (file, heads))
    return LPIPS(alexnet, lins, weight_files.sha256(file)).to(device)


def heads_file() -> Path:
    """Return where torchmetrics keeps the heads, without importing it.

    Importing it fails where a torchvision is installed that does not fit torch. Raises MissingPackageError if it is
    not installed or has no such file.
    """
    found = importlib.util.find_spec("torchmetrics")
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        file = Path(place) / "functional" / "image" / "lpips_models" / "alex.pth"
        if file.is_file():
            return file
    raise MissingPackageError(
        "torchmetrics with functional/image/lpips_models/alex.pth is not installed: pip install 'diffcache[eval]'"
    )


def _features() -> nn.Sequential:
    """Return AlexNet's convolutions, in the order and with the names of torchvision's."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )
