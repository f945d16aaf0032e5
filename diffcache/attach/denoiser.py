"""The attachment to one network: its clock, branches, record and extensions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from diffcache.anchor import release
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.branches import doubted, is_broken, note_output, tell, turned, watch
from diffcache.attach.cache_context import Context, current_context
from diffcache.attach.call import Call
from diffcache.attach.continuity import glance, items
from diffcache.attach.counted import count, only_branch
from diffcache.attach.extension import Extension, make_extension
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.peers import check_alone
from diffcache.attach.provenance import other_shape
from diffcache.attach.record import CallRecord
from diffcache.attach.run import Branch, Run, Timeline
from diffcache.attach.runs import Runs
from diffcache.attach.signature import all_conditions_of, conditions_of, signature_of
from diffcache.errors import AttachError
from diffcache.foreign import process_group_of


class Denoiser:
    """One network of a pipeline, or a bare one, with the extensions of a method.

    It tells extensions which step, branch and run every call belongs to; what a method does with
    that is theirs.

    Args:
        handle: Runs of the pipeline or model, with the method.
        name: Name of the denoiser in its pipeline.
        model: The network.
        anatomy: Its anatomy.

    Attributes:
        arguments: Names of the forward's arguments in their order.
        is_noticed: Whether it was said that the forward is called directly.
        hooks: Handles of the forward hooks, which `attach.hooks` registers.

    Raises:
        AttachError: If the network cannot have an ability of the method.
    """

    def __init__(self, handle: Runs, name: str, model: nn.Module, anatomy: Anatomy) -> None:
        self.handle, self.name, self.model, self.anatomy = handle, name, model, anatomy
        self.arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self.is_noticed = False
        self.hooks: list[Any] = []
        self.total = handle.method.total
        self.extensions: list[Extension] = []
        _check_kind(model, anatomy, handle)
        handle.method.check_model(facts_of(model, handle.scheduler, handle.target()))
        try:
            for ability in handle.method.abilities():
                self.extensions.append(make_extension(self, ability))
        except BaseException:
            self._remove()
            raise
        self._from_last = self.extensions[::-1]

    @property
    def watches_steps(self) -> bool:
        """True where an extension looks at what the scheduler steps with."""
        return any(type(e).stepping is not Extension.stepping for e in self.extensions)

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

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the tensors that extensions keep of a run."""
        for extension in self.extensions:
            yield from extension.tensors(run)

    def extra_bytes(self, runs: list[Run]) -> int:
        """Return the bytes that extensions keep of runs besides tensors, or beyond them."""
        return sum(extension.held_bytes(runs) for extension in self.extensions)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    # one call ------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Start a call: which step and branch it is, and what extensions make of it.

        Raises:
            AttachError: If the run is not what the method is made for, or an extension refuses.
        """
        anatomy, run = self.anatomy, self.handle.run()
        timestep = kwargs.get(anatomy.timestep) if anatomy.timestep else None
        named = kwargs
        if timestep is None:
            named = self.named(args, kwargs)
            timestep = named.get(anatomy.timestep or "")
            positional: tuple[Any, ...] = ()
        else:
            positional = args
        timeline = run.timeline(self)
        context = current_context(self.model)
        writes = context is not None and context.writes
        sample = named.get(anatomy.sample, positional[0] if positional else None)
        if writes:
            if timeline.index < 0:  # no first step has looked
                check_alone(self.model)
        elif self._arrive(timeline, context, timestep):
            self._check_length(timeline)
            if timeline.index == 0:
                self._start(timeline, sample)
        signature = signature_of(positional, named, anatomy.timestep)
        branch = self._branch(timeline, context, signature, (positional, named), sample)
        step = timeline.aside(timestep) if writes else timeline.step(branch.number)
        record = CallRecord(
            self.name, step.index, step.timestep, branch.name or branch.number,
            started=time.perf_counter(), writes=writes,
        )  # fmt: skip
        call = Call(
            self, step, branch, timeline, signature, args, kwargs, sample, writes, record
        )  # fmt: skip
        if writes:
            record.computed, record.reason = True, "writes to a stream"
        for extension in self.extensions:
            call = extension.open(call)
        if call.learns:
            for extension in self.extensions:
                extension.given(call)
        branch.signature = signature
        return call

    def _arrive(self, timeline: Timeline, context: Context | None, timestep: Any) -> bool:
        """Note a call; return whether it starts a step."""
        if not self.handle.method.counts_calls:
            return timeline.arrive(context, timestep)
        count(timeline)
        return True

    def _branch(
        self,
        timeline: Timeline,
        context: Context | None,
        signature: Any,
        given: tuple[Any, Any],
        sample: Any,
    ) -> Branch:
        """Return the branch of a call; warn where nothing tells it.

        A bare denoiser's run starts at the call if its sample is another trajectory's.
        """
        args, kwargs = given
        if context is not None and context.writes:  # no step of the run
            return Branch(0, context.name, {})
        if self.handle.method.counts_calls:
            return only_branch(timeline)
        if timeline.run.in_pipeline:
            return timeline.branch_of(
                context, signature, lambda: conditions_of(args, kwargs, self.anatomy.timestep)
            )
        name = None if context is None else context.name
        conditions = all_conditions_of(self.named(args, kwargs), self.anatomy)
        branch, said = tell(timeline, name, signature, conditions)
        if timeline.is_guessed and timeline.doubt:
            watch(timeline, sample)
        elif timeline.is_guessed and is_broken(timeline, branch, signature, conditions, sample):
            if timeline.doubt:
                branch, said = doubted(timeline, name)
            else:
                timeline.restart()
                self._start(timeline, sample)
                branch, said = tell(timeline, name, signature, conditions)
                branch.glance = timeline.glance = glance(sample)
                branch.samples = items(sample)[:1]
        if said := said or turned(timeline):
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
            f"{self.handle.method!r} is made for runs of {made_for} steps, this one has {found}: "
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
        """Finish a call; return what the denoiser returns instead, None if that stays.

        Raises:
            AttachError: If an extension finds that the model cannot be cached as asked.
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
        run = call.run
        if call.timeline.is_guessed and not call.timeline.doubt and not call.writes:
            note_output(call.timeline, out)
        run.record.calls.append(record)
        if record.computed:
            run.record.peak_bytes = max(run.record.peak_bytes, self.handle.bytes_of(run))
        return replaced


def _check_kind(model: nn.Module, anatomy: Anatomy, handle: Runs) -> None:
    """Raise AttachError for an autoencoder or text encoder, which no sampler calls in steps."""
    if anatomy.timestep is not None or handle.method.counts_calls:
        return
    if hasattr(model, "encode") and hasattr(model, "decode"):
        kind = "an autoencoder, whose forward pipelines never call"
    elif hasattr(model, "get_input_embeddings") and handle.scheduler is None:
        kind = "a language model or text encoder"
    else:
        return
    raise AttachError(
        f"{anatomy.model} is {kind}: it takes no timestep, so {handle.method!r} has no steps to "
        "skip; wrap the pipeline, or its transformer or unet"
    )
