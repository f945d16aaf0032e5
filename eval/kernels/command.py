"""`diffcache kernels`: which implementation of each operator is used here, and measuring it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffcache.command import EXIT_LINE, Device, check_target, device_of, guarded
from diffcache.errors import MissingError
from diffcache.kernels import dispatch
from diffcache.pipelines.demo.console import print_rows, progress
from diffcache.registry import rows_of

app = typer.Typer(
    invoke_without_command=True, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]}
)


@app.callback(epilog=EXIT_LINE)
@guarded
def kernels(call: typer.Context, device: Device = "auto") -> None:
    """Say which operators run as Triton kernels on a device, and why.

    [bold]Try[/bold]

        diffcache kernels

        diffcache kernels measure
    """
    if call.invoked_subcommand is not None:
        if device != "auto":
            raise ValueError(f"options before {call.invoked_subcommand!r}: put them after it")
        return
    place = device_of(device)
    if place.type != "cuda":
        typer.echo(f"{place.type}: plain PyTorch for every operator; kernels are for CUDA devices")
        return
    name = dispatch.device_name(place.index or 0)
    for line in _heads(name):
        typer.echo(line)
    rows = []
    for operator, row in rows_of("kernel").items():
        used, why = _choice(operator, place, name)
        rows.append((operator, used, why, row.cells["used"]))
    print_rows(("operator", "used here", "why", "called for"), rows)


@app.command(epilog=EXIT_LINE)
@guarded
def measure(
    seconds: Annotated[
        float, typer.Option(min=1, help="Time that there is; the most useful operators go first.")
    ] = 170,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write here, and leave this machine as it is.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Check every kernel on this machine's GPU, time it beside plain PyTorch, and keep the winners.

    What is found is used from then on, as long as driver, torch and Triton stay the same. Every
    result is kept as soon as it is known. An operator that fails is left out alone. A FILE is used
    by DIFFCACHE_KERNELS_CHOICES=FILE and DIFFCACHE_KERNELS_CONFIGS=FILE.

    [bold]Try[/bold]

        diffcache kernels measure

        diffcache kernels measure --seconds 60 --out h100.json
    """
    place = device_of(device)
    if place.type != "cuda":
        raise ValueError(f"--device {device!r}: kernels are for CUDA devices, and this is none")
    if not dispatch.has_triton():
        raise MissingError("triton 3.5 or newer is missing: pip install 'diffcache[gpu]'")
    if out is not None:
        check_target("--out", out, (".json",))
    from diffcache.eval.kernels import measure as measuring
    from diffcache.eval.kernels import watch

    found = watch.Found(lambda name: out or dispatch.kept_file(name))
    command = [sys.executable, "-m", measuring.__name__, f"cuda:{place.index or 0}"]
    with progress("measuring") as show:
        watch.measure(command, measuring.tasks(), found, seconds, show)
    for line in _told(found.body):
        typer.echo(line)
    if not found.body:
        typer.echo(f"nothing was measured in {seconds:g} seconds; give it more with --seconds")
    else:
        typer.echo(f"wrote {found.file(found.body['device'])}")


def _told(body: dict[str, Any]) -> list[str]:
    """Return a line for every measured operator, fastest first, and the failures."""
    ratios = body.get("choices", {}).get(body.get("device"), {})
    lines = [
        f"{name}: {ratio:.2f} times as fast as plain PyTorch"
        for name, ratio in sorted(ratios.items(), key=lambda item: -item[1])
        if name not in body["failed"]
    ]
    return lines + [f"{name}: left out: {why}" for name, why in body.get("failed", {}).items()]


def _heads(name: str) -> list[str]:
    """Return lines that give the grounds of the choice."""
    versions = ", ".join(f"{key} {value}" for key, value in dispatch.versions().items())
    lines = [f"{name}: {versions}", f"DIFFCACHE_KERNELS={dispatch.chosen()}"]
    if unknown := dispatch.turned_off() - {"", *rows_of("kernel")}:
        lines.append(f"DIFFCACHE_KERNELS_OFF names no operator of ours: {', '.join(sorted(unknown))}")
    file = dispatch.kept_file(name)
    if dispatch.kept(name):
        lines.append(f"measured on this machine: {file}")
    elif file.exists():
        lines.append(f"measured with other versions, so not used: {file}; run measure again")
    else:
        lines.append("not measured on this machine: diffcache kernels measure")
    if dispatch.shipped(name) and not dispatch.kept(name):
        lines.append("measured on another machine of this kind; its ratios come with diffcache")
    return lines


def _choice(operator: str, place: torch.device, name: str) -> tuple[str, str]:
    """Return the implementation of an operator, and why it is used."""
    plain, kernel = "plain PyTorch", "cuDNN first" if operator == "sdpa_cudnn" else "kernel"
    if dispatch.chosen() == "torch":
        return plain, "DIFFCACHE_KERNELS=torch"
    if operator in dispatch.turned_off():
        return plain, "DIFFCACHE_KERNELS_OFF"
    if operator in dispatch.OPERATORS and not dispatch.has_triton():
        return plain, "triton 3.5 or newer is missing"
    if why := dispatch.refused(operator, place):
        return plain, why
    ratio = dispatch.ratio(operator, place)
    failed = dispatch.kept(name).get("failed", {}).get(operator)
    why = f"{ratio:.2f} times as fast as plain PyTorch" if ratio else failed or "not measured"
    if dispatch.chosen() == "triton" and operator in dispatch.OPERATORS:
        return kernel, f"DIFFCACHE_KERNELS=triton; {why}"
    return kernel if ratio > 1 else plain, why
