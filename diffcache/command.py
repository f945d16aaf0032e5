"""What every command line of the project shares: errors as one line, exit codes, KEY=VALUE."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import typer

from diffcache.errors import DiffcacheError

Command = TypeVar("Command", bound=Callable[..., None])
EXPECTED = (
    DiffcacheError, ValueError, FileNotFoundError, FileExistsError, IsADirectoryError,
    NotADirectoryError, PermissionError,
)  # fmt: skip
DEBUG: ContextVar[bool] = ContextVar("diffcache_debug", default=False)


def guarded(command: Command) -> Command:
    """Turn the errors of a command into one line and an exit code.

    What a user can put right ends with 2, a failed run with 1, Ctrl-C with 130. With --debug the
    exception goes on its way.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt as stop:
            fail(str(stop) or "interrupted", 130, "")
        except Exception as error:
            if DEBUG.get():
                raise
            if isinstance(error, EXPECTED):
                fail(str(error), 2)
            fail(f"{type(error).__name__}: {error} (diffcache --debug shows where)", 1)

    return inner  # type: ignore[return-value]


def fail(message: str, code: int, prefix: str = "error: ") -> NoReturn:
    """Print one line on standard error and exit."""
    typer.echo(prefix + " ".join(message.split()), err=True)
    raise typer.Exit(code)


def parse_settings(settings: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Read KEY=VALUE pairs; a value is Python where it can be read so, else text.

    Raises:
        ValueError: If a pair has no `=`.
    """
    parsed: dict[str, Any] = {}
    for pair in settings:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise ValueError(f"{option} {pair!r}: must be a setting and its value, such as every=4")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = value
    return parsed
