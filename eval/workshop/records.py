"""Keep records true: make a part of each again where its code has changed, and stamp it.

    python -m diffcache.eval.workshop.records                 # what is stale: make records
    python -m diffcache.eval.workshop.records judge --all

A stamp beside a record, in `assets/bench/stamps/`, holds a digest of the record, the definitions
that ran while a part of it was made again, and their hashes (`reached.py`). A stamp is written
where all values that were made hold, and it names the rows of which none was (`not_made`); where
one does not, the command that draws the whole record is named. Times are not made again: they are
of their machine, and of the release that the record names.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffcache.command import FAILED, Seed, fail, script
from diffcache.eval.record import FOLDER, ROOT, Setting, commit
from diffcache.eval.workshop.again import METHOD, again_of
from diffcache.eval.workshop.reached import Reached, changed
from diffcache.files import read_json, write_json
from diffcache.pipelines.demo.console import quiet

STAMPS = FOLDER / "stamps"
SHARE = 0.05
GRACE = datetime.timedelta(days=7)
ALL: list[str] = []
Share = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the samples.")]


def file_of(name: str) -> Path:
    """Return the file of a record."""
    return (ROOT / "docs" if name == "demo" else FOLDER) / f"{name}.json"


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
    files = changed(stamp["code"])
    return f"depends on code that has changed: {', '.join(files)}" if files else ""


def is_late(name: str) -> bool:
    """Say whether a stamp is older than a week by the date of the last commit; never without one.

    A suite that failed after any commit to what all methods share would be of no use to anybody,
    so that a record may be stale for a week of commits.
    """
    found = read_json(stamp_of(name))
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%cI"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if found is None or done.returncode or not (ROOT / ".git").exists():
        return False
    last, stamped = (
        datetime.datetime.fromisoformat(text) for text in (done.stdout.strip(), found["date"])
    )
    return last - stamped > GRACE


def digest(file: Path) -> str:
    """Return a digest of a record."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def stamp(name: str, share: float = SHARE, seed: int = 0) -> str:
    """Make a part of a record again, and stamp it where it holds.

    Args:
        name: Name of the record.
        share: Share of its samples.
        seed: Seed of their choice.

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
    rows = record.get("rows") or [{"name": METHOD}]
    started, reached = time.process_time(), Reached()
    with reached:
        made = list(again(record, rows, share, seed))
    if not made:
        raise ValueError(f"{name}: no number was made again, which proves nothing; share={share}")
    off = [one for one in made if not one.holds]
    if off:
        told = "; ".join(f"{one.row}, {one.key}" for one in off[:3])
        raise ValueError(
            f"{name}: {len(off)} of {len(made)} numbers differ ({told}); draw it again: "
            f"{record['command']}"
        )
    again_made = {one.row for one in made}
    exact = sum(one.now.numel() for one in made if one.kept is not None)
    about = {
        "record": digest(file_of(name)), "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": Setting(torch.device("cpu")).device_name, "torch": torch.__version__,
        "share": share, "seed": seed, "numbers": len(made), "values": exact,
        "not_made": [row["name"] for row in rows if row["name"] not in again_made],
    }  # fmt: skip
    write_json(stamp_of(name), {**about, "code": reached.definitions()})
    seconds = time.process_time() - started
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


def records(
    named: Annotated[list[str], typer.Argument(metavar="RECORD...", help="Those stale.")] = ALL,
    check: Annotated[bool, typer.Option("--check", help="Only say what is stale.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also those whose stamp holds.")] = False,
    share: Share = SHARE,
    seed: Seed = 0,
) -> None:
    """Make a part of records again where their code has changed, and stamp them."""
    quiet()
    torch.set_num_threads(1)
    if check:
        stale = {name: why for name in named or names() if (why := why_stale(name))}
        if stale:
            fail("; ".join(f"{name} {why}" for name, why in stale.items()), FAILED, "")
        return
    if len(named) == 1:
        print(stamp(named[0], share, seed), flush=True)
        return
    chosen = [name for name in named or names() if every or why_stale(name)]
    words = ["--share", str(share), "--seed", str(seed)]
    failed = []
    for name in chosen:  # in processes of their own: what one has cached, another would not reach
        module = [sys.executable, "-m", "diffcache.eval.workshop.records", name, *words]
        if subprocess.run(module, check=False).returncode:
            failed.append(name)
    if failed:
        fail(f"not stamped: {', '.join(failed)}", FAILED, "")


main = script(records)

if __name__ == "__main__":
    sys.exit(main())
