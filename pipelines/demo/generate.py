"""Run any diffusers pipeline once, with and without a cache."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image

import diffcache
from diffcache.features.base import Method
from diffcache.pipelines.demo.saved import Parameters
from diffcache.psnr import CAP, psnr
from diffcache.run_report import Report
from diffcache.targets import denoisers_of

IMAGES = ("image", "control_image", "mask_image")
VIDEO = "video"
# Pipelines that take images or videos but generate from text alone just as well.
TEXT_IS_ENOUGH = frozenset({
    "AnyFlowFARPipeline", "AnyFlowPipeline", "BriaFibo2Pipeline", "Cosmos2_5_PredictBasePipeline",
    "Cosmos3OmniPipeline", "DreamLiteMobilePipeline", "DreamLitePipeline", "Flux2KleinKVPipeline",
    "Flux2KleinPipeline", "Flux2Pipeline", "GlmImagePipeline", "HeliosPipeline",
    "HeliosPyramidPipeline", "Kandinsky6TI2VAPipeline", "LTXConditionPipeline",
    "QwenImage21Pipeline", "UniDiffuserPipeline", "WanVACEPipeline", "ZImageOmniPipeline",
})  # fmt: skip
_SHOWN = 40  # class names that an error lists


def needed_inputs(pipeline: str, parameters: Parameters) -> tuple[str, ...]:
    """Return the image and video arguments without which a pipeline has nothing to work on.

    Most of them have a default in the signature, with which the pipeline fails late or invents an image.
    """
    if pipeline in TEXT_IS_ENOUGH:
        return ()
    return tuple(name for name in (*IMAGES, VIDEO) if name in parameters)


def read_images(texts: Sequence[str], pipeline: str, parameters: Parameters) -> dict[str, Image.Image]:
    """Read the input images of a pipeline's call; return them in RGB by its arguments.

    A text is `FILE` for the pipeline's first image argument, or `NAME=FILE`, as in `mask_image=mask.png`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the pipeline takes no such image, one is missing, or one cannot be read.
    """
    taken = [name for name in IMAGES if name in parameters]
    images: dict[str, Image.Image] = {}
    for text in texts:
        name, sign, file = text.partition("=")
        if not (sign and name.isidentifier() and not Path(text).exists()):
            name, file = (taken or [""])[0], text
        if name not in taken:
            takes = f"only {', '.join(taken)}" if taken else "no image"
            raise ValueError(f"--image {text}: {pipeline} takes {takes}")
        if name in images:
            raise ValueError(f"--image {text}: {name} is given twice")
        images[name] = _read(text, Path(file))
    needed = needed_inputs(pipeline, parameters)
    if VIDEO in needed:
        raise ValueError(f"{pipeline} works on a video, which no option gives: run it from Python")
    for name in needed:
        if name not in images:
            option = "--image FILE" if name == taken[0] else f"--image {name}=FILE"
            raise ValueError(f"{pipeline} works on an image: pass {option}")
    return images


def check_required(pipeline: str, parameters: Parameters, call: Mapping[str, Any]) -> None:
    """Raise ValueError unless a call has every argument without a default."""
    for name, parameter in parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and name not in call:
            raise ValueError(f"{pipeline} needs {name}, which no option gives: run it from Python")


def class_number(pipe: Any, text: str) -> int:
    """Return the class of a class-conditional pipeline, given by its number or its name.

    Raises:
        ValueError: If the pipeline has no such class.
    """
    names: dict[str, int] = dict(getattr(pipe, "labels", None) or {})
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    # A table of classes may be longer than the trained embedding, so names go first.
    count = max(names.values(), default=-1) + 1 or getattr(config, "num_embeds_ada_norm", None)
    if text in names:
        return int(names[text])
    if text.isdecimal() and (not count or int(text) < count):
        return int(text)
    known = sorted(names, key=names.__getitem__)
    listed = f": {', '.join(known[:_SHOWN])}{', ...' * (len(known) > _SHOWN)}" if known else ""
    numbers = f" from 0 to {count - 1}" if count else ""
    raise ValueError(f"prompt {text!r}: this pipeline takes a class number{numbers}{listed}")


def _read(text: str, file: Path) -> Image.Image:
    if not file.is_file():
        raise FileNotFoundError(f"--image {text}: no such file")
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"--image {text}: cannot be read as an image: {error}") from error


@dataclass(frozen=True)
class Order:
    """Settings to ask of a pipeline; None leaves one to the pipeline.

    Attributes:
        prompt: Prompt to draw; a class number for class-conditional pipelines.
        height: Height of a picture in pixels; the width alike.
        images: Input images by argument, as `read_images` returns them.
    """

    prompt: str
    steps: int | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    images: Mapping[str, Image.Image] = field(default_factory=dict)


@dataclass
class Done:
    """Pictures of a cached run, and its cost.

    Attributes:
        seconds: Seconds of the whole pipeline.
        plain: Pictures of the uncached run; empty without one, as its seconds are None.
        place: Device and dtype of the denoiser.
    """

    made: list[Image.Image]
    report: Report
    seconds: float
    plain: list[Image.Image]
    plain_seconds: float | None = None
    place: str = ""

    @property
    def psnr_db(self) -> float | None:
        """Mean PSNR of the cached pictures to the uncached ones, in dB; None without those."""
        return fmean(closeness(self.plain, self.made)) if self.plain else None

    def lines(self) -> list[str]:
        """Return lines on the seconds, and on the distance from the uncached run."""
        if self.plain_seconds is None or self.psnr_db is None:
            return [f"the pipeline took {self.seconds:.2f} s on {self.place}"]
        ratio = self.plain_seconds / self.seconds
        both = f"uncached {self.plain_seconds:.2f}, cached {self.seconds:.2f}: {ratio:.2f}x"
        return [
            f"seconds: {both} on {self.place}",
            f"closeness to the uncached: PSNR {decibels(self.psnr_db)} (8 bit)",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            "schema": 2,
            "place": self.place,
            "seconds": self.seconds,
            "uncached_seconds": self.plain_seconds,
            "psnr_db": self.psnr_db,
            "report": self.report.to_dict(),
        }


def run(
    pipe: Any,
    method: str | Method | None,
    order: Order,
    defaults: dict[str, Any],
    *,
    preset: str | None = None,
    compare: bool = False,
) -> Done:
    """Run a pipeline under a method or a preset, and with `compare` uncached too.

    With `compare`, a run of two steps comes before each of the two timed runs, or a whole run where the method is made
    for one number of steps.

    Raises:
        AttachError: If the pipeline cannot be cached with this method.
        ValueError: If it does not take an argument that was ordered, or sides are no multiple of its token's.
    """
    _check_divides(pipe, order)
    with diffcache.wrapped(pipe, method, preset=preset) as handle:
        chosen = handle.method  # what cannot be cached is refused before an uncached run
    short = order if chosen.total else replace(order, steps=2)  # its tables fit one number of steps alone
    plain: list[Image.Image] = []
    plain_seconds = None
    if compare:
        generate(pipe, short, defaults)
        start = time.perf_counter()
        plain = generate(pipe, order, defaults)
        plain_seconds = time.perf_counter() - start
    diffcache.wrap(pipe, method, preset=preset)
    if compare:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            generate(pipe, short, defaults)
    start = time.perf_counter()
    made = generate(pipe, order, defaults)
    seconds = time.perf_counter() - start
    _check_size(made, order)
    return Done(made, diffcache.report(pipe), seconds, plain, plain_seconds, _place(pipe))


def generate(pipe: Any, order: Order, defaults: dict[str, Any]) -> list[Image.Image]:
    """Call a pipeline and return the pictures of its first result, several for a film.

    `defaults` are the arguments of the call that `order` does not set.

    Raises:
        ValueError: If the pipeline does not take an argument that was asked for, or makes neither pictures nor films.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    asked = {"num_inference_steps": order.steps, "height": order.height, "width": order.width}
    given = {name: value for name, value in asked.items() if value is not None}
    unknown = sorted(set(given) - set(taken))
    if unknown:
        raise ValueError(f"{type(pipe).__name__} takes no {unknown[0]}")
    call = {**{k: v for k, v in defaults.items() if k in taken}, **given}
    call |= order.images
    if "prompt" in taken:
        call["prompt"] = order.prompt
    elif "class_labels" in taken:
        call["class_labels"] = [class_number(pipe, order.prompt)]
    if "generator" in taken:
        call["generator"] = torch.Generator("cpu").manual_seed(order.seed)
    check_required(type(pipe).__name__, {k: v for k, v in taken.items() if k != "self"}, call)
    return pictures(pipe(**call))


def closeness(ones: Sequence[Image.Image], others: Sequence[Image.Image]) -> list[float]:
    """Return the PSNR of pairs of 8-bit pictures of equal size, in dB, at most 100."""
    pairs = zip(ones, others, strict=True)
    arrays = [[np.array(picture.convert("RGB")) for picture in pair] for pair in pairs]
    return [float(psnr(*(torch.from_numpy(a)[None] for a in pair))) for pair in arrays]


def decibels(value: float) -> str:
    """Return a PSNR as text; at the cap, pictures are equal or too close to tell."""
    return "100 dB or more" if value >= CAP else f"{value:.1f} dB"


def _check_divides(pipe: Any, order: Order) -> None:
    """Refuse sides that a pipeline would round.

    Raises:
        ValueError: If one is no multiple of a latent's pixels times a token's latents.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    spatial = getattr(pipe, "vae_scale_factor_spatial", None)
    scale: int = spatial or getattr(pipe, "vae_scale_factor", None) or 1
    model = next(iter(denoisers_of(pipe).values()))
    patch: Any = getattr(getattr(model, "config", None), "patch_size", None) or 1
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    config = getattr(getattr(pipe, "image_processor", None), "config", None)
    packed = getattr(config, "vae_scale_factor", 1)  # FLUX: two latents a token, and no patches
    multiple = max(scale * patch, packed)
    for name, side in (("height", order.height), ("width", order.width)):
        if side is not None and name in taken and side % multiple:
            below = side // multiple * multiple
            near = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise ValueError(f"--{name} {side}: must be a multiple of {multiple}, such as {near}")


def _check_size(made: list[Image.Image], order: Order) -> None:
    """Warn if the images have another size than the one that was asked for."""
    for name, asked, side in zip(("width", "height"), (order.width, order.height), made[0].size, strict=True):
        if asked not in (None, side):
            warnings.warn(f"--{name} {asked}: the pipeline rounded it to {side}", diffcache.CacheWarning, stacklevel=2)


def _place(pipe: Any) -> str:
    """Return device and dtype of a pipeline's denoiser in words."""
    model = next(iter(denoisers_of(pipe).values()))
    return f"{pipe.device}, {str(model.dtype).removeprefix('torch.')}"


def pictures(output: Any) -> list[Image.Image]:
    """Return the pictures of the first result in a pipeline's output.

    Raises:
        ValueError: If it has neither `images` nor `frames`.
    """
    if getattr(output, "frames", None) is not None:
        return [picture(frame) for frame in output.frames[0]]
    if getattr(output, "images", None) is not None:
        return [picture(output.images[0])]
    names = ", ".join(output.keys()) if hasattr(output, "keys") else type(output).__name__
    raise ValueError(f"the pipeline makes neither images nor frames but {names}")


def picture(value: Any) -> Image.Image:
    """Return a PIL picture of a picture, or of an array or tensor in [0, 1], last axis color."""
    if isinstance(value, Image.Image):
        return value
    array = value.float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.dtype != np.uint8:
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
