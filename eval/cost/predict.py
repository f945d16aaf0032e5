"""Predict cost and savings of a cache, before a run and without weights: `diffcache.predict`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffcache.anchor import owner_of
from diffcache.api import choice_for, method_for
from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.eval.cost.configured import Denoiser, resolve
from diffcache.eval.cost.roofline import ASSUMPTIONS, DEVICES, Device, Repeats
from diffcache.features.base import Method, When, check_int
from diffcache.features.combine import Combine, reuse_of
from diffcache.files import read_json
from diffcache.memory import Rehearsal, check_reuse, compression_of, in_dtype, size_of, without_weights
from diffcache.presets.choose import presets
from diffcache.presets.published import models
from diffcache.run_report import human, share
from diffcache.step import Site, Step
from diffcache.targets import denoisers_of

Kind = tuple[tuple[bool, frozenset[str]], ...]  # of a step: what every branch computes


@dataclass(frozen=True)
class Cost:
    """Cost of the denoiser calls of a run.

    Attributes:
        steps: Steps in which any branch is computed.
        flops: Operations of all calls; a multiply-add is two.
        seconds: Least seconds of all calls on the device.
        expected: Seconds to be expected, host included; not measured.
    """

    steps: int
    flops: float
    seconds: float
    expected: float


@dataclass(frozen=True)
class Prediction:
    """Cost of a run under a method, before the run.

    Attributes:
        model: Class of the denoiser, and the model whose sizes it has.
        method: The method.
        why: Choice of the method by what the model is, empty where it was named.
        size: Size of a denoiser call.
        steps: Steps of the run.
        calls: Denoiser calls of a step: 2 for guidance in two calls.
        device: Device of the seconds.
        uncached: Cost without a cache.
        most: Cost if a gate skips nothing; where none decides at run time, the cost.
        least: Cost if a gate skips all that its settings allow; else the same.
        skipped: Cost of a step that the method skips whole; None where it skips none so.
        held_bytes: Most bytes that the cache holds.
        weight_bytes: Bytes of the denoiser's weights.
        remarks: Remarks, a sentence each.
    """

    model: str
    method: Method
    why: str
    size: Size
    steps: int
    calls: int
    device: Device
    uncached: Cost
    most: Cost
    least: Cost
    skipped: Cost | None
    held_bytes: int
    weight_bytes: int
    remarks: tuple[str, ...] = field(default=())

    @property
    def is_exact(self) -> bool:
        """True where the computed steps follow from the settings, and no value decides them."""
        return self.most == self.least

    @property
    def flops_ratio(self) -> tuple[float, float]:
        """Ratio of uncached to cached operations, at least and at most."""
        whole = self.uncached.flops
        return whole / self.most.flops, whole / self.least.flops

    @property
    def seconds_ratio(self) -> tuple[float, float]:
        """Ratio of uncached to cached seconds of the device, at least and at most."""
        whole = self.uncached.seconds
        return whole / self.most.seconds, whole / self.least.seconds

    def lines(self) -> list[str]:
        """Return the predictions, a sentence each."""
        most, least, whole = self.most, self.least, self.uncached
        size, calls = self.size, f"{self.calls} call{'s' * (self.calls > 1)}"
        film = f", {size.frames} frames" if size.frames > 1 else ""
        skipped = [share(max(whole.flops - c.flops, 0), c.flops) for c in (most, least)]
        spent = [f"{cost.seconds:.3g}" for cost in (most, least)]
        later = [f"{cost.expected:.3g}" for cost in (most, least)]
        flops = f"{_range(human(least.flops), human(most.flops))} of {human(whole.flops)}"
        held, weights = human(self.held_bytes, "B"), human(self.weight_bytes, "B")
        seconds = f"at least {_range(*spent[::-1])} instead of {whole.seconds:.3g}"
        lines = [
            textwrap.shorten(repr(self.method), 100, placeholder=" ..."),
            f"on {self.model}, {size.width} x {size.height}{film}",
            f"calls    {calls} a step, batch {size.batch}, {size.text_tokens} tokens of text",
            f"steps    {self.steps}: {_range(f'{least.steps}', f'{most.steps}')} computed",
            f"FLOPs    {flops}, {_range(*skipped)} skipped, {_times(self.flops_ratio)} fewer",
            f"bytes    {held} held, beside {weights} of weights",
            f"seconds  {seconds}, {_times(self.seconds_ratio)} fewer, on {self.device}",
            f"expected {_range(*later[::-1])} instead of {whole.expected:.3g}: not measured",
        ]
        if not self.is_exact:
            lines.append(
                "range    a gate decides at run time by what it sees; the ends are the steps that "
                "its settings force, and all steps: only a run, or diffcache.tune, tells where "
                "between them it falls"
            )
        lines += [f"preset   {self.why}"] if self.why else []
        return [*lines, *self.remarks, f"assumed  {ASSUMPTIONS}"]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold."""
        plain: Any = replace(self, method=None)  # type: ignore[arg-type]
        return {**asdict(plain), "method": repr(self.method)}


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _times(ratio: tuple[float, float]) -> str:
    return f"{_range(*(f'{value:.2f}' for value in ratio))} times"


def predict(
    target: Any,
    method: Any = None,
    *,
    preset: str | None = None,
    published: str | None = None,
    steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    text_tokens: int | None = None,
    batch: int = 1,
    guidance: bool | None = None,
    device: str | Device = "h100",
    **settings: Any,
) -> Prediction:
    """Predict operations, bytes and least seconds of a run, on configurations alone.

    The denoiser is built on torch's `meta` device, where tensors have shapes and no values, and the
    method's own schedule says what every step computes. Where a gate looks at values to decide,
    both ends of what it may do are returned. Weights are taken as bfloat16, but for a pipeline or
    model that is there.

    Args:
        target: Class name of a pipeline, which stands for the first model in
            `diffcache.presets` that it runs; class name of a denoiser, in its default
            configuration; a saved pipeline's or model's directory, of which only configurations
            are read, a configuration file, or a configuration with `_class_name`; a shipped model;
            a Hugging Face model ID; a pipeline or denoiser itself.
        method: A method, or its name; None for that of the preset, as in `diffcache.wrap`.
        preset: Preset to take in place of a method: `quality`, `balanced`, `fast`.
        published: Model whose sizes the class name of a pipeline stands for.
        steps: Steps of the run; None for the pipeline's default.
        height: Pixels; None for the pipeline's default, or for the width of a picture.
        width: Pixels; None for the pipeline's default, or for the height of a picture.
        frames: Frames of a video; None for the pipeline's default.
        text_tokens: Length of the prompt as the denoiser sees it, padding included; None for the
            pipeline's default.
        batch: Samples.
        guidance: Whether a step computes the sample with and without its prompt; None for what
            pipelines of the class do by default.
        device: Name in `diffcache.eval.cost.roofline.DEVICES`, or a device of yours.
        **settings: Settings of a method given by name, such as `every=4`.

    Raises:
        AttachError: If the model cannot be cached with this method, or has no such preset.
        FileNotFoundError: If there is no such directory.
        ValueError: If the model's inputs are not known, it has two denoisers, the method does more
            than reuse features, or the size or a setting does not fit.

    Examples:
        >>> diffcache.predict("FluxPipeline", preset="fast", device="h200")  # doctest: +SKIP
    """
    check_int("batch", batch, 1)
    place = DEVICES.get(device.lower()) if isinstance(device, str) else device
    if place is None:
        raise ValueError(f"device={device!r}: must be one of {', '.join(DEVICES)}, or a Device")
    pipe, model = _resolved(target, published, preset)
    remarks: list[str] = []
    cls, name = type(model).__name__, next(iter(denoisers_of(pipe)))
    if cls in INPUTS and INPUTS[cls].temporal == 1:  # a picture of one side is a square
        height = width if height is None else height
        width = height if width is None else width
    asked = {"height": height, "width": width, "frames": frames, "text_tokens": text_tokens}
    size = size_of(pipe, model, {**_saved_size(pipe, cls), **_given(asked), "batch": batch})
    usual = INPUTS[cls].guidance
    if guidance is None:
        guidance = _guides(usual, getattr(pipe, "saved_call", {}))
    branches = 2 if guidance and usual != "batch" else 1
    size = replace(size, batch=2 * batch) if guidance and branches == 1 else size
    total = _steps(pipe, steps)
    choice = None
    if method is None or preset is not None:
        choice = choice_for(pipe, {name: model}, method, preset, settings)
        method, settings = choice.given([name], settings)
    chosen = method_for(pipe, {name: model}, method, **settings).for_denoiser(name)
    chosen.check_model(facts_of(model, getattr(pipe, "scheduler", None), pipe))
    if choice is not None and choice.preset is not None:
        known = choice.preset
        remarks += [f"measured {known.measured} (all of a run, by their code)"] if known.measured else []
        if known.steps != total:
            remarks.append(f"preset   it holds for {known.steps} steps, and these are {total}")
    cost = _Costs(model, chosen, (size, compression_of(pipe), total, branches), place)
    return Prediction(
        f"{cls}{_sizes_of(pipe)}", chosen, choice.why if choice else "", size, total, branches,
        place, cost.uncached, cost.most, cost.least, cost.skipped, cost.held_bytes,
        sum(value.nbytes for value in model.state_dict().values()), tuple(remarks),
    )  # fmt: skip


# the model -------------------------------------------------------------------------------------


def _resolved(target: Any, published: str | None, preset: str | None) -> tuple[Any, nn.Module]:
    """Return a pipeline, or a stand-in for one, and its denoiser."""
    if not isinstance(target, (str, Path, Mapping)):
        denoisers = denoisers_of(target)
        if published is not None:
            raise ValueError(f"published={published!r}: is for class names; leave it out")
        _check_one(denoisers)
        return target, next(iter(denoisers.values()))
    import diffusers

    cls = getattr(diffusers, str(target), None) if isinstance(target, str) else None
    if isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline):
        return _of_class(cls, published, preset)
    if published is not None:
        raise ValueError(f"published={published!r}: {str(target)!r} is no class of pipelines; leave it out")
    if isinstance(target, Mapping):
        model = _built(resolve(target))
        return model, model
    from diffcache.pipelines.demo.describe import directory_of
    from diffcache.pipelines.demo.saved import call_defaults, pipeline_of

    path = Path(target)
    path = path if path.is_file() else directory_of(str(target))
    denoiser = resolve(path)
    model = _built(denoiser)
    if not (path / "model_index.json").exists():
        return model, model
    parts = ("transformer", "transformer_2")
    _check_one([one for one in parts if (path / one / "config.json").exists()])
    name, parameters = pipeline_of(path)
    pipe = _stand_in(getattr(diffusers, name, None), name, model, denoiser.compression)
    tokenizer = path / "tokenizer" / "tokenizer_config.json"
    if "max_sequence_length" not in parameters and tokenizer.exists():  # as long as it pads
        pipe.saved_call = {"max_sequence_length": read_json(tokenizer).get("model_max_length")}
    pipe.saved_call = {**getattr(pipe, "saved_call", {}), **call_defaults(path)}
    return pipe, model


def _check_one(denoisers: Any) -> None:
    """Raise ValueError for pipelines of two denoisers, as of Wan 2.2."""
    if len(denoisers) > 1:
        raise ValueError(
            f"denoisers {', '.join(denoisers)}: the scheduler says how many steps each has; "
            "predict each of them, by its own folder and steps="
        )


def _of_class(cls: Any, published: str | None, preset: str | None) -> tuple[Any, nn.Module]:
    """Return a stand-in for a pipeline of a class: a published model that it runs.

    Raises ValueError if there is none of that name, or nothing tells which of several it is.
    """
    name, takes = cls.__name__, inspect.signature(cls.__init__).parameters.values()
    texts = [str(getattr(given.annotation, "__name__", given.annotation)) for given in takes]
    known = {
        one: entry
        for one, entry in models().items()
        if entry.model in INPUTS
        and entry.sizes
        and re.fullmatch(entry.pipeline, name)
        and any(entry.model in text for text in texts)
    }
    level = (preset or "").rpartition("/")
    wanted = published or level[0]
    fit = {
        one: entry
        for one, entry in known.items()
        if one == wanted or (not wanted and level[2] in (*presets().get(one, ()), "") and one in presets())
    }
    if not fit or len({repr(entry.built) for entry in fit.values()}) > 1:
        told = f"say which: published={' or '.join(map(repr, fit or known))}"
        told = told if known else "name the directory of a model, or a configuration file"
        about = f"{name}, published={wanted!r}" if wanted else name
        raise ValueError(f"{about}: stands for {'several models' if fit else 'no known model'}; {told}")
    chosen, entry = next(iter(fit.items()))
    model = _built(Denoiser(entry.model, entry.built))
    pipe = _stand_in(cls, name, model, entry.compression)
    pipe.published = chosen
    return pipe, model


def _built(denoiser: Denoiser) -> nn.Module:
    """Build a denoiser without memory, in bfloat16."""
    return nn.Module.to(denoiser.build(), torch.bfloat16)


def _stand_in(cls: Any, name: str, model: nn.Module, compression: Any) -> Any:
    """Return a stand-in for a pipeline: its denoiser, its call's defaults, its class's name."""
    key = "unet" if "UNet" in type(model).__name__ else "transformer"
    rows, frames = compression or (None, None)
    config: Any = model.config
    facts = {
        "components": {key: model},
        key: model,
        "__call__": object.__init__ if cls is None else cls.__call__,
        "vae_scale_factor_spatial": rows,
        "vae_scale_factor_temporal": frames,
        "default_sample_size": config.get("sample_size"),
    }
    return type(name, (), facts)()


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


def _saved_size(pipe: Any, cls: str) -> dict[str, int]:
    """Return the size of a call as the folder of a saved pipeline says it."""
    call = getattr(pipe, "saved_call", {})
    words = call.get("max_sequence_length")
    text = None if words is None or cls not in INPUTS else INPUTS[cls].more_text + words
    size = {"height": call.get("height"), "width": call.get("width")}
    return _given({**size, "frames": call.get("num_frames"), "text_tokens": text})


def _guides(usual: str, call: Mapping[str, Any]) -> bool:
    """Return whether a step computes with and without a prompt, as a saved call says or usual."""
    if usual == "none":  # that scale is an input of the model
        return bool(call.get("true_cfg_scale", 1) > 1)
    return bool(call.get("true_cfg_scale", call.get("guidance_scale", 2)) > 1)


def _sizes_of(pipe: Any) -> str:
    known = getattr(pipe, "published", None)
    return f" ({known})" if isinstance(known, str) else ""


def _steps(pipe: Any, steps: int | None) -> int:
    """Return the steps of a run: those asked for, else the default of the pipeline's call."""
    if steps is not None:
        check_int("steps", steps, 1)
        return steps
    known = {} if isinstance(pipe, nn.Module) else inspect.signature(type(pipe).__call__).parameters
    default = known["num_inference_steps"].default if "num_inference_steps" in known else None
    default = getattr(pipe, "saved_call", {}).get("num_inference_steps", default)
    if not isinstance(default, int):
        raise ValueError("steps=None: there is no pipeline whose default it is; give steps=")
    return default


# the cost --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Replay(When):
    """A schedule whose decisions are given, with the state and the probe of another."""

    of: When
    kinds: tuple[Kind, ...]

    @property
    def by_branch(self) -> bool:  # type: ignore[override]
        return self.of.by_branch

    @property
    def probe(self) -> Any:
        return self.of.probe

    @property
    def sites(self) -> tuple[str, ...]:
        return self.of.sites

    def init(self) -> Any:
        return self.of.init()

    def should_compute(self, state: Any, step: Step, probe: Any) -> bool:
        return self._at(step)[0]

    def computes_at(self, step: Step, site: str) -> bool:
        return site in self._at(step)[1]

    def computed(self, state: Any, step: Step, probe: Any) -> None:
        self.of.computed(state, step, probe)

    def held(self, state: Any) -> Any:
        return self.of.held(state)

    def _at(self, step: Step) -> tuple[bool, frozenset[str]]:
        kind = self.kinds[min(step.index, len(self.kinds) - 1)]
        return kind[step.branch if self.of.by_branch else 0]


class _Costs:
    """Costs of a run, from one call of each kind of its steps.

    Args:
        model: The denoiser.
        method: The method.
        run: Size of a call, compression, steps, and calls of a step.
        device: The device.
    """

    def __init__(self, model: nn.Module, method: Method, run: tuple[Size, Any, int, int], device: Device) -> None:
        size, compression, steps, branches = run
        check_reuse(method)
        parts = reuse_of(method)
        assert parts is not None
        if method.total not in (None, steps) or parts.when.total not in (None, steps):
            made_for = method.total or parts.when.total
            raise ValueError(f"steps={steps}: {method!r} is made for runs of {made_for} steps")
        config: Any = model.config
        given = inputs_of(type(model).__name__, config, size, compression)
        bare = owner_of(model) is None and all(p.is_meta for p in model.parameters())
        empty = model if bare else without_weights(model)
        inputs = in_dtype(given, empty)
        lowest, highest = (kinds_of(parts.when, steps, branches, skips) for skips in (True, False))
        kinds = list(dict.fromkeys([*lowest[1:], *highest[1:]]))
        replay = replace(parts, when=_Replay(parts.when, (highest[0], *kinds)))
        costs: dict[Kind, Cost] = {}
        alike = list(_alike(empty, parts))
        sites = len(alike) if Site.of(parts.site).is_module else 0
        with Repeats(alike, device) as repeats:
            with torch.no_grad(), repeats.counted() as plain:
                _call(empty, inputs, size)
            with Rehearsal(empty, replay) as rehearsal:
                for number in range(branches):
                    rehearsal.call(inputs, size, 0, number)
                for index, kind in enumerate(kinds, 1):
                    with repeats.counted() as spent:
                        for number in range(branches):
                            rehearsal.call(inputs, size, index, number)
                    calls = rehearsal.run().record.calls[-branches:]
                    computed = int(any(call.computed for call in calls))
                    idle = 0 if computed else sites * branches
                    costs[kind] = Cost(computed, spent.flops, spent.seconds, spent.expected(idle))
                records = sum(any(one for one, _ in kind) for kind in highest)
                made = sum(any(one for one, _ in kind) for kind in kinds)  # beside the first
                held = rehearsal.held(max(1, min(records, 8) - made))
        whole = plain.flops, plain.seconds, plain.expected()
        skips = [cost for kind, cost in costs.items() if kind in lowest and not cost.steps]
        self.skipped = skips[-1] if skips else None
        first = Cost(1, *(branches * one for one in whole))
        self.uncached = _sum([first] * steps)
        self.most, self.least = (_sum([first, *(costs[kind] for kind in kinds[1:])]) for kinds in (highest, lowest))
        self.held_bytes = held.of(branches)


def _call(model: nn.Module, inputs: Mapping[str, Any], size: Size) -> None:
    try:
        model(**inputs)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be called at {size}, which is larger or smaller than "
            f"it is made for: give another height=, width= or frames= ({error})"
        ) from error


def _sum(costs: list[Cost]) -> Cost:
    steps = sum(cost.steps for cost in costs)
    return Cost(steps, sum(c.flops for c in costs), sum(c.seconds for c in costs), sum(c.expected for c in costs))


def _alike(model: nn.Module, parts: Combine) -> Iterator[nn.Module]:
    """Yield modules of which some are alike, none inside another, that a method runs or skips."""
    anatomy, site = anatomy_of(model), Site.of(parts.site)
    if site.is_module:
        for place in anatomy.modules_at(site):
            yield model.get_submodule(f"{place.parent}.{place.child}")
    elif not anatomy.is_unet and not anatomy.opened:
        for entry in anatomy.lists:
            yield from model.get_submodule(entry.key).children()


def kinds_of(when: When, steps: int, branches: int, skips: bool) -> list[Kind]:
    """Return the work of a schedule at every step, one branch after the other.

    Some steps are computed or skipped by a look at the sample; `skips` says whether these count as skipped.
    """
    own = branches if when.by_branch else 1
    states = [when.init() for _ in range(own)]
    kinds: list[Kind] = []
    for index in range(steps):
        kind = []
        for number, state in enumerate(states):
            step = Step(index, total=steps, branch=number)
            computes = index == 0 or _decides(when, state, step, skips)
            if computes:
                when.computed(state, step, _unseen(when))
            ran = [s for s in when.sites if computes and (not index or when.computes_at(step, s))]
            kind.append((computes, frozenset(ran)))
        kinds.append(tuple(kind))
    return kinds


def _unseen(when: When) -> torch.Tensor | None:
    """Return a probe without values; None for a schedule that looks at none."""
    return None if when.probe is None else torch.empty(1, 4, 4, device="meta")


def _decides(when: When, state: Any, step: Step, skips: bool) -> bool:
    """Return whether a step is computed; `skips` decides where only values would tell."""
    try:
        return when.should_compute(state, step, _unseen(when))
    except (NotImplementedError, RuntimeError):  # it looks at values, of which there are none
        if when.probe is None:
            raise
        return not skips
