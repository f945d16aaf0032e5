"""Timeline of the computed steps of each guidance branch, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffcache.attach.record import CallRecord

if TYPE_CHECKING:
    from PIL.Image import Image

COMPUTED, SKIPPED, PARTS = "█", "·", "▁▂▃▄▅▆▇"
ASCII_COMPUTED, ASCII_SKIPPED, ASCII_PARTS = "#", ".", "0123456789"
_BLUE, _PALE, _INK, _GREY = (37, 99, 175), (214, 224, 236), (40, 44, 52), (125, 132, 142)
_LONGEST_LABEL = 28


@dataclass
class Lane:
    """One guidance branch of one denoiser over the steps of a run.

    Marks are the part of every step that was computed, 0 to 1; None where this branch did not run.
    """

    label: str
    marks: list[float | None] = field(default_factory=list)


def steps_of(calls: Sequence[CallRecord]) -> list[list[CallRecord]]:
    """Group denoiser calls into their steps, in order; leave out calls of no step."""
    steps: list[list[CallRecord]] = []
    place: tuple[str, int] | None = None
    seen: set[int | str] = set()
    for call in calls:
        if call.writes:
            continue
        if (call.denoiser, call.index) != place or call.branch in seen:
            steps.append([])
            place, seen = (call.denoiser, call.index), set()
        steps[-1].append(call)
        seen.add(call.branch)
    return steps


def lanes_of(calls: Sequence[CallRecord]) -> list[Lane]:
    """Return one lane for every branch of every denoiser, in the order of their first calls."""
    several = len({call.denoiser for call in calls}) > 1
    steps = steps_of(calls)
    lanes: dict[tuple[str, int | str], Lane] = {}
    for number, step in enumerate(steps):
        for call in step:
            key = (call.denoiser, call.branch)
            if key not in lanes:
                branch = f"branch {call.branch}" if isinstance(call.branch, int) else call.branch
                label = f"{call.denoiser} {branch}" if several else branch
                lanes[key] = Lane(label, [None] * len(steps))
            lanes[key].marks[number] = call.share
    return list(lanes.values())


def timeline_text(calls: Sequence[CallRecord], width: int = 100, ascii_only: bool = False) -> str:
    """Draw the timeline in characters, one line a branch, wrapped at `width` columns, at least 40.

    It is a ruler of step numbers, one line for each branch, and a legend; empty without calls. Steps of
    which a part was computed are bars of that height, or tenths in ASCII, which draws with `#` and `.`.
    """
    lanes = lanes_of(calls)
    if not lanes:
        return ""
    on, off, parts = COMPUTED, SKIPPED, PARTS
    if ascii_only:
        on, off, parts = ASCII_COMPUTED, ASCII_SKIPPED, ASCII_PARTS
    signs: dict[float | None, str] = {1: on, 0: off, None: " "}
    margin = min(max(len(lane.label) for lane in lanes), _LONGEST_LABEL)
    room = max((max(width, 40) - margin - 4) // 10 * 10, 10)
    total = len(lanes[0].marks)
    lines = []
    for start in range(0, total, room):
        end = min(start + room, total)
        ruler = "".join(f"{number:<10}" for number in range(start, end, 10))
        lines.append(f"  {'step':<{margin}}  {ruler}".rstrip())
        for lane in lanes:
            row = "".join(signs.get(mark) or parts[int((mark or 0) * len(parts))] for mark in lane.marks[start:end])
            lines.append(f"  {lane.label[:margin]:<{margin}}  {row}".rstrip())
    in_part = any(mark not in signs for lane in lanes for mark in lane.marks)
    legend = f"  {parts[1]} to {parts[-1]} in part" if in_part else ""
    lines.append(f"  {'':<{margin}}  {on} computed  {off} skipped{legend}")
    return "\n".join(lines)


def timeline_image(calls: Sequence[CallRecord], width: int = 800, height: int = 200) -> Image:
    """Draw the timeline as an RGB `PIL.Image`: steps to the right, branches downwards.

    Raises:
        ValueError: If the picture is below 160 x 80 pixels, too small to be read.
    """
    from PIL import Image, ImageDraw, ImageFont

    if width < 160 or height < 80:
        raise ValueError(f"width={width}, height={height}: a timeline needs at least 160 x 80 pixels")
    canvas: Image.Image = Image.new("RGB", (width, height), "white")
    pen, lanes = ImageDraw.Draw(canvas), lanes_of(calls)
    size = max(10, min(16, height // 12, width // 24))
    pen.font = ImageFont.load_default(size=size)
    if not lanes:
        pen.text((size, size), "no denoiser call yet", fill=_GREY)
        return canvas
    margin = max(pen.textlength(lane.label) for lane in lanes)
    left, right = int(min(margin, width * 0.35)) + size + 6, width - size
    top, bottom = size, height - round(4.4 * size)
    columns = len(lanes[0].marks)
    for row, lane in enumerate(lanes):
        high = top + (bottom - top) * row / len(lanes)
        low = top + (bottom - top) * (row + 1) / len(lanes)
        pen.text((left - 6, (high + low) / 2), lane.label, fill=_INK, anchor="rm")
        _draw_lane(pen, lane, (left, high, right, low))
    _draw_axis(pen, columns, (left, bottom, right), size)
    _draw_legend(pen, (left, height - size - 2), size)
    return canvas


def _draw_lane(pen: Any, lane: Lane, box: tuple[float, float, float, float]) -> None:
    """Fill one cell for every step; cells touch where there are more of them than pixels."""
    left, high, right, low = box
    pitch = (right - left) / len(lane.marks)
    gap = 1 if pitch >= 4 else 0
    inset = min(3.0, (low - high) / 6)
    for number, mark in enumerate(lane.marks):
        if mark is not None:
            start, end = left + pitch * number, left + pitch * (number + 1) - gap
            cell = (round(start), high + inset, max(round(end) - 1, round(start)), low - inset)
            color = tuple(round(pale + (blue - pale) * mark) for pale, blue in zip(_PALE, _BLUE, strict=True))
            pen.rectangle(cell, fill=color)


def _draw_axis(pen: Any, columns: int, place: tuple[float, float, float], size: int) -> None:
    """Draw step numbers at round distances below the lanes."""
    left, top, right = place
    pitch = (right - left) / columns
    label = pen.textlength("0000")
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n * pitch >= label), 500)
    for number in range(0, columns, every):
        x = left + pitch * (number + 0.5)
        pen.line((x, top, x, top + 3), fill=_GREY)
        pen.text((x, top + 5), str(number), fill=_GREY, anchor="ma")
    pen.text(((left + right) / 2, top + 6 + size), "step", fill=_GREY, anchor="ma")


def _draw_legend(pen: Any, place: tuple[float, float], size: int) -> None:
    """Draw a square and a word for each color."""
    x, y = place
    for color, word in ((_BLUE, "computed"), (_PALE, "skipped")):
        pen.rectangle((x, y - size // 2, x + size, y + size // 2), fill=color)
        pen.text((x + size + 5, y), word, fill=_INK, anchor="lm")
        x += size + 5 + pen.textlength(word) + 2 * size
