"""Check pictures for the objects, numbers, colors and positions that GenEval's prompts name.

This file runs in an interpreter that has mmdet 2 and open_clip, and not diffcache.

Reference: GenEval, arXiv 2310.11513, section 3; thresholds and the order of the checks of its
official code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LEAST, LEAST_TO_COUNT = 0.3, 0.9  # confidence of a detection; where the prompt names a number
MOST = 16  # objects of a class
NEAR = 0.1  # share of both objects' sizes by which their centers may differ without a direction
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
CONFIG = "mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py"
TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")

Object = Any  # box [x0, y0, x1, y1, ...], and its mask or None
ColorsOf = Callable[[Sequence[Object], str], Sequence[str]]


def directions(one: Sequence[float], other: Sequence[float]) -> set[str]:
    """Return where a box lies, seen from another: left of, right of, above, below."""
    offset, beyond = [], []
    for axis in (0, 1):
        between = (one[axis] + one[axis + 2] - other[axis] - other[axis + 2]) / 2
        sizes = abs(one[axis + 2] - one[axis]) + abs(other[axis + 2] - other[axis])
        offset.append(between)
        beyond.append(max(abs(between) - NEAR * sizes, 0) * (1 if between > 0 else -1))
    if all(abs(value) < 1e-3 for value in beyond):
        return set()
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    x, y = (value / length for value in beyond)
    found = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in found.items() if holds}


def is_right(objects: dict[str, list[Object]], asked: dict[str, Any], colors_of: ColorsOf) -> bool:
    """Return whether a picture shows what a prompt asks for.

    Args:
        objects: Detected objects by class, the most certain first.
        asked: A line of GenEval's metadata: `include` and `exclude` of classes and numbers.
        colors_of: Names the colors of objects of a class.
    """
    right = True
    groups: list[list[Object] | None] = []
    for want in asked.get("include", []):
        name, count = want["class"], want["count"]
        found = objects.get(name, [])[:count]
        holds = len(found) >= count
        if holds and "color" in want:
            holds = list(colors_of(found, name)).count(want["color"]) >= count
        if holds and "position" in want:
            direction, group = want["position"]
            others = groups[group]
            holds = others is not None and all(
                direction in directions(one[0], other[0]) for one in found for other in others
            )
        groups.append(found if holds else None)
        right &= holds
    return right and not any(
        len(objects.get(unwanted["class"], [])) >= unwanted["count"]
        for unwanted in asked.get("exclude", [])
    )


def kept(
    boxes: Sequence[Any], masks: Sequence[Any] | None, names: Sequence[str], least: float
) -> dict[str, list[Object]]:
    """Return the objects that a detector is sure of, by class, the most certain first.

    Args:
        boxes: Boxes of each class, [N, 5] with the confidence last.
        masks: Masks of each class and box, bool [H, W]; None where there are none.
        names: Names of the classes.
        least: Confidence that an object must exceed.
    """
    found = {}
    for number, name in enumerate(names):
        order = sorted(range(len(boxes[number])), key=lambda at: -boxes[number][at][4])
        order = [at for at in order if boxes[number][at][4] > least][:MOST]
        if order:
            shapes = None if masks is None else masks[number]
            found[name] = [
                (boxes[number][at], None if shapes is None else shapes[at]) for at in order
            ]
    return found


def scorer(weights: Sequence[str], device: str) -> Callable[[str, str], float]:
    """Return what scores a picture for a prompt of GenEval: 1 where all that is asked is there.

    Args:
        weights: Files: metadata of the prompts, names of the classes, weights of the detector and
            of CLIP ViT-L/14.
        device: Device of the networks.
    """
    import mmdet
    from mmdet.apis import inference_detector, init_detector
    from PIL import Image, ImageOps

    prompts, classes, detector, clip = weights
    # A configuration refers to others beside it: that of the package, or of its repository.
    package = Path(mmdet.__file__).parent
    places = [folder / "configs" / CONFIG for folder in (package / ".mim", package.parent)]
    config = str(next((place for place in places if place.is_file()), places[0]))
    lines = [json.loads(line) for line in Path(prompts).read_text().splitlines() if line]
    asked = {line["prompt"]: line for line in lines}
    names = [line.strip() for line in Path(classes).read_text().splitlines() if line.strip()]
    network = init_detector(config, detector, device=device)
    colors = _colors(clip, device)

    def score(prompt: str, picture: str) -> float:
        if prompt not in asked:
            raise ValueError(f"prompt {prompt!r} is none of GenEval's; draw those of {prompts}")
        found = inference_detector(network, picture)
        boxes, masks = found if isinstance(found, tuple) else (found, None)
        counts = asked[prompt]["tag"] == "counting"
        objects = kept(boxes, masks, names, LEAST_TO_COUNT if counts else LEAST)
        image = ImageOps.exif_transpose(Image.open(picture)).convert("RGB")
        return float(is_right(objects, asked[prompt], lambda each, name: colors(image, each, name)))

    return score


def _colors(weights: str, device: str) -> Callable[[Any, Sequence[Object], str], list[str]]:
    """Return what names the colors of objects in an image, by CLIP and cut out on grey."""
    import open_clip
    import torch
    from PIL import Image

    model, _, prepare = open_clip.create_model_and_transforms(
        "ViT-L-14", pretrained=weights, device=device
    )
    model.eval()
    tokenize = open_clip.get_tokenizer("ViT-L-14")
    known: dict[str, Any] = {}

    def unit(x: Any) -> Any:
        return x / x.norm(dim=-1, keepdim=True)

    def texts(name: str) -> Any:
        if name not in known:
            every = []
            for color in COLORS:
                words = tokenize([template.format(color, name) for template in TEMPLATES])
                every.append(unit(unit(model.encode_text(words.to(device))).mean(0)))
            known[name] = torch.stack(every)
        return known[name]

    def colors(image: Any, objects: Sequence[Object], name: str) -> list[str]:
        grey = Image.new("RGB", image.size, "#999")
        cut = []
        for box, mask in objects:
            shown = image if mask is None else Image.composite(image, grey, Image.fromarray(mask))
            cut.append(prepare(shown.crop(tuple(box[:4]))))
        features = unit(model.encode_image(torch.stack(cut).to(device)))
        return [COLORS[int(at)] for at in (features @ texts(name).mT).argmax(1)]

    return colors
