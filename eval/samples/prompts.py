"""Lists of prompts: built in, or from the files that benchmarks ship them in.

    load_prompts("pictures"); load_prompts("DrawBench.csv", limit=200)

Sample `i` is drawn from prompt `i` of the list, from its start again where it ends.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.offline.calibrate import prompt_hash

# Built-in lists; each has another to calibrate on, in `<name>-calibration.txt`.
SHIPPED = {
    "stickers": "256 held-out sentences of the shipped models of pictures",
    "sticker-films": "11 held-out sentences of the shipped models of films",
    "pictures": "100 prompts for pictures",
    "films": "50 prompts for films",
}
HALF = "held-out:"  # before a file: the half that is never calibrated on
# DrawBench names its column Prompts, PartiPrompts Prompt.
COLUMNS = ("prompts", "prompt", "caption")
# VBench names its field prompt_en, COCO caption.
FIELDS = ("prompt", "prompt_en", "caption")
SEED = 0  # of the captions drawn from a file that has several a picture
RULE = f"one caption a picture, captions and order of pictures drawn at random with seed {SEED}"
_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"


@dataclass(frozen=True)
class Prompts:
    """A list of prompts."""

    source: str  # name of a built-in list, or the path of the file
    texts: Sequence[str]  # the prompts, none empty
    # SHA-256 of the whole list as UTF-8, one prompt a line, before any limit; the same for the same prompts in
    # another kind of file
    sha256: str
    rule: str = ""  # rule by which they were chosen from a file that holds more; empty where all are taken

    def __getitem__(self, sample: int) -> str:
        """Return the prompt of a sample; the list repeats."""
        return self.texts[sample % len(self.texts)]


def load_prompts(source: str | Path, limit: int | None = None) -> Prompts:
    """Load a list of prompts.

    Args:
        source: One of `SHIPPED`, or a file: `.txt` (one a line; blank lines and those that begin with # are left out),
            `.csv` and `.tsv` with a header, `.json` (COCO captions, one drawn at random for each picture: `RULE`;
            VBench's full info, a list of texts or of objects), `.jsonl`. `FILE:COLUMN` names the column of a table, or
            the field of objects, if it is not one of the usual names; `held-out:FILE` is the half of its prompts that
            `calibration_prompts` does not take.
        limit: Number of prompts to take, from the start; None for all.

    Raises:
        FileNotFoundError: If there is neither such a list nor such a file.
        ValueError: If the file cannot be read, lacks the column, or holds no prompt.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: must be at least 1 prompt")
    name = str(source)
    if name in SHIPPED:
        texts, _ = _read(_FOLDER / f"{name}.txt", None)
        return Prompts(name, tuple(texts[:limit]), _sha256(texts))
    if name.startswith(HALF):
        whole = load_prompts(name.removeprefix(HALF))
        texts = [text for text in whole.texts if not is_for_calibration(text)]
        if not texts:
            raise ValueError(f"{whole.source} holds no prompt to hold out; give a longer list")
        return Prompts(HALF + whole.source, tuple(texts[:limit]), _sha256(texts), whole.rule)
    file, column = _locate(source)
    texts, rule = _read(file, column)
    if not texts:
        raise ValueError(f"{file} holds no prompt")
    return Prompts(str(file), tuple(texts[:limit]), _sha256(texts), rule)


def calibration_prompts(source: str) -> Prompts:
    """Load prompts to calibrate on, which no evaluation should use.

    Built-in lists have separate lists for this; of any other list it is the half that a hash of each prompt selects,
    wherever the prompt stands. `source` is as for `load_prompts`.

    Raises:
        FileNotFoundError: If there is neither such a list nor such a file.
        ValueError: If the file cannot be read, or no prompt falls into the half.
    """
    if source in SHIPPED:
        texts, _ = _read(_FOLDER / f"{source}-calibration.txt", None)
        return Prompts(f"{source}-calibration", tuple(texts), _sha256(texts))
    whole = load_prompts(source)
    texts = [text for text in whole.texts if is_for_calibration(text)]
    if not texts:
        raise ValueError(
            f"prompts={source!r}: none of its {len(whole.texts)} prompts may be calibrated on, "
            "since all fall into the half that is held out for evaluations; give a longer list"
        )
    return Prompts(whole.source, tuple(texts), _sha256(texts))


def is_for_calibration(text: str) -> bool:
    """Return whether a prompt is in the half to calibrate on, by its hash alone."""
    return int(prompt_hash(text), 16) % 2 == 0


def _locate(source: str | Path) -> tuple[Path, str | None]:
    """Return the file and the column; a source FILE:COLUMN is taken apart."""
    file = Path(source).expanduser()
    if not file.exists() and isinstance(source, str):
        front, sign, back = source.rpartition(":")
        if sign and back and Path(front).expanduser().is_file():
            return Path(front).expanduser(), back
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give a file of prompts")
    if file.is_file():
        return file, None
    close = difflib.get_close_matches(str(source), SHIPPED, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise FileNotFoundError(f"no prompts {str(source)!r}: neither a file nor one of {', '.join(SHIPPED)}{hint}")


def _read(file: Path, column: str | None) -> tuple[list[str], str]:
    """Return the prompts of a file, white space collapsed, empty ones left out, and the rule."""
    ending = file.suffix.lower()
    if ending not in _READERS:
        raise ValueError(f"{file}: prompts are read from {', '.join(_READERS)}")
    if ending == ".txt" and column is not None:
        raise ValueError(f"column={column!r}: {file} is plain text and has no columns")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 (byte {error.start}): save it as UTF-8 text") from error
    try:
        found = _READERS[ending](text, column)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file}: {error}") from error
    cleaned = (" ".join(prompt.split()) for prompt in found)
    rule = RULE if isinstance(found, _OneAPicture) else ""
    return [prompt for prompt in cleaned if prompt], rule


def _read_text(text: str, column: str | None) -> Iterable[str]:
    lines = text.replace("\r", "\n").split("\n")
    return [line for line in lines if not line.lstrip().startswith("#")]


def _read_csv(text: str, column: str | None) -> Iterable[str]:
    return _cells(list(csv.reader(io.StringIO(text, newline=""))), column)


def _read_tsv(text: str, column: str | None) -> Iterable[str]:
    # PartiPrompts has bare quotation marks; a reader that pairs them would swallow lines.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    return _cells([list(map(_unquote, row)) for row in reader], column)


def _unquote(cell: str) -> str:
    """Take away the quotation marks that a spreadsheet puts around a whole cell."""
    inner = cell[1:-1].replace('""', "\0")
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner:
        return inner.replace("\0", '"')
    return cell


def _cells(rows: list[list[str]], column: str | None) -> list[str]:
    """Return the cells of the column of prompts, below the header."""
    if not rows:
        return []
    header = [name.strip() for name in rows[0]]
    wanted = COLUMNS if column is None else (column.lower(),)
    places = [place for place, name in enumerate(header) if name.lower() in wanted]
    if len(places) != 1:
        asked = "prompts" if column is None else repr(column)
        many = "several columns" if places else "no column"
        raise ValueError(f"{many} of {asked}, there are {', '.join(header)}: name one as FILE:COLUMN")
    return [row[places[0]] for row in rows[1:] if len(row) > places[0]]


def _read_json(text: str, column: str | None) -> Iterable[str]:
    data = json.loads(text)
    if isinstance(data, dict) and isinstance(data.get("annotations"), list):
        data = data["annotations"]
        if data and all(isinstance(entry, dict) and "image_id" in entry for entry in data):
            return _one_a_picture(data, column)
    if not isinstance(data, list):
        raise ValueError('expected a list of prompts or an object with "annotations"')
    return [_field(entry, column, f"entry {place}") for place, entry in enumerate(data)]


class _OneAPicture(list[str]):
    """Captions that were drawn by `RULE`."""


def _one_a_picture(annotations: Sequence[dict[str, Any]], column: str | None) -> _OneAPicture:
    """Return one caption of each picture, in an order drawn at random.

    Hashes draw, so that every version of Python and of the file's order agrees.
    """
    captions: dict[str, list[tuple[str, str]]] = {}
    for place, entry in enumerate(annotations):
        text = _field(entry, column, f"entry {place}")
        captions.setdefault(str(entry["image_id"]), []).append((_drawn(text), text))
    order = sorted(captions, key=_drawn)
    return _OneAPicture(min(captions[image])[1] for image in order)


def _drawn(text: str) -> str:
    return hashlib.sha256(f"{SEED} {text}".encode()).hexdigest()


def _read_lines(text: str, column: str | None) -> Iterable[str]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            found.append(_field(entry, column, f"line {number}"))
    return found


def _field(entry: Any, column: str | None, place: str) -> str:
    """Return the prompt of an entry: the entry itself, or a field of it."""
    if isinstance(entry, str) and column is None:
        return entry
    names = FIELDS if column is None else (column,)
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is neither a text nor an object with {' or '.join(names)}")
    found = next((entry[name] for name in names if name in entry), None)
    if not isinstance(found, str):
        raise ValueError(f"{place} has no text under {' or '.join(names)}: {', '.join(entry)}")
    return found


_READERS: dict[str, Callable[[str, str | None], Iterable[str]]] = {
    ".txt": _read_text,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".json": _read_json,
    ".jsonl": _read_lines,
}


def _sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
