"""The options of a command line that say how a pipeline is loaded, once for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from diffcache.pipelines.load import OFFLOADS, QUANTIZED, Loading

Command = TypeVar("Command", bound=Callable[..., None])
AS_SAVED = Loading()
_OPTIONS: dict[str, Any] = {
    "variant": Annotated[str, typer.Option(help="Files of weights that are read, such as fp16.")],
    "revision": Annotated[str, typer.Option(help="Branch, tag or commit of a Hugging Face model.")],
    "offload": Annotated[
        str,
        typer.Option(help=f"Weights wait on the CPU, as in diffusers: {', '.join(OFFLOADS)}."),
    ],
    "loras": Annotated[
        list[str],
        typer.Option("--lora", metavar="PATH_OR_ID[:SCALE]", help="An adapter. May be repeated."),
    ],
    "quantize": Annotated[str, typer.Option(help=f"Weights of denoisers: {', '.join(QUANTIZED)}.")],
    "compile": Annotated[
        bool, typer.Option("--compile", help="Compile the denoisers' repeated blocks.")
    ],
}


def with_loading(command: Command) -> Command:
    """Give a command the options of `Loading` in place of its argument `loading`."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "loading"]
    for name, annotation in _OPTIONS.items():
        default = [] if name == "loras" else getattr(AS_SAVED, name)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        chosen = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        command(*args, **kwargs, loading=Loading(**chosen))

    inner.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return inner  # type: ignore[return-value]
