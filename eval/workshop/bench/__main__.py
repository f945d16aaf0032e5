"""Measure what caching itself costs: host time of skipped steps, compiled graphs, KV caches.

    python -m diffcache.eval.workshop.bench           # all of them, a few minutes on two cores
    python -m diffcache.eval.workshop.bench overhead --quick

prints tables and writes one JSON record for each benchmark. Peers are measured in the same process,
in turn with ours. Whole runs of pipelines are timed by `diffcache eval`.
"""

from __future__ import annotations

import gc
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from diffcache.command import Device, Threads, device_of, script
from diffcache.eval.record import FOLDER, ROOT, Setting, envelope, write
from diffcache.eval.workshop.bench import (
    ca2_vdm,
    capacity,
    causal,
    compiled,
    decode,
    dllm,
    full_size,
    full_size_decode,
    full_size_dllm,
    kernels,
    kv,
    overhead,
)
from diffcache.eval.workshop.bench.models import Shape
from diffcache.pipelines.demo.console import progress, quiet
from diffcache.pipelines.demo.saved import DTYPES

BENCHMARKS: dict[str, ModuleType] = {
    "overhead": overhead, "compile": compiled, "kv": kv, "decode": decode, "capacity": capacity,
    "kernels": kernels, "full-size": full_size, "full-size-decode": full_size_decode,
    "full-size-dllm": full_size_dllm, "ca2-vdm": ca2_vdm, "causal": causal,
    **{f"dllm-{model}": dllm for model in dllm.MODELS},
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "overhead": {"rounds": 5, "shape": Shape(4, 8)}, "kv": {"rounds": 2, "slots": 256},
    "decode": {"rounds": 2, "layers": 2, "prompt": 256}, "capacity": {"tokens": 30},
    "kernels": {"rounds": 2}, "full-size": {"rounds": 1}, "full-size-decode": {"rounds": 1},
    "full-size-dllm": {"rounds": 1},
    "ca2-vdm": {"rounds": 2, "prefixes": (1, 2)},
    "causal": {"rounds": 12, "samples": 2, "frames": 30},
    **{f"dllm-{model}": {"rounds": 1, "samples": 2, "named": ["Fast-dLLM dual"]}
       for model in dllm.MODELS},
}  # fmt: skip
ALL: list[str] = []
QUICK = ROOT / "out" / "bench"


def bench(
    benchmarks: Annotated[
        list[str], typer.Argument(metavar="BENCHMARK...", help=f"Of {', '.join(BENCHMARKS)} (all).")
    ] = ALL,
    device: Device = "cpu",
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option()] = "float32",
    threads: Threads = 1,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed rounds (50, dllm: 16, ca2-vdm: 7, full-size: 3)."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help=f"decode: layers of the model ({decode.LAYERS}).")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help=f"decode: tokens of the prompt ({decode.PROMPT}).")
    ] = None,
    recipes: Annotated[str, typer.Option(help="decode: caches, with commas (all).")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder (default: assets/bench).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure little, to see that it works, to out/bench.")
    ] = False,
) -> None:
    """Measure what feature caches cost, beside the caches of diffusers.

    overhead: host time of a skipped step. compile: graphs and breaks of compiled blocks. kv: host
    time, bytes and error of caches of keys and values. decode: time of a token with each cache, as
    a share of the stock cache's. capacity: whether time and bytes stay flat for 10,000 tokens.
    kernels: every kernel beside plain PyTorch and rivals; on a CPU only whether they are right.
    full-size: runs of FLUX.1-dev and Wan2.1-1.3B with random weights; tiny ones on a CPU.
    full-size-decode: tokens of LLaMA-3.1-8B with random weights, beside caches of other libraries.
    full-size-dllm: answers of LLaDA-8B with random weights, with each cache.
    ca2-vdm: cost of a chunk of video after 8 to 48 others, cached and computed anew.
    causal: what films of causal video keep with each cache, time and bytes of a chunk; an hour.
    dllm-...: right answers, token-layers and time of caches of diffusion language models, on a
    shipped one; hours for all three.
    """
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
        has_rounds = rounds is not None and name not in ("compile", "capacity")
        sizes: dict[str, Any] = {"rounds": rounds} if has_rounds else {}
        sizes |= SMALL.get(name, {}) if quick else {}
        sizes |= chosen if name == "decode" else {}
        sizes |= {"model": name.removeprefix("dllm-")} if name.startswith("dllm-") else {}
        words = ["python -m diffcache.eval.workshop.bench", name, f"--device {device}",
                 f"--dtype {dtype} --threads {threads}"]  # fmt: skip
        if name == "decode":
            words += [f"--{key} {_quoted(value)}" for key, value in chosen.items()]
        if "rounds" in sizes:
            words.append(f"--rounds {sizes['rounds']}")
        words += ["--quick"] * quick
        needs_gpu = name == "kernels" or name.startswith("full-size")
        little = quick or (needs_gpu and setting.device.type == "cpu")
        _measure(name, setting, sizes, " ".join(words), out or (QUICK if little else FOLDER))


def _quoted(value: object) -> str:
    return shlex.quote(",".join(value) if isinstance(value, list) else str(value))


def _measure(
    name: str, setting: Setting, sizes: dict[str, Any], command: str, folder: Path
) -> None:
    """Run one benchmark, print its tables and write its record."""
    with progress(name) as show:
        told: dict[str, Any] = {} if name == "compile" else {"progress": show}
        if BENCHMARKS[name] in (causal, dllm):  # hours
            told["unfinished"] = folder / f"{name}.unfinished"
        body = BENCHMARKS[name].measure(setting, **sizes, **told)
    gc.collect()  # wrapped models are in cycles, and the next ones may need all the device's memory
    torch.cuda.empty_cache()
    record = envelope(name, setting, command, body)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in BENCHMARKS[name].tables(record):
        console.print(table)
    file = write(record, folder)
    console.print(f"{name}: {record['seconds']:.0f} s, wrote {file.name}\n")


main = script(bench)

if __name__ == "__main__":
    sys.exit(main())
