"""Put the measured quality of the shipped models into their cards and `docs/models.md`.

    python -m diffcache.eval.workshop.shipped.cards --write

fills what stands between `<!-- quality: MODEL -->` and `<!-- /quality -->` from the records of
`diffcache.eval.workshop.shipped.quality`; `<!-- quality: all -->` is a table of all models. No
number in these places is typed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop.shipped.quality import OF, QUALITIES, WHOLE, file_of
from diffcache.files import read_json
from diffcache.pipelines.shipped_models import MODELS

_PLACE = re.compile(r"(<!-- quality: (\S+) -->\n).*?(<!-- /quality -->)", re.DOTALL)
_TITLES = {
    WHOLE: "right in everything",
    "target_right": "target right",
    "touched": "touched an obstacle",
    "first_right": "first value",
    "second_right": "second value, given the first",
    "token_right": "tokens",
    "frame_right": "frames",
    "wall_db": "wall in the last frame, dB",
    "untouched_psnr_db": "untouched part, dB",
    "autoencoder_untouched_psnr_db": "the same, autoencoder alone, dB",
}


def filled(text: str, folder: Path = FOLDER) -> str:
    """Return a page with its places filled.

    Args:
        text: Text of the page.
        folder: Folder of the records.

    Raises:
        FileNotFoundError: If a record is not there; the command that makes it is named.
        ValueError: If a place names no shipped model.
    """
    return _PLACE.sub(lambda m: f"{m[1]}\n{_block(m[2], folder)}\n\n{m[3]}", text)


def _block(name: str, folder: Path) -> str:
    if name == "all":
        return _overview(folder)
    if name not in QUALITIES:
        raise ValueError(f"<!-- quality: {name} -->: must be one of all, {', '.join(QUALITIES)}")
    record = _read(name, folder)
    rows, what = record["rows"], record["shapes"]["what"]
    first, whole = rows[0], rows[0]["quality"][WHOLE]
    head = (
        f"**{_share(whole)} of {whole['n']:,} {_unit(first, what)} are right in everything** "
        f"({first['name']}; 95 % interval)."
    )
    keys = [key for key in first["quality"] if key != WHOLE and not key.startswith(OF)]
    titles = [_TITLES.get(key, key.replace("_", " ")) for key in (WHOLE, *keys)]
    cells = [[row["name"], *(_cell(key, row["quality"][key]) for key in (WHOLE, *keys))] for row in rows]
    source = (
        f"Measured by `{record['command']}` at commit `{record['commit']}` and kept in "
        f"`assets/bench/{file_of(name).name}`."
    )
    own = {key: found for key, found in first["quality"].items() if key.startswith(OF)}
    objects = [[key.removeprefix(OF), str(found["n"]), _share(found)] for key, found in own.items()]
    by_object = [*table(["object", "films", _TITLES[WHOLE]], objects, numbers=True), ""] if own else []
    return "\n".join([head, "", *table(["", *titles], cells, numbers=True), "", *by_object, source])


def _overview(folder: Path) -> str:
    """Return a table of all models."""
    rows = []
    for name in QUALITIES:
        record = _read(name, folder)
        row = record["rows"][0]
        whole = row["quality"][WHOLE]
        samples = f"{whole['n']:,} {_unit(row, record['shapes']['what'])}, {row['name']}"
        link = f"[`{name}`](../assets/models/{name}/README.md)"
        rows.append([link, samples, _share(whole)])
    return "\n".join(table(["model", "samples", "right in everything (95 %)"], rows))


def _read(name: str, folder: Path) -> dict[str, Any]:
    record: dict[str, Any] | None = read_json(file_of(name, folder))
    if record is None:
        raise FileNotFoundError(
            f"{file_of(name, folder).name} is missing; make it: python -m "
            f"diffcache.eval.workshop.shipped.quality {name}"
        )
    return record


def _unit(row: Mapping[str, Any], what: str) -> str:
    """Return the name of a row's samples."""
    return f"contexts' {what}" if "tokens" in row else f"held-out {what}"


def _share(found: Mapping[str, float]) -> str:
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def _cell(key: str, found: Mapping[str, float]) -> str:
    if key.endswith("_db"):
        return f"{found['value']:.1f} (median {found['median']:.1f})"
    return _share(found)


CARDS = [MODELS / name / "README.md" for name in QUALITIES]
main = keep_pages(filled, *CARDS, ROOT / "docs/models.md")

if __name__ == "__main__":
    sys.exit(main())
