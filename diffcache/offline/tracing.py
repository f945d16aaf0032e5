"""Traced runs: everything is computed and shown to collectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diffcache.anchor import owner_of
from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.attention import Door, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.handle import Handle
from diffcache.errors import AttachError
from diffcache.features.base import Ability, Method, Probe, When
from diffcache.features.collect import Collector, Observer, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.step import Step, current_step


@dataclass(frozen=True)
class Always(When):
    """Compute every step, and show the probe of a gate, if one is given."""

    of: Probe | None = None

    @property
    def probe(self) -> Probe | None:
        """Probe that is shown."""
        return self.of

    def init(self) -> None:
        """Return nothing."""

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Traced(Method):
    """Computes everything, for runs that are watched, and asks for what collectors need beyond features."""

    name: ClassVar[str] = "traced"

    everything: Combine
    needs: tuple[Ability, ...] = ()

    def abilities(self) -> tuple[Ability, ...]:
        """Return the site, and the abilities that collectors need."""
        return (self.everything, *self.needs)


class Tracer(Observer):
    """Shows traced runs to collectors.

    Attributes:
        steps: Length of the last run, in steps that were taken: of a run that starts in the middle
            of its schedule (`strength=0.6`) or ends there (`denoising_end=0.8`) those between.
        shape: Shape of its sample, without the batch.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.shape: list[int] = []
        self._collectors: list[Collector] = []
        self._place = (0, 0)
        self._handle: Handle | None = None
        self._times: tuple[Tensor, Tensor | None] | None = None
        self._waits = False
        self._shapes: dict[int, torch.Size] = {}  # of the outputs of each branch

    def run(
        self,
        pipe: Any,
        denoisers: dict[str, nn.Module],
        collectors: Sequence[Collector],
        place: tuple[int, int],
        call: Callable[[], Any],
    ) -> Any:
        """Run a pipeline, not wrapped, once with everything computed, and show it to collectors of one site.

        `place` is the number of the pass and of the batch; `call` runs the pipeline.

        Raises:
            AttachError: If the pipeline never set its scheduler's times, or never called its denoiser after it.
            ValueError: If a number that is seen is not finite.
        """
        self._prepare(collectors, place)
        site = collectors[0].site()
        parts = replace(site, when=Always(site.when.probe), instead=Reuse())
        method = Traced(parts, tuple(a for c in collectors for a in c.abilities()))
        with ExitStack() as stack:
            self._handle = stack.enter_context(Handle(pipe, denoisers, method, observer=self))
            stack.callback(setattr, self, "_handle", None)
            for model in denoisers.values():  # before the wrap's own hook, which shows layers
                hook = model.register_forward_pre_hook(self._arrive, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            if any(c.wants_attention for c in collectors):
                for model in denoisers.values():
                    stack.enter_context(_attention_watch(model, collectors))
            out = call()
        if self._times is None:
            raise AttachError(f"{type(pipe).__name__} never set its scheduler's times")
        if self._waits:
            raise AttachError(
                f"{type(pipe).__name__} did not call its {', '.join(denoisers)} after it set its scheduler's times"
            )
        for collector in collectors:
            collector.end()
        return out

    def _prepare(self, collectors: Sequence[Collector], place: tuple[int, int]) -> None:
        self._collectors, self._place = list(collectors), place
        self._times, self._waits = None, False

    def times(self, scheduler: Any) -> None:
        """Note that a run starts; where in its schedule is known when the denoiser is called."""
        timesteps = torch.as_tensor(scheduler.timesteps).detach().cpu().float()
        sigmas = getattr(scheduler, "sigmas", None)
        if sigmas is not None:
            sigmas = torch.as_tensor(sigmas).detach().cpu().float()
        self._times, self._waits = (timesteps, sigmas), True

    def _arrive(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Tell the collectors that a run starts, at the first call of the denoiser."""
        if not self._waits:
            return
        assert self._times is not None
        assert self._handle is not None
        denoiser, run = owner_of(model), self._handle.run()
        run.seek(denoiser.named(args, kwargs).get(denoiser.anatomy.timestep))
        (timesteps, sigmas), first, last = self._times, run.begin, run.begin + (run.total or 0)
        timesteps, sigmas = timesteps[first:last], None if sigmas is None else sigmas[first : last + 1]
        self.steps, self._waits, self._shapes = len(timesteps), False, {}
        for collector in self._collectors:
            collector.begin(RunInfo(*self._place, timesteps, sigmas, self.steps))

    def _check(self, what: str, step: Step, value: Tensor) -> None:
        """Raise ValueError for numbers of which no table can be made."""
        if not torch.isfinite(value).all():
            raise ValueError(
                f"{what} at step {step.index} of batch {self._place[1]} is not finite (nan or "
                "inf), so nothing can be measured: run the pipeline in a wider dtype "
                "(torch.bfloat16 or torch.float32), or leave these prompts out"
            )

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> Tensor | None:
        """Show a fresh feature; a lone collector may replace it."""
        self._check(f"the feature of {site}", step, value)
        seen = [c.feature(step, site, index, value) for c in self._collectors]
        return seen[0] if len(seen) == 1 else None

    def output(self, step: Step, given: Tensor, value: Tensor) -> Tensor | None:
        """Show an output; a lone collector may replace it."""
        self._check("the denoiser's output", step, value)
        before = self._shapes.setdefault(step.branch, value.shape)
        if value.shape != before and any(c.one_shape for c in self._collectors):
            raise ValueError(
                f"the denoiser's output is {list(value.shape)} at step {step.index} and was {list(before)}: steps "
                "of a run are compared, so calibrate without what changes it, such as a callback that ends guidance"
            )
        self.shape = list(given.shape[1:])
        seen = [c.output(step, given, value) for c in self._collectors]
        return seen[0] if len(seen) == 1 else None

    def probe(self, step: Step, value: Tensor) -> None:
        """Show a probe."""
        self._check("what the gate looks at", step, value)
        for collector in self._collectors:
            collector.probe(step, value)

    def guided(self, step: Step, sample: Tensor, output: Tensor) -> None:
        """Show a guided output."""
        for collector in self._collectors:
            collector.guided(step, sample, output)


def _attention_watch(model: nn.Module, collectors: Sequence[Collector]) -> Any:
    """Return a context in which queries and keys of a model's blocks are shown to collectors."""
    watched = [collector for collector in collectors if collector.wants_attention]
    modules = (site for site in anatomy_of(model).modules if site.kind == "attention")
    paths = [f"{site.parent}.{site.child}" for site in modules]
    try:
        sites = [site for site in attention_sites(model) if site.path in paths]
    except AttachError:  # a processor that the door does not know
        return _AttentionMode(model, watched, paths)
    return Door(model, _Shown(watched), sites)


class _Shown:
    """Shows rotated queries and keys of every call, and leaves attention to the model."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self.collectors = collectors

    def attend(self, site: AttentionSite, call: AttentionCall) -> None:
        """Show queries and keys of the call."""
        step = current_step()
        if step is not None:
            query, key = (x.detach().transpose(1, 2) for x in call.rotated())
            for collector in self.collectors:
                collector.attention(step, site.path, query, key)


class _AttentionMode(TorchFunctionMode):
    """Show queries and keys of attention modules, of any library that calls torch's attention."""

    def __init__(self, model: nn.Module, collectors: Sequence[Collector], paths: Sequence[str]) -> None:
        super().__init__()
        self.model, self.collectors, self.paths = model, collectors, paths
        self.inside: list[str] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> Any:
        for name in self.paths:
            module = self.model.get_submodule(name)
            self.hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name)))
            self.hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        super().__exit__(*exception)

    def _leave(self) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        step = current_step()
        if func is functional.scaled_dot_product_attention and self.inside and step is not None:
            given = dict(zip(("query", "key"), args, strict=False)) | kwargs
            query, key = (given[name].detach() for name in ("query", "key"))
            if query.dim() == 3:  # [B, N, D], of one head
                query, key = query[:, None], key[:, None]
            for collector in self.collectors:
                collector.attention(step, self.inside[-1], query, key)
        return func(*args, **kwargs)


def batches_of(prompts: Sequence[Any], size: int) -> list[list[Any]]:
    """Return prompts in batches; a mapping is a batch of its own."""
    batches: list[list[Any]] = []
    for prompt in prompts:
        alone = isinstance(prompt, Mapping)
        if batches and not alone and len(batches[-1]) < size and not isinstance(batches[-1][0], Mapping):
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def call_pipeline(pipe: Any, prompts: list[Any], seed: int, given: Mapping[str, Any]) -> Any:
    """Draw one batch as latents where the pipeline can leave it at that; noise is drawn on the CPU.

    Prompts are texts (`prompt=`), numbers (`class_labels=`), or one mapping of arguments. A `generator` among
    the arguments stays as it is, so that every run of a batch draws the same noise.

    Raises:
        ValueError: If the pipeline's call takes no such prompts.
    """
    names = inspect.signature(type(pipe).__call__).parameters
    kwargs = dict(given)
    if isinstance(prompts[0], Mapping):
        kwargs |= prompts[0]
    else:
        key = "class_labels" if isinstance(prompts[0], int) else "prompt"
        if key not in names:
            raise ValueError(
                f"prompts={prompts[:1]!r}: {type(pipe).__name__} takes no {key}; give mappings of "
                f"its arguments: {', '.join(list(names)[1:])}"
            )
        kwargs[key] = prompts
    if "generator" in kwargs:
        kwargs["generator"] = _copied(kwargs["generator"])
    elif "generator" in names:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    if "output_type" in names and "output_type" not in kwargs:
        kwargs["output_type"] = "latent"
    return pipe(**kwargs)


def _copied(generator: Any) -> Any:
    """Return copies of generators, alone or in a list."""
    if isinstance(generator, (list, tuple)):
        return [_copied(one) for one in generator]
    return generator.clone_state() if isinstance(generator, torch.Generator) else generator
