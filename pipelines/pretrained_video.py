"""Open a causal `WanPipeline`: a folder, with the weights of a file in the place of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline

from diffcache.files import read_json
from diffcache.method import check_int
from diffcache.pipelines.causal_checkpoint import load_causal
from diffcache.pipelines.demo.saved import call_defaults
from diffcache.pipelines.shipped_models import places
from diffcache.video import FewSteps, make_policy

WAN_SIZE, WAN_FPS = (480, 832), 16
WAN_PROMPTS = (
    "A red fox trots through a snowy birch forest, the camera follows it at eye level.",
    "A lighthouse on a cliff at dusk, waves break below, the lamp turns slowly.",
)


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
        policy: Policy of streams that name none, and its settings, such as `window:window=9,sinks=0`.
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


def open_pipeline(
    folder: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None,
    *,
    device: str | torch.device,
    dtype: torch.dtype | None,
    **weights: Any,
) -> tuple[Any, Streaming]:
    """Return a `WanPipeline` whose transformer is causal, and how it is streamed.

    Args:
        folder: Folder as diffusers saves it, the name of a shipped model, or a Hugging Face ID.
        checkpoint: File of causal weights for the transformer; None for those of the folder.
        device: Device of all models.
        dtype: Dtype of transformer and text encoder; None for float32 on the CPU, bfloat16 elsewhere. The autoencoder
            stays float32, as diffusers advises.
        **weights: More arguments of `load_causal`.

    Raises:
        FileNotFoundError: If there is no such file, or neither a folder nor such an ID.
        CheckpointError: If the file holds anything else.
        ValueError: If weights come without `checkpoint`, or `diffcache.json` cannot be read.
    """
    place = torch.device(device)
    kind = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    path = next((p for p in places(os.fspath(folder)) if (p / "model_index.json").exists()), None)
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", os.fspath(folder))
    if path is None and (Path(folder).exists() or not is_id):
        raise FileNotFoundError(
            f"no pipeline at {os.fspath(folder)!r}: name a folder with a model_index.json, as "
            "diffusers saves a WanPipeline, a shipped model (sticker-causal) or a Hugging Face ID"
        )
    if path is not None and (cls := read_json(path / "model_index.json").get("_class_name")) != (WanPipeline.__name__):
        raise ValueError(
            f"{path}: is a {cls}, which makes no film chunk by chunk; name a WanPipeline with a "
            "causal transformer, such as the shipped sticker-causal"
        )
    parts = {}
    if checkpoint is not None:
        parts["transformer"] = load_causal(checkpoint, dtype=kind, **weights)
    elif any(value is not None for value in weights.values()):
        name = next(name for name, value in weights.items() if value is not None)
        raise ValueError(f"{name}={weights[name]!r}: goes with checkpoint, a file of weights")
    pipe: Any = WanPipeline.from_pretrained(
        str(path or folder), torch_dtype={"default": kind, "vae": torch.float32}, **parts
    )
    return pipe.to(str(place)), Streaming() if path is None else streaming(path)
