"""Every denoiser class of diffusers, as a tiny case or with the reason why it has none."""

from __future__ import annotations

import re

from tests.zoo import (
    audio,
    flux_like,
    hunyuan,
    image,
    image_joint,
    image_more,
    special,
    unet,
    unet_more,
    video,
    wan_like,
)
from tests.zoo.case import Case

_MODULES = (
    flux_like,
    image,
    image_joint,
    image_more,
    video,
    hunyuan,
    wan_like,
    audio,
    special,
    unet,
    unet_more,
)
_DENOISER = re.compile(r"Transformer|DiT|UNet|UVit|UniDiffuser|T5Film|RVQDepth")

EXCLUDED: dict[str, str] = {
    "HunyuanDiT2DControlNetModel": "control network: makes residuals for a denoiser",
    "HunyuanDiT2DMultiControlNetModel": "control networks: make residuals for a denoiser",
    "LongCatAudioDiTVae": "autoencoder, has no denoising forward",
    "MiniMaxMusic3RVQDepthDecoder": "autoregressive decoder of codebook tokens, no timestep",
    "UniDiffuserTextDecoder": "language model that decodes text, has no denoising forward",
}


def cases() -> dict[str, Case]:
    """Collect the cases whose class the installed diffusers has.

    Returns:
        The cases by name.

    Raises:
        ValueError: If two cases share a name.
    """
    import diffusers

    exported = set(dir(diffusers))
    found: dict[str, Case] = {}
    for case in (case for module in _MODULES for case in module.CASES):
        if case.name in found:
            raise ValueError(f"two cases are named {case.name!r}; give one of them a suffix")
        if case.cls in exported:
            found[case.name] = case
    return found


def exported_denoisers() -> list[str]:
    """List the model classes of the installed diffusers whose name is that of a denoiser.

    Returns:
        Sorted class names; a few of them denoise nothing, see `EXCLUDED`.
    """
    import diffusers
    from diffusers import ModelMixin

    return sorted(
        name
        for name in dir(diffusers)
        if _DENOISER.search(name)
        and isinstance(found := getattr(diffusers, name), type)
        and issubclass(found, ModelMixin)
    )
