"""Draw the samples of a case: load the pipeline when it is needed, call it a batch at a time."""

from __future__ import annotations

import copy
import inspect
import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

import diffcache
from diffcache.command import device_of
from diffcache.digest import content
from diffcache.eval.runs.folder import Batch
from diffcache.eval.runs.peers import Peer, observed
from diffcache.eval.runs.ranks import Ranks
from diffcache.eval.runs.task import Case, Task, digest, directory_sha256, versions, weights_sha256
from diffcache.eval.samples.prompts import Prompts, load_prompts
from diffcache.features.base import Method
from diffcache.pipelines import load
from diffcache.pipelines.demo import generate, saved
from diffcache.pipelines.demo.generate import needed_inputs
from diffcache.pipelines.demo.saved import Parameters
from diffcache.targets import denoisers_of
from diffcache.timeline import steps_of


@dataclass
class Drawn:
    """One call of a pipeline."""

    samples: list[Tensor]  # pictures uint8 [3, H, W] or films uint8 [F, 3, H, W]
    about: dict[str, Any] = field(default_factory=dict)  # entries for the manifest: seconds and what the cache did
    # Latents behind every step, float32 [S, B, ...]; None where the pipeline does not show them or nobody asked
    latents: Tensor | None = None


class Drawer:
    """A pipeline that draws batches, uncached or under a method.

    Args:
        task: Task to draw.
        ranks: This process among those of the run.
        live: A pipeline that is loaded already; the task's `model` is its name in tables then, and
            its dtype and device are those of the pipeline.
        inputs: Arguments of the call that are no plain data; all samples share them.

    Raises:
        FileNotFoundError: If there is no such model.
        MissingError: If a package that loads the model is missing.
        ValueError: If the pipeline does not take an argument of the task's call, or needs more
            than prompts or class numbers.
    """

    def __init__(
        self, task: Task, ranks: Ranks | None = None, live: Any = None, inputs: Mapping[str, Any] | None = None
    ) -> None:
        self.task, self.ranks, self.live = task, ranks or Ranks(), live
        self.inputs = dict(inputs or {})
        self.directory: Path | None = None
        if live is None:
            self.device = device_of(task.device)
            if self.device == torch.device("cuda") and self.ranks.count > 1:
                self.device = torch.device("cuda", self.ranks.local)
            how = task.loading
            how.check(task.model, self.device)
            self.directory = saved.locate(task.model, variant=how.variant, revision=how.revision)
            self.pipeline, self.parameters = saved.pipeline_of(self.directory)
            self.dtype = saved.dtype_of(task.dtype, self.directory, self.device)
        else:
            load.check_made(task.dtype, task.device, task.loading)
            self.pipeline = type(live).__name__
            self.parameters = dict(inspect.signature(type(live).__call__).parameters)
            del self.parameters["self"]
            # the weights of an offloaded pipeline wait elsewhere: this is the device of its calls
            self.device = torch.device(getattr(live, "_execution_device", live.device))
            dtype = next(iter(denoisers_of(live).values())).dtype
            self.dtype = str(dtype).removeprefix("torch.")
        defaults = saved.live_defaults(live) if self.directory is None else saved.call_defaults(self.directory)
        self.call = {name: value for name, value in defaults.items() if name in self.parameters}
        self.call |= task.call
        check_call(self.pipeline, self.parameters, task, self.call, self.inputs)
        self.fps = frame_rate(self.pipeline, self.parameters, task, self.call)

    @property
    def name(self) -> str:
        """Name of the model."""
        if self.directory is not None and Path(self.task.model).exists():
            return self.directory.resolve().name
        return self.task.model

    @property
    def steps(self) -> int:
        """Sampling steps of the uncached case; raises ValueError if the pipeline has no default."""
        found = self.task.steps
        if found is None and "num_inference_steps" in self.parameters:
            default = self.parameters["num_inference_steps"].default
            found = self.call.get("num_inference_steps", default)
        if not isinstance(found, int):
            raise ValueError(f"steps: {self.pipeline} has no default; pass --steps")
        return found

    def full_steps(self, steps: int) -> float:
        """Return the number of steps of the uncached case that cost as much as a run of `steps` steps.

        Solvers of second order take two calls for a step, but one for the last.
        """
        return self.steps * self._calls(steps) / self._calls(self.steps)

    def _calls(self, steps: int) -> int:
        """Return the number of calls that the solver plans; the number of steps where it does not tell."""
        try:
            self._solver.set_timesteps(steps)
            return len(self._solver.timesteps)
        except (OSError, LookupError, AttributeError, TypeError, ValueError):
            return steps

    @cached_property
    def _solver(self) -> Any:
        """The pipeline's scheduler, without the pipeline; only its plan is looked at."""
        if self.directory is None:
            return copy.deepcopy(self.live.scheduler)
        place = self.directory / "scheduler"
        name = json.loads((place / "scheduler_config.json").read_text())["_class_name"]
        return getattr(diffusers, name).from_pretrained(place)

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts: those of the task, or those that suit the model."""
        return prompts_of(self.task, self.pipeline, self.parameters, self.directory or self.live)

    @cached_property
    def about(self) -> dict[str, Any]:
        """Facts that all cases share and that change their samples; part of their hashes."""
        task = self.task
        directory, loading = self.directory, load.identity_of(task.loading)
        model = directory_sha256(directory) if directory else weights_sha256(self.live)
        inputs = {name: digest(content(value)) for name, value in self.inputs.items()}
        more = {"loading": loading, "fps": self.fps, "inputs": inputs}
        return {
            **{key: value for key, value in more.items() if value},
            "model": model,
            "pipeline": self.pipeline,
            "call": self.call,
            "dtype": self.dtype,
            "device": self.device.type,
            "threads": task.threads,
            "batch_size": task.batch_size,
            "seed": task.seed,
            "prompts": self.prompts.sha256,
            "versions": versions(),
        }

    @cached_property
    def pipe(self) -> Any:
        """The pipeline, loaded when it is first asked for."""
        torch.set_num_threads(self.task.threads)
        if self.live is not None:
            return self.live
        task = self.task
        pipe, _ = load.load(task.model, self.dtype, str(self.device), task.loading)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def arguments(self, batch: Batch, steps: int) -> dict[str, Any]:
        """Return the arguments of the call that draws a batch."""
        given: dict[str, Any] = {**self.call, **self.inputs, "num_inference_steps": steps}
        if "prompt" in self.parameters:
            given["prompt"] = list(batch.prompts)
        elif "class_labels" in self.parameters:
            given["class_labels"] = [int(text) for text in batch.prompts]
        elif "batch_size" in self.parameters:
            given["batch_size"] = len(batch.ids)
        # Noise from the host: the same on every device, and each sample's own.
        given["generator"] = [torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds]
        return given

    def wrapped(self, case: Case) -> Any:
        """Return a context in which the pipeline runs under the case's method, if it has one."""
        if case.method is None:
            return nullcontext()
        if isinstance(case.method, Peer):
            return case.method.applied(self.pipe, case.steps)
        return diffcache.wrapped(self.pipe, case.method)

    def draw(self, case: Case, batch: Batch, keep_latents: int = 0, timed: bool = False) -> Drawn:
        """Draw a batch; call it within `wrapped(case)`.

        Of the first `keep_latents` samples the latents of every step are kept, where the pipeline shows them. In a
        call that is `timed`, a cache of another library, which counts nothing itself, is not watched.
        """
        given = self.arguments(batch, case.steps)
        kept: list[Tensor] = []
        if keep_latents and "callback_on_step_end" in self.parameters:

            def keep(pipe: Any, step: int, timestep: Any, inner: dict[str, Any]) -> dict[str, Any]:
                kept.append(inner["latents"][:keep_latents].detach().float().cpu())
                return {}

            given["callback_on_step_end"] = keep
        started = time.perf_counter()
        is_watched = isinstance(case.method, Peer) and not timed
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)  # the record tells it
            with observed(self.pipe) if is_watched else nullcontext() as count:
                output = self.pipe(**given)
        samples = samples_of(output)  # on the host: an accelerator has ended here
        about: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 4)}
        if isinstance(case.method, Method):
            about["cache"] = summary(self.pipe)
        elif count is not None:
            about["cache"] = count.summary()
        return Drawn(samples, about, torch.stack(kept) if kept else None)


def summary(pipe: Any) -> dict[str, Any]:
    """Return the last run's report for the manifest, without times."""
    report = diffcache.report(pipe)
    steps = []
    for calls in steps_of(report.calls):
        steps.append([calls[0].timestep, int(any(call.computed for call in calls))])
    return {
        "steps": steps,
        "computed": report.computed,
        "skipped": report.skipped,
        "flops_computed": report.flops_computed,
        "flops_saved": report.flops_saved,
        "held_bytes": report.peak_bytes,
    }


def samples_of(output: Any) -> list[Tensor]:
    """Return the samples of a pipeline's output as 8-bit tensors.

    They are pictures uint8 [3, H, W], or films uint8 [F, 3, H, W]. Raises ValueError if the output holds neither
    pictures nor films.
    """
    if getattr(output, "frames", None) is not None:
        return [torch.stack([_tensor(frame) for frame in film]) for film in output.frames]
    if getattr(output, "images", None) is not None:
        return [_tensor(image) for image in output.images]
    raise ValueError(f"a {type(output).__name__} holds neither pictures nor films")


def _tensor(image: Any) -> Tensor:
    array = np.array(generate.picture(image).convert("RGB"))
    return torch.from_numpy(array).movedim(-1, 0)


def relative_errors(latents: Tensor, others: Tensor) -> list[list[float]]:
    """Return the relative L2 error of every sample's latents behind every step.

    Both are [S, B, ...], the uncached ones first.
    """
    apart = (others - latents).flatten(2).double().norm(dim=2)
    errors = apart / latents.flatten(2).double().norm(dim=2).clamp_min(1e-12)
    return [list(row) for row in errors.tolist()]


_CLASSES = 1000
# Arguments that a run sets itself -> field of the task that has the value.
_OWN = {
    "prompt": "prompts",
    "class_labels": "prompts",
    "num_inference_steps": "steps",
    "generator": "seed",
    "batch_size": "batch_size",
}
# One sample for each prompt, as pictures: a run could not read anything else.
_FIXED = ("num_images_per_prompt", "num_videos_per_prompt", "output_type", "return_dict", "callback_on_step_end")
_RATES = ("frame_rate", "fps")  # what pipelines call their frames per second
# Frame rates of pipelines whose documentation in diffusers names none, from their model cards.
_KNOWN_RATES = {"MochiPipeline": 30.0}
_REAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_call(
    pipeline: str, parameters: Parameters, task: Task, call: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> None:
    """Check that a pipeline takes the arguments of a run.

    `call` includes defaults of the model; `inputs` are arguments that are no plain data, such as pictures. Raises
    ValueError if an argument is not taken, is set by the run, or is missing.
    """
    more = dict(inputs or {})
    for name, value in {**task.call, **more}.items():
        if name in _OWN:
            raise ValueError(f"call {name}={value!r}: set {_OWN[name]} of the task instead")
        if name in _FIXED:
            raise ValueError(f"call {name}={value!r}: the evaluation sets it; leave it out")
        if name not in parameters:
            raise ValueError(f"call {name}={value!r}: {pipeline} takes none")
        if name in more:
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"call {name}={value!r}: must be plain data ({error})") from error
    needed = needed_inputs(pipeline, parameters)
    for name, parameter in parameters.items():
        is_needed = parameter.kind in _REAL and parameter.default is parameter.empty
        if (is_needed or name in needed) and name not in {*call, *more, *_OWN}:
            raise ValueError(
                f"{pipeline} needs {name}, beside prompts or class numbers: pass a picture with "
                "--image, plain values with --call KEY=VALUE, and anything from Python: "
                f"diffcache.evaluate(pipe, methods, prompts, {name}=...)"
            )


def frame_rate(pipeline: str, parameters: Parameters, task: Task, call: Mapping[str, Any]) -> float | None:
    """Return the frames per second of a pipeline's films; None for a pipeline of pictures.

    The task's number takes precedence, then the call's own argument, given or default. For pipelines without such an
    argument, the rate is read from the example in their documentation, where it exports its film. `call` includes
    defaults of the model.

    Raises:
        ValueError: If the rate of a pipeline of films is not known, or the task gives one to a pipeline of pictures.
    """
    if not {"num_frames", "video_length"} & set(parameters):
        if task.fps is not None:
            raise ValueError(f"fps={task.fps:g}: {pipeline} draws no films; leave --fps out")
        return None
    if task.fps is not None:
        return task.fps
    for name in _RATES:
        if name in parameters:
            value = call.get(name, parameters[name].default)
            if isinstance(value, (int, float)) and value > 0:
                return float(value)
    known = getattr(diffusers, pipeline, None)  # a live one may be a class of the user's
    example = (known and known.__call__.__doc__) or ""
    rates = {float(rate) for rate in re.findall(r"\bfps=(\d+(?:\.\d+)?)", example)}
    if len(rates) == 1:
        return rates.pop()
    if pipeline in _KNOWN_RATES:
        return _KNOWN_RATES[pipeline]
    raise ValueError(f"{pipeline} does not say how many frames a second its films have: give them with --fps")


def prompts_of(task: Task, pipeline: str, parameters: Parameters, model: Any) -> Prompts:
    """Return the prompts of a task, or if it has none, those that suit the pipeline.

    `model` is its directory, or a loaded pipeline. A class-conditional pipeline gets class numbers in digits, and an
    unconditional one a single empty prompt.

    Raises:
        FileNotFoundError: If there is no such list.
        ValueError: If the pipeline takes no prompts but the task has some, or a class number is invalid.
    """
    source = task.prompts
    if not isinstance(source, str):
        return _given(source, pipeline, parameters, model)
    if "prompt" in parameters:
        if not source:
            name = model.resolve().name if isinstance(model, Path) else task.model
            is_film = "num_frames" in parameters
            if name.startswith("sticker-"):
                source = "sticker-films" if is_film else "stickers"
            else:
                source = "films" if is_film else "pictures"
        return load_prompts(source, task.samples)
    if "class_labels" not in parameters:
        if source:
            raise ValueError(f"prompts={source!r}: {pipeline} takes neither prompts nor classes")
        return Prompts("unconditional", ("",), digest([""]))
    count = _class_count(model)
    if not source:
        texts = tuple(map(str, range(count)))
        return Prompts("class numbers", texts, digest(texts))
    found = load_prompts(source, task.samples)
    _check_classes(found.texts, pipeline, count)
    return found


def _given(texts: tuple[str, ...], pipeline: str, parameters: Parameters, model: Any) -> Prompts:
    """Return prompts or class numbers that were given one by one."""
    if "class_labels" in parameters:
        _check_classes(texts, pipeline, _class_count(model))
    elif "prompt" not in parameters:
        raise ValueError(f"prompts={texts[0]!r}, ...: {pipeline} takes neither prompts nor classes")
    return Prompts("given", texts, digest(list(texts)))


def _check_classes(texts: Sequence[str], pipeline: str, count: int) -> None:
    """Raise ValueError unless all texts are class numbers."""
    wrong = [text for text in texts if not (text.isdecimal() and int(text) < count)]
    if wrong:
        raise ValueError(f"prompts: {pipeline} takes class numbers from 0 to {count - 1}, not {wrong[0]!r}")


def _class_count(model: Any) -> int:
    """Return the number of classes of a pipeline: those that have names, else those that fit its table.

    A table may be longer than the trained embedding, so names go first.
    """
    if isinstance(model, Path):
        index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
        numbers = list(map(int, index.get("id2label") or ()))
        file = model / "transformer" / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    else:
        numbers = list((getattr(model, "labels", None) or {}).values())
        config = dict(getattr(getattr(model, "transformer", None), "config", None) or {})
    return max(numbers) + 1 if numbers else int(config.get("num_embeds_ada_norm") or _CLASSES)
