"""`python -m diffcache.eval.report`: records to tables, plots and a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffcache.command import script
from diffcache.eval.report.record_files import load
from diffcache.eval.report.write import FOLDER, FORMATS, write_report


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders or records.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Folder of the files (default: RUN/{FOLDER}).")
    ] = None,
    formats: Annotated[str, typer.Option("--format", metavar="LIST", help="Of md,html,csv.")] = ",".join(FORMATS),
) -> None:
    """Write tables, plots and a page from the records of runs.

    [bold]Try[/bold]

        diffcache eval report runs/sticker-flux-0123abcd
    """
    if len(runs) > 1 and out is not None:
        raise ValueError(f"--out {out}: files of {len(runs)} runs have the same names; leave it out")
    named = [name.strip() for name in formats.split(",") if name.strip()]
    for path, record in [(path, load(path)) for path in runs]:
        for file in write_report(record, path if path.is_dir() else path.parent, out, named):
            if file.suffix.removeprefix(".") in FORMATS:
                typer.echo(file)


main = script(report)

if __name__ == "__main__":
    sys.exit(main())
