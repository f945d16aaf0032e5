"""Measure what the offline `-lite` metrics see, and write the model card of their weights.

    python -m diffcache.eval.workshop.lite_card

writes `README.md` and `sensitivity.json` into assets/models/sticker-features, from 4,000 held-out
pictures and 256 held-out films. No number in the card is typed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from diffcache.command import Threads, script
from diffcache.eval.metrics import lite
from diffcache.eval.metrics.distances import frechet, inception_score, moments
from diffcache.eval.pages import rendered
from diffcache.eval.workshop.small.sticker_features import corrupt, draw, draw_films
from diffcache.eval.workshop.small.stickers import Scene
from diffcache.files import write_file, write_json

PICTURES = 2_000
FILMS = 256
SEED = 2_000
CASES = {  # artefact -> strengths
    "blur": (1.0, 0.5, 0.25, 0.1, 0.05, 0.02),
    "noise": (0.015, 0.075),
    "ghost": (0.1, 0.5),
    "echo": (0.1, 0.5),
    "patch": (0.01, 0.05),
    "grid": (0.006, 0.03),
    "color": (0.1,),
}

Row = tuple[str, float]


def fid_lite(pictures: Tensor) -> float:
    """Return FID-lite of pictures against the shipped reference.

    Args:
        pictures: uint8 [N, 3, H, W].
    """
    return frechet(moments(lite.embed(pictures)), lite.reference().moments)


def picture_rows(scenes: Sequence[Scene], pictures: Tensor) -> Iterator[Row]:
    """Yield FID-lite of clean pictures and of pictures with known artefacts.

    Args:
        scenes: Scenes of the pictures.
        pictures: uint8 [4000, 3, 64, 64], clean; all but one row use the first half of them.
    """
    yield f"clean, {len(pictures):,} pictures", fid_lite(pictures)
    pictures = pictures[:PICTURES]
    yield f"clean, {len(pictures):,} pictures", fid_lite(pictures)
    for kind, strengths in CASES.items():
        for strength in strengths:
            yield f"{kind} {strength:g}", fid_lite(corrupt(pictures, kind, strength))
    kept = [all(one.name != "fox" for one in scene.stickers) for scene in scenes[:PICTURES]]
    yield "no foxes", fid_lite(pictures[torch.tensor(kept)])
    yield "moved by 1 pixel", fid_lite(pictures.roll(1, -1))
    half = pictures[: len(pictures) // 2]
    yield "every picture twice", fid_lite(torch.cat([half, half]))


def class_rows(scenes: Sequence[Scene], pictures: Tensor) -> Iterator[Row]:
    """Yield IS-lite of all pictures, blurred ones, and those that hold a fox."""
    foxes = [any(one.name == "fox" for one in scene.stickers) for scene in scenes]
    sets = {"clean": pictures, "blur 1": corrupt(pictures, "blur", 1.0), "foxes only": pictures[torch.tensor(foxes)]}
    for name, chosen in sets.items():
        yield name, inception_score(lite.embed_and_classify(chosen)[1], splits=1)[0]


def film_rows(films: Sequence[Tensor]) -> Iterator[Row]:
    """Yield FVD-lite, and of two cases that single frames cannot tell from clean ones."""
    generator = torch.Generator().manual_seed(SEED)

    def each(change: Callable[[Tensor], Tensor]) -> float:
        return fvd_lite([change(film) for film in films])

    yield f"clean, {len(films)} films", fvd_lite(films)
    yield f"clean, {len(films) // 4} films", fvd_lite(films[: len(films) // 4])
    yield "every second frame repeated", each(lambda film: film[torch.arange(len(film)) // 2 * 2])
    yield "frozen", each(lambda film: film[:1].expand_as(film))
    yield "frames shuffled", each(lambda f: f[torch.randperm(len(f), generator=generator)])
    yield "each frame 30 % of the one before", each(_trail)
    yield "noise 0.02", each(lambda film: corrupt(film, "noise", 0.02))
    yield "blur 0.5", each(lambda film: corrupt(film, "blur", 0.5))


def _trail(film: Tensor) -> Tensor:
    before = torch.cat([film[:1], film[:-1]]).float()
    return (0.7 * film.float() + 0.3 * before).round().to(torch.uint8)


def fvd_lite(films: Sequence[Tensor]) -> float:
    """Return FVD-lite of films against the shipped reference.

    Args:
        films: Each uint8 [F, 3, H, W].
    """
    return frechet(moments(lite.clip_features(films)), lite.reference().films)


def measure() -> dict[str, dict[str, float]]:
    """Return every table: title, then case, then value."""
    scenes, pictures = draw(2 * PICTURES, SEED, held=True)
    return {
        "FID-lite": dict(picture_rows(scenes, pictures)),
        "IS-lite": dict(class_rows(scenes[:PICTURES], pictures[:PICTURES])),
        "FVD-lite": dict(film_rows(draw_films(FILMS, SEED))),
    }


LEGENDS = {
    "FID-lite": "lower is better; times: to the clean pictures of the same number",
    "IS-lite": "higher is better, at most 24: which object is shown most clearly",
    "FVD-lite": "lower is better; times: to the clean films of the same number",
}


def card(tables: dict[str, dict[str, float]]) -> str:
    """Write the model card.

    Args:
        tables: Tables that `measure` returned.
    """
    weights = (one.numel() for one in lite.load().parameters())
    floors = {"FID-lite": f"clean, {PICTURES:,} pictures", "FVD-lite": f"clean, {FILMS} films"}
    return rendered(
        "workshop/lite_card.md.jinja",
        weights=sum(weights),
        config=lite.read_config(),
        films=FILMS,
        held=PICTURES,
        tables=tables,
        legends=LEGENDS,
        floors=floors,
    )


def lite_card(
    out: Annotated[Path, typer.Option(help="Folder of the card.")] = lite.DIRECTORY, threads: Threads = 1
) -> None:
    """Measure what the -lite metrics see and write their model card."""
    torch.set_num_threads(threads)
    tables = measure()
    exact = {t: {k: float(f"{v:.6g}") for k, v in rows.items()} for t, rows in tables.items()}
    write_json(out / "sensitivity.json", exact, indent=2)
    write_file(out / "README.md", card(tables))
    print(card(tables))


main = script(lite_card)

if __name__ == "__main__":
    sys.exit(main())
