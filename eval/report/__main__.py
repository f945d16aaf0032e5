"""`python -m diffcache.eval.report`: records to tables, plots and a page, or into a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffcache.command import FAILED, fail, script
from diffcache.eval.report import docs
from diffcache.eval.report.records import load
from diffcache.eval.report.write import FOLDER, FORMATS, write_report


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders or records.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Folder of the files (default: RUN/{FOLDER})."),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="LIST", help="Of md,html,csv.")
    ] = ",".join(FORMATS),
    document: Annotated[
        Path | None, typer.Option("--docs", metavar="FILE", help="Fill the tables of a document.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --docs: only compare; exit 1 where it differs.")
    ] = False,
) -> None:
    """Write tables, plots and a page from the records of runs.

    [bold]Try[/bold]

        diffcache eval report runs/sticker-flux-0123abcd

        diffcache eval report --docs README.md RECORD.json --check

    The last one fills what stands between <!-- diffcache.eval: RECORD --> and
    <!-- /diffcache.eval -->.
    """
    if document is not None:
        _fill(document, runs, check, out)
        return
    if check:
        raise ValueError("--check: only with --docs FILE")
    if len(runs) > 1 and out is not None:
        raise ValueError(
            f"--out {out}: files of {len(runs)} runs have the same names; leave it out"
        )
    named = [name.strip() for name in formats.split(",") if name.strip()]
    for path, record in [(path, load(path)) for path in runs]:
        for file in write_report(record, path if path.is_dir() else path.parent, out, named):
            if file.suffix.removeprefix(".") in FORMATS:
                typer.echo(file)


def _fill(document: Path, runs: list[Path], check: bool, out: Path | None) -> None:
    """Fill the tables of a document, or compare them."""
    if out is not None:
        raise ValueError("--docs: not with --out")
    differs = docs.update(document, runs, check)
    if differs and check:
        again = f"--docs {document} {' '.join(map(str, runs))}"
        fail(f"{document} differs from its records; run without --check: {again}", FAILED, "")
    typer.echo(f"{document}: {'filled' if differs else 'as its records say'}")


main = script(report)

if __name__ == "__main__":
    sys.exit(main())
