"""Options of drawing and of loading a pipeline, once for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from diffcache.command import METHOD, MODELS, Device, Dtype, Seed, Threads, parse_settings
from diffcache.pipelines.load import OFFLOADS, QUANTIZED, Loading, made_by

Command = TypeVar("Command", bound=Callable[..., None])
Settings = dict[str, Any]
AS_SAVED = Loading()
NONE: Settings = {}
EMPTY: list[str] = []
MODEL = f"{MODELS[0].upper()}{MODELS[1:]}, or module:function that returns a pipeline."
Methods = Annotated[list[str], typer.Option("--method", metavar=METHOD, help="May be repeated.")]
Images = Annotated[
    list[str],
    typer.Option(
        "--image",
        metavar="[NAME=]FILE",
        help="A picture that all samples are made from, of an editing pipeline. May be repeated.",
    ),
]
CausalModel = Annotated[str, typer.Option(help="Directory of a causal model, Hugging Face model ID, or smollm2.")]
Texts = Annotated[
    Path | None,
    typer.Option(
        help='A file with a text on each line, a .jsonl file with "text", or a folder of .txt files.',
        show_default="Python's reference",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def _loading(
    variant: Annotated[str, typer.Option(help="Files of weights to read, such as fp16.")] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = "",
    offload: Annotated[
        str, typer.Option(help=f"Weights wait on the CPU, as in diffusers: {', '.join(OFFLOADS)}.")
    ] = "",
    loras: Annotated[
        list[str], typer.Option("--lora", metavar="PATH_OR_ID[:SCALE]", help="An adapter. May be repeated.")
    ] = EMPTY,
    quantize: Annotated[str, typer.Option(help=f"Weights of denoisers: {', '.join(QUANTIZED)}.")] = "",
    compile: Annotated[  # noqa: A002
        bool, typer.Option("--compile", help="Compile the denoisers' repeated blocks.")
    ] = False,
) -> Loading:
    """Return how a pipeline is loaded."""
    return Loading(variant, revision, offload, tuple(loras), quantize, compile)


def _task(
    model: Annotated[str, typer.Option(help=MODEL)],
    samples: Annotated[int, typer.Option(min=1, help="Samples to draw.")] = 256,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps (default: the pipeline's).")] = None,
    prompts: Annotated[str, typer.Option(help="stickers, sticker-films, pictures, films, a file.")] = "",
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a call.")] = 8,
    call: Annotated[
        list[str], typer.Option("--call", metavar="KEY=VALUE", help="An argument of the pipeline's call.")
    ] = EMPTY,
    fps: Annotated[
        float | None, typer.Option(min=0.01, max=1000, help="Frames a second of films (default: the model's).")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = 1,
) -> None:
    """Stand for the fields of `diffcache.eval.runs.task.Task`, whose module is slow to import."""


def given_of(model: str, images: list[str]) -> dict[str, Any]:
    """Return the pipeline that a function of the user's makes, if one is named, and the pictures.

    Raises FileNotFoundError if there is no such model or picture, and ValueError if the pipeline takes no such
    picture, or lacks one.
    """
    from diffcache.pipelines.demo import saved
    from diffcache.pipelines.demo.generate import read_images

    pipe, inputs = made_by(model), {}
    if images and pipe is None:
        inputs = read_images(images, *saved.pipeline_of(saved.locate(model, configs_only=True)))
    elif images:
        inputs = read_images(images, type(pipe).__name__, inspect.signature(pipe).parameters)
    return {"pipe": pipe, "inputs": inputs}


def with_loading(command: Command) -> Command:
    """Give a command the options of `Loading` in place of its argument `loading`."""
    return _replaced(command, "loading", _parameters(_loading), _loading)


def with_task(*names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command options of `Task` in place of its argument `task`, a dict of its fields.

    Fields of loading are always among them; `defaults` are fields with defaults of the command's own.
    """
    loading = _parameters(_loading)
    options = [
        option.replace(default=defaults.get(option.name, option.default))
        for option in _parameters(_task)
        if option.name in {*names, *defaults}
    ]

    def gathered(call: list[str], **values: Any) -> Settings:
        how = _loading(**{option.name: values.pop(option.name) for option in loading})
        return {**values, "call": parse_settings(call, "--call"), "loading": how}

    return lambda command: _replaced(command, "task", [*options, *loading], gathered)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, to be given by name."""
    found = inspect.signature(function, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in found]


def _replaced(
    command: Command, argument: str, options: Iterable[inspect.Parameter], make: Callable[..., Any]
) -> Command:
    """Give a command options in place of an argument, which is made of their values."""
    parameters = _parameters(command)
    place = [parameter.name for parameter in parameters].index(argument)
    parameters[place : place + 1] = options
    names = [option.name for option in options]

    @functools.wraps(command)
    def inner(**given: Any) -> None:
        made = make(**{name: given.pop(name) for name in names})
        command(**given, **{argument: made})

    signature = inspect.Signature(parameters)
    inner.__signature__ = signature  # type: ignore[attr-defined]
    return inner  # type: ignore[return-value]
