"""A cache backend of vLLM-Omni: the methods of diffcache on its pipelines.

vLLM-Omni calls `enable` once, when its pipeline is loaded, and `refresh` before a generation, if it knows the number
of steps: where a request leaves that out, it may pass 0 or not call at all. So nothing here depends on it.
A generation is a call of the pipeline's `forward`, however it ends; its steps are those of the pipeline's scheduler,
or its timesteps where the pipeline steps another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.cache.base import CacheBackend

import diffcache
from diffcache.catalog import make_method
from diffcache.errors import AttachError
from diffcache.features.base import Method

DENOISERS = ("transformer", "transformer_2", "unet")
# Methods known to have the same steps on every rank; gates decide by the part of the sample that a rank has.
FIXED = ("interval", "taylorseer", "magcache")


class Loop:
    """The `forward` of a pipeline of vLLM-Omni, which is one module, as a pipeline that `diffcache.wrap` knows."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.own = vars(pipeline).get("forward")  # of this pipeline alone, None for that of its class
        self.forward = pipeline.forward

    @property
    def components(self) -> dict[str, Any]:
        """Return the denoisers by name."""
        found = {name: getattr(self.pipeline, name, None) for name in DENOISERS}
        return {name: model for name, model in found.items() if isinstance(model, nn.Module)}

    @property
    def scheduler(self) -> Any:
        """Return the scheduler; None where the pipeline has none."""
        return getattr(self.pipeline, "scheduler", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a generation."""
        return self.forward(*args, **kwargs)


class DiffcacheBackend(CacheBackend):  # type: ignore[misc]
    """Caches the denoisers of a pipeline with any method of diffcache.

    Args:
        config: Cache configuration of vLLM-Omni. Only its `method` is used, a name with settings if any, such as
            `taylorseer:every=4`, which is also the default.

    Raises:
        UnknownMethodError: If there is no such method.
        ValueError: If a setting is unknown or out of its range.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        extra: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
        given = {**extra.get("_extra_params", {}), **extra}
        self.method: Method = make_method(given.get("method", "taylorseer:every=4"))
        self.loop: Loop | None = None
        self.models: list[Any] = []

    def enable(self, pipeline: Any) -> None:
        """Cache a pipeline's denoisers from now on.

        Raises:
            AttachError: If it has none, or they cannot be cached with this method.
            ValueError: If there are several ranks and the method is none of `FIXED`.
        """
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks and torch.distributed.get_world_size() > 1 and self.method.name not in FIXED:
            raise ValueError(
                f"method={self.method.name!r}: may decide by what one rank sees, and ranks that "
                f"decide differently wait for one another; take {', '.join(FIXED)}"
            )
        self.disable()
        loop = Loop(pipeline)
        if not loop.components:
            raise AttachError(f"{type(pipeline).__name__} has none of {', '.join(DENOISERS)} to cache")
        diffcache.wrap(loop, self.method, components=list(loop.components))
        pipeline.forward = loop  # the runner calls that, not the module
        self.loop, self.models = loop, list(loop.components.values())
        self.enabled = True

    def disable(self) -> None:
        """Take the cache out again; the pipeline is bit for bit as before."""
        if self.loop is not None:
            diffcache.unwrap(self.loop)
            del self.loop.pipeline.forward
            if self.loop.own is not None:
                self.loop.pipeline.forward = self.loop.own
        self.loop, self.models, self.enabled = None, [], False

    def refresh(self, pipeline: Any, num_inference_steps: int | None = None, verbose: bool = True) -> None:
        """Drop the features of the generation before; cache anew if the pipeline or its denoisers are others.

        `num_inference_steps` and `verbose` are part of the interface and not used.
        """
        now = list(Loop(pipeline).components.values())
        same = len(now) == len(self.models) and all(a is b for a, b in zip(now, self.models, strict=True))
        if self.loop is None or not same or self.loop.pipeline is not pipeline:
            self.enable(pipeline)
        else:
            diffcache.reset(self.loop)

    def report(self) -> str:
        """Return the computed and skipped steps of the last generation, as text.

        Raises:
            AttachError: If no pipeline is cached.
        """
        if self.loop is None:
            raise AttachError("no pipeline is cached; call enable first")
        return str(diffcache.report(self.loop))
