"""Compute the bytes that a method will hold, before a run and without the model's weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffcache.attach.cache_context import branch
from diffcache.attach.handle import Handle
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.attach.reuse.reusing import FeatureReuse
from diffcache.attach.run import Timeline
from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.combine import Combine, reuse_of
from diffcache.step import Step

_EDITORS = re.compile("FluxKontext")  # pipelines that append the tokens of a picture to edit
_RECORDS = 8  # computed steps after which every forecast holds as many tensors as it ever will


@dataclass(frozen=True)
class ExpectedBytes:
    """Bytes that a method will hold: of each guidance branch, and those that all branches of a run share.

    The latter are what a schedule looks at, where the first branch decides for all.
    """

    branch: int = 0
    shared: int = 0

    def of(self, branches: int) -> int:
        """Return the bytes of a run with as many guidance branches, each in a call of its own."""
        return branches * self.branch + self.shared

    def __add__(self, other: ExpectedBytes) -> ExpectedBytes:
        return ExpectedBytes(self.branch + other.branch, self.shared + other.shared)


def expectation(handle: Handle) -> tuple[ExpectedBytes, Size] | None:
    """Return the bytes that a wrapped pipeline will hold at its default size.

    Returns:
        Bytes of all denoisers, and the size; None where either is not known.
    """
    target, total, size = handle.target(), ExpectedBytes(), None
    try:
        for denoiser in handle.denoisers:
            size = size_of(target, denoiser.model, {})
            total += bytes_of(denoiser.model, denoiser.method, size, compression_of(target))
    except (ValueError, AttachError):
        return None
    return None if size is None else (total, size)


def bytes_of(
    model: nn.Module, method: Method, size: Size, compression: tuple[int, int] | None = None
) -> ExpectedBytes:
    """Return the bytes that a method holds of one denoiser, which may be on the `meta` device itself.

    A copy of the denoiser without weights, on torch's `meta` device, is called once with inputs
    of the right shapes, so that the count is that of a real run. The compression, pixels of a latent row
    and frames of a latent frame, is that of the usual autoencoder of the denoiser's class where it is None.

    Raises:
        AttachError: If the denoiser cannot be cached with this method.
        ValueError: If the method holds more than features, or the size does not fit.
    """
    config: Mapping[str, Any] = model.config  # type: ignore[assignment]
    inputs = inputs_of(type(model).__name__, config, size, compression)
    check_reuse(method)
    check_skipped_layers(model, size)
    empty = without_weights(model)
    given = in_dtype(inputs, empty)
    with Rehearsal(empty, method) as rehearsal:
        rehearsal.call(given, size)
        if size.skip_layers:  # one more branch, which has half of the samples
            half = {key: value[: size.batch // 2] for key, value in given.items()}
            rehearsal.call(half | {"skip_layers": list(size.skip_layers)}, size, number=1)
        found, reuse = rehearsal.held(calls=1), reuse_of(method)
        if reuse is None or reuse.feature != "guidance":
            return found
        rehearsal.call(given, size, number=1)  # which holds its difference to the first branch
        other = rehearsal.held(calls=1).branch - found.branch
        return ExpectedBytes(other, found.branch - other + found.shared)


def check_skipped_layers(model: nn.Module, size: Size) -> None:
    """Raise ValueError if a denoiser has no skip-layer guidance, or the batch none in one call."""
    if not size.skip_layers:
        return
    skipped = f"skip_guidance_layers={list(size.skip_layers)}"
    if "skip_layers" not in inspect.signature(type(model).forward).parameters:
        name = type(model).__name__
        raise ValueError(f"{skipped}: {name} has no skip-layer guidance; leave it out")
    if size.batch % 2:
        raise ValueError(f"{skipped} needs guidance in one batch, an even one; batch={size.batch}")


def check_reuse(method: Method) -> None:
    """Raise ValueError if a method does more than reuse features."""
    if not all(isinstance(ability, Combine) for ability in method.abilities()):
        raise ValueError(f"{method!r}: holds more than features, which only a run can tell")


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a denoiser on torch's `meta` device, with the dtypes of its weights."""
    cls: Any = type(model)
    with torch.device("meta"):
        empty: nn.Module = cls.from_config(model.config).eval()
    # Streams have the dtypes of the weights, some of which a model keeps in float32.
    state = model.state_dict()
    weights = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    empty.load_state_dict(weights, strict=False, assign=True)
    return empty


def in_dtype(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return forward arguments whose float32 tensors have the dtype of a denoiser's weights."""
    dtype = next(model.parameters()).dtype
    return {
        key: value.to(dtype) if getattr(value, "dtype", None) == torch.float32 else value
        for key, value in inputs.items()
    }


class Rehearsal(Handle):
    """A method that reuses features alone, on a denoiser on the `meta` device, whose steps are called by hand."""

    def __init__(self, model: nn.Module, method: Method) -> None:
        super().__init__(model, {"model": model}, method)
        self.restart(None)

    def call(self, inputs: Mapping[str, Any], size: Size, step: int = 0, number: int = 0) -> None:
        """Call the denoiser with inputs of a size as in a step of a run, and a guidance branch, both from 0.

        Raises:
            ValueError: If the denoiser cannot be called at this size.
        """
        model = self.denoisers[0].model
        self.run().ticks = step + 1  # the scheduler tells the steps: a timestep without a value cannot
        try:
            with torch.no_grad(), branch(f"branch {number}"):
                model(**inputs)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{type(model).__name__} cannot be called at {size}, which is larger or smaller "
                f"than it is made for: give another height=, width= or frames= ({error})"
            ) from error

    def held(self, records: int = _RECORDS, calls: int = 0) -> ExpectedBytes:
        """Return the bytes that the method holds after some computed steps, by default as many as fill every forecast.

        They are shared out among `calls` branches; 0 for all that were called.
        """
        denoiser, run = self.denoisers[0], self.run()
        (reuse,) = denoiser.extensions
        assert isinstance(reuse, FeatureReuse)
        timeline = run.timelines[denoiser]
        for one in timeline.branches:
            kept = one.storage[reuse]
            for held in kept.features.values():
                latest = list(kept.output[1])
                for place, state in enumerate(held.states):
                    shape, kind, device = held.shapes[place]
                    for index in range(1, records):
                        fresh = torch.empty(shape, dtype=kind, device=device)
                        step = Step(index, branch=one.number)
                        reuse.setup.instead.record(state, step, fresh)
                        if latest:
                            latest[place] = fresh
                kept.output = kept.output[0], latest
        _fill_gates(reuse, timeline)
        total = sum(tensor.nbytes for tensor in denoiser.tensors(run))
        when, state = reuse.setup.parts.when, timeline.storage[reuse].state
        own = [] if state is None or when.by_branch else when.held(state)
        shared = sum(tensor.nbytes for tensor in own)
        return ExpectedBytes((total - shared) // (calls or len(timeline.branches)), shared)


def _fill_gates(reuse: FeatureReuse, timeline: Timeline) -> None:
    """Let the gates of a run see as many probes as their forecasts ever hold."""
    when = reuse.setup.parts.when
    decisions = [timeline.storage[reuse], *(b.storage[reuse].decision for b in timeline.branches)]
    states = {id(each.state): each.state for each in decisions if each.state is not None}
    for state in states.values():
        for probe in when.held(state)[:1]:
            for index in range(1, _RECORDS):
                when.computed(state, Step(index), torch.empty_like(probe))


def size_of(target: Any, model: nn.Module, given: Mapping[str, int | None]) -> Size:
    """Return the size of a call: sizes that were given, else those of the pipeline's defaults.

    Raises:
        ValueError: If the inputs of the denoiser's class are not known, or it has no default size.
    """
    cls = type(model).__name__
    known = INPUTS.get(cls)
    if known is None:
        raise ValueError(f"{cls}: its inputs are not known; known are {', '.join(INPUTS)}")
    pipeline = not isinstance(target, nn.Module)
    call = inspect.signature(type(target).__call__).parameters if pipeline else {}
    config: Mapping[str, Any] = model.config  # type: ignore[assignment]
    rows = getattr(target, "default_sample_size", None) or config.get("sample_size")
    compression = compression_of(target) or (known.spatial, known.temporal)
    side = rows * compression[0] if isinstance(rows, int) else None
    defaults = {
        "height": _default(call, "height") or side,
        "width": _default(call, "width") or side,
        "frames": _default(call, "num_frames") or 1,
        "text_tokens": known.more_text + (_default(call, "max_sequence_length") or 77),
        "batch": 1,
        "references": int(_EDITORS.match(type(target).__name__) is not None),
    }
    size = {key: defaults[key] if given.get(key) is None else given[key] for key in defaults}
    known_size: dict[str, Any] = {key: value for key, value in size.items() if value is not None}
    missing = [key for key in size if key not in known_size]
    if missing:
        raise ValueError(f"{missing[0]}=None: {cls} has no default size; give height= and width=")
    return Size(**known_size)


def _default(call: Mapping[str, inspect.Parameter], name: str) -> int | None:
    """Return the default of an argument of a pipeline's call, None where it has none."""
    value = call[name].default if name in call else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def compression_of(target: Any) -> tuple[int, int] | None:
    """Return pixels of a latent row and frames of a latent frame of a pipeline's autoencoder."""
    in_space = ("vae_spatial_compression_ratio", "vae_scale_factor_spatial", "vae_scale_factor")
    in_time = ("vae_temporal_compression_ratio", "vae_scale_factor_temporal")
    spatial = [getattr(target, name, None) for name in in_space]
    temporal = [getattr(target, name, None) for name in in_time]
    rows = next((value for value in spatial if value), None)
    config = getattr(getattr(target, "vae", None), "config", {})
    if rows is None and "block_out_channels" in config:  # as pipelines compute it, DiT's in place
        rows = 2 ** (len(config["block_out_channels"]) - 1)
    return None if rows is None else (rows, next((value for value in temporal if value), 1))
