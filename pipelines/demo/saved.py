"""Find a saved pipeline by its name, and read its class, its dtype and the defaults of its call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffcache.pipelines.shipped_models import MODELS, places

Parameters = Mapping[str, inspect.Parameter]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MOST_LAYERS = 10_000
_DENOISERS = ("transformer", "unet", "prior")
_OWN = {"DiffusionPolicyPipeline": "diffcache.pipelines.policy"}


def locate(model: str, configs_only: bool = False, *, variant: str = "", revision: str = "") -> Path:
    """Return the directory of a pipeline: a path, a shipped name, or a Hugging Face model ID.

    A model ID is looked up in the local hub cache, and downloaded unless `HF_HUB_OFFLINE` is set.

    Args:
        model: Model that a command line names.
        configs_only: Whether to download configurations only, no weights.
        variant: Variant of the weight files to download, such as `fp16`; "" for the files without one.
        revision: Branch, tag or commit of a Hugging Face model; "" for the newest.

    Raises:
        FileNotFoundError: If there is no saved pipeline.
    """
    for path in places(model):
        if (path / "model_index.json").exists():
            return path
    if model.count("/") == 1 and not model.startswith((".", "/")) and not Path(model).exists():
        chosen = {"variant": variant, "revision": revision}
        return _from_hub(model, configs_only, {k: v for k, v in chosen.items() if v})
    what = f"no pipeline at {model!r}"
    if any(_field(path / "config.json", "model_type") for path in places(model)):
        what = f"{model!r} is for `diffcache kv --model {model}`, as a language model, and no pipeline"
    shipped = sorted(place.parent.name for place in MODELS.glob("*/model_index.json"))
    raise FileNotFoundError(
        f"{what}: name a directory that holds a model_index.json, as "
        "`save_pretrained` writes it (or, to run a diffusion language model, a config.json that "
        "names its mask_token_id), a Hugging Face model ID (owner/name), or a shipped model: "
        f"{', '.join(shipped)}"
    )


def _from_hub(model: str, configs_only: bool, chosen: Mapping[str, str]) -> Path:
    """Return the directory of a Hugging Face model in the local cache."""
    try:
        if configs_only:
            from huggingface_hub import snapshot_download

            names = ["model_index.json", "config.json", "*/config.json"]
            return Path(snapshot_download(model, allow_patterns=names, revision=chosen.get("revision")))
        from diffusers import DiffusionPipeline

        return Path(DiffusionPipeline.download(model, **chosen))
    except Exception as error:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        reason = (
            "HF_HUB_OFFLINE is set, and it is not in the local cache; unset it, or name a folder"
            if HF_HUB_OFFLINE
            else str(error).strip().split("\n", 1)[0]
        )
        raise FileNotFoundError(f"no pipeline at {model!r}, and the hub did not give one: {reason}") from error


def _field(file: Path, name: str) -> Any:
    """Return a field of a file of JSON; None where there is no such file, object or field."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))).get(name)
    except (OSError, ValueError, TypeError):
        return None


def check_dtype(name: str) -> None:
    """Raise ValueError unless `name` is `auto` or one of `DTYPES`."""
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"dtype={name!r}: must be one of auto, {', '.join(DTYPES)}")


def dtype_of(name: str, directory: Path, device: torch.device) -> str:
    """Return the dtype that `--dtype` chooses for a pipeline on a device, one of `DTYPES`.

    `auto` is float32 on the CPU, where half precision is slow. On an accelerator it is float16 where the denoiser was
    saved in it, else bfloat16.

    Raises:
        ValueError: If the name is neither `auto` nor one of `DTYPES`.
    """
    check_dtype(name)
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    return "float16" if _saved_dtype(directory) == "F16" else "bfloat16"


def _saved_dtype(directory: Path) -> str:
    """Return the commonest dtype of the denoiser's first file of weights, as safetensors names it; "" without one."""
    from safetensors import safe_open

    for name in _DENOISERS:
        for file in sorted((directory / name).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                dtypes = [str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()]  # noqa: SIM118
            return max(set(dtypes), key=dtypes.count) if dtypes else ""
    return ""


def pipeline_of(directory: Path) -> tuple[str, Parameters]:
    """Return the class name of a saved pipeline and the parameters of its call.

    Raises:
        ValueError: If `model_index.json` cannot be read, or names a class that the installed libraries do not have.
    """
    import diffusers
    import transformers

    place = directory / "model_index.json"
    try:
        index = json.loads(place.read_text(encoding="utf-8"))
        name = str(index["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} names no pipeline: {error}") from error
    if name in _OWN:
        raise ValueError(f"{place}: {name} is run from Python ({_OWN[name]})")
    libraries = {"diffusers": diffusers, "transformers": transformers}
    parts = [part for part in index.values() if isinstance(part, list) and len(part) == 2]
    for library, cls in [("diffusers", name), *parts]:
        found = getattr(libraries.get(str(library)), str(cls), None)
        if library in libraries and cls and not isinstance(found, type):
            version = libraries[library].__version__
            raise ValueError(f"{place}: {library} {version} has no {cls}; it may need a newer one")
    cls = getattr(diffusers, name)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise ValueError(f"{place}: _class_name={name!r}: must be a pipeline of diffusers")
    for part in index.values():
        if isinstance(part, list) and not all(isinstance(each, str | None) for each in part):
            raise ValueError(f"{place}: {part}: must be a library and a class")
    parameters = dict(inspect.signature(cls.__call__).parameters)
    parameters.pop("self", None)
    return name, parameters


def call_defaults(path: Path) -> dict[str, Any]:
    """Return the default arguments of a saved pipeline's call, from its `diffcache.json`.

    Raises:
        ValueError: If the file is no JSON, or has other values than numbers and a negative prompt.
    """
    file = path / "diffcache.json"
    if not file.exists():
        return {}
    try:
        call = dict(json.loads(file.read_text(encoding="utf-8")).get("call", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: must be an object with an object `call` ({error})") from error
    for name, value in call.items():
        numbers = value if isinstance(value, list) else [value]
        if name != "negative_prompt" and not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{file}: call.{name}={value!r}: must be a number")
    return call


def live_defaults(pipe: Any) -> dict[str, Any]:
    """Return `call_defaults` of the folder that a live pipeline was loaded from; none where it does not tell."""
    folder = getattr(pipe, "name_or_path", None)
    return call_defaults(Path(folder)) if folder and Path(folder).is_dir() else {}


def check_depth(path: Path) -> None:
    """Refuse a pipeline whose parts claim more layers than any model has, and would take hours to build.

    Raises ValueError if one does.
    """
    for file in sorted(path.glob("*/config.json")):
        try:
            config = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{file}: cannot be read as an object of JSON ({error})") from error
        for name, value in config.items():
            if "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
                raise ValueError(f"{file}: {name}={value}: must be at most {MOST_LAYERS:,}")
