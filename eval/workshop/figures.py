"""Draw the figures of the pages again, each by the command of its record: `make figures`.

    python -m diffcache.eval.workshop.figures --budget 2      # all, the oldest first, for two hours
    python -m diffcache.eval.workshop.figures kv-recall       # a record, by its own command
    python -m diffcache.eval.workshop.figures sticker-flux    # the table of a shipped model

A round draws every record once. What is drawn is noted in `runs/figures.json`, so that a round that
was interrupted or whose time was over goes on; the next one begins anew. The pages are made at the
end.

The table of a model reads `assets/bench/eval-<model>-methods.toml`, a sweep as `diffcache eval
sweep` takes it. A method whose `tables` are not there yet is calibrated first, on prompts that the
evaluation does not draw. The record and the plot of all rows go beside the sweep; `docs/figures.md`
is made of them. An interrupted run goes on.
"""

from __future__ import annotations

import json
import math
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import diffcache
from diffcache.catalog import make_method
from diffcache.command import FAILED, fail, script
from diffcache.eval.commands import show
from diffcache.eval.pages import escape_markdown, rendered, table
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.report.plots import draw_pareto
from diffcache.eval.report.record_files import Record, columns_of, load
from diffcache.eval.report.table import markdown, table_of
from diffcache.eval.report.words import conditions
from diffcache.eval.runs.sweep import read_sweep, read_values, settings_of
from diffcache.eval.workshop.parts import Budget, run_each
from diffcache.features.collect import Calibrated
from diffcache.files import read_json, write_file, write_json
from diffcache.pipelines.demo.console import progress, quiet

NAME = "eval-{}-methods"
PAGE = ROOT / "docs" / "figures.md"
OUT = Path("runs")
ALL: list[str] = []
SAMPLES = 32
# A file may not name code, so that this stands here.
REWARDS = {
    "sticker-dit": "diffcache.eval.workshop.shipped.quality:right",
    "sticker-flux": "diffcache.eval.workshop.small.sticker_judge:right",
    "sticker-wan": "diffcache.eval.workshop.video.rollouts:films_right",
}
COLUMNS = (
    "evaluations", "flops_ratio", "ratio", "cpu_ratio", "psnr_db", "ssim", "lpips_lite",
    "temporal_error", "reward_right", "reward_films_right", "whole_right", "whole_right_change", "success_rate",
    "success_rate_change", "action_error", "fid_lite_to_uncached", "fvd_lite_to_uncached",
    "held_bytes",
)  # fmt: skip
STATE = ROOT / OUT / "figures.json"
HOUR_TITLES = ("record", "hours", "drawn", "commit", "device")
GPU = "NVIDIA"
# Modules that make pages of records.
PAGES = ("kv.page", "method_page", "dllm.page", "kernels.page", "video.page", "shipped.cards", "shipped.telling_page")


def models() -> list[str]:
    """Return the names of the models that have a sweep."""
    start, end = NAME.split("{}")
    return sorted(path.stem.removeprefix(start).removesuffix(end) for path in FOLDER.glob(NAME.format("*") + ".toml"))


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
    task = Task(model=top["model"], samples=samples, steps=top.get("steps"), call=top.get("call", {}))
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
                inputs.pipe,
                method,
                inputs.prompts,
                steps=task.steps,
                seed=inputs.seed,
                out=file,
                progress=bar,
                **inputs.call,
            )


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
    records, (start, end) = [], NAME.split("{}")
    for file in sorted(folder.glob(NAME.format("*") + ".json")):
        record, plot = load(file), file.with_suffix(".png")
        held = [column.key for column in columns_of(record)]
        shown = {
            "model": file.stem.removeprefix(start).removesuffix(end),
            "table": markdown(table_of(record, [key for key in COLUMNS if key in held])),
            "about": escape_markdown(f"{conditions(record)[:-1]}; commit {record['commit']}."),
            "plot": plot.name * plot.exists(),
        }
        records.append(shown)
    hours = "\n".join(table(HOUR_TITLES, map(hours_of, drawable(folder).items())))
    return rendered("workshop/figures.md.jinja", records=records, hours=hours)


def drawable(folder: Path = FOLDER) -> dict[str, Record]:
    """Return the records that a command draws, by name, the oldest first."""
    files = [file for file in folder.glob("*.json") if not file.stem.endswith("-training")]
    files += [ROOT / "docs" / "demo.json"] if folder == FOLDER else []
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    return dict(sorted(found.items(), key=lambda item: (item[1]["date"][:19], item[0])))


def hours_of(item: tuple[str, Record]) -> list[str]:
    """Return the cells of a record: name, hours, day, commit, device."""
    name, record = item
    hours = record.get("cpu_hours", record.get("seconds", math.nan) / 3600)
    said = "not noted" if math.isnan(hours) else f"{hours:.2f}"
    day, commit = record["date"][:10], str(record["commit"]).partition(",")[0]
    return [f"`{name}`", said, day, f"`{commit}`", record["device"]]


def draw_all(named: Sequence[str], hours: float) -> list[str]:
    """Draw records by their commands, those that this round has not drawn yet, and make the pages.

    Args:
        named: Names of records; all for none, and then a round that was begun goes on.
        hours: Hours that they may take together.

    Returns:
        Names of those that failed.
    """
    records = {name: one for name, one in drawable().items() if not named or name in named}
    state = (None if named else read_json(STATE)) or {"done": []}
    gpu = torch.cuda.is_available()
    without = [name for name, one in records.items() if one["device"].startswith(GPU) and not gpu]
    if without:
        print(f"not drawn without a GPU: {', '.join(without)}", flush=True)
    left = {name: one for name, one in records.items() if name not in {*without, *state["done"]}}
    jobs = {name: partial(_drawn, name, one["command"]) for name, one in left.items()}
    if not named:
        jobs = {name: partial(_noted, name, job, state) for name, job in jobs.items()}
    last = {name: one["seconds"] for name, one in left.items() if one.get("seconds")}
    failed, later = run_each(jobs, hours, last)
    if not named and not failed and not later:
        STATE.unlink(missing_ok=True)
    pages = {name: f"python -m diffcache.eval.workshop.{name} --write" for name in PAGES}
    broken, _ = run_each({name: partial(_run, one) for name, one in pages.items()}, math.inf, {})
    return failed + broken


def _run(command: str) -> bool:
    return not subprocess.run([sys.executable, *words_of(command)], cwd=ROOT).returncode


def _drawn(name: str, command: str) -> bool:
    """Draw a record, and keep in it the CPU hours that it took."""
    before = _cpu_hours()
    if not _run(command):
        return False
    record = json.loads(file_of(name).read_text(encoding="utf-8"))
    write_json(file_of(name), {**record, "cpu_hours": round(_cpu_hours() - before, 3)})
    return True


def _noted(name: str, job: Callable[[], bool], state: dict[str, list[str]]) -> bool:
    """Do a job, and note in the file of the round that it is done."""
    if not job():
        return False
    state["done"].append(name)
    write_json(STATE, state)
    return True


def words_of(command: str) -> list[str]:
    """Return the words of a record's command behind the interpreter.

    Raises:
        ValueError: If it begins with neither `python -m` nor `diffcache`.
    """
    first, *words = shlex.split(command)
    if first == "python":
        return words
    if first != "diffcache":
        raise ValueError(f"{command!r}: must begin with python -m or diffcache")
    return ["-m", "diffcache", *words]


def file_of(name: str) -> Path:
    """Return the file of a record."""
    return (ROOT / "docs" if name == "demo" else FOLDER) / f"{name}.json"


def _cpu_hours() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (found.ru_utime + found.ru_stime) / 3600


def figures(
    named: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models or records (all records).")] = ALL,
    budget: Budget = math.inf,
    only_page: Annotated[bool, typer.Option("--page", help="Only make docs/figures.md of the records.")] = False,
) -> None:
    """Draw the figures of the pages again, each by the command of its record."""
    known, recorded = models(), drawable()
    for name in named:
        if name not in known and name not in recorded:
            raise ValueError(f"no sweep or record of {name!r}; there are {', '.join([*known, *recorded])}")
    quiet()
    for model in known:
        if model in named:
            draw(model)
    others, failed = [name for name in named if name not in known], []
    if not only_page and (others or not named):
        failed = draw_all(others, budget)
    write_file(PAGE, page())
    if failed:
        fail(f"not drawn: {', '.join(failed)}", FAILED, "")


main = script(figures)

if __name__ == "__main__":
    sys.exit(main())
