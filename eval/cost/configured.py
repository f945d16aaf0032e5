"""Denoisers that are not loaded: their class and configuration, built without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

_COMPONENTS = ("transformer", "unet", "prior")


@dataclass(frozen=True)
class Denoiser:
    """A denoiser class with its configuration."""

    cls: str  # class name in diffusers
    config: Mapping[str, Any]  # constructor arguments; what is missing has the class's default
    # Pixels of a latent row and frames of a latent frame, of the pipeline's autoencoder; None where that is not known
    compression: tuple[int, int] | None = None

    def build(self) -> nn.Module:
        """Build the model without memory, in eval mode.

        Raises ValueError if diffusers has no such class, or the configuration does not fit it.
        """
        import diffusers

        found: Any = getattr(diffusers, self.cls, None)
        if found is None:
            raise ValueError(f"{self.cls!r}: the installed diffusers has no such class")
        config = {key: value for key, value in self.config.items() if not key.startswith("_")}
        try:
            with torch.device("meta"):
                model: nn.Module = found(**config)
        except TypeError as error:
            raise ValueError(f"{self.cls}: the configuration does not fit: {error}") from error
        return model.eval()


def resolve(model: Mapping[str, Any] | str | Path | type[nn.Module]) -> Denoiser:
    """Return the denoiser that a configuration, a directory or a class stands for.

    Raises ValueError if it is none of these.
    """
    if isinstance(model, type):
        return Denoiser(model.__name__, {})
    if isinstance(model, Mapping):
        if "_class_name" not in model:
            raise ValueError("config: '_class_name' is missing, the class of diffusers it is for")
        return Denoiser(str(model["_class_name"]), model)
    path = Path(model)
    if not path.exists() and str(model).isidentifier():
        return Denoiser(str(model), {})
    for file in (path, path / "config.json"):
        if file.suffix == ".json" and file.is_file():
            return resolve(_read(file))
    if (path / "model_index.json").exists():
        for name in _COMPONENTS:
            if (path / name / "config.json").exists():
                found = resolve(_read(path / name / "config.json"))
                return Denoiser(found.cls, found.config, compression_of(path))
        raise ValueError(f"{path}: has none of {', '.join(_COMPONENTS)}")
    raise ValueError(
        f"{str(model)!r}: is neither a directory with config.json or model_index.json, nor a file "
        "of a configuration, nor a class of diffusers"
    )


def compression_of(directory: Path) -> tuple[int, int] | None:
    """Return how many pixels a latent row has, and how many frames a latent frame, by a pipeline's autoencoder.

    Returns None where its configuration does not tell.
    """
    file = directory / "vae" / "config.json"
    config = _read(file) if file.exists() else {}
    spatial = config.get("spatial_compression_ratio") or config.get("scale_factor_spatial")
    if spatial is None and config.get("_class_name") == "AutoencoderKL":
        spatial = 2 ** (len(config["block_out_channels"]) - 1)
    if spatial is None:
        return None
    temporal = config.get("temporal_compression_ratio") or config.get("scale_factor_temporal")
    return int(spatial), int(temporal or 1)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
