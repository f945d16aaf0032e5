"""Films that are saved as they are made: found again by their viewers alone, and old ones go."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.kept import SAVED_EVERY, Kept, is_viewer
from diffcache.pipelines.demo.program import Asked
from diffcache.pipelines.demo.session_film import program_of
from diffcache.pipelines.demo.showing import Viewers, show
from diffcache.video import FewSteps

PLENTY = 10**9


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo.from_pretrained("sticker-causal") as opened:
        opened.sampler = FewSteps((1000, 500), shift=2.0, predicts="clean")
        yield opened


def asked(**changes: Any) -> Asked:
    return replace(Asked("a fox on grass", "window", 3, 2, (16, 16)), **changes)


def pictures(chunk: int) -> Any:
    """Return the pictures that come in for a chunk: a square that moves."""
    film = np.zeros((5 if chunk == 0 else 6, 16, 16, 3), np.uint8)
    for at, picture in enumerate(film):
        picture[4:9, (chunk + at) % 12 : (chunk + at) % 12 + 4] = 200
    return film


@pytest.mark.parametrize("anew", [False, True])
def test_a_film_goes_on_in_another_process_as_if_nothing_had_happened(
    video: CausalVideo, anew: bool, tmp_path: Path
) -> None:
    """With orders in it, one that begins with pictures and one that is made from them."""
    make = program_of(video, "tiny", 2, PLENTY).make
    start = None if anew else pictures(0)[:5]
    request, viewer = asked(anew=anew, start=start), token_hex(16)
    seen = [(pictures(chunk),) if anew else () for chunk in range(8)]
    order = {"prompt": "a crab", "policy": "window:window=3", "switch": "keep"}

    film = Kept(tmp_path, PLENTY).film(viewer, request, lambda: make(request), False)
    for chunk in range(SAVED_EVERY + 2):  # two of them are lost
        if chunk == 2:
            film.apply(order)
        film.next(*seen[chunk])
    kept = Kept(tmp_path, PLENTY)  # of a process that begins anew
    found = kept.find(viewer)
    assert found is not None and found[1] == SAVED_EVERY
    assert found[0] == asked(anew=anew, prompt="a crab", policy="window:window=3")
    again = kept.film(viewer, found[0], lambda: make(found[0]), True)
    assert again.news() == f"the film goes on from chunk {SAVED_EVERY}, as saved"

    plain = make(request)
    for chunk in range(8):
        if chunk == 2:
            plain.apply(order)
        frames = plain.next(*seen[chunk])
        if chunk >= SAVED_EVERY:
            np.testing.assert_array_equal(again.next(*seen[chunk]), frames)
    assert again.news() == "" and kept.find(viewer) == (found[0], 2 * SAVED_EVERY)


def test_a_page_goes_on_with_its_viewers_film_alone(video: CausalVideo, tmp_path: Path) -> None:
    program, viewer = replace(program_of(video, "tiny", 2, PLENTY), fps=10_000), token_hex(16)
    viewers = Viewers(2, kept=Kept(tmp_path, PLENTY))
    values = show(program, viewers, "me", asked(), viewer=viewer)
    for _ in range(SAVED_EVERY + 1):
        next(values)
    values.close()
    viewers = Viewers(2, kept=Kept(tmp_path, PLENTY))
    assert viewers.kept is not None
    for stranger in (token_hex(16), "", None, "../" + viewer, viewer.upper(), 7):
        assert viewers.kept.find(stranger) is None  # type: ignore[arg-type]
        if not is_viewer(stranger):
            continue
        values = show(program, viewers, "other", asked(), viewer=stranger, goes_on=True)
        with pytest.raises(ValueError, match="not saved any more"):
            next(values)
    assert viewer not in " ".join(os.listdir(tmp_path))
    values = show(program, viewers, "again", asked(), viewer=viewer, goes_on=True)
    first = next(values)
    assert first["note"] == f"**the film goes on from chunk {SAVED_EVERY}, as saved**"
    assert first["player"]["marks"][-1] == {"frame": 0, "text": "restored"}
    values.close()
    live = asked(anew=True)
    with pytest.raises(ValueError, match="turn the camera on"):
        next(show(program, viewers, "live", live, viewer=viewer, goes_on=True))


def test_the_folder_is_bounded_and_a_film_of_something_else_is_refused(video: CausalVideo, tmp_path: Path) -> None:
    make = program_of(video, "tiny", 2, PLENTY).make
    viewers = [token_hex(16) for _ in range(3)]

    def filmed(kept: Kept, viewer: str) -> Any:
        film = kept.film(viewer, asked(), lambda: make(asked()), False)
        for _ in range(SAVED_EVERY):
            film.next()
        return film

    kept = Kept(tmp_path, PLENTY)
    filmed(kept, viewers[0])
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    kept.most_bytes = int(2.5 * size)
    for age, viewer in enumerate(viewers[1:]):
        os.utime(next(kept.place(viewers[0]).glob("film.json")), (0, time.time() - 60 + age))
        filmed(kept, viewer)
    assert [kept.find(viewer) is not None for viewer in viewers] == [False, True, True]
    old = filmed(kept, viewers[1])
    filmed(kept, viewers[1])  # another film of the viewer
    before = kept.find(viewers[1])
    for _ in range(SAVED_EVERY):
        old.next()  # whose saves count no more
    assert kept.find(viewers[1]) == before

    other = asked(size=(32, 16))
    with pytest.raises(ValueError, match="your film cannot go on here, start another one"):
        kept.film(viewers[1], other, lambda: make(other), True)
    late = Kept(tmp_path, PLENTY, seconds=0)
    assert late.find(viewers[2]) is None and not list(tmp_path.iterdir())


def test_a_save_that_cannot_be_is_told_and_the_film_goes_on(video: CausalVideo, tmp_path: Path) -> None:
    make, viewer = program_of(video, "tiny", 2, PLENTY).make, token_hex(16)
    kept = Kept(tmp_path, PLENTY)
    film = kept.film(viewer, asked(), lambda: make(asked()), False)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    os.utime(tmp_path / "other", (0, 0))
    kept.folder = tmp_path / "file"  # no folder can be made in it
    for _ in range(SAVED_EVERY):
        assert len(film.next())
    assert "the film could not be saved" in film.news()
    ended = weakref.ref(film.film)  # type: ignore[attr-defined]
    del film
    gc.collect()
    assert ended() is None and (tmp_path / "other").exists()  # old, and not ours
    kept = Kept(tmp_path, 1)
    film = kept.film(viewer, asked(), lambda: make(asked()), False)
    for _ in range(SAVED_EVERY):
        film.next()
    assert "more room than all films may" in film.news() and (tmp_path / "other").exists()
