"""Every tiny pipeline of the zoo."""

from __future__ import annotations

from tests.zoo import (
    pipes_flux,
    pipes_image,
    pipes_more,
    pipes_segments,
    pipes_unet,
    pipes_video,
)
from tests.zoo.pipe import PipeCase

_MODULES = (pipes_flux, pipes_image, pipes_video, pipes_segments, pipes_unet, pipes_more)


def pipes() -> dict[str, PipeCase]:
    """Collect the pipelines whose class the installed diffusers has.

    Returns:
        The pipelines by name.

    Raises:
        ValueError: If two pipelines share a name.
    """
    import diffusers

    exported = set(dir(diffusers))
    found: dict[str, PipeCase] = {}
    for case in (case for module in _MODULES for case in module.PIPES):
        if case.name in found:
            raise ValueError(f"two pipelines are named {case.name!r}; give one of them a suffix")
        if case.name.partition("-")[0] in exported:
            found[case.name] = case
    return found
