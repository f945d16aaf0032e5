"""Measure what caching itself costs: host time of skipped steps, compiled graphs, KV caches.

    python -m diffcache.eval.bench                     # all of them, a few minutes on two cores
    python -m diffcache.eval.bench overhead --quick

prints tables and writes one JSON record for each benchmark. Peers are measured in the same process,
in turn with ours. Whole runs of pipelines are timed by `diffcache eval`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from diffcache.eval.bench import compiled, decode, kv, overhead
from diffcache.eval.bench.models import Shape
from diffcache.eval.record import FOLDER, ROOT, Setting, envelope, write
from diffcache.pipelines.demo.console import progress, quiet
from diffcache.pipelines.demo.saved import DTYPES

BENCHMARKS: dict[str, ModuleType] = {
    "overhead": overhead, "compile": compiled, "kv": kv, "decode": decode,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "overhead": {"rounds": 5, "shape": Shape(4, 8)}, "kv": {"rounds": 2, "slots": 256},
    "decode": {"rounds": 2, "layers": 2, "prompt": 256},
}  # fmt: skip
QUICK = ROOT / "out" / "bench"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.eval.bench",
        description="Measure what feature caches cost, beside the caches of diffusers.",
        epilog="overhead: host time of a skipped step. compile: graphs and breaks of compiled "
        "blocks. kv: host time, bytes and error of caches of keys and values. decode: time of a "
        "token with each cache, as a share of the stock cache's.",
    )
    add = parser.add_argument
    add("benchmarks", nargs="*", metavar="benchmark", help=f"{', '.join(BENCHMARKS)}; default: all")
    add("--device", default="cpu", help="torch device (default: cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    add("--rounds", type=int, default=50, help="timed rounds (default: 50)")
    add("--layers", type=int, help=f"layers of the model of decode (default: {decode.LAYERS})")
    add("--prompt", type=int, help=f"tokens of the prompt of decode (default: {decode.PROMPT})")
    add("--recipes", help="caches that decode times, comma-separated (default: all)")
    add("--out", type=Path, help="folder of the records (default: assets/bench)")
    add("--quick", action="store_true",
        help="measure as little as shows that it works; records go to out/bench")  # fmt: skip
    return parser


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of `decode` that were asked for."""
    recipes = options.recipes and [name.strip() for name in options.recipes.split(",")]
    given = {"layers": options.layers, "prompt": options.prompt, "recipes": recipes}
    return {name: value for name, value in given.items() if value is not None}


def _quoted(value: int | list[str]) -> str:
    return str(value) if isinstance(value, int) else shlex.quote(",".join(value))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write records."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.benchmarks if name not in BENCHMARKS]
    if unknown:
        parser().error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in ("threads", "rounds"):
        if getattr(options, name) < 1:
            parser().error(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser().error(f"--device {options.device}: torch sees no CUDA device here")
    torch.set_num_threads(options.threads)
    quiet()  # no bars and notes of diffusers between the tables
    setting = Setting(torch.device(options.device), DTYPES[options.dtype])
    folder = options.out or (QUICK if options.quick else FOLDER)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in options.benchmarks or BENCHMARKS:
        with progress(name) as show:
            sizes = {} if name == "compile" else {"rounds": options.rounds, "progress": show}
            sizes |= SMALL.get(name, {}) if options.quick else {}
            sizes |= _chosen(options) if name == "decode" else {}
            body = BENCHMARKS[name].measure(setting, **sizes)
        words = ["python -m diffcache.eval.bench", name, f"--device {options.device}",
                 f"--dtype {options.dtype} --threads {options.threads}"]  # fmt: skip
        if name == "decode":
            words += [f"--{key} {_quoted(value)}" for key, value in _chosen(options).items()]
        words += [f"--rounds {body['rounds']}"] * ("rounds" in sizes) + ["--quick"] * options.quick
        record = envelope(name, setting, " ".join(words), body)
        for table in BENCHMARKS[name].tables(record):
            console.print(table)
        file = write(record, folder)
        console.print(f"{name}: {record['seconds']:.0f} s, wrote {file.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
