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
from diffcache.pipelines.shipped_models import places, present
from diffcache.pipelines.small import causal
from diffcache.pipelines.small.causal_scenes import (
    CHUNK,
    COLORS,
    HELD_OUT,
    SHAPES,
    draw,
    parse,
    prompt,
)
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import FewSteps, make_policy

WAN_SIZE, WAN_FPS = (480, 832), 16
WAN_PROMPTS = (
    "A red fox trots through a snowy birch forest, the camera follows it at eye level.",
    "A lighthouse on a cliff at dusk, waves break below, the lamp turns slowly.",
)


def open_model(model: str | None, wan: Path | None, dtype: str, device: torch.device) -> Served:
    """Open a model.

    Args:
        model: Folder like that of shapes-causal; folder of a `WanPipeline` whose transformer is
            causal; or file of weights as Self-Forcing releases them. None for the shipped model.
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
    if (path / "vae").is_dir():
        pipe = WanPipeline.from_pretrained(path, torch_dtype=kinds)
        return _of_wan(pipe.to(device), path.name, streaming(path))
    return of_shapes(causal.load(path, kind), path.name, device)


def of_shapes(model: causal.ShapesCausal, name: str, device: torch.device) -> Served:
    """Return a model of shapes to be served.

    Args:
        model: Model.
        name: Name of it.
        device: Device of the transformer.
    """
    torch.nn.Module.to(model.transformer, device)
    prompts = [prompt(n % len(SHAPES), n) for n in range(len(COLORS))]
    return Served(model.video(), lambda text: model.embed([text]), Pixels, causal.CALL["size"], 1,
                  prompts, 12, name, opening_of_shapes)  # fmt: skip


def opening_of_shapes(text: str, seed: int) -> Tensor:
    """Draw the first chunk of a film of shapes, `[1, 3, 3, 24, 24]` in -1..1.

    Args:
        text: Prompt.
        seed: Seed of what no prompt states.
    """
    shape, color = parse(text)
    clip = draw(1, CHUNK, torch.Generator().manual_seed(HELD_OUT + seed))
    shapes, colors = (torch.full((1, CHUNK), number) for number in (shape, color))
    return replace(clip, shapes=shapes, colors=colors).film()


class Pixels:
    """Stands in for a decoder where latents are pictures."""

    nbytes = 0

    def decode(self, latents: Tensor) -> Tensor:
        """Return them as they are."""
        return latents


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
        return present(causal.DIRECTORY)
    for path in places(model):
        config = path / "transformer" / "config.json"
        if config.exists():
            cls = WanTransformer3DModel.load_config(str(config.parent)).get("_class_name")
            if cls != WanTransformer3DModel.__name__:
                raise ValueError(
                    f"{path}: its transformer is a {cls}, which makes no film chunk by chunk; name "
                    "a model with a causal WanTransformer3DModel, such as the shipped shapes-causal"
                )
        if path.is_file() or config.exists():
            return path
    raise FileNotFoundError(
        f"no causal video model at {model!r}: name a folder that holds transformer/config.json, "
        "such as the shipped shapes-causal, or a file of weights as Self-Forcing releases them"
    )
