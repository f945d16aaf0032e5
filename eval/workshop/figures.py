"""Draw the table of figures of shipped models: every method of a sweep, calibrated where needed.

    python -m diffcache.eval.workshop.figures         # every shipped model that has a sweep
    python -m diffcache.eval.workshop.figures sticker-dit

reads `assets/bench/eval-<model>-methods.toml`, a sweep as `diffcache eval sweep` takes it. A method
whose `tables` are not there yet is calibrated first, on prompts that the evaluation does not draw.
The record and the plot of all rows go beside the sweep; `docs/figures.md` is made of them. An
interrupted run goes on.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import diffcache
from diffcache.catalog import make_method
from diffcache.command import script
from diffcache.eval.cli import show
from diffcache.eval.pages import escape_markdown
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.report.columns import columns_of
from diffcache.eval.report.plots import draw_pareto
from diffcache.eval.report.records import Record, load
from diffcache.eval.report.table import markdown, table_of
from diffcache.eval.report.words import conditions
from diffcache.eval.runs.sweep import read_sweep, read_values, settings_of
from diffcache.features.collect import Calibrated
from diffcache.files import write_file, write_json
from diffcache.pipelines.demo.console import progress, quiet

NAME = "eval-{}-methods"
PAGE = ROOT / "docs" / "figures.md"
OUT = Path("runs")
ALL: list[str] = []
SAMPLES = 32
LONGEST = 80  # characters of a cell
# A file may not name code, so that this stands here.
REWARDS = {"sticker-flux": "diffcache.eval.workshop.small.sticker_judge:right"}
COLUMNS = (
    "evaluations", "flops_ratio", "ratio", "cpu_ratio", "psnr_db", "ssim", "lpips_lite",
    "temporal_error", "reward_right", "whole_right", "whole_right_change", "success_rate",
    "success_rate_change", "action_error", "fid_lite_to_uncached", "fvd_lite_to_uncached",
    "held_bytes",
)  # fmt: skip
HEAD = """# Figures

What methods cost and save on shipped models. `make figures` draws all of it again:
methods that need tables are calibrated first, on prompts that the evaluation does not draw; the
rows of a table come from one process, and their seconds were measured in turn. The tables are
made of the records beside the sweeps in `assets/bench/`, which hold versions, settings and
every metric; [evaluation.md](evaluation.md) defines these. The policy and the editing pipeline,
whose inputs are no prompts, are drawn by `python -m diffcache.eval.workshop.shipped.reach` and
`.kontext`.
"""


def models(folder: Path = FOLDER) -> list[str]:
    """Return the names of the models that have a sweep."""
    start, end = NAME.split("{}")
    return sorted(
        path.stem.removeprefix(start).removesuffix(end)
        for path in folder.glob(NAME.format("*") + ".toml")
    )


def missing_tables(sweep: Path) -> list[tuple[str, dict[str, Any], Path]]:
    """Return name, settings and file of every method of a sweep whose tables are not there.

    Rows that share a file are calibrated with the settings of the first.

    Args:
        sweep: TOML or YAML; files in it are relative to the working directory.
    """
    found: dict[Path, tuple[str, dict[str, Any], Path]] = {}
    for name, settings in settings_of(sweep, read_values(sweep).get("method", [])):
        file = settings.pop("tables", None)
        if file is not None and not Path(file).exists():
            found.setdefault(Path(file), (name, settings, Path(file)))
    return list(found.values())


def calibrate(sweep: Path, samples: int = SAMPLES) -> None:
    """Calibrate the methods of a sweep whose tables are not there.

    Args:
        sweep: TOML or YAML.
        samples: Prompts to calibrate on.

    Raises:
        ValueError: If `tuned` is among them, which a search must choose.
    """
    from diffcache.eval.offline import inputs_of
    from diffcache.eval.runs.peers import MAG_CACHE, mag_ratios_of
    from diffcache.eval.runs.task import Task

    missing = missing_tables(sweep)
    if not missing:
        return
    top = read_values(sweep)
    for name, _, file in missing:
        if name == "tuned":
            raise ValueError(f"{sweep}: {file} is missing; make it: diffcache tune --out {file}")
    task = Task(
        model=top["model"], samples=samples, steps=top.get("steps"), call=top.get("call", {})
    )
    inputs = inputs_of(task)
    for name, settings, file in missing:
        if name == MAG_CACHE:
            noise = torch.Generator().manual_seed(inputs.seed)
            call = {"prompt": inputs.prompts, "num_inference_steps": task.steps, "generator": noise}
            write_json(file, {"mag_ratios": mag_ratios_of(inputs.pipe, {**inputs.call, **call})})
            continue
        method = make_method(name, **settings)
        if not isinstance(method, Calibrated):
            raise ValueError(f"{sweep}: {name} takes no tables, yet names {file}")
        with progress(name) as bar:
            diffcache.calibrate(
                inputs.pipe, method, inputs.prompts, steps=task.steps, seed=inputs.seed,
                out=file, progress=bar,
                **inputs.call,
            )  # fmt: skip


def draw(model: str, folder: Path = FOLDER, out: Path = OUT) -> None:
    """Evaluate the sweep of a model; write its record and its plot beside it.

    Raises:
        ValueError: If the sweep holds several tasks.
    """
    name = NAME.format(model)
    sweep = folder / f"{name}.toml"
    calibrate(sweep)
    plans = read_sweep(sweep, out)
    if len(plans) != 1:
        raise ValueError(f"{sweep}: {len(plans)} tasks; a table of figures has one")
    record = show(replace(plans[0], reward=REWARDS.get(model, plans[0].reward)))
    if record is None:
        return
    record["command"] = f"python -m diffcache.eval.workshop.figures {model}"
    write_json(folder / f"{name}.json", record)
    write_plot(record, folder / f"{name}.png")


def write_plot(record: Record, file: Path) -> None:
    """Draw PSNR, or the first metric there is, of all rows against what they saved."""
    plots, _ = draw_pareto(record)
    plots.sort(key=lambda plot: plot.stem != "pareto-psnr_db")
    if plots:
        write_file(file, plots[0].png)


def page(folder: Path = FOLDER) -> str:
    """Return `docs/figures.md`: a table and a plot for every record."""
    parts = [HEAD]
    start, end = NAME.split("{}")
    for file in sorted(folder.glob(NAME.format("*") + ".json")):
        model = file.stem.removeprefix(start).removesuffix(end)
        record = load(file)
        held = [column.key for column in columns_of(record)]
        shown = table_of(record, [key for key in COLUMNS if key in held])
        drawn = f"{conditions(record)[:-1]}; commit {record['commit']}."
        parts += [f"## {model}\n", short(markdown(shown)), f"{escape_markdown(drawn)}\n"]
        if file.with_suffix(".png").exists():
            parts.append(f"![rows of {model}](../assets/bench/{file.stem}.png)\n")
    return "\n".join(parts)


def short(text: str) -> str:
    """Return a Markdown table whose long first cells are cut, and said in full below it."""
    lines, said = [], []
    for line in text.split("\n"):
        name = line[2:].partition(" | ")[0]
        if line.startswith("| ") and len(name) > LONGEST:
            said.append(name)
            line = line.replace(name, f"{name[: LONGEST - 8].rstrip(chr(92))}... ({len(said)})", 1)
        lines.append(line)
    notes = [f"- ({number}) {name}" for number, name in enumerate(said, 1)]
    at = next((place for place, line in enumerate(lines) if line.startswith("- ")), len(lines))
    return "\n".join([*lines[:at], *notes, *lines[at:]])


def figures(
    named: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models (all).")] = ALL,
    only_page: Annotated[
        bool, typer.Option("--page", help="Only make docs/figures.md of the records.")
    ] = False,
) -> None:
    """Draw the tables of shipped models."""
    known = models()
    for name in named:
        if name not in known:
            raise ValueError(f"no sweep of {name!r}; there are {', '.join(known)}")
    quiet()
    for model in [] if only_page else named or known:
        draw(model)
    write_file(PAGE, page())


main = script(figures)

if __name__ == "__main__":
    sys.exit(main())
