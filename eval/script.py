"""What the scripts on folders share: errors as one line, exit codes, a bar, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from diffcache.command import DONE, FAILED, INTERRUPTED, MISSING, WRONG, check_target
from diffcache.errors import AttachError, DiffcacheError, MissingError

_SHOWN_AFTER_SECONDS = 2.0
Item = TypeVar("Item")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing."""
        raise ValueError(f"{message} (see --help)")


def guarded(
    work: Callable[[], int | None], failures: tuple[type[Exception], ...] = (), lines: bool = False
) -> int:
    """Do the work; turn what a user can put right into one line and an exit code.

    Args:
        work: Returns an exit code, None for 0.
        failures: Errors that mean a failed run (exit code 1), where they are not a wrong request.
        lines: Keep the line breaks of messages, such as lists of files.

    Returns:
        One of `diffcache.command.EXIT_CODES`.
    """
    expected: tuple[type[Exception], ...] = (DiffcacheError, ValueError, OSError, *failures)
    try:
        return work() or DONE
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (MissingError, ImportError) as error:
        return _fail(error, MISSING, lines)
    except expected as error:
        is_failure = isinstance(error, failures) and not isinstance(error, AttachError)
        return _fail(error, FAILED if is_failure else WRONG, lines)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def warn(*texts: str) -> None:
    """Print warnings, each one line on standard error."""
    for text in texts:
        print(f"warning: {' '.join(text.split())}", file=sys.stderr)


def bar(items: Iterable[Item], total: int, label: str) -> Iterable[Item]:
    """Show progress on a terminal's standard error, where it takes more than two seconds."""
    from tqdm import tqdm

    shown: Iterable[Item] = tqdm(
        items, label, total, leave=False, file=sys.stderr, disable=None, delay=_SHOWN_AFTER_SECONDS
    )
    return shown


def check_targets(**targets: str | None) -> None:
    """Check that files can be written, before anything is computed.

    Args:
        targets: Option -> path. Only that of `json` may be `-`, standard output.

    Raises:
        ValueError: If the path is a folder, or cannot be written.
    """
    for option, target in targets.items():
        if target is None or (target == "-" and option == "json"):
            continue
        if target == "-":
            raise ValueError(f"--{option} -: name a file; only --json prints")
        check_target(f"--{option}", Path(target))


def show(target: str | None, report: dict[str, Any], print_table: Callable[[], None]) -> None:
    """Print the table, or nothing but JSON for `-`; write JSON to a file if one is named."""
    from diffcache.files import write_json

    if target == "-":
        print(json.dumps(report, indent=1, allow_nan=False))
        return
    print_table()
    if target:
        write_json(Path(target), report)
        print(f"wrote {target}")


def at_least(least: int) -> Callable[[str], int]:
    """Return a converter for a whole number that is not below `least`."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {least}")
        return value

    return whole_number


def _fail(error: BaseException, code: int, lines: bool) -> int:
    text = str(error) if lines else " ".join(str(error).split())
    print(f"error: {text}", file=sys.stderr)
    return code
