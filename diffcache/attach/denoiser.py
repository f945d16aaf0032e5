"""The attachment to one network: its hooks, clock, branches, record and extensions."""

from __future__ import annotations

import inspect
import time
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.anchor import claim, owner_of, release
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.branches import doubted, glance, is_broken, note_output, tell, turned, watch
from diffcache.attach.cache_context import Context, current_context
from diffcache.attach.call import Call
from diffcache.attach.extension import Extension, make_extension
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.provenance import other_shape
from diffcache.attach.record import CallRecord
from diffcache.attach.run import Branch, Run, Timeline
from diffcache.attach.runs import Runs
from diffcache.attach.signature import all_conditions_of, conditions_of, signature_of
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError, CacheWarning
from diffcache.foreign import is_cached, own_hooks, process_group_of, registry_of, take_hooks, without_dynamo
from diffcache.step import CURRENT

TOKEN = "token"  # of the context variable, in a call's storage
# Modules of diffusers whose hooks are other caches.
_PEERS = ["first_block_cache", "mag_cache", "taylorseer_cache", "pyramid_attention_broadcast"]
_PEERS += ["faster_cache", "sea_cache", "text_kv_cache"]


class Denoiser:
    """One network of a pipeline, or a bare one, with the extensions of a method.

    It tells extensions which step, branch and run every call belongs to; what a method does with
    that is theirs.

    Args:
        handle: Handle of the pipeline or model, with its runs and the method.
        name: Name of the denoiser in its pipeline.
        model: The network.
        anatomy: Its anatomy.

    Attributes:
        method: Method of this network.
        arguments: Names of the forward's arguments in their order.
        is_noticed: Whether it was said that the forward is called directly.
        hooks: Handles of the forward hooks.
        counts_calls: Whether every call is a step.

    Raises:
        AttachError: If the network cannot have an ability of the method.
    """

    def __init__(self, handle: Runs, name: str, model: nn.Module, anatomy: Anatomy) -> None:
        self.handle, self.name, self.model, self.anatomy = handle, name, model, anatomy
        self.arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self.is_noticed = False
        self.hooks: list[Any] = []
        self.method = handle.method.for_denoiser(name)
        self.total, self.counts_calls = self.method.total, self.method.counts_calls
        self.extensions: list[Extension] = []
        _check_kind(name, model, anatomy, handle)
        self.method.check_model(facts_of(model, handle.scheduler, handle.target()))
        try:
            for ability in self.method.abilities():
                self.extensions.append(make_extension(self, ability))
        except BaseException:
            self._remove()
            raise
        self._from_last = self.extensions[::-1]

    def detach(self) -> None:
        """Leave the model as it was found."""
        for hook in self.hooks:
            hook.remove()
        self._remove()
        release(self.model)

    def _remove(self) -> None:
        for extension in reversed(self.extensions):
            extension.remove()
        self.extensions = []

    def tensors(self, run: Run) -> list[Tensor]:
        """Return the tensors that extensions keep of a run."""
        return [tensor for extension in self.extensions for tensor in extension.tensors(run)]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    # one call ------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Start a call: find its step and branch, and open the extensions, which may refuse with an AttachError."""
        anatomy, run = self.anatomy, self.handle.run()
        given = self.named(args, kwargs) if args else kwargs
        timestep = given.get(anatomy.timestep or "")
        sample = given.get(anatomy.sample, args[0] if args else None)
        timeline = run.timelines.get(self) or run.timeline(self)
        context = current_context(self.model)
        signature = signature_of(given, anatomy.timestep)
        writes = context is not None and context.writes
        if context is not None and context.writes:  # no step of the run
            branch, step = Branch(0, context.name, {}), timeline.aside(timestep)
            if timeline.index < 0:  # no first step has looked
                check_alone(self.model)
        else:
            begins = timeline.count() if self.counts_calls else timeline.arrive(context, timestep)
            if begins and (self.total is not None or run.steps is not None):
                self._check_length(timeline)
            if begins and timeline.index == 0:
                self._start(timeline, sample)
            branch = self._branch(timeline, context, signature, given, sample)
            step = timeline.step(branch.number)
        record = CallRecord(
            self.name,
            step.index,
            step.timestep,
            branch.name or branch.number,
            started=time.perf_counter(),
            writes=writes,
        )
        call = Call(self, step, branch, timeline, signature, args, kwargs, sample, writes, record)
        if writes:
            record.computed, record.reason = True, "writes to a stream"
        for extension in self.extensions:
            call = extension.open(call)
        if call.learns:
            for extension in self.extensions:
                extension.given(call)
        branch.signature = signature
        return call

    def _branch(
        self, timeline: Timeline, context: Context | None, signature: Any, given: dict[str, Any], sample: Any
    ) -> Branch:
        """Return the branch of a call; warn where nothing tells it.

        A bare denoiser's run starts at the call if its sample is another trajectory's.
        """
        if self.counts_calls:
            return timeline.only_branch()
        if timeline.run.in_pipeline:
            return timeline.branch_of(context, signature, lambda: conditions_of(given, self.anatomy))
        name = None if context is None else context.name
        conditions = all_conditions_of(given, self.anatomy)
        branch, said = tell(timeline, name, signature, conditions)
        if timeline.is_guessed:
            seen = next(iter(leaves(sample)), None)  # of samples in lists, the first
            doubt = timeline.doubt
            if doubt:
                watch(timeline, seen)
            elif is_broken(timeline, branch, signature, conditions, seen):
                if timeline.doubt:
                    branch, said = doubted(timeline, name)
                else:
                    timeline.restart()
                    self._start(timeline, sample)
                    branch, said = tell(timeline, name, signature, conditions)
                    branch.glance = timeline.glance = glance(seen)
                    first = glance(seen, 0)
                    branch.samples = [] if first is None else [first]
        if not said and timeline.left is not None:
            said = turned(timeline)
        if said:
            self.handle.remark(timeline.run, [f"{self.anatomy.model}: {said}"])
        return branch

    def _check_length(self, timeline: Timeline) -> None:
        """Raise unless the run has as many steps as the method's tables are made for."""
        made_for, said = self.total, timeline.run.steps
        if said is not None and timeline.index >= said:
            raise AttachError(
                f"diffcache.run(..., steps={said}): a step more than that began; say how many "
                "timesteps the run has, or put each sampling run into a `with` of its own"
            )
        if made_for is None:
            return
        has = timeline.total
        found = steps = str(has)
        if has in (None, made_for):  # nobody said how many, or more may come
            if timeline.index < made_for:
                return
            found, steps = "more", "..."
        raise AttachError(
            f"{self.method!r} is made for runs of {made_for} steps, this one has {found}: "
            f"pass num_inference_steps={made_for}, or calibrate with steps={steps}"
        )

    def _start(self, timeline: Timeline, sample: Any) -> None:
        """Start a run, whose sample is known."""
        handle, run = self.handle, timeline.run
        check_alone(self.model)
        run.start(timeline)
        timeline.ranks = process_group_of(self.model)
        if not run.in_pipeline and not timeline.doubt:
            handle.new_record(run)
        run.record.method = handle.chosen
        if handle.tables and isinstance(sample, Tensor):
            handle.remark(run, other_shape(handle.tables, sample.shape[1:]))
        for extension in self.extensions:
            extension.start(timeline)

    def close(self, call: Call, out: Any) -> Any:
        """Finish a call; return the replacement of the denoiser's output, None if it stays.

        Raises AttachError if an extension finds that the model cannot be cached as asked.
        """
        record, replaced = call.record, None
        if call.learns:
            for extension in self.extensions:
                extension.ran(call, out)
        in_order = self.extensions if record.computed is False else self._from_last
        for extension in in_order:
            changed = extension.close(call, out)
            if changed is not None:
                out = replaced = changed
        for extension in self.extensions:
            record.counts.update(extension.counts(call))
        if record.computed is None:
            record.computed = True
        record.reason = record.reason or "method"
        record.seconds = time.perf_counter() - record.started
        timeline = call.timeline
        run = timeline.run
        if call.branch.samples and not timeline.doubt:  # where samples tell runs apart
            note_output(timeline, out)
        run.record.calls.append(record)
        if record.computed:
            run.record.peak_bytes = max(run.record.peak_bytes, self.handle.bytes_of(run))
        return replaced


def _check_kind(name: str, model: nn.Module, anatomy: Anatomy, handle: Runs) -> None:
    """Raise AttachError for an autoencoder or text encoder, which no sampler calls in steps."""
    if anatomy.timestep is not None or handle.method.counts_calls:
        return
    if hasattr(model, "encode") and hasattr(model, "decode"):
        kind, way = "an autoencoder, whose forward pipelines never call", ""
    elif hasattr(model, "get_input_embeddings") and (handle.scheduler is None or name.startswith("text_encoder")):
        kind = "a language model or text encoder"
        way = ", or give a language model a recipe such as 'snapkv', or a policy such as 'elastic'"
    else:
        return
    raise AttachError(
        f"{anatomy.model} is {kind}: it takes no timestep, so {handle.method!r} has no steps to "
        f"skip; wrap the pipeline, or its transformer or unet{way}"
    )


def check_alone(model: nn.Module) -> None:
    """Raise AttachError if a denoiser is cached by diffusers or one like cache-dit, or its attention maps are read."""
    name = type(model).__name__
    if is_cached(model):
        raise AttachError(f"{name} already runs under another cache, such as cache-dit; disable it")
    for module in model.modules():
        registry = registry_of(module)
        for hook in registry.hooks.values() if registry is not None else ():
            if type(hook).__module__.rpartition(".")[2] in _PEERS:
                raise AttachError(
                    f"{name} already runs under diffusers' {type(hook).__name__}; call disable_cache() first"
                )
        processor = getattr(module, "processor", None)
        if {"attention_probs", "attnstore"} & getattr(processor, "__dict__", {}).keys():  # of SAG, of LEdits++
            raise AttachError(
                f"{name}: a {type(processor).__name__} keeps the attention maps of each call for the pipeline, and "
                "calls that are skipped have none; run this pipeline unwrapped"
            )


# the two hooks: top-level functions, so that copies and pickles work


def hook(denoiser: Denoiser) -> None:
    """Let every call of a denoiser's network be one of the denoiser."""
    model = denoiser.model
    pre = model.register_forward_pre_hook(open_call, prepend=True, with_kwargs=True)
    post = model.register_forward_hook(close_call, with_kwargs=True, always_call=True)
    denoiser.hooks = [pre, post]
    claim(model, denoiser)


def open_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a wrapped denoiser; does nothing on a copy of one."""
    if torch.compiler.is_compiling():
        _refuse_compiled(module)
        return None
    denoiser: Denoiser | None = owner_of(module)
    if denoiser is None:
        _orphan(module)
        return None
    stale: Call | None = CURRENT.get()
    if stale is not None and stale.owner is denoiser:
        denoiser.handle.settle()
    if torch.is_grad_enabled() and _trains(denoiser, args, kwargs):
        return None
    try:
        call = denoiser.open(args, kwargs)
    except BaseException:
        denoiser.handle.abandon(writes=_writes(denoiser))
        raise
    call.storage[TOKEN] = CURRENT.set(call)
    if call.args is args and call.kwargs is kwargs:
        return None
    return call.args, call.kwargs


def _trains(denoiser: Denoiser, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether gradients go through a call; it then runs as if it were not wrapped.

    No call is open: what is skipped has no gradient, and checkpointed blocks run once more when
    the call is over. Features of this run are forgotten, which are of earlier steps.
    """
    tensors = chain(denoiser.model.parameters(), leaves(args), leaves(kwargs))  # mostly the first
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    run = denoiser.handle.run()
    if not _writes(denoiser):  # which is no step
        run.timeline(denoiser).clear()
    text = (
        f"{denoiser.anatomy.model}: gradients are on, so every block is computed and nothing is "
        "kept; to sample, call it under torch.no_grad()"
    )
    denoiser.handle.remark(run, [text])
    return True


def _writes(denoiser: Denoiser) -> bool:
    """Return whether it was said that the call at hand writes to a stream."""
    context = current_context(denoiser.model)
    return context is not None and context.writes


def close_call(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """Forward hook of a wrapped denoiser, called after exceptions as well."""
    if torch.compiler.is_compiling():
        return None
    call: Call | None = CURRENT.get()
    denoiser: Any = None if call is None else call.owner
    if call is None or getattr(denoiser, "model", None) is not module:  # none, another's, a copy
        return None
    CURRENT.reset(call.storage.pop(TOKEN))
    try:
        if out is not None:
            return denoiser.close(call, out)
        denoiser.handle.abandon(call)  # an exception is on its way
        return None
    except BaseException:  # the step is half done
        denoiser.handle.abandon(call)
        raise
    finally:
        call.storage.clear()  # which may refer to the call, and so keep the model alive


@without_dynamo
def _refuse_compiled(module: nn.Module) -> None:
    """Raise for a wrapped model that is being compiled as a whole; a copy of one may be."""
    if owner_of(module) is not None:
        raise AttachError(
            f"{type(module).__name__} is compiled as a whole, which fixes what runs; compile its "
            "blocks instead: model.compile_repeated_blocks(fullgraph=True)"
        )
    _orphan(module)


def _orphan(module: nn.Module) -> None:
    """Take the hooks off a copy of a wrapped model and say that it runs uncached."""
    own_hooks(module)  # a shallow copy shares them with the original
    take_hooks(module, lambda hook: hook is open_call or hook is close_call)
    warnings.warn(
        f"this {type(module).__name__} is a copy of a wrapped one and runs uncached; wrap it too",
        CacheWarning,
        stacklevel=4,
    )
