"""One cache on its own copy of a pipeline's denoiser, and what one timed call of it shows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline

import diffcache
from diffcache.eval import peers
from diffcache.eval.metrics import pixels
from diffcache.eval.record import Setting
from diffcache.features.base import Method


@dataclass
class Draw:
    """One call of a pipeline.

    Attributes:
        call_seconds: Wall time of the whole call.
        denoiser_seconds: Wall time of its denoiser calls.
        denoiser_cpu_seconds: CPU time of the thread in them.
        computed: Denoiser calls in which the last block was computed.
        pictures: uint8 `[B, H, W, 3]`.
    """

    call_seconds: float
    denoiser_seconds: float
    denoiser_cpu_seconds: float
    computed: int
    pictures: np.ndarray[Any, Any]


@dataclass
class Contender:
    """A pipeline with one cache in it, or none.

    Attributes:
        name: Name in the table.
        pipe: A pipeline with a denoiser and a scheduler of its own; the rest is shared.
        cache: The method of diffcache or the configuration of diffusers, None for none.
        draws: The timed calls.
        held_bytes: Most bytes held at the end of a step, in the warm-up.
        first_seconds: Denoiser seconds of the first call, in which diffcache learns the model.
    """

    name: str
    pipe: FluxPipeline
    cache: Any = None
    draws: list[Draw] = field(default_factory=list)
    held_bytes: int = 0
    first_seconds: float = 0.0

    @property
    def is_ours(self) -> bool:
        """Whether the cache is one of diffcache."""
        return isinstance(self.cache, Method)

    def attach(self) -> Contender:
        """Put the cache in."""
        if self.is_ours:
            diffcache.wrap(self.pipe, self.cache)
        elif self.cache is not None:
            self.pipe.transformer.enable_cache(self.cache)
        return self

    def detach(self) -> None:
        """Take the cache out again."""
        if self.is_ours:
            diffcache.unwrap(self.pipe)
        elif self.cache is not None:
            self.pipe.transformer.disable_cache()

    def held(self) -> int:
        """Return the bytes that the cache holds now."""
        if self.is_ours:
            return diffcache.report(self.pipe).held_bytes
        return peers.held_bytes(self.pipe.transformer)


def separate(pipe: FluxPipeline) -> FluxPipeline:
    """Return a pipeline with a copy of the denoiser and of the scheduler; the rest is shared."""
    parts = dict(pipe.components)
    parts["transformer"] = copy.deepcopy(pipe.transformer)
    parts["scheduler"] = type(pipe.scheduler).from_config(pipe.scheduler.config)
    copied = FluxPipeline(**parts)
    copied.set_progress_bar_config(disable=True)
    return copied


class Meter:
    """Times the denoiser calls of a pipeline, and counts those that compute the last block.

    Its hooks are the outermost, whatever a cache has put in, so that the cost of every cache is
    within. An accelerator is waited for on both sides of every call.
    """

    def __init__(self, model: Any, setting: Setting) -> None:
        self.setting = setting
        self.seconds = self.cpu_seconds = 0.0
        self.computed = 0
        last = list(model.single_transformer_blocks)[-1].attn.to_q
        self._hooks = [
            model.register_forward_pre_hook(self._start, prepend=True),
            model.register_forward_hook(self._stop),
            last.register_forward_hook(self._count),
        ]

    def _start(self, *given: Any) -> None:
        self.setting.wait()
        self._began, self._began_cpu = time.perf_counter(), time.thread_time()

    def _stop(self, *given: Any) -> None:
        self.setting.wait()
        self.seconds += time.perf_counter() - self._began
        self.cpu_seconds += time.thread_time() - self._began_cpu

    def _count(self, *given: Any) -> None:
        self.computed += 1

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()


class Drawing:
    """How every contender is called.

    Args:
        setting: Device and dtype.
        steps: Sampling steps.
        size: Arguments that fix the size of a picture.
    """

    def __init__(self, setting: Setting, steps: int, size: dict[str, Any]) -> None:
        self.setting, self.steps, self.size = setting, steps, size

    def __call__(
        self,
        contender: Contender,
        prompts: Sequence[str],
        seed: int,
        each_step: Callable[[], None] | None = None,
    ) -> Draw:
        """Draw pictures, each from the noise of its own seed.

        Args:
            contender: Who draws.
            prompts: One for each picture.
            seed: Of the first picture; the next has the next.
            each_step: Called behind every step, None in timed calls.
        """
        noise = [torch.Generator("cpu").manual_seed(seed + n) for n in range(len(prompts))]
        more: dict[str, Any] = {}
        if each_step is not None:
            more["callback_on_step_end"] = _callback(each_step)
        with Meter(contender.pipe.transformer, self.setting) as meter:
            self.setting.wait()
            started = time.perf_counter()
            images = contender.pipe(
                list(prompts), num_inference_steps=self.steps, generator=noise, **self.size, **more
            ).images
            self.setting.wait()
            seconds = time.perf_counter() - started
        pictures = np.stack([np.asarray(image) for image in images])
        return Draw(seconds, meter.seconds, meter.cpu_seconds, meter.computed, pictures)

    def warm_up(self, contender: Contender, prompts: Sequence[str], seed: int) -> None:
        """Draw once untimed, with an eye on the bytes held."""
        most = 0

        def watch() -> None:
            nonlocal most
            most = max(most, contender.held())

        draw = self(contender, prompts, seed, watch)
        contender.first_seconds, contender.held_bytes = draw.denoiser_seconds, most


def _callback(each_step: Callable[[], None]) -> Callable[..., dict[str, Any]]:
    """Return a function that diffusers' pipelines can call behind every step."""

    def call(*given: Any) -> dict[str, Any]:
        each_step()
        return {}

    return call


def psnr(pictures: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> list[float | None]:
    """Return the peak signal-to-noise ratio of each picture in dB, None where they are equal.

    Args:
        pictures: uint8 `[B, H, W, 3]`; the peak is 255.
        others: Same shape.
    """
    one, other = (torch.from_numpy(x).movedim(-1, 1) for x in (pictures, others))
    equal = (one == other).flatten(1).all(1).tolist()
    found = pixels.psnr(one, other).tolist()
    return [None if same else value for same, value in zip(equal, found, strict=True)]
