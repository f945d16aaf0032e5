"""Make the tables that recipes need, on recall-llama, from contexts that nothing is measured on.

    python -m diffcache.eval.kv.prepare             # all that are not there yet, minutes
    python -m diffcache.eval.kv.prepare locret --again

Each is one file in assets/tables/recall-llama; `diffcache kv --recipe` reads it by `@name`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffcache.command import EXIT_LINE
from diffcache.eval import script
from diffcache.eval.kv.offline import Prepared, Samples
from diffcache.eval.kv.offline_gates import duo_attention
from diffcache.eval.kv.offline_heads import (
    compresskv,
    cskv,
    double_sparsity,
    kv_heads,
    lococo,
    locret,
    prefixkv,
    razor_attention,
)
from diffcache.eval.kv.recall import SHIPPED, KVTask
from diffcache.eval.kv.tables import FOLDER, write_table

MAKERS: dict[str, Callable[[Any, Samples], Prepared]] = {
    "duo_attention": duo_attention,
    "razor_attention": razor_attention,
    "compresskv": compresskv,
    "prefixkv": prefixkv,
    "lococo": lococo,
    "locret": locret,
    "double_sparsity": double_sparsity,
    "cskv": cskv,
    "kv_heads": kv_heads,
}


def prepare(
    names: Sequence[str], model: nn.Module, samples: Samples, folder: Path, again: bool = False
) -> list[Path]:
    """Make tables and return their files; those that are there are left as they are.

    Args:
        names: Keys of `MAKERS`; none for all.
        model: recall-llama, in float32.
        samples: Contexts.
        folder: Of the files.
        again: Make them anew.

    Raises:
        ValueError: If there is no such name.
    """
    unknown = sorted(set(names) - set(MAKERS))
    if unknown:
        raise ValueError(f"no table {unknown[0]!r}; there are {', '.join(MAKERS)}")
    files = []
    for name in names or MAKERS:
        file = folder / f"{name}.safetensors"
        files.append(file)
        if file.exists() and not again:
            continue
        print(f"{name} ...", file=sys.stderr)
        found = MAKERS[name](model, samples)
        about = {"kind": found.kind, "samples": dataclasses.asdict(samples), **found.about}
        write_table(file, found.tensors, about)
        print(f"wrote {file.name}, {file.stat().st_size:,} bytes: {shown(found)}")
    return files


def shown(found: Prepared) -> str:
    """Return small tables as text, and the shapes of large ones."""
    parts = []
    for name, value in found.tensors.items():
        small = value.numel() <= 32
        parts.append(f"{name}={value.tolist() if small else list(value.shape)}")
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what a command line asks for; return an exit code."""
    parser = script.Parser(
        prog="python -m diffcache.eval.kv.prepare",
        description="Make the tables that recipes need, on recall-llama.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_LINE,
    )
    parser.add_argument("names", nargs="*", help=f"{', '.join(MAKERS)}; default: all")
    parser.add_argument("--model", default=SHIPPED, help="directory (default: recall-llama)")
    parser.add_argument("--again", action="store_true", help="make those anew that are there")
    parser.add_argument("--context", type=int, default=513, help="tokens (default: 513)")
    parser.add_argument("--facts", type=int, default=64, help="in a context (default: 64)")
    parser.add_argument("--count", type=int, default=16, help="contexts (default: 16)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the files")

    def work() -> None:
        given = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
        torch.set_num_threads(1)
        samples = Samples(given.context, given.facts, given.count)
        model = KVTask(given.model, dtype="float32").load()
        prepare(given.names, model, samples, given.folder, given.again)

    return script.guarded(work)


if __name__ == "__main__":
    raise SystemExit(main())
