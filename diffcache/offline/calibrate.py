"""Calibration: traced runs of a pipeline, from which methods make their tables."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.digest import content, digest
from diffcache.errors import AttachError, TablesError
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated, Collector
from diffcache.features.tables import Tables
from diffcache.files import check_target, write_file
from diffcache.offline.tracing import Tracer, batches_of, call_pipeline
from diffcache.targets import check_free, denoisers_of

M = TypeVar("M", bound=Calibrated)
Progress = Callable[[int, int, str], None]
BATCH_SIZE = 4
GUIDANCE = ("guidance_scale", "true_cfg_scale")


@dataclass(frozen=True)
class CollectPlan:
    """Settings of a calibration."""

    # texts, class numbers, or keyword arguments of the pipeline's call, one a sample
    prompts: Sequence[str | int | Mapping[str, Any]]
    steps: int | None = None  # sampling steps; None leaves the pipeline's default
    batch_size: int = BATCH_SIZE  # samples a run
    # seed of the noise; batch i is drawn with `seed + i`, but a `generator` in the call is used as it is for all
    # (not by HarmoniCa's training, which draws new noise for every run)
    seed: int = 0
    call: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the pipeline's call
    out: Path | None = None  # file of the tables, None to keep them in memory only
    resume: bool = True  # whether to go on from `<out>.part`, which an interrupted calibration leaves
    progress: Progress | None = None  # called with what is done, what there is in all, and a word on it

    def __post_init__(self) -> None:
        if isinstance(self.prompts, (str, Mapping)) or not self.prompts:
            raise ValueError(f"prompts={self.prompts!r}: must be a list of at least one prompt")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        if not callable(self.progress) and self.progress is not None:
            raise ValueError(
                f"progress={self.progress!r}: must be a function of what is done, what there is in "
                "all and a word on it, or None for none"
            )
        if self.out is not None:
            check_target("out", Path(self.out))

    def batches(self) -> list[list[Any]]:
        """Return the prompts in batches."""
        return batches_of(self.prompts, self.batch_size)

    def arguments(self) -> dict[str, Any]:
        """Return the call's further arguments, the steps among them where they are given."""
        steps = {} if self.steps is None else {"num_inference_steps": self.steps}
        return {**self.call, **steps}

    def about(self) -> dict[str, Any]:
        """Return the facts that two calibrations must share to be one, as plain data."""
        own = {"prompts": digest(list(self.prompts)), "steps": self.steps, "seed": self.seed}
        return own | {"batch_size": self.batch_size, "call": content(dict(self.call))}

    def guidance(self, pipe: Any) -> dict[str, Any]:
        """Return the guidance that the runs have, by the argument of the pipeline's call.

        An argument that is not given counts with its default; one in which prompts differ is left out.
        """
        taken = inspect.signature(type(pipe).__call__).parameters
        found: dict[str, Any] = {}
        for name in filter(taken.__contains__, GUIDANCE):
            default = taken[name].default
            given = self.call.get(name, None if default is inspect.Parameter.empty else default)
            each = [p.get(name, given) if isinstance(p, Mapping) else given for p in self.prompts]
            if all(one == each[0] for one in each):
                found[name] = each[0]
        return found

    def run(self, pipe: Any, number: int) -> Any:
        """Draw one batch."""
        batch = self.batches()[number]
        return call_pipeline(pipe, batch, self.seed + number, self.arguments())


@overload
def calibrate(pipe: Any, method: str, prompts: Sequence[Any], **settings: Any) -> Calibrated: ...
@overload
def calibrate(pipe: Any, method: M, prompts: Sequence[Any], **settings: Any) -> M: ...
@overload
def calibrate(
    pipe: Any, method: Sequence[Calibrated], prompts: Sequence[Any], **settings: Any
) -> list[Calibrated]: ...
def calibrate(pipe: Any, method: Any, prompts: Sequence[Any], **settings: Any) -> Any:
    """Measure the tables of a method on a pipeline.

    Args:
        pipe: A diffusers pipeline, not wrapped, with one denoiser.
        method: A method that needs tables, its catalogue name, or several methods, whose first passes over the prompts
            are one where their features are taken at the same site.
        prompts: Texts, class numbers, or mappings of the pipeline's call, one a sample.
        **settings: `steps` or `num_inference_steps`, `batch_size`, `seed`, `out`, `resume` and `progress` as in
            `CollectPlan`; anything else goes to the pipeline's call (`height=64`, `guidance_scale=3.0`).

    Returns:
        The method with its tables; with `out` they are that file's. A list for several methods.

    Raises:
        AttachError: If the pipeline has several denoisers, is wrapped, or cannot be cached with the method.
        TablesError: If `<out>.part` is damaged, or of another calibration.
        ValueError: If a method takes no tables, a setting is out of its range, or something that is measured is not
            finite or changes its shape in a run.

    Examples:
        >>> method = diffcache.calibrate(pipe, ERTACache(), prompts)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, method)  # doctest: +SKIP
    """
    settings = with_steps(settings)
    names = {f.name for f in dataclasses.fields(CollectPlan)}
    own = {key: settings.pop(key) for key in list(settings) if key in names - {"prompts", "call"}}
    if own.get("out") is not None:
        own["out"] = Path(own["out"])
    texts: Any = prompts if isinstance(prompts, (str, Mapping)) else list(prompts)
    plan = CollectPlan(prompts=texts, call=settings, **own)
    several = not isinstance(method, (str, Method))
    chosen = [_checked(make_method(m)) for m in (method if several else [method])]
    if several and plan.out is not None:
        raise ValueError(f"out={str(plan.out)!r}: is for one method; save each one's tables")
    trained = iter([_train(pipe, m, plan) for m in chosen if m.trainer])
    collected = iter(_collect(pipe, [m for m in chosen if not m.trainer], plan))
    results = [next(trained if m.trainer else collected) for m in chosen]
    return results if several else results[0]


def _checked(method: Method) -> Calibrated:
    if not isinstance(method, Calibrated):
        raise ValueError(f"{method!r} takes no tables: there is nothing to calibrate")
    return method


def with_steps(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with diffusers' name of the steps, `num_inference_steps`, as `steps`.

    Raises:
        ValueError: If both are given.
    """
    found = dict(settings)
    if "num_inference_steps" in found:
        if found.get("steps") is not None:
            raise ValueError(
                f"steps={found['steps']!r} and num_inference_steps={found['num_inference_steps']!r}: give one of them"
            )
        found["steps"] = found.pop("num_inference_steps")
    return found


def _train(pipe: Any, method: Calibrated, plan: CollectPlan) -> Calibrated:
    """Return a method whose tables are trained."""
    module, function = method.trainer.split(":")
    trained: Calibrated = getattr(importlib.import_module(module), function)(pipe, method, plan)
    return trained


def _collect(pipe: Any, methods: list[Calibrated], plan: CollectPlan) -> list[Calibrated]:
    """Return methods whose tables are collected, over shared passes where that can be."""
    if not methods:
        return []
    collectors = [method.collector() for method in methods]
    jobs = _jobs(collectors)
    count = len(plan.batches())
    total = len(jobs) * count
    name, model = _denoiser(pipe)
    for collector in collectors:
        check_free(pipe, {name: model}, collector.site().site)
    facts = facts_of(model, getattr(pipe, "scheduler", None), pipe)
    for method in methods:  # what could not be used afterwards is not measured
        dataclasses.replace(method, tables=None).check_model(facts)  # type: ignore[type-var]
    saved = _Saved(plan, methods, {**facts, "guidance": plan.guidance(pipe)})
    done = saved.load(collectors)
    watch = Tracer()
    for index in range(done, total):
        number, batch = divmod(index, count)
        if plan.progress is not None:
            plan.progress(index, total, f"pass {number + 1} of {len(jobs)}")
        level, members = jobs[number]
        seen_by = [collectors[member] for member in members]
        watch.run(pipe, {name: model}, seen_by, (level, batch), partial(plan.run, pipe, batch))
        saved.save(collectors, index + 1, watch)
    if plan.progress is not None and total:
        plan.progress(total, total, "done")
    made = [
        _with_tables(method, collector, saved.header(method, collector, watch), plan)
        for method, collector in zip(methods, collectors, strict=True)
    ]
    saved.remove()
    return made


def _jobs(collectors: list[Collector]) -> list[tuple[int, list[int]]]:
    """Return passes over the prompts: the pass number of collectors, and who takes part.

    First passes at the same site are one, but for collectors with abilities, which are attached for
    them alone. Later passes may change what the denoiser returns, so each is its collector's own.
    """
    groups: dict[tuple[int | None, str], list[int]] = {}
    for index, collector in enumerate(collectors):
        site, alone = collector.site(), index if collector.abilities() else None
        place = (site.site, site.lead, site.tail, site.blocks, site.feature, site.when.probe)
        groups.setdefault((alone, repr(place)), []).append(index)
    jobs = [(0, members) for members in groups.values()]
    for index, collector in enumerate(collectors):
        jobs += [(level, [index]) for level in range(1, collector.passes)]
    return jobs


def _denoiser(pipe: Any) -> tuple[str, torch.nn.Module]:
    found = denoisers_of(pipe)
    if len(found) != 1:
        raise AttachError(
            f"{type(pipe).__name__} has the denoisers {', '.join(found)}; tables are measured on "
            "one: calibrate a pipeline that has one of them"
        )
    return next(iter(found.items()))


def _with_tables(method: Calibrated, collector: Collector, header: dict[str, Any], plan: CollectPlan) -> Calibrated:
    tables = Tables(header, collector.tables())
    if plan.out is not None:
        tables = tables.save(plan.out)
    made: Calibrated = dataclasses.replace(method, tables=tables)  # type: ignore[type-var]
    return made


def header_of(method: Calibrated, facts: Mapping[str, Any], plan: CollectPlan, **more: Any) -> dict[str, Any]:
    """Return the header of a method's tables: their kind and the facts of their measurement."""
    from diffcache import __version__

    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}  # type: ignore[arg-type]
    fields.pop("tables", None)
    about = {key: value for key, value in facts.items() if key not in ("settings", "pipeline")}
    return {
        "method": method.name,
        "diffcache": __version__,
        "date": datetime.date.today().isoformat(),
        "fields": json.loads(json.dumps(fields, default=repr)),
        "prompts": len(plan.prompts),
        "prompt_hashes": sorted({prompt_hash(text) for text in _texts(plan.prompts)}),
        "call": json.loads(json.dumps(dict(plan.call), default=content)),
        **json.loads(json.dumps(about, default=repr)),
        **more,
    }


def prompt_hash(text: str) -> str:
    """Return 16 hexadecimal digits of a prompt, by which it is known again but cannot be read."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _texts(prompts: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of prompts, which may be arguments of the call."""
    for prompt in prompts:
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        several = given if isinstance(given, (list, tuple)) else [given]
        yield from (text for text in several if isinstance(text, str))


class _Saved:
    """The state of an interrupted calibration, in `<out>.part`, from which it goes on."""

    def __init__(self, plan: CollectPlan, methods: list[Calibrated], facts: dict[str, Any]) -> None:
        self.facts, self.plan = facts, plan
        self.path = None if plan.out is None else plan.out.with_name(plan.out.name + ".part")
        self.about = digest([list(methods), plan.about(), facts])
        self.seen: dict[str, Any] = {}

    def load(self, collectors: list[Collector]) -> int:
        """Give the collectors their sums; return how many runs are behind them."""
        if self.path is None or not self.path.exists() or not self.plan.resume:
            return 0
        tensors, metadata = read_state(self.path, "about", "seen", "done")
        if metadata["about"] != self.about:
            raise TablesError(
                f"{self.path} is of another calibration (other method, prompts, steps, seed or "
                "model); delete it, or pass resume=False"
            )
        for index, collector in enumerate(collectors):
            mark = f"{index}/"
            collector.load({k.removeprefix(mark): t for k, t in tensors.items() if k.startswith(mark)})
        self.seen = json.loads(metadata["seen"])
        return int(metadata["done"])

    def save(self, collectors: list[Collector], done: int, watch: Tracer) -> None:
        """Keep the collectors' sums, atomically."""
        self.seen = {"steps": watch.steps, "shape": watch.shape}
        if self.path is None:
            return
        tensors = {
            f"{index}/{name}": tensor
            for index, collector in enumerate(collectors)
            for name, tensor in collector.state().items()
        }
        seen = json.dumps(self.seen)
        write_state(self.path, tensors, {"about": self.about, "done": str(done), "seen": seen})

    def header(self, method: Calibrated, collector: Collector, watch: Tracer) -> dict[str, Any]:
        """Return the header of one method's tables."""
        return header_of(method, self.facts, self.plan, **self.seen, **collector.settings())

    def remove(self) -> None:
        """Forget the sums: the tables are made."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def write_state(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a state, tensors of any kind and text by name, atomically; its folder is made."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_file(path, serialized(held, metadata))


def read_state(path: Path, *wanted: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a state, which must have the wanted names.

    Raises:
        TablesError: If the file is damaged, or no state.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    missing = [name for name in wanted if name not in metadata]
    if missing:
        raise _damaged(path, f"it has no {missing[0]!r}")
    return tensors, metadata


def _damaged(path: Path, why: str) -> TablesError:
    return TablesError(
        f"{path}: not the state of a training or calibration, or damaged ({why}); delete it, or pass resume=False"
    )
