"""Sheets of samples: uncached, every method and five times the difference; frames of films."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from diffcache.eval.metrics.pixels import pooled_psnr
from diffcache.eval.report.palette import Picture
from diffcache.eval.report.record_files import Record, ordered

AMPLIFY = 5
GROUPS = ("worst", "median", "best")
_SIDE, _FRAME = 192, 128
_GAP, _PAD, _SMALL, _LARGE = 12, 16, 13, 15
_BLOCKS, _METHODS, _FRAMES = 4, 6, 8
_WIDEST = 1272  # pixels of a sheet with several blocks in a line
_DIFFERENCE = "Uncached, every method, and below it the difference five times as strong."
_INK, _GREY, _LINE = (28, 32, 40), (105, 112, 122), (208, 212, 218)


def draw(record: Record, folders: Sequence[Path]) -> tuple[list[Picture], list[str]]:
    """Draw one sheet for each group of samples: worst, median and best by LPIPS.

    `folders` are those of the runs that the record is about. Returns the sheets, and a sentence about each omission.
    """
    samples = Samples(folders)
    rows = ordered(record)
    uncached, methods = rows[0], [row for row in rows if row["kind"] == "method"]
    sheets, missing = [], 0
    left_out = []
    if len(methods) > _METHODS:
        left_out.append(f"Pictures: {_METHODS} of {len(methods)} methods are shown, the first.")
        methods = methods[:_METHODS]
    block, about = _picture_block, _DIFFERENCE
    if record["task"].get("kind") == "films":
        block, about = _film_block, "Frames of every film, uncached first."
    for group in GROUPS:
        named = picks(methods, group, _BLOCKS)
        chosen = [(number, f"{group} of {name}") for number, name in named]
        made = [(c, block(samples, uncached, methods, c)) for c in chosen]
        drawn = [(c, image) for c, image in made if image is not None]
        missing += len(made) - len(drawn)
        if drawn:
            png = io.BytesIO()
            _stack([one for _, one in drawn]).save(png, "png", optimize=True)
            lines = tuple(_caption(samples, number, of) for (number, of), _ in drawn)
            title = f"{group.capitalize()} samples by distance to uncached"
            stem = f"samples-{group}"
            sheets.append(Picture(stem, title, about, png.getvalue(), lines=lines))
    if missing:
        left_out.append(f"Pictures: the files of {missing} samples are not in the run's folder.")
    elif not sheets:
        left_out.append("Pictures: the record names no samples to show.")
    return sheets, left_out


def picks(methods: Sequence[dict[str, Any]], group: str, most: int) -> list[tuple[int, str]]:
    """Choose samples, the methods taking turns.

    `group` is a field of `samples`. Returns different numbers of samples, at most `most`, each with the method that it
    was chosen for.
    """
    queues = [(row["name"], list((row.get("samples") or {}).get(group) or [])) for row in methods]
    found: dict[int, str] = {}
    for place in range(max((len(queue) for _, queue in queues), default=0)):
        for name, queue in queues:
            if place < len(queue) and len(found) < most:
                found.setdefault(int(queue[place]), name)
    return list(found.items())


def _caption(samples: Samples, number: int, of: str) -> str:
    prompt = " ".join(samples.prompts.get(number, "").split())
    return f"sample {number}, {of}" + (f": {prompt}" if prompt else "")


def _picture_block(
    samples: Samples, uncached: dict[str, Any], methods: Sequence[dict[str, Any]], chosen: tuple[int, str]
) -> Image.Image | None:
    """Draw one sample: uncached and methods above, prompt and differences below."""
    number, of = chosen
    base = samples.picture(uncached, number)
    if base is None:
        return None
    panel = _enlarged(base)
    wide, high = _SIDE, panel.height  # the words under a narrow picture need more room than it
    width = (len(methods) + 1) * (wide + _GAP) - _GAP
    canvas = Image.new("RGB", (width, 22 + 2 * high + 3 * 22), "white")
    pen = ImageDraw.Draw(canvas)
    _write(pen, (0, 0), f"sample {number}, {of}", (width, _SMALL, _GREY))
    _place(canvas, panel, (0, 22), ("uncached", ""))
    prompt = samples.prompts.get(number, "")
    words = "\n".join(_wrapped(prompt, wide, high // 18 + 2))
    pen.multiline_text((0, 22 + high + 26), words, fill=_GREY, font=_font(_SMALL), spacing=4)
    for place, row in enumerate(methods, 1):
        left = place * (wide + _GAP)
        theirs = samples.picture(row, number)
        if theirs is None or theirs.shape != base.shape:
            _write(pen, (left, 22), f"{row['name']}: no file", (wide, _SMALL, _GREY))
            continue
        _place(canvas, _enlarged(theirs), (left, 22), (row["name"], ""))
        strong = np.minimum(np.abs(theirs.astype(np.int32) - base) * AMPLIFY, 255)
        apart = (f"{AMPLIFY}x difference", closeness(base, theirs))
        _place(canvas, _enlarged(strong.astype(np.uint8)), (left, 22 + high + 26), apart)
    return canvas


def _film_block(
    samples: Samples, uncached: dict[str, Any], methods: Sequence[dict[str, Any]], chosen: tuple[int, str]
) -> Image.Image | None:
    """Draw one film: a row of frames for uncached and for every method."""
    number, of = chosen
    base = samples.film(uncached, number)
    if base is None:
        return None
    films = [(row, samples.film(row, number)) for row in methods]
    shown = np.unique(np.linspace(0, len(base) - 1, min(_FRAMES, len(base))).round().astype(int))
    high = _enlarged(base[0], _FRAME).height
    label, pitch = 150, _enlarged(base[0], _FRAME).width + 4
    rows = [(uncached, base), *films]
    width = label + pitch * len(shown) - 4
    canvas = Image.new("RGB", (width, 44 + (high + 8) * len(rows)), "white")
    pen = ImageDraw.Draw(canvas)
    caption = _caption(samples, number, of)
    _write(pen, (0, 0), caption, (width, _SMALL, _GREY))
    for column, frame in enumerate(shown):
        _write(pen, (label + column * pitch, 22), f"frame {frame}", (pitch, 11, _GREY))
    for line, (row, film) in enumerate(rows):
        top = 42 + line * (high + 8)
        method, _, settings = str(row["name"]).partition(":")
        _write(pen, (0, top), method, (label - 8, _LARGE, _INK))
        fits = film is not None and film.shape == base.shape
        words = "no file" if not fits else "" if row is uncached else closeness(base, film)
        for number, text in enumerate(filter(None, (settings, words))):
            _write(pen, (0, top + 22 + 17 * number), text, (label - 8, _SMALL, _GREY))
        for column, frame in enumerate(shown if fits else []):
            canvas.paste(_enlarged(film[frame], _FRAME), (label + column * pitch, top))
    return canvas


def closeness(one: Any, other: Any) -> str:
    """Return the PSNR of two pictures or films in words. Both are uint8 [..., H, W, 3]."""
    if np.array_equal(one, other):
        return "identical"
    both = (torch.from_numpy(np.ascontiguousarray(x)).movedim(-1, -3) for x in (one, other))
    a, b = (x if x.ndim == 4 else x[None] for x in both)
    return f"PSNR {pooled_psnr(a, b):.1f} dB"


def _enlarged(pixels: Any, side: int = _SIDE) -> Image.Image:
    """Bring a picture to a readable size: small ones keep their pixels, large ones are reduced."""
    image = Image.fromarray(pixels)
    longest = max(image.size)
    if longest <= side:
        times = side // longest
        size = (image.width * times, image.height * times)
        return image.resize(size, Image.Resampling.NEAREST)
    size = (max(image.width * side // longest, 1), max(image.height * side // longest, 1))
    return image.resize(size, Image.Resampling.LANCZOS)


def _place(canvas: Image.Image, panel: Image.Image, at: tuple[int, int], words: tuple[str, str]) -> None:
    """Paste a panel with a hairline and two short texts under it, the second to the right."""
    pen = ImageDraw.Draw(canvas)
    canvas.paste(panel, at)
    bottom = at[1] + panel.height
    pen.rectangle((at[0], at[1], at[0] + panel.width - 1, bottom - 1), outline=_LINE)
    taken = _font(_SMALL).getlength(words[1]) + 6 if words[1] else 0
    _write(pen, (at[0], bottom + 3), words[0], (int(_SIDE - taken), _SMALL, _INK))
    pen.text((at[0] + _SIDE, bottom + 3), words[1], fill=_GREY, font=_font(_SMALL), anchor="ra")


def _write(pen: Any, at: tuple[int, int], text: str, how: tuple[int, int, Any]) -> None:
    """Write one line in a width, size and color; text that does not fit ends in an ellipsis."""
    width, size, color = how
    font = _font(size)
    if font.getlength(text) > width:
        while text and font.getlength(text + "…") > width:
            text = text[:-1]
        text += "…"
    pen.text(at, text, fill=color, font=font)


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """Break text into lines that fit a width, at most `most` lines."""
    font = _font(_SMALL)
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1] + " …"]


def _stack(blocks: Sequence[Image.Image]) -> Image.Image:
    """Paste blocks on one sheet, line by line, as many in a line as a page is wide."""
    pitch = max(block.width for block in blocks) + 2 * _PAD
    columns = max(1, min(len(blocks), _WIDEST // pitch))
    lines = [blocks[start : start + columns] for start in range(0, len(blocks), columns)]
    heights = [max(block.height for block in line) + _PAD for line in lines]
    sheet = Image.new("RGB", (columns * pitch, sum(heights) + _PAD), "white")
    for place, line in enumerate(lines):
        top = _PAD + sum(heights[:place])
        for column, block in enumerate(line):
            sheet.paste(block, (_PAD + column * pitch, top))
    return sheet


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)


class Samples:
    """The files of a run's samples, found by row and number.

    A run's folder may be somebody else's: links that lead out of it are not followed.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]

    def picture(self, row: dict[str, Any], number: int) -> Any:
        """Return a picture as uint8 [H, W, 3]; None where there is no whole one."""
        for case in self._cases(row):
            file = self._inside(case / "samples" / f"{number:05d}.png")
            if file is None:
                continue
            try:
                with Image.open(file) as opened:
                    return np.array(opened.convert("RGB"))
            except (OSError, SyntaxError):
                continue  # Not there, or not a whole picture.
        return None

    def film(self, row: dict[str, Any], number: int) -> Any:
        """Return a film as uint8 [F, H, W, 3]; None where there is none."""
        from diffcache.eval.samples.clips import read_clip

        for case in self._cases(row):
            file = self._inside(case / "clips" / f"{number:05d}.mp4")
            if file is not None:
                return read_clip(file).movedim(1, -1).numpy()
        return None

    def preview(self, row: dict[str, Any], number: int) -> bytes | None:
        """Return the bytes of a small film for browsers; None where there is none."""
        named = (c / "previews" / f"{number:05d}.mp4" for c in self._cases(row))
        return next((file.read_bytes() for file in map(self._inside, named) if file), None)

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The prompts by number of sample, from the manifests' `ids` and `prompts`."""
        found: dict[int, str] = {}
        for folder in self._folders:
            named = sorted(folder.glob("cases/*/manifest*.jsonl"))
            for file in filter(None, map(self._inside, named)):
                for text in file.read_text(encoding="utf-8").splitlines():
                    try:
                        line = json.loads(text)
                        pairs = zip(line["ids"], line["prompts"], strict=True)
                        found |= {int(key): str(prompt) for key, prompt in pairs}
                    except (ValueError, KeyError, TypeError):
                        continue  # A line cut off by a kill, or a manifest without prompts.
        return found

    def _cases(self, row: dict[str, Any]) -> list[Path]:
        """Return the folders that may hold a row's samples, never one outside the runs'."""
        found = []
        for folder in self._folders:
            if row.get("folder"):
                found.append((folder / str(row["folder"])).resolve())
            elif row.get("hash"):
                found += sorted(folder.glob(f"cases/*-{str(row['hash'])[:8]}"))
        return [case.resolve() for case in found if self._holds(case)]

    def _holds(self, place: Path) -> bool:
        """Return whether a place is in a run's folder, with links followed."""
        return any(map(place.resolve().is_relative_to, self._folders))

    def _inside(self, file: Path) -> Path | None:
        """Return a file that is in a run's folder, None if there is none."""
        return file if self._holds(file) and file.is_file() else None
