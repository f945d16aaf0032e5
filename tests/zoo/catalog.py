"""Every denoiser class of diffusers, as a tiny case or with the reason why it has none."""

from __future__ import annotations

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
