"""Read the inputs of a pipeline's call besides its prompt: images and class numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from diffcache.pipelines.demo.saved import Parameters

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
    """Return the class of a class-conditional pipeline that a word names, by its number or its name.

    Raises:
        ValueError: If the pipeline has no such class.
    """
    names: dict[str, int] = dict(getattr(pipe, "labels", None) or {})
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    # A table of classes may be longer than what was trained, so names go first.
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
