"""Keep records true: make a part of each again where its code or weights changed, and stamp it.

    python -m diffcache.eval.workshop.records                 # what is stale: make records
    python -m diffcache.eval.workshop.records --budget 0.1    # the oldest first, for six minutes
    python -m diffcache.eval.workshop.records judge --all
    python -m diffcache.eval.workshop.records judge --keep    # make all of it, and keep its values

A stamp beside a record, in `assets/bench/stamps/`, holds a digest of the record, the definitions
that ran while a part of it was made again, and their hashes (`reached.py`), and those of the
weights, tables, prompts and pictures that it is made of. A stamp is written where all values that
were made hold, and it names the rows of which none was (`not_made`); where one does not, or where
the record names other weights, the command that draws the whole record is named. Each stamp is
written as it is made: an interrupt loses one. Times are not made again: they are of their machine,
and of the release that the record names.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffcache.command import FAILED, Seed, fail, script
from diffcache.eval.record import FOLDER, ROOT, Setting, commit, values
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.again import METHOD, SOLE, Made, again_of, share_of
from diffcache.eval.workshop.figures import PAGE, file_of, page
from diffcache.eval.workshop.parts import Budget, in_fork, run_each
from diffcache.eval.workshop.reached import Reached, changed
from diffcache.files import read_json, write_file, write_json
from diffcache.pipelines.demo.console import quiet
from diffcache.pipelines.shipped_models import MODELS

STAMPS = FOLDER / "stamps"
ALL: list[str] = []
Share = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of the samples (each its own).")]
# Begin of a model's name -> what its samples are also made of, or judged with.
ASSETS = ROOT / "assets"
BESIDE = {
    "sticker-": ("models/sticker-judge", "models/sticker-features", "stickers", "prompts"),
    "chain-": ("models/chain-guide",),
    "chain-llada-probe": ("models/chain-guide-probe",),
}
MODEL_OF = {"demo": "sticker-flux", "judge": "sticker-judge"}  # models of records that name none
LEFT_OUT = (".md", ".lock", "grid.png")  # not hashed, as records of trainings are not


def stamp_of(name: str) -> Path:
    """Return the file of a record's stamp."""
    return STAMPS / f"{name}.json"


def names() -> list[str]:
    """Return the names of the records of which a part can be made again."""
    found = [*(file.stem for file in FOLDER.glob("*.json")), "demo"]
    return sorted(name for name in found if again_of(name) is not None)


def why_stale(name: str) -> str:
    """Say why a record may no longer be what its code makes; empty where its stamp holds."""
    stamp = read_json(stamp_of(name))
    if stamp is None:
        return "has no stamp"
    if stamp["record"] != digest(file_of(name)):
        return "is not the record that was stamped"
    record = json.loads(file_of(name).read_text(encoding="utf-8"))
    if of_other_weights(record):
        return "names other weights than those that are shipped"
    if files := changed(stamp["code"]):
        return f"depends on code that has changed: {', '.join(files)}"
    now = inputs(name, record)
    others = [one for one in {**now, **stamp["inputs"]} if now.get(one) != stamp["inputs"].get(one)]
    return f"depends on files that have changed: assets/{', assets/'.join(others)}" * bool(others)


def about(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of its model and its task."""
    return {**record.get("shapes", {}), **record.get("task", {})}


def inputs(name: str, record: Mapping[str, Any]) -> dict[str, str]:
    """Return hashes of weights, tables, prompts, pictures and the sweep that a record is made of.

    Args:
        name: Name of the record.
        record: The record.

    Returns:
        Folder or file below `assets` -> its hash.
    """
    model = str(about(record).get("model") or MODEL_OF[record["benchmark"]])
    folders = [f"models/{model}", f"tables/{model}"]
    for start, beside in BESIDE.items():
        folders += beside if model.startswith(start) else ()
    there = [one for one in dict.fromkeys(folders) if (ASSETS / one).is_dir()]
    found = {one: folder_digest(ASSETS / one) for one in there}
    sweep = FOLDER / f"{name}.toml"
    return found | ({f"bench/{sweep.name}": digest(sweep)} if sweep.is_file() else {})


@cache
def folder_digest(folder: Path) -> str:
    """Return a short hash of all bytes of a folder's files, but for words and trainings."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not file.name.endswith(LEFT_OUT) and not file.name.startswith(("training-", ".")):
            found.update(f"{file.relative_to(folder).as_posix()}:{digest(file)}\n".encode())
    return found.hexdigest()[:16]


def of_other_weights(record: Mapping[str, Any]) -> bool:
    """Say whether a record names weights that are not those that are shipped."""
    told = about(record)
    said = told.get("model_sha256")
    return said is not None and said != directory_sha256(MODELS / told["model"])


def digest(file: Path) -> str:
    """Return a short hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def stamp(name: str, share: float | None = None, seed: int = 0, keep: bool = False) -> str:
    """Make a part of a record again, and stamp it where it holds.

    Args:
        name: Name of the record.
        share: Share of its samples; None for the record's own.
        seed: Seed of their choice.
        keep: Make all samples, and keep their values in the record where they give its numbers.

    Returns:
        What was compared, in words.

    Raises:
        ValueError: If a value differs, where the first ones and the command are named, or none was
            made again.
    """
    again = again_of(name)
    if again is None:
        raise ValueError(f"no record {name!r} can be made again; there are {', '.join(names())}")
    record = json.loads(file_of(name).read_text(encoding="utf-8"))
    if of_other_weights(record):
        raise ValueError(f"{name}: made with other weights; draw it again: {record['command']}")
    share = 1.0 if keep else share_of(name) if share is None else share
    rows = record.get("rows") or [{"name": METHOD}]
    started, reached = time.process_time(), Reached()
    with reached:
        made = list(again(record, rows, share, seed))
    if not made:
        raise ValueError(f"{name}: no number was made again, which proves nothing; share={share}")
    off = [one for one in made if not (one.is_whole if keep else one.holds)]
    if off:
        told = "; ".join(f"{one.row}, {one.key}" for one in off[:3])
        raise ValueError(
            f"{name}: {len(off)} of {len(made)} numbers differ ({told}); draw it again: {record['command']}"
        )
    if keep:
        keep_values(record, made)
        write_json(file_of(name), record)
    again_made = {one.row for one in made}
    exact = sum(one.now.numel() for one in made if one.kept is not None)
    seconds = time.process_time() - started
    stamped = {
        "record": digest(file_of(name)),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": Setting(torch.device("cpu")).device_name,
        "torch": torch.__version__,
        "share": share,
        "seed": seed,
        "numbers": len(made),
        "values": exact,
        "cpu_seconds": round(seconds, 1),
        "inputs": inputs(name, record),
        "not_made": [row["name"] for row in rows if row["name"] not in again_made],
    }
    write_json(stamp_of(name), {**stamped, "code": reached.definitions()})
    how = f"{exact} values are the same" if exact else "inside the interval of the part"
    return f"{name}: {len(made)} numbers hold, {how}; {seconds:.0f} CPU seconds"


def known(name: str | None) -> bool:
    """Say whether a commit is in the history; any may be where the history is not all here."""
    git = ["git", "-C", str(ROOT)]
    if not (ROOT / ".git").exists():
        return True
    try:
        asked = [*git, "merge-base", "--is-ancestor", str(name), "HEAD"]
        if not subprocess.run(asked, capture_output=True).returncode:
            return True
        shallow = [*git, "rev-parse", "--is-shallow-repository"]
        return subprocess.run(shallow, capture_output=True, text=True).stdout.strip() == "true"
    except OSError:
        return True


def keep_values(record: dict[str, Any], made: Sequence[Made]) -> None:
    """Put the values of all samples into the rows of a record, which gave its numbers."""
    rows = {row["name"]: row for row in record["rows"]}
    for one in made:
        if one.key in SOLE:
            rows[one.row]["values"] = values(one.now)
        else:
            rows[one.row].setdefault("values", {})[one.key] = values(one.now)
    record["values_of"] = commit()


def by_age(named: Sequence[str]) -> list[str]:
    """Return records in the order of their stamps' dates: first those without, then the oldest."""
    return sorted(named, key=lambda name: ((read_json(stamp_of(name)) or {}).get("date", ""), name))


def records(
    named: Annotated[list[str], typer.Argument(metavar="RECORD...", help="Those stale.")] = ALL,
    check: Annotated[bool, typer.Option("--check", help="Only say what is stale.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also those whose stamp holds.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Make all samples; keep values.")] = False,
    share: Share = None,
    budget: Budget = math.inf,
    seed: Seed = 0,
) -> None:
    """Make a part of records again where their code or weights changed, and stamp them."""
    quiet()
    torch.set_num_threads(1)
    if check:
        stale = {name: why for name in named or names() if (why := why_stale(name))}
        if stale:
            fail("; ".join(f"{name} {why}" for name, why in stale.items()), FAILED, "")
        return
    if len(named) == 1:
        print(stamp(named[0], share, seed, keep), flush=True)
        return
    chosen = [name for name in by_age(named or names()) if every or why_stale(name)]
    words = ["--seed", str(seed), *(["--keep"] if keep else [])]
    words += [] if share is None else ["--share", str(share)]
    stamps = {name: read_json(stamp_of(name)) or {} for name in chosen}
    # Each in a process of its own: functions whose results are cached already would not run and be noted.
    jobs = {name: partial(in_fork, partial(main, [name, *words])) for name in chosen}
    last = {name: one["cpu_seconds"] for name, one in stamps.items() if "cpu_seconds" in one}
    failed, _ = run_each(jobs, budget, last)
    write_file(PAGE, page())  # which has the hours of records that were drawn anew
    if failed:
        fail(f"not stamped: {', '.join(failed)}", FAILED, "")


main = script(records)

if __name__ == "__main__":
    sys.exit(main())
