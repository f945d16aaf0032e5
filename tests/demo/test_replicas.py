"""Films in replicas under Ray Serve: as those of one process, and apart from one another."""

import os
import signal
import time
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest

from diffcache.pipelines.demo.replicas import IDLE, place_of, replicas, scaling


def opener() -> Any:
    """Return what opens a tiny model; it is sent to processes that do not know the tests."""

    def opened() -> Any:
        import os

        import numpy as np
        import torch
        from diffusers import WanTransformer3DModel

        from diffcache.pipelines.causal_video import CausalVideo
        from diffcache.video import FewSteps, Window

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=24,
            num_layers=1,
            rope_max_seq_len=64,
        )
        video = CausalVideo(model.eval(), sampler=FewSteps((1000,)))

        class Film:
            def __init__(self, seed: int) -> None:
                if seed < 0:
                    raise ValueError(f"seed={seed}: must be at least 0")
                text = torch.ones(1, 2, 8)
                self.session = video.session(text, size=(4, 4), policy=Window(3, 1), seed=seed)

            def next(self) -> Any:
                latents = self.session.next()[0].movedim(0, -1)[..., :3]
                return latents.mul(40).add(128).clamp(0, 255).byte().numpy().astype(np.uint8)

            def apply(self, order: Any) -> None:
                if order["scale"] <= 0:
                    raise ValueError("scale: must be above 0")
                self.session.switch(order["scale"] * torch.ones(1, 2, 8))

            def save(self, folder: str) -> None:
                self.session.save(folder)

            def resume(self, folder: str) -> None:
                self.session = video.restore(folder, Window(3, 1))

            def readings(self) -> dict[str, float]:
                return {"bytes": self.session.store.nbytes, "process": os.getpid()}

        return Film

    return opened


def test_replicas_are_scaled_by_the_films_that_wait() -> None:
    """Films go where few are, and to a replica that sleeps once all others have two."""
    films, least, begun = [0, 0, 0], 1, []
    for _ in range(8):
        begun.append(place_of(films, least))
        films[begun[-1]] += 1
    assert begun == [0, 0, 1, 1, 2, 2, 0, 1]
    assert [place_of(films, 3) for films in ([2, 1, 1], [0, 0, 0])] == [1, 0]
    assert place_of([1, 0, 2], 1) == 0  # nobody waits: the second goes on sleeping
    assert scaling(True) == {"num_replicas": 1}
    config = pytest.importorskip("ray.serve.config", reason="needs ray[serve]")
    (told,) = scaling(False).values()
    found = config.AutoscalingConfig(**told)  # refuses what Ray does not know
    assert (found.min_replicas, found.max_replicas, found.initial_replicas) == (0, 1, 0)
    assert found.downscale_delay_s == IDLE and found.upscale_delay_s == 0


@pytest.mark.slow
def test_films_of_replicas_are_those_of_one_process_apart_and_restored(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    alone = [opener()()(seed) for seed in range(4)]
    with replicas(opener(), folder=str(tmp_path), count=2, cpus=0.25) as make:
        films = [make(seed) for seed in range(4)]
        for chunk in range(3):
            for mine, film in zip(alone, films, strict=True):
                if chunk == 1:
                    mine.apply({"scale": 2.0})
                    film.apply({"scale": 2.0})
                np.testing.assert_array_equal(film.next(), mine.next())
        places = [int(film.readings()["process"]) for film in films]
        assert places[0] == places[2] != places[1] == places[3]
        assert os.getpid() not in places
        with pytest.raises(ValueError, match="^scale: must be above 0$"):
            films[0].apply({"scale": 0.0})
        with pytest.raises(ValueError, match="^seed=-1: must be at least 0$"):
            make(-1)

        np.testing.assert_array_equal(films[1].next(), alone[1].next())  # the fourth: it is saved
        order = {"scale": 3.0}
        films[1].apply(order)
        np.testing.assert_array_equal(films[1].next(), _applied(alone[1], order).next())
        os.kill(places[1], signal.SIGKILL)
        started = time.monotonic()
        restored, seconds = films[1].next(), time.monotonic() - started
        again = opener()()(1)  # which makes the lost chunk once more, and the next
        for chunk in range(4):
            _applied(again, {"scale": 2.0} if chunk == 1 else {}).next()
        _applied(again, order)
        np.testing.assert_array_equal(restored, again.next())
        assert seconds < 10
        assert "ended at chunk 5; it goes on from chunk 4" in films[1].news()
        assert films[1].news() == ""
        assert int(films[1].readings()["process"]) == places[0]
        np.testing.assert_array_equal(films[1].next(), again.next())
        with pytest.raises(ValueError, match="has ended; start the film again"):
            films[3].next()  # was not saved yet
        for number in (0, 2):  # as if nothing had happened
            np.testing.assert_array_equal(films[number].next(), alone[number].next())
        films[1] = films[3] = None
        again = make(7)
        np.testing.assert_array_equal(again.next(), opener()()(7).next())
        assert int(again.readings()["process"]) not in places
        again.save(str(tmp_path / "kept"))
        other = make(7)
        other.resume(str(tmp_path / "kept"))
        rmtree(tmp_path / "kept")
        np.testing.assert_array_equal(other.next(), again.next())
    assert not [place for place in places if is_alive(place)]
    del films, film, other
    assert not list(tmp_path.iterdir())


def _applied(film: Any, order: dict[str, float]) -> Any:
    """Return a film after an order, if there is one."""
    if order:
        film.apply(order)
    return film


def is_alive(process: int) -> bool:
    """Return whether a process runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
