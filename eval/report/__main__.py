"""`python -m diffcache.eval.report`: records to tables, plots and a page, or into a document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from diffcache.command import EXIT_LINE
from diffcache.eval import script
from diffcache.eval.report import docs
from diffcache.eval.report.records import load
from diffcache.eval.report.write import FOLDER, FORMATS, write_joined, write_report, write_reports

EPILOG = f"""\
  python -m diffcache.eval.report runs/shapes-flux-0123abcd
  python -m diffcache.eval.report runs/one runs/two --join --out both
  python -m diffcache.eval.report --docs README.md RECORD.json --check
The last one fills what stands between <!-- diffcache.eval: RECORD --> and <!-- /diffcache.eval -->.
{EXIT_LINE}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        0 when done, 1 where a document differs from its records, 2 for a wrong request.
    """
    return script.guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    return _documents(options) if options.docs else _reports(options)


def _parser() -> argparse.ArgumentParser:
    parser = script.Parser(
        prog="python -m diffcache.eval.report",
        description="Write tables, plots and a page from the records of runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder or record")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder to write to (default: RUN/{FOLDER})"
    )
    parser.add_argument("--format", metavar="LIST", help="of md,html,csv (default: all)")
    parser.add_argument(
        "--join", action="store_true", help="put the rows of runs of the same task in one table"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="fill the tables of a document")
    parser.add_argument(
        "--check", action="store_true", help="with --docs: only compare; 1 where it differs"
    )
    return parser


def _reports(options: argparse.Namespace) -> int:
    if options.check:
        raise ValueError("--check: only with --docs FILE")
    formats = list(FORMATS)
    if options.format is not None:
        formats = [name.strip() for name in options.format.split(",") if name.strip()]
    runs = [(load(path), path if path.is_dir() else path.parent) for path in options.runs]
    if len(runs) > 1 and options.out is None:
        raise ValueError("several runs need a folder of their own: give --out DIR")
    if options.join:
        files = write_joined(runs, options.out or runs[0][1] / FOLDER, formats)
    elif len(runs) > 1:
        files = write_reports(runs, options.out, formats)
    else:
        files = write_report(*runs[0], options.out, formats)
    for file in files:
        if file.suffix in (".md", ".html", ".csv"):
            print(file)
    return 0


def _documents(options: argparse.Namespace) -> int:
    if options.out or options.join or options.format:
        raise ValueError("--docs: not with --out, --join or --format")
    differs = docs.update(options.docs, options.runs, options.check)
    if differs and options.check:
        again = f"--docs {options.docs} {' '.join(map(str, options.runs))}"
        print(
            f"{options.docs} differs from its records; run without --check: {again}",
            file=sys.stderr,
        )
        return 1
    print(f"{options.docs}: {'filled' if differs else 'as its records say'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
