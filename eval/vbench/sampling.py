"""Draw the films of VBench's suite, one seed each, resumable at any film."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffcache.eval.vbench import layout, suite

Draw = Callable[[str, int], torch.Tensor]
Progress = Callable[[int, int], None]


def draw_suite(
    folder: str | Path,
    prompts: Sequence[layout.Prompt],
    draw: Draw,
    dimensions: Sequence[str] | None = None,
    *,
    fps: float = suite.FRAME_RATE,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Draw every film that is not there yet.

    Args:
        folder: Receives the films; the manifest with their seeds stands beside it.
        prompts: All of VBench's, from `read_info`.
        draw: Takes a prompt and a seed and returns `[F, 3, H, W]` uint8.
        dimensions: To draw for; None for all. The choice does not change a film's seed.
        fps: Frames per second.
        seed: Of the first film of the whole suite; film i has `seed + i`, so no two share one.
        progress: Called with (films there, films needed) behind every film.

    Returns:
        How many films were drawn now.

    Raises:
        ValueError: Films in the folder were drawn with other seeds or another frame rate, or are
            not in the manifest.
    """
    folder = Path(folder)
    wanted = layout.expected(prompts, dimensions)
    seeds = {name: seed + i for i, name in enumerate(layout.expected(prompts))}
    text = {layout.film_name(p.text, i): p.text for p in prompts for i in range(_most(p))}
    recorded = read_manifest(folder)
    there = {name for name in wanted if (folder / name).is_file()}
    for name in sorted(there):
        _check(folder / name, recorded.get(name), {"seed": seeds[name], "fps": fps})
    for done, name in enumerate((n for n in wanted if n not in there), start=1):
        frames = draw(text[name], seeds[name])
        facts = {"prompt": text[name], "seed": seeds[name], "fps": fps, "frames": len(frames)}
        # First the line, then the film: a film without a line cannot come about.
        if recorded.get(name) != facts:
            layout.record_film(folder, name, **facts)
        layout.write_film(folder, name, frames, fps)
        if progress:
            progress(len(there) + done, len(wanted))
    return len(wanted) - len(there)


def read_manifest(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return what is recorded about each film; the last line about a film counts.

    A line that was cut off by an interrupt is left out: its film was not written.
    """
    path = layout.manifest(folder)
    if not path.is_file():
        return {}
    facts: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        facts[entry.pop("file")] = entry
    return facts


def _most(prompt: layout.Prompt) -> int:
    return suite.samples(prompt.dimensions)


def _check(path: Path, recorded: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> None:
    """Refuse to mix films of different settings."""
    if recorded is None:
        raise ValueError(f"{path} is not in the manifest beside its folder: move it away")
    for key, value in asked.items():
        if recorded.get(key) != value:
            raise ValueError(
                f"{path} was drawn with {key} {recorded.get(key)}, not {value}: use another folder"
            )
