"""Load a saved pipeline as its user runs it: variant, offload, adapters, quantized, compiled."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch

from diffcache.command import device_of
from diffcache.errors import MissingError
from diffcache.pipelines.demo.saved import DTYPES, call_defaults, check_depth, check_dtype, dtype_of, locate
from diffcache.targets import denoisers_of

OFFLOADS = ("model", "sequential", "group")
# Name -> back end of diffusers, its arguments, the package it needs.
QUANTIZED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bnb-4bit": ("BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
    "bnb-8bit": ("BitsAndBytesConfig", {"load_in_8bit": True}, "bitsandbytes"),
    "torchao-int8": ("TorchAoConfig", {"quant_type": "Int8WeightOnlyConfig"}, "torchao"),
    "torchao-float8": ("TorchAoConfig", {"quant_type": "Float8WeightOnlyConfig"}, "torchao"),
    "quanto-int8": ("QuantoConfig", {"weights_dtype": "int8"}, "optimum.quanto"),
}


@dataclass(frozen=True)
class Loading:
    """Options for loading a pipeline, beside its dtype and device.

    Attributes:
        variant: Variant of the weight files that are read, such as `fp16`; "" for the files without one.
        revision: Branch, tag or commit of a Hugging Face model; "" is the newest.
        offload: One of `OFFLOADS`, as diffusers names them; "" keeps all on the device.
        loras: Adapters of low rank, each a file, a folder or a Hugging Face model ID, with `:SCALE` behind it if that
            is not 1.
        quantize: Key of `QUANTIZED` for the weights of the denoisers; "" for none.
        compile: Whether to compile the repeated blocks of the denoisers.
    """

    variant: str = ""
    revision: str = ""
    offload: str = ""
    loras: tuple[str, ...] = ()
    quantize: str = ""
    compile: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "loras", tuple(self.loras))  # JSON files give a list
        for name, value, known in (("offload", self.offload, OFFLOADS), ("quantize", self.quantize, QUANTIZED)):
            if value and value not in known:
                raise ValueError(f"--{name} {value!r}: must be one of {', '.join(known)}")

    @property
    def changes(self) -> dict[str, Any]:
        """Options that are not the default, as plain data."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}

    def check(self, model: str, device: torch.device) -> None:
        """Check the options before any file is read.

        Args:
            model: Model that the command line names.
            device: Device that the pipeline will run on.

        Raises:
            FileNotFoundError: If an adapter is not there.
            MissingError: If a package is missing.
            ValueError: If the device does not support an option.
        """
        if self.offload and device.type == "cpu":
            raise ValueError(
                f"--offload {self.offload}: on the CPU there is nothing to move the weights from; "
                "leave it out, or name an accelerator with --device"
            )
        if self.quantize:
            package = QUANTIZED[self.quantize][2]
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                name = package.replace(".", "-")
                raise MissingError(f"--quantize {self.quantize} needs {name}: pip install {name}")
        if self.revision and (Path(model).exists() or model.count("/") != 1):
            raise ValueError(f"--revision {self.revision}: {model} is no Hugging Face model ID; leave it out")
        for text in self.loras:
            source, _ = _adapter(text)
            is_file = source.endswith((".safetensors", ".bin", ".pt"))
            if not Path(source).exists() and (source.count("/") != 1 or is_file):
                raise FileNotFoundError(f"--lora {text}: no file or folder {source}, and no Hugging Face model ID")
        if self.loras and importlib.util.find_spec("peft") is None:
            raise MissingError(f"--lora {self.loras[0]} needs peft: pip install peft")


def made_by(model: str) -> Any:
    """Return the pipeline that a function of the user makes, named as `module:function`; None for other text.

    Modules of the working directory are found too.

    Raises:
        ValueError: If there is no such function, or it needs arguments or returns no pipeline.
    """
    if not re.fullmatch(r"[\w.]+:\w+", model) or Path(model).exists():
        return None
    function = named_function("--model", model)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"--model {model}: must need no argument ({error})") from error
    pipe = function()
    if not isinstance(getattr(pipe, "components", None), dict):
        raise ValueError(f"--model {model}: returned a {type(pipe).__name__}, which is no pipeline")
    return pipe


def named_function(option: str, text: str) -> Callable[..., Any]:
    """Import a function of the user by its name, `module:function`; modules of the working directory are found too.

    `option` is the option that named it, for errors.

    Raises:
        ValueError: If the module cannot be imported, or has no such function.
    """
    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{option} {text}: {module} cannot be imported ({error})") from error
    if not callable(function):
        raise ValueError(f"{option} {text}: {module} has no function {name}")
    found: Callable[..., Any] = function
    return found


def check_made(dtype: str, device: str, loading: Loading) -> None:
    """Raise ValueError if a dtype, a device or an option of loading is given for a pipeline that is loaded already."""
    for name, value in (("dtype", dtype), ("device", device)):
        if value != "auto":
            raise ValueError(f"{name}={value!r}: a loaded pipeline has its own; leave it out")
    if loading.changes:
        raise ValueError(f"loading={loading.changes!r}: the pipeline is loaded already")


def load(
    model: str, dtype: str = "auto", device: str = "auto", loading: Loading | None = None
) -> tuple[Any, dict[str, Any]]:
    """Load a pipeline, and the defaults of its call.

    Defaults are read from `diffcache.json` beside the pipeline, as `{"call": {"height": 64}}`.

    Args:
        model: Path, shipped name or Hugging Face model ID, for `locate`.
        dtype: Name of the dtype, for `dtype_of`.
        device: Name of the device, for `diffcache.command.device_of`.
        loading: Further options; None for the plain weights on the device.

    Raises:
        FileNotFoundError: If there is no such pipeline or adapter.
        MissingError: If a package is missing.
        ValueError: If an argument is wrong, or the pipeline cannot be loaded so.
    """
    from diffusers import DiffusionPipeline

    loading = loading or Loading()
    check_dtype(dtype)
    place = device_of(device)
    loading.check(model, place)
    path = locate(model, variant=loading.variant, revision=loading.revision)
    check_depth(path)
    kind = DTYPES[dtype_of(dtype, path, place)]
    more: dict[str, Any] = {"variant": loading.variant} if loading.variant else {}
    if loading.quantize:
        more["quantization_config"] = _quantization(loading.quantize, path, kind)
    try:
        pipe = DiffusionPipeline.from_pretrained(str(path), torch_dtype=kind, **more)
    except (OSError, ValueError) as error:
        if not loading.changes:
            raise
        raise ValueError(f"{model} cannot be loaded with {loading.changes}: {error}") from error
    _adapt(pipe, loading.loras)
    _place(pipe, loading.offload, place)
    if loading.compile:
        for name, denoiser in denoisers_of(pipe).items():
            if not getattr(denoiser, "_repeated_blocks", None):
                raise ValueError(f"--compile: {type(denoiser).__name__} ({name}) names no repeated blocks")
            cast(Any, denoiser).compile_repeated_blocks()
    return pipe, call_defaults(path)


def identity_of(loading: Loading) -> dict[str, Any]:
    """Return data that identify the options, with the content of adapters."""
    known = loading.changes
    sums = {}
    for source, _ in map(_adapter, loading.loras):
        place = Path(source)
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        whole = hashlib.sha256()
        for file in filter(Path.is_file, files):
            whole.update(file.read_bytes())
        sums[source] = whole.hexdigest()
    return {**known, "adapters": sums} if sums else known


def _adapter(text: str) -> tuple[str, float]:
    """Return source and scale of an adapter."""
    source, sign, scale = text.rpartition(":")
    try:
        return (source, float(scale)) if sign else (text, 1.0)
    except ValueError:
        return text, 1.0


def _quantization(name: str, path: Path, dtype: torch.dtype) -> Any:
    """Return diffusers' configuration that quantizes the denoisers."""
    import diffusers

    kind, known, _ = QUANTIZED[name]
    options = dict(known)
    if "load_in_4bit" in options:
        options["bnb_4bit_compute_dtype"] = dtype
    if kind == "TorchAoConfig":
        kinds = importlib.import_module("torchao.quantization")
        options["quant_type"] = getattr(kinds, options["quant_type"])()
    index = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
    parts = [part for part in index if part.startswith(("transformer", "unet", "prior"))]
    # A configuration for each part: by backend alone diffusers also asks transformers, whose
    # configurations of the same name take other arguments.
    made = getattr(diffusers, kind)(**options)
    return diffusers.PipelineQuantizationConfig(quant_mapping=dict.fromkeys(parts, made))


def _adapt(pipe: Any, loras: tuple[str, ...]) -> None:
    """Put adapters into a pipeline."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise ValueError(f"--lora {loras[0]}: {type(pipe).__name__} takes no adapters")
    scales = {}
    for number, text in enumerate(loras):
        source, scale = _adapter(text)
        file = Path(source)
        where = (str(file.parent), {"weight_name": file.name}) if file.is_file() else (source, {})
        name = f"lora{number}"
        try:
            pipe.load_lora_weights(where[0], adapter_name=name, **where[1])
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"--lora {text}: cannot be put into the pipeline: {reason}") from error
        if not any(name in names for names in pipe.get_list_adapters().values()):
            raise ValueError(f"--lora {text}: has no weights for a {type(pipe).__name__}")
        scales[name] = scale
    pipe.set_adapters(list(scales), list(scales.values()))


def _place(pipe: Any, offload: str, device: torch.device) -> None:
    """Move a pipeline to the device, or let diffusers move its parts when they are needed."""
    if not offload:
        pipe.to(device)
    elif offload == "group":
        pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_model_cpu_offload(device=device)
