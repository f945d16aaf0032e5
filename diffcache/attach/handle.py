"""Attach a method: taps on a pipeline, its scheduler and its denoisers, in one handle."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from diffcache.anchor import owner_of
from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.cache_context import listen, unlisten
from diffcache.attach.denoiser import Denoiser, hook
from diffcache.attach.extension import Extension
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.pipeline_hooks import tap_pipeline, tap_scheduler, untap
from diffcache.attach.provenance import tables_of
from diffcache.attach.run import Run
from diffcache.attach.runs import ATTACHING, Runs
from diffcache.attach.text_encoders import TextCache
from diffcache.features.base import Method
from diffcache.features.collect import Observer
from diffcache.presets.choose import ChosenMethod

_BYTES = attrgetter("nbytes")
WRAPPED: WeakSet[Handle] = WeakSet()  # changed and looked through under ATTACHING


class Handle(Runs):
    """A method attached to a pipeline or a model; a context manager that detaches at its end.

    Args:
        target: A pipeline or a denoiser.
        denoisers: Name -> denoiser.
        method: The method for all of them; each keeps its own state.
        observer: Observer of the features, outputs and guided outputs of every step, for
            calibration; None for none.
        text_bytes: Most bytes of outputs of text encoders to keep; None keeps none.

    Attributes:
        texts: Cache of the text encoders; None for none.
        choice: Choice of the method by what the model is; None where the user named it.

    Raises:
        AttachError: If a denoiser cannot be cached with this method, or a text encoder at all.
    """

    def __init__(
        self,
        target: Any,
        denoisers: dict[str, nn.Module],
        method: Method,
        *,
        observer: Observer | None = None,
        text_bytes: int | None = None,
    ) -> None:
        super().__init__(target, method, observer)
        self.texts: TextCache | None = None
        self.choice: ChosenMethod | None = None
        self.schedulers: list[Any] = []
        self.denoisers: list[Denoiser] = []
        anatomies = {name: anatomy_of(model) for name, model in denoisers.items()}
        try:
            for name, model in denoisers.items():
                denoiser = Denoiser(self, name, model, anatomies[name])
                self.denoisers.append(denoiser)
                hook(denoiser)
                listen(model)
            if not isinstance(target, nn.Module):
                tap_pipeline(target, self)
                self.follow(target)
            if text_bytes is not None:
                self.texts = TextCache(target, text_bytes)
            with ATTACHING:
                WRAPPED.add(self)
        except BaseException:
            self.detach()
            raise

    # the scheduler -------------------------------------------------------------------------

    @property
    def watches_steps(self) -> bool:
        """True where an extension looks at the arguments of the scheduler's step."""
        extensions = (each for denoiser in self.denoisers for each in denoiser.extensions)
        return self.observer is not None or any(type(e).stepping is not Extension.stepping for e in extensions)

    def set_times(self, scheduler: Any) -> None:
        """Let extensions see, or change, the times that the scheduler was just given."""
        if self.observer is not None:
            self.observer.times(scheduler)
        run = self.run()
        for denoiser in self.denoisers:
            for extension in denoiser.extensions:
                extension.timesteps(run, scheduler)

    def stepping(self, scheduler: Any, given: dict[str, Any]) -> None:
        """Tell of a step of the scheduler before it is taken: the guided output is complete."""
        output, sample = given.get("model_output"), given.get("sample")
        if not isinstance(output, Tensor) or not isinstance(sample, Tensor):
            return
        run = self.run()
        for denoiser in self.denoisers:
            for extension in denoiser.extensions:
                extension.stepping(run, scheduler, output, given.get("timestep"), sample)
        known = [run.timelines[d] for d in self.denoisers if d in run.timelines]
        if self.observer is not None and known and known[0].index >= 0:
            self.observer.guided(known[0].step(0), sample, output)

    # memory --------------------------------------------------------------------------------

    def bytes_of(self, run: Run) -> int:
        """Return the bytes that all denoisers keep of a run."""
        total = 0
        for extension in (each for denoiser in self.denoisers for each in denoiser.extensions):
            total += sum(map(_BYTES, extension.tensors(run))) + extension.held_bytes([run])
        return total

    def held_bytes(self) -> int:
        """Return the bytes of all features held now, each storage once."""
        runs = [run for _, run in self.live()]
        storages: dict[int, int] = {}
        for tensor in (t for run in runs for d in self.denoisers for t in d.tensors(run)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values()) + sum(each.held_bytes(runs) for d in self.denoisers for each in d.extensions)

    # attaching -----------------------------------------------------------------------------

    def follow(self, pipeline: Any) -> None:
        """Listen to the pipeline's scheduler, which users replace.

        Raises AttachError if the method does not serve the scheduler, TablesError if its tables
        were measured with another one.
        """
        scheduler = getattr(pipeline, "scheduler", None)
        if scheduler is None or not hasattr(scheduler, "set_timesteps"):
            return
        if owner_of(scheduler) is not self:
            self.check_fits(self.method, scheduler)
            for old in self.schedulers:
                untap(old, self)
            tap_scheduler(scheduler, self)
            self.schedulers = [scheduler]

    def replaced(self, pipeline: Any) -> Iterator[str]:
        """Yield a remark for every denoiser in whose place the pipeline has another by now."""
        for denoiser in self.denoisers:
            found = getattr(pipeline, denoiser.name, None)
            if found is denoiser.model or not isinstance(found, nn.Module):
                continue
            if all(part is not denoiser.model for part in found.modules()):  # nor is it inside
                yield (
                    f"{denoiser.name} is another {type(found).__name__} than when the pipeline was "
                    "wrapped, and this cache is not on it; unwrap the pipeline and wrap it again"
                )

    def check_fits(self, method: Method, scheduler: Any) -> None:
        """Raise AttachError or TablesError unless a method serves the denoisers and a scheduler."""
        for denoiser in self.denoisers:
            method.for_denoiser(denoiser.name).check_model(facts_of(denoiser.model, scheduler, self.target()))

    def use(self, method: Method) -> None:
        """Let the runs that start from now on have another method at the same places."""
        self.method, self.tables = method, tables_of(method)
        for denoiser in self.denoisers:
            denoiser.method = method.for_denoiser(denoiser.name)

    def reset(self) -> None:
        """Forget the features of every run, the contents of every stream, and texts."""
        super().reset()
        if self.texts is not None:
            self.texts.clear()

    def detach(self) -> None:
        """Leave everything as it was found; detaching twice does nothing."""
        with ATTACHING:
            self.reset()
            self._runs.clear()
            WRAPPED.discard(self)
            for denoiser in self.denoisers:
                unlisten(denoiser.model)
                denoiser.detach()
            self.denoisers = []
            for scheduler in self.schedulers:
                untap(scheduler, self)
            self.schedulers = []
            if self.texts is not None:
                self.texts.detach()
            target = self.target()
            if target is not None:
                untap(target, self)
