"""Make the tables that recipes need, of any model; as a script those shipped for recall-llama.

    python -m diffcache.eval.kv.prepare             # all that are not there yet, minutes
    python -m diffcache.eval.kv.prepare locret --again

Each is one file in assets/tables/recall-llama; `diffcache kv --recipe` reads it by `@name`. For
another model there is `diffcache kv calibrate`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffcache.command import EXIT_LINE
from diffcache.eval import script
from diffcache.eval.kv.offline import Prepared, RecallSamples, Report, Samples
from diffcache.eval.kv.offline_bases import a2ats, cskv, kv_heads, xquant_latent
from diffcache.eval.kv.offline_gates import duo_attention, lococo, locret
from diffcache.eval.kv.offline_heads import (
    compresskv,
    double_sparsity,
    epicache,
    prefixkv,
    razor_attention,
)
from diffcache.eval.kv.recall import SHIPPED, KVTask
from diffcache.eval.kv.tables import FOLDER, weights_digest, write_table
from diffcache.eval.methods import naming
from diffcache.kv.hf.cache import detach

# Recipe -> what finds its tables: called with a model, samples, where to report, and settings.
MAKERS: dict[str, Callable[..., Prepared]] = {
    "duo_attention": duo_attention,
    "razor_attention": razor_attention,
    "compresskv": compresskv,
    "prefixkv": prefixkv,
    "epicache": epicache,
    "lococo": lococo,
    "locret": locret,
    "double_sparsity": double_sparsity,
    "a2ats": a2ats,
    "cskv": cskv,
    "kv_heads": kv_heads,
    "xquant_latent": xquant_latent,
}
SHIPPED_TABLES = tuple(
    name for name in MAKERS if name not in ("epicache", "a2ats", "xquant_latent")
)


def check(name: str, settings: dict[str, Any]) -> None:
    """Check that there are tables of a name, and settings of what finds them.

    Raises:
        ValueError: If there are not; the message lists those that there are.
    """
    if name not in MAKERS:
        raise ValueError(f"no table {name!r}; there are {', '.join(MAKERS)}")
    known = settings_of(name)
    wrong = sorted(set(settings) - set(known))
    if wrong:
        taken = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "none"
        raise ValueError(f"{name}: measuring has no setting {wrong[0]!r}; it has {taken}")


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of what finds the tables of a recipe, with their defaults."""
    parameters = inspect.signature(MAKERS[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def make(
    name: str,
    model: nn.Module,
    samples: Samples,
    file: Path,
    weights: str,
    report: Report,
    **settings: Any,
) -> Prepared:
    """Find the tables of a recipe on a model, and write them.

    Args:
        name: Key of `MAKERS`.
        model: Model of transformers, in the state that it is used in.
        samples: Contexts with questions.
        file: File to write.
        weights: Digest of the model's weights, which is checked where the tables are read.
        report: Told how far it is.
        settings: Settings of what finds them.

    Raises:
        AttachError: If the model has no such tables.
        ValueError: If there is no such name or setting, or one is out of its range.
    """
    check(name, settings)
    try:
        with naming(f"tables of {name}"):
            found = MAKERS[name](model, samples, report, **settings)
    finally:
        detach(model)
    about = {
        "kind": found.kind, "recipe": name, "weights": weights, "samples": samples.about(),
        "gives": {setting: list(entries) for setting, entries in found.gives.items()},
        "settings": settings_of(name) | settings, **found.about,
    }  # fmt: skip
    write_table(file, found.tensors, about)
    return found


def prepare(
    names: Sequence[str],
    model: nn.Module,
    samples: Samples,
    folder: Path,
    weights: str,
    again: bool = False,
) -> list[Path]:
    """Make tables and return their files; those that are there are left as they are.

    Args:
        names: Keys of `MAKERS`; none for those that are shipped.
        model: recall-llama, in float32.
        samples: Contexts.
        folder: Folder of the files.
        weights: Digest of the model's weights.
        again: Make them anew.

    Raises:
        ValueError: If there is no such name.
    """
    for name in names:
        check(name, {})
    files = []
    for name in names or SHIPPED_TABLES:
        file = folder / f"{name}.safetensors"
        files.append(file)
        if file.exists() and not again:
            continue
        print(f"{name} ...", file=sys.stderr)
        found = make(name, model, samples, file, weights, quiet_report)
        print(f"wrote {file.name}, {file.stat().st_size:,} bytes: {shown(found)}")
    return files


def quiet_report(done: int, total: int, what: str) -> None:
    """Print the quarters of what is being done on standard error."""
    if done and done % max(total // 4, 1) == 0:
        print(f"  {what}: {done} of {total}", file=sys.stderr)


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
    parser.add_argument("names", nargs="*", help=f"{', '.join(MAKERS)}; default: those shipped")
    parser.add_argument("--model", default=SHIPPED, help="directory (default: recall-llama)")
    parser.add_argument("--again", action="store_true", help="make those anew that are there")
    parser.add_argument("--context", type=int, default=513, help="tokens (default: 513)")
    parser.add_argument("--facts", type=int, default=64, help="in a context (default: 64)")
    parser.add_argument("--count", type=int, default=16, help="contexts (default: 16)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the files")

    def work() -> None:
        given = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
        torch.set_num_threads(1)
        samples = RecallSamples(given.context, given.facts, given.count)
        task = KVTask(given.model, dtype="float32")
        weights = weights_digest(task.directory)
        prepare(given.names, task.load(), samples, given.folder, weights, given.again)

    return script.guarded(work)


if __name__ == "__main__":
    raise SystemExit(main())
