"""Measure what caching itself costs: host time of skipped steps, KV caches.

    python -m diffcache.eval.workshop.bench           # all of them, a few minutes on two cores
    python -m diffcache.eval.workshop.bench overhead --quick

prints tables and writes one JSON record for each benchmark. Peers are measured in the same process,
in turn with ours. Whole runs of pipelines are timed by `diffcache eval`.
"""

from __future__ import annotations

import gc
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from diffcache.command import Device, Threads, device_of, script
from diffcache.eval.kernels import timing
from diffcache.eval.record import FOLDER, ROOT, Setting, write
from diffcache.eval.workshop.bench import causal, decode, judge, kv, overhead, search, telling
from diffcache.eval.workshop.bench.overhead import Shape
from diffcache.eval.workshop.bench.runner import Bench, tables
from diffcache.eval.workshop.dllm import measure as dllm
from diffcache.eval.workshop.dllm import steps
from diffcache.pipelines.demo.console import progress, quiet
from diffcache.pipelines.demo.saved import DTYPES

BENCHMARKS: dict[str, Bench] = {
    "overhead": Bench(overhead.measure, "host time of a skipped step", dict(rounds=5, shape=Shape(4, 8), batches=[1])),
    "kv": Bench(kv.measure, "host time, bytes and error of caches of keys and values", dict(rounds=2, slots=256)),
    **{
        f"decode{name}": Bench(
            decode.measure,
            f"time of a token with each cache beside the stock cache's, {about}",
            dict(rounds=2, layers=2, prompt=256, model=decode.BAR),
            dict(model=model, prompt=prompt),
        )
        for name, about, model, prompt in (
            ("", "prompt of 2,048", decode.BAR, 2048),
            ("-4096", "prompt of 4,096", decode.BAR, 4096),
            ("-smollm2", "SmolLM2 and 2,048", decode.SMOLLM2, 2048),
            ("-smollm2-4096", "SmolLM2 and 4,096", decode.SMOLLM2, 4096),
        )
    },
    "capacity": Bench(decode.capacity, "whether time and bytes stay flat for 10,000 tokens", dict(tokens=30)),
    "kernels": Bench(
        timing.measure,
        "every kernel beside plain PyTorch and rivals; on a CPU only whether they are right",
        dict(rounds=2),
        needs_gpu=True,
    ),
    "judge": Bench(
        judge.measure, "whole and broken objects that the judge of the sticker models accepts", dict(samples=2)
    ),
    "telling": Bench(
        telling.measure,
        "caches on sticker-flux at 2 to 8 times, beside fewer steps; half an hour",
        dict(samples=2, factors=(8,), picture=None),
    ),
    "search": Bench(
        search.measure,
        "choices of diffcache tune on sticker-flux beside every single method; ten minutes",
        dict(samples=4, factors=(4,), trials=2),
    ),
    "causal": Bench(
        causal.measure,
        "what films of causal video keep with each cache, time and bytes of a chunk; hours",
        dict(rounds=12, samples=2, length=3),
    ),
    **{
        f"dllm-{model}": Bench(
            dllm.measure,
            f"right answers, token-layers and time of caches on {model}; hours",
            dict(rounds=1, samples=2, named=["Fast-dLLM dual"]),
            dict(model=model),
        )
        for model in dllm.MODELS
    },
    **{
        f"dllm-steps{name}": Bench(
            steps.measure,
            f"host time of a step of each cache beside plain forwards of as many rows, {about}",
            dict(rounds=1, named=["uncached", "Fast-dLLM dual"]),
            sizes,
        )
        for name, about, sizes in (
            ("", "chain-llada, batch 1", {}),
            ("-8", "chain-llada, batch 8", dict(size=8)),
            ("-compiled", "compiled, chain-llada, batch 1", dict(compiled=True)),
            ("-compiled-8", "compiled, batch 8", dict(compiled=True, size=8)),
        )
    },
}
ALL: list[str] = []
_LISTED = "; ".join(f"{name}: {bench.about}" for name, bench in BENCHMARKS.items()) + " (all)."
QUICK = ROOT / "out" / "bench"


def bench(
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...", help=_LISTED)] = ALL,
    device: Device = "cpu",
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option()] = "float32",
    threads: Threads = 1,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds (50, dllm: 16).")] = None,
    layers: Annotated[int | None, typer.Option(help=f"decode: layers of the model ({decode.LAYERS}).")] = None,
    prompt: Annotated[int | None, typer.Option(help="decode: tokens of the prompt.")] = None,
    recipes: Annotated[str, typer.Option(help="decode: caches, with commas (all).")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder (default: assets/bench).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure little, to see that it works, to out/bench.")
    ] = False,
) -> None:
    """Measure what feature caches cost, beside the caches of others."""
    for name in benchmarks:
        if name not in BENCHMARKS:
            raise ValueError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    setting = Setting(device_of(device), DTYPES[dtype])
    torch.set_num_threads(threads)
    quiet()  # no bars and notes of diffusers between the tables
    named = [name.strip() for name in recipes.split(",")] if recipes else None
    asked = {"layers": layers, "prompt": prompt, "recipes": named}
    chosen = {name: value for name, value in asked.items() if value is not None}
    for name in benchmarks or BENCHMARKS:
        found = BENCHMARKS[name]
        given = chosen if found.takes("recipes") else {}
        sizes: dict[str, Any] = {"rounds": rounds} if found.takes("rounds") and rounds else {}
        sizes |= {**(found.quick if quick else {}), **given}
        words = ["python -m diffcache.eval.workshop.bench", name, f"--device {device}"]
        words += [
            f"--dtype {dtype} --threads {threads}",
            *(f"--{key} {_quoted(value)}" for key, value in given.items()),
        ]
        if "rounds" in sizes:
            words.append(f"--rounds {sizes['rounds']}")
        words += ["--quick"] * quick
        little = quick or (found.needs_gpu and setting.device.type == "cpu")
        folder = out or (QUICK if little else FOLDER)
        with progress(name) as show:
            told = replace(setting, progress=show)
            record = found.run(name, told, sizes, folder / f"{name}.unfinished")
        record["command"] = " ".join(words)
        gc.collect()  # wrapped models are in cycles; the next may need all the device's memory
        torch.cuda.empty_cache()
        _keep(record, folder)


def _quoted(value: object) -> str:
    return shlex.quote(",".join(value) if isinstance(value, list) else str(value))


def _keep(record: dict[str, Any], folder: Path) -> None:
    """Print the rows of a record and write it."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(record):
        console.print(table)
    file = write(record, folder)
    name, seconds = record["benchmark"], record["seconds"]
    console.print(f"{name}: {seconds:.0f} s, wrote {file.name}\n")


main = script(bench)

if __name__ == "__main__":
    sys.exit(main())
