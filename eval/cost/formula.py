"""Floating-point operations of models too big to run: from the shapes of one call alone.

The model is built from its configuration on torch's `meta` device, where tensors have shapes but
no memory, and its own forward is called there once under the counter of real runs
(`diffcache.attach.flops`). The count is that of a real run, of any size, in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_flop_count

from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.inputs import Size, inputs_of
from diffcache.errors import AttachError
from diffcache.eval.cost.flops import counting

_COMPONENTS = ("transformer", "unet", "prior")


@dataclass(frozen=True)
class Flops:
    """Operations of one denoiser call; a multiply-add is two.

    Attributes:
        total: Operations of the whole call.
        blocks: Operations of the lists of blocks that a cache can skip.
        attention: Operations of the two products of softmax attention, wherever it is.
        rest: Operations outside the blocks: embedders, refiners, head.
    """

    total: float
    blocks: float
    attention: float
    rest: float


@dataclass(frozen=True)
class Denoiser:
    """A denoiser class with its configuration.

    Attributes:
        cls: Class name in diffusers.
        config: Constructor arguments; what is missing has the class's default.
        compression: Pixels of a latent row and frames of a latent frame, of the pipeline's
            autoencoder; None where that is not known.
    """

    cls: str
    config: Mapping[str, Any]
    compression: tuple[int, int] | None = None

    def build(self) -> nn.Module:
        """Build the model without memory, in eval mode.

        Raises:
            ValueError: If diffusers has no such class, or the configuration does not fit it.
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


class _Attention(TorchFunctionMode):
    """Adds up the operations of scaled dot product attention, from the shapes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.total += sdpa_flop_count(
                given["query"].shape, given["key"].shape, given["value"].shape
            )
        return func(*args, **kwargs)


def formula_flops(
    model: Mapping[str, Any] | str | Path | type[nn.Module],
    height: int,
    width: int,
    frames: int = 1,
    text_tokens: int = 512,
    batch: int = 1,
) -> Flops:
    """Return the operations of one denoiser call of a model that need not be run, nor be there.

    Args:
        model: A configuration with `_class_name`; a directory of a saved pipeline (its first
            denoiser and its autoencoder's compression are used) or of a saved model; or a class of
            diffusers, or its name, which stands for its default configuration.
        height: Pixels.
        width: Pixels.
        frames: Frames of a film, 1 for a picture.
        text_tokens: Length of the prompt as the denoiser sees it, padding included.
        batch: Samples in the call; guidance in one batch doubles it.

    Raises:
        ValueError: If the model is none of these or not known, or the size does not fit it.
    """
    size = Size(height, width, frames, text_tokens, batch)
    denoiser = resolve(model)
    built = denoiser.build()
    config: Any = built.config
    return count_call(built, inputs_of(denoiser.cls, config, size, denoiser.compression))


def count_on_meta(cls: str, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Flops:
    """Return the operations of one call of any denoiser of diffusers, with inputs of your own.

    Args:
        cls: Class name in diffusers.
        config: Constructor arguments.
        inputs: Forward arguments; their tensors on the `meta` device.

    Raises:
        ValueError: If the class or the configuration is wrong, or its forward needs values.
    """
    return count_call(Denoiser(cls, config).build(), inputs)


def count_call(model: nn.Module, inputs: Mapping[str, Any]) -> Flops:
    """Return the operations of one call of a model, on any device.

    Args:
        model: A denoiser.
        inputs: Forward arguments, on its device.

    Raises:
        ValueError: If they cannot be counted.
    """
    name = type(model).__name__
    try:
        anatomy = anatomy_of(model)
    except AttachError:
        parts: dict[str, nn.Module] = {}
    else:
        parts = {
            f"{entry.key}.{index}": block
            for entry in anatomy.lists
            for index, block in enumerate(model.get_submodule(entry.key).children())
        } | {key: model.get_submodule(key) for key in anatomy.singles}
    try:
        with torch.no_grad(), counting({"": model, **parts}) as tally, _Attention() as attention:
            model(**inputs)
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{name}: cannot be called with these inputs: {reason}") from error
    counts = dict(tally.calls)
    total = counts.get("")
    if total is None:
        raise ValueError(f"{name}: may use flex attention or be compiled, and cannot be counted")
    blocks = sum(flops or 0.0 for key, flops in tally.calls if key)
    return Flops(total, blocks, attention.total, total - blocks)


def resolve(model: Mapping[str, Any] | str | Path | type[nn.Module]) -> Denoiser:
    """Return the denoiser that a configuration, a directory or a class stands for.

    Raises:
        ValueError: If it is none of these.
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
    """Return pixels of a latent row and frames of a latent frame, from a pipeline's autoencoder.

    Returns:
        Both; None where its configuration does not tell.
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
