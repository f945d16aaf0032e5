"""What a sampling run with a cache is made of: the parts of a step, and the rest of the call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from diffusers import FluxPipeline
from rich.table import Table
from torch import Tensor, nn

from diffcache.eval.loop import Loop, Plain
from diffcache.eval.record import Setting, stats
from diffcache.eval.tiny import emptied
from diffcache.features.base import Method
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.taylorseer import TaylorSeer
from diffcache.pipelines.small.flux import CALL
from diffcache.pipelines.small.scenes import held_out_prompts

_NEVER = 10**9
_WARMUP = 8
_ROW = 5  # skipped steps between two computed ones


def measure(
    setting: Setting, pipe: FluxPipeline, batch: int, *, steps: int, calls: int
) -> dict[str, Any]:
    """Time the parts of a run on real inputs, in turn, `calls` times.

    Args:
        setting: Device and dtype.
        pipe: The pipeline, without a cache.
        batch: Prompts in a call.
        steps: Sampling steps of a run.
        calls: Timed calls of every part.

    Returns:
        Milliseconds of every part, and the account of a run of TaylorSeer at the stack.
    """
    prompts = held_out_prompts(batch, seed=3)
    call, latents, timestep = _inputs(pipe, prompts)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        parts = _parts(pipe, prompts, call, latents, timestep)
        rows = _floors(stack, pipe.transformer, call) | _skipped(stack, pipe.transformer, call)
        samples: dict[str, list[float]] = {name: [] for name in parts | rows}
        for number in range(1 + calls):
            for name, part in (parts | rows).items():
                if name in rows:  # as in a run: a computed step, then a row of skipped ones
                    parts["computed step"]()
                seconds = _timed(setting, part, _ROW if name in rows else 1)
                if number:
                    samples[name].append(seconds)
    milliseconds = {name: stats(values, 1e3) for name, values in samples.items()}
    medians = {name: values["median"] for name, values in milliseconds.items()}
    return {
        "batch": batch,
        "image_tokens": call["hidden_states"].shape[1],
        "milliseconds": milliseconds,
        "account": _account(medians, steps),
        "reachable_fraction": _reachable(medians, steps),
    }


def _timed(setting: Setting, part: Callable[[], Any], times: int) -> float:
    """Return the mean time of some calls in a row."""
    setting.wait()
    started = setting.clock()
    for _ in range(times):
        part()
    setting.wait()
    return (setting.clock() - started) / times


def _inputs(pipe: FluxPipeline, prompts: list[str]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the arguments of the denoiser and of the scheduler in the middle of a short run."""
    seen: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    noise = torch.Generator("cpu").manual_seed(0)
    pipe(prompts, num_inference_steps=4, generator=noise, output_type="latent", **CALL)
    hook.remove()
    call = {**seen[2], "joint_attention_kwargs": None}
    return call, call["hidden_states"], pipe.scheduler.timesteps[0]


def _parts(
    pipe: FluxPipeline, prompts: list[str], call: dict[str, Any], latents: Tensor, timestep: Tensor
) -> dict[str, Callable[[], Any]]:
    """Return what a run is made of, each as a function to be timed."""
    model: nn.Module = pipe.transformer
    text, scheduler = call["encoder_hidden_states"], pipe.scheduler
    width = pipe.transformer.config.num_attention_heads * pipe.transformer.config.attention_head_dim
    streams = [stream.new_zeros(*stream.shape[:2], width) for stream in (text, latents)]
    high, wide = CALL["height"], CALL["width"]

    def forecast() -> None:  # of the residuals of both lists, and their sum with the base
        for _ in range(2):
            for stream in streams:
                torch.add(stream, torch.add(stream, stream, alpha=3.0))

    def step() -> None:
        scheduler._step_index = 0
        scheduler.step(latents, timestep, latents, return_dict=False)

    def decode() -> None:
        unpacked = pipe._unpack_latents(latents, high, wide, pipe.vae_scale_factor)
        decoded = pipe.vae.decode(unpacked.to(pipe.vae.dtype), return_dict=False)[0]
        pipe.image_processor.postprocess(decoded, output_type="pil")

    def encode() -> None:
        tokens = CALL["max_sequence_length"]
        pipe.encode_prompt(prompts, None, max_sequence_length=tokens)

    return {
        "computed step": lambda: model(**call),
        "forecast arithmetic": forecast,
        "scheduler step": step,
        "text encoders": encode,
        "autoencoder and pictures": decode,
    }


def _computed(steps: int) -> int:
    """Return how many steps TaylorSeer(every=6) computes."""
    return sum(step < 3 or (step - 2) % 6 == 0 for step in range(steps))


def _reachable(ms: dict[str, float], steps: int) -> dict[str, float]:
    """Return what part of the allowed ratio a cache of no cost at all would reach.

    Skipped steps still run the embedders and the head, and with a gate the first block.
    """
    computed = _computed(steps)
    whole = computed * ms["computed step"]
    return {
        "no block runs": whole / (whole + (steps - computed) * ms["embedders and head"]),
        "first block runs": whole
        / (whole + (steps - computed) * ms["embedders, first block and head"]),
    }


def _floors(
    stack: ExitStack, model: nn.Module, call: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Return calls of copies of the model without blocks, and with the first one only."""
    found: dict[str, Callable[[], Any]] = {}
    for keep, name in enumerate(("embedders and head", "embedders, first block and head")):
        floor = Plain(copy.deepcopy(model), call)
        stack.enter_context(emptied(floor.model, keep))
        found[name] = floor.call
    return found


def _skipped(
    stack: ExitStack, model: nn.Module, call: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Return skipped steps of wrapped copies of the model; the end of a step is within them."""
    methods: dict[str, Method] = {
        "skipped step, stack": TaylorSeer(_NEVER, 1, site="stack"),
        "skipped step, module": TaylorSeer(_NEVER, 1, site="module"),
        "skipped step, gated": ConfidenceGatedTaylor(float("inf")),
    }
    found: dict[str, Callable[[], Any]] = {}
    for name, method in methods.items():
        loop = stack.enter_context(Loop(copy.deepcopy(model), method, call))
        loop.take(_WARMUP)
        found[name] = lambda loop=loop: loop.take(1)  # type: ignore[misc]
    return found


def _account(ms: dict[str, float], steps: int) -> dict[str, float]:
    """Return the milliseconds of every part in a run of TaylorSeer(every=6) at the stack."""
    computed = _computed(steps)
    skipped = steps - computed
    frame = ms["skipped step, stack"] - ms["embedders and head"] - ms["forecast arithmetic"]
    return {
        "computed steps": computed * ms["computed step"],
        "skipped steps: embedders and head": skipped * ms["embedders and head"],
        "skipped steps: forecast arithmetic": skipped * ms["forecast arithmetic"],
        "skipped steps: diffcache": skipped * frame,
        "scheduler": steps * ms["scheduler step"],
        "text encoders": ms["text encoders"],
        "autoencoder and pictures": ms["autoencoder and pictures"],
    }


def tables(part: dict[str, Any]) -> list[Table]:
    """Return the parts and the account as tables."""
    parts = Table("", "ms", "quartiles", title=f"parts of a run, batch {part['batch']}")
    for name, ms in part["milliseconds"].items():
        parts.add_row(name, f"{ms['median']:.3f}", f"{ms['q1']:.3f}-{ms['q3']:.3f}")
    title = f"a run of TaylorSeer(every=6) at the stack, batch {part['batch']}"
    account = Table("", "ms", "share", title=title)
    total = sum(part["account"].values())
    for name, ms in part["account"].items():
        account.add_row(name, f"{ms:,.1f}", f"{ms / total:.1%}")
    account.add_section()
    for name, share in part["reachable_fraction"].items():
        account.add_row(f"reachable part of the allowed ratio: {name}", "", f"{share:.1%}")
    return [parts, account]
