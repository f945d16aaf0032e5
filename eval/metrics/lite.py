"""The offline stand-ins: the `-lite` metrics, on the project's own features.

The features come from a small network trained on pictures of the shapes generator and on
artefacts (`diffcache.pipelines.small.features`). Their numbers are comparable among themselves
only: FID-lite is not FID, and so on for each. Pictures of another size than 64x64 are resized by
antialiased bilinear interpolation; work is done in batches of 32 pictures, in float32, on the
device that they are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.metrics.frechet import Moments
from diffcache.pipelines.small import features
from diffcache.pipelines.small.features import check, in_batches
from diffcache.pipelines.small.moving import film_statistics
from diffcache.pipelines.small.scenes import parse


class Weights(NamedTuple):
    """The name and sha256 of the weights that a number came from."""

    name: str
    sha256: str

    def entry(self) -> dict[str, str]:
        """Return what a record says of a metric that these weights made."""
        return {"backend": "lite", "extractor": self.name, "sha256": self.sha256}


class Reference(NamedTuple):
    """Statistics of real, held-out pictures and films.

    `moments` are of the features of 10,000 pictures, `features` those of the first 2,000 of them,
    float32 [2000, 64] (stored in half precision), and `films` the moments of `clip_features` of
    2,048 films of 16 frames.
    """

    moments: Moments
    features: Tensor
    films: Moments


DIMENSIONS = features.FEATURES
EXTRACTOR = Weights("shapes-features", str(features.read_config()["sha256"]))


def _extractor(pictures: Tensor) -> features.Extractor:
    """Return the extractor on the device of the pictures."""
    return features.load(device=str(pictures.device)).extractor


def embed(pictures: Tensor) -> Tensor:
    """Return the features behind FID-lite, KID-lite and the PRDC-lite metrics.

    Args:
        pictures: uint8 [N, 3, H, W].

    Returns:
        float32 [N, 64], standardised: of clean pictures the mean is 0 and the standard deviations
        are 1 on average.

    Raises:
        ValueError: if these are no pictures.
    """
    return in_batches(_extractor(check(pictures)), pictures)


def lpips_lite(a: Tensor, b: Tensor) -> Tensor:
    """Return the perceptual distance of pairs of pictures, 0 where they are equal.

    It is the mean over four levels of the squared difference of maps whose vectors have unit
    length, summed over channels and averaged over places: LPIPS (arXiv 1801.03924, section 3)
    with this network and equal weights of channels.

    Args:
        a: uint8 [N, 3, H, W].
        b: uint8 of the same shape.

    Returns:
        float32 [N], dimensionless, at most 2 (the maps are nowhere negative).

    Raises:
        ValueError: if these are no pictures, or the shapes differ.
    """
    if check(a, "a").shape != check(b, "b").shape:
        raise ValueError(f"a is {list(a.shape)} but b is {list(b.shape)}; pass pairs of one shape")
    extractor = _extractor(a)

    def distance(one: Tensor, other: Tensor) -> Tensor:
        levels = zip(extractor.maps(one), extractor.maps(other), strict=True)
        return torch.stack([_unit_difference(*level) for level in levels]).mean(0)

    return in_batches(distance, a, b)


def _unit_difference(one: Tensor, other: Tensor) -> Tensor:
    change = functional.normalize(one, eps=1e-6) - functional.normalize(other, eps=1e-6)
    return change.square().sum(1).mean(dim=(1, 2))


def clip_score_lite(pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return 100 times the cosine of each picture's and its prompt's vectors.

    Like CLIPScore without its clamp at 0 (arXiv 2104.08718, section 3), with two perceptrons
    trained on the prompts of the shapes generator in place of CLIP.

    Args:
        pictures: uint8 [N, 3, H, W].
        prompts: N sentences in the words of `scenes.prompt`.

    Returns:
        float32 [N] in [-100, 100].

    Raises:
        ValueError: if these are no pictures, there are not as many prompts, or a prompt cannot be
            read by `scenes.parse`.
    """
    if len(check(pictures)) != len(prompts):
        raise ValueError(f"{len(pictures)} pictures but {len(prompts)} prompts; pass one for each")
    meant = features.slots([parse(prompt) for prompt in prompts])
    extractor, matcher = _extractor(pictures), features.load().matcher
    seen = in_batches(
        lambda part: features.picture_inputs(extractor, extractor.maps(part)), pictures
    )
    with torch.no_grad():
        one, other = matcher(seen, meant)
    scores: Tensor = 100 * (one * other).sum(-1)
    return scores


def class_probabilities(pictures: Tensor) -> Tensor:
    """Return what IS-lite is of: the shape of the object that is first in reading order.

    Args:
        pictures: uint8 [N, 3, H, W].

    Returns:
        float64 [N, 5], in the order of `scenes.SHAPES`; each row sums to 1.

    Raises:
        ValueError: if these are no pictures.
    """
    extractor = _extractor(check(pictures))
    return in_batches(
        lambda part: features.first_shape(extractor.read(extractor.maps(part)[-1])), pictures
    )


def clip_features(films: Sequence[Tensor]) -> Tensor:
    """Return the features behind FVD-lite: how a film's frames lie and move.

    The mean, the root mean square of first and second differences, and the distance from the first
    to the last frame, of each of the 64 features; standardised and reduced to 64 principal
    components, both as fitted on real films.

    Args:
        films: each uint8 [F, 3, H, W] with F >= 3; F and the size may differ.

    Returns:
        float64 [N, 64].

    Raises:
        ValueError: if there is no film, or one has fewer than three frames.
    """
    if not films:
        raise ValueError("no films; pass at least one, uint8 [F, 3, H, W]")
    for index, film in enumerate(films):
        if len(check(film, f"films[{index}]")) < 3:
            raise ValueError(f"films[{index}] has {len(film)} frames; pass at least 3")
    fitted = features.load_reference()
    found = torch.stack([film_statistics(embed(film)) for film in films]).double()
    standard = (found - fitted["film_centre"]) / fitted["film_scale"]
    return standard @ fitted["film_components"].double()


def reference() -> Reference:
    """Return the shipped statistics of real pictures and films."""
    stored = features.load_reference()
    pictures = Moments(stored["mean"], stored["cov"], int(stored["count"]))
    films = Moments(stored["film_mean"], stored["film_cov"], int(stored["film_count"]))
    return Reference(pictures, stored["features"].float(), films)
