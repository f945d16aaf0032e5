"""Exit codes, options and errors in one line, for every command line of the project."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from diffcache.errors import DiffcacheError, MissingError, UncalibratedError
from diffcache.files import check_target as check_target
from diffcache.files import write_json

if TYPE_CHECKING:
    import torch

Command = TypeVar("Command", bound=Callable[..., None])
EXIT_CODES = {
    0: "done",
    1: "a run failed or a limit was crossed",
    2: "a wrong request or file",
    3: "weights or a package are missing",
    130: "interrupted",
}
DONE, FAILED, WRONG, MISSING, INTERRUPTED = EXIT_CODES
EXIT_LINE = "Exit codes: " + ", ".join(f"{code} {word}" for code, word in EXIT_CODES.items()) + "."
MAX_SEED = 2**63 - 1  # torch takes twice as much, so that `seed + i` always fits
DEVICES = "auto (CUDA where there is one, else cpu), cpu, cuda:1, mps, ..."
DTYPES = (
    "auto (float32 on the CPU; elsewhere float16 where the denoiser was saved so, else bfloat16), "
    "float32, float16, bfloat16"
)
MODELS = "directory of a pipeline, a Hugging Face model ID, or a shipped model such as sticker-flux"
METHOD = "NAME[:KEY=VALUE,...]"

# The options that several commands have, with one meaning.
Device = Annotated[str, typer.Option(help=f"Device of torch: {DEVICES}")]
Dtype = Annotated[str, typer.Option(help=f"Dtype of the models: {DTYPES}.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the noise; torch reads its lowest 32 bits.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of torch.")]
Json = Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or - for only JSON.")]
DEBUG: ContextVar[bool] = ContextVar("diffcache_debug", default=False)


def guarded(command: Command) -> Command:
    """Turn the errors of a command into one line and one of `EXIT_CODES`.

    With --debug the exception goes on its way.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt as stop:
            fail(str(stop) or "interrupted", INTERRUPTED, "")
        except Exception as error:
            if DEBUG.get():
                raise
            fail(*_told(error))

    return inner  # type: ignore[return-value]


def script(command: Command) -> Callable[..., int]:
    """Return the `main` of a module: it runs a command, whose docstring is the help, and returns the exit code."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(epilog=EXIT_LINE, context_settings={"help_option_names": ["-h", "--help"]})(guarded(command))

    def main(arguments: Sequence[str] | None = None, name: str | None = None) -> int:
        """Run a command line, by default that of the process, under a name that the help shows."""
        try:
            app(arguments, prog_name=name)
        except SystemExit as stop:
            return int(stop.code or DONE)
        return DONE

    return main


def _told(error: Exception) -> tuple[str, int]:
    """Return the message of an error as a command line says it, and the exit code."""
    if isinstance(error, UncalibratedError) and error.method:
        name = error.method
        command = "tune --speedup 3" if name == "tuned" else f"calibrate --method {name}"
        made = f"`diffcache {command} --model MODEL --steps N` writes them"
        use = f"then take --method {name}:tables={name}.safetensors"
        return f"method {name!r} has no tables for this model: {made}; {use}", WRONG
    if isinstance(error, (MissingError, ImportError)):
        return str(error), MISSING
    if isinstance(error, (DiffcacheError, ValueError, OSError)):
        return str(error), WRONG
    return f"{type(error).__name__}: {error} (diffcache --debug shows where)", FAILED


def fail(message: str, code: int, prefix: str = "error: ") -> NoReturn:
    """Print one line on standard error and exit."""
    typer.echo(prefix + " ".join(message.split()), err=True)
    raise typer.Exit(code)


def warn(*texts: str) -> None:
    """Print warnings, each one line on standard error."""
    for text in texts:
        typer.echo(f"warning: {' '.join(text.split())}", err=True)


def check_json(target: str) -> None:
    """Check the file that `--json` names as `check_target` does; `-` is standard output."""
    if target not in ("", "-"):
        check_target("--json", Path(target))


def print_or_write(target: str, report: dict[str, Any], print_text: Callable[[], None]) -> None:
    """Print a report as text, or as nothing but JSON where `--json` is `-`; a file gets the JSON as well."""
    if target == "-":
        typer.echo(json.dumps(report, indent=1, allow_nan=False))
        return
    print_text()
    if target:
        write_json(Path(target), report)
        typer.echo(f"wrote {target}")


def refuse(options: dict[str, Any], why: str) -> None:
    """Raise ValueError for the first option that was given, by its name without dashes; `why` ends the sentence."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name} {value}: {why}")


def device_of(name: str) -> torch.device:
    """Return the device that `--device` names; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ValueError: If torch does not know the device, or sees none of its kind here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        count = torch.get_device_module(device).device_count()
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"--device {name!r}: must be auto, cpu, cuda, cuda:1, mps, ...") from error
    kind = device.type if device.type == "cpu" else device.type.upper()
    if not count:
        raise ValueError(f"--device {name!r}: torch sees no {kind} device here; use cpu")
    if (device.index or 0) >= count:
        raise ValueError(
            f"--device {name!r}: torch sees {count} {kind} device{'s' * (count > 1)} here, up to "
            f"{device.type}:{count - 1}"
        )
    return device


def parse_settings(settings: Sequence[str], option: str) -> dict[str, Any]:
    """Read KEY=VALUE pairs; a value is Python, true or false where it can be read so, else text.

    Raises:
        ValueError: If a pair has no `=`.
    """
    parsed: dict[str, Any] = {}
    for pair in settings:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise ValueError(f"{option} {pair!r}: must be a setting and its value, such as every=4")
        try:
            parsed[key] = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (ValueError, SyntaxError):
            parsed[key] = value
    return parsed
