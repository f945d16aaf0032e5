"""Arguments of a pipeline's call, checked before anything is drawn."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers

from diffcache.eval.runs.task import Task, digest
from diffcache.eval.samples.prompts import Prompts, load_prompts
from diffcache.pipelines.demo.generate import needed_inputs
from diffcache.pipelines.demo.saved import Parameters

_CLASSES = 1000
# Arguments that a run sets itself, and the field of the task that says what to.
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

    `call` has defaults of the model, too; `inputs` are arguments that are no plain data, such as pictures.

    Raises:
        ValueError: If an argument is not taken, is set by the run, or is missing.
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
    """Return the frames per second of a pipeline's films.

    The task's number goes first, then the call's own argument, given or default. Pipelines without such an argument
    name the rate where the example in their documentation exports its film. `call` has defaults of the model, too.

    Returns:
        Frames per second; None for a pipeline of pictures.

    Raises:
        ValueError: If a pipeline of films does not say its frame rate, or the task gives one to a pipeline of
            pictures.
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
    """Return the prompts of a task, or those that suit the pipeline.

    `model` is its directory, or a loaded pipeline.

    Returns:
        Class numbers in digits where the pipeline is class-conditional, and one empty prompt where it is
        unconditional.

    Raises:
        FileNotFoundError: If there is no such list.
        ValueError: If the pipeline takes no prompts but the task has some, or a class number is none.
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
    """Return how many classes a pipeline has: those that it names, else those that fit its table.

    A table may be longer than what was trained, so names go first.
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
