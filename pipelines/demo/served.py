"""Open a causal video model to be served: the shipped one, a folder, or a file of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor

from diffcache.files import read_json
from diffcache.method import check_int
from diffcache.pipelines.causal_checkpoint import load_causal
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.saved import DTYPES, call_defaults, check_dtype
from diffcache.pipelines.demo.session_film import Served
from diffcache.pipelines.shipped_models import MODELS, places, present
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import FewSteps, make_policy

SHIPPED = MODELS / "sticker-causal"
WAN_SIZE, WAN_FPS = (480, 832), 16
WAN_PROMPTS = (
    "A red fox trots through a snowy birch forest, the camera follows it at eye level.",
    "A lighthouse on a cliff at dusk, waves break below, the lamp turns slowly.",
)


def open_model(model: str | None, wan: Path | None, dtype: str, device: torch.device) -> Served:
    """Open a model.

    Args:
        model: Folder of a `WanPipeline` whose transformer is causal, or file of weights as
            Self-Forcing releases them. None for the shipped sticker-causal.
        wan: Folder of a `WanPipeline`, whose text encoder and autoencoder go with a file.
        dtype: `auto` for float32 on the CPU and bfloat16 elsewhere, or a name in `DTYPES`.
        device: Device of the model.

    Raises:
        MissingError: If the shipped model is not there.
        FileNotFoundError: If there is no such model.
        ValueError: If a file comes without `wan`, or a folder with it; or the dtype is unknown.
    """
    check_dtype(dtype)
    kind = DTYPES.get(dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    path = _found(model)
    if path.is_file() and wan is None:
        raise ValueError(
            f"{path} holds a transformer alone: pass --wan FOLDER, a WanPipeline as diffusers "
            "saves it, for text encoder and autoencoder"
        )
    if path.is_dir() and wan is not None:
        raise ValueError(f"--wan {wan}: goes with a file of weights; {path} is a folder")
    # The autoencoder stays float32, as diffusers advises.
    kinds = {"default": kind, "vae": torch.float32}
    if path.is_file():
        transformer = load_causal(path, dtype=kind)
        pipe = WanPipeline.from_pretrained(wan, transformer=transformer, torch_dtype=kinds)
        return _of_wan(pipe.to(device), path.stem, Streaming())
    pipe = WanPipeline.from_pretrained(path, torch_dtype=kinds)
    return _of_wan(pipe.to(device), path.name, streaming(path))


@dataclass(frozen=True)
class Streaming:
    """Settings of streams of a causal `WanPipeline`; by default those of Self-Forcing's weights.

    Attributes:
        size: Height and width that it was trained at, in pixels.
        words: Tokens of a prompt, with padding.
        chunk: Latent frames of a chunk.
        fps: Frames a second.
        prompts: Examples.
        sampler: Noise levels.
        policy: Policy that the page begins with, and its settings, such as
            `window:window=9,sinks=0`.
    """

    size: tuple[int, int] = WAN_SIZE
    words: int = 512
    chunk: int = 3
    fps: int = WAN_FPS
    prompts: Sequence[str] = WAN_PROMPTS
    sampler: FewSteps = field(default_factory=FewSteps)
    policy: str = "window"


def streaming(folder: Path) -> Streaming:
    """Read how a model is streamed from `diffcache.json` in its folder.

    Its `call` may hold `height`, `width` and `max_sequence_length`, its `stream` the `chunk`, the
    `fps`, `prompts`, the settings of a `FewSteps` as `sampler`, and the `policy` to begin with.

    Raises:
        ValueError: If the file is no JSON, or has something else there.
    """
    call, file = call_defaults(folder), folder / "diffcache.json"
    found = Streaming(
        size=(call.get("height", WAN_SIZE[0]), call.get("width", WAN_SIZE[1])),
        words=call.get("max_sequence_length", Streaming.words),
    )
    try:
        said = dict(read_json(file).get("stream", {})) if file.exists() else {}
        if "sampler" in said:
            given = dict(said["sampler"])
            if isinstance(given.get("timesteps"), list):
                given["timesteps"] = tuple(given["timesteps"])
            said["sampler"] = FewSteps(**given)
        found = replace(found, **said)
        make_policy(found.policy)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: stream: {error}") from error
    for name in ("words", "chunk", "fps"):
        check_int(f"{file}: {name}", getattr(found, name), 1)
    if not found.prompts or not all(isinstance(text, str) for text in found.prompts):
        raise ValueError(f"{file}: stream.prompts={found.prompts!r}: must be sentences")
    return found


def _of_wan(pipe: Any, name: str, way: Streaming) -> Served:
    """Return a model of Wan to be served."""

    @torch.no_grad()
    def embed(text: str) -> Tensor:
        found: Tensor = pipe.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=way.words
        )[0]
        return found

    return Served(
        CausalVideo(pipe.transformer, chunk=way.chunk, sampler=way.sampler),
        embed,
        lambda: WanDecoder(pipe.vae),
        way.size,
        pipe.vae_scale_factor_spatial,
        way.prompts,
        way.fps,
        name,
        beside="window:sinks=0",
        policy=way.policy,
    )


def _found(model: str | None) -> Path:
    """Return the folder or file that a command line names."""
    if model is None:
        return present(SHIPPED)
    for path in places(model):
        config = path / "transformer" / "config.json"
        if config.exists():
            cls = WanTransformer3DModel.load_config(str(config.parent)).get("_class_name")
            if cls != WanTransformer3DModel.__name__:
                raise ValueError(
                    f"{path}: its transformer is a {cls}, which makes no film chunk by chunk; name "
                    "one with a causal WanTransformer3DModel, such as the shipped sticker-causal"
                )
        if path.is_file() or (config.exists() and (path / "vae").is_dir()):
            return path
    raise FileNotFoundError(
        f"no causal video model at {model!r}: name the folder of a WanPipeline, such as the "
        "shipped sticker-causal, or a file of weights as Self-Forcing releases them"
    )
