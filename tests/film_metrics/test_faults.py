"""The own film dimensions on a still film and on films with planted faults."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from diffcache.eval.clips import write_clip
from diffcache.eval.vbench import own

KEYS = list(own.DIRECTIONS)


@pytest.fixture(scope="module")
def measured(faults: Any) -> dict[str, dict[str, float]]:
    return {name: own.measure(film, 8) for name, film in faults().items()}


def test_a_still_film_is_at_the_limits(measured: dict[str, dict[str, float]]) -> None:
    still = measured["static"]
    assert list(still) == KEYS
    assert still["temporal_flickering"] == 1
    assert still["lite_dynamic_degree"] == 0
    assert still["lite_warp_error"] < 5e-4
    assert still["lite_motion_smoothness"] > 0.9999
    assert still["lite_subject_consistency"] == pytest.approx(1, abs=1e-6)
    assert still["lite_background_consistency"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("key", "fault", "rises", "factor"),
    [
        ("temporal_flickering", "flicker", False, 1.5),
        ("temporal_flickering", "noise", False, 1.5),
        ("temporal_flickering", "patches", False, 2),
        ("temporal_flickering", "shuffled", False, 1.5),
        ("temporal_flickering", "frozen", True, 1.5),
        ("lite_motion_smoothness", "flicker", False, 4),
        ("lite_motion_smoothness", "noise", False, 4),
        ("lite_motion_smoothness", "patches", False, 8),
        ("lite_motion_smoothness", "shuffled", False, 4),
        ("lite_motion_smoothness", "stutter", False, 3),
        ("lite_warp_error", "flicker", True, 2),
        ("lite_warp_error", "noise", True, 2),
        ("lite_warp_error", "patches", True, 4),
        ("lite_warp_error", "shuffled", True, 1.5),
        ("lite_dynamic_motion", "shuffled", True, 1.5),
        ("lite_dynamic_motion", "patches", True, 1.1),
        ("lite_dynamic_motion", "frozen", False, 1.5),
        ("lite_sharpness", "noise", True, 1.3),
        ("lite_sharpness", "blurred", False, 3),
        ("lite_noise_sigma", "noise", True, 2),
        ("lite_blockiness", "patches", True, 1.5),
        ("lite_subject_consistency", "swapped", False, 1.1),
        ("lite_background_consistency", "swapped", False, 3),
    ],
)
def test_a_planted_fault_moves_the_dimension_it_is_for(
    measured: dict[str, dict[str, float]], key: str, fault: str, rises: bool, factor: float
) -> None:
    clean, faulty = measured["clean"][key], measured[fault][key]
    if clean < 1 and own.DIRECTIONS[key] == "up":
        # Of a score that is at most 1 the distance to 1 is what is compared.
        clean, faulty, rises = 1 - clean, 1 - faulty, not rises
    assert faulty > factor * clean if rises else faulty < clean / factor


def test_flickering_is_vbench_s_formula_on_its_own_reader(tmp_path: Path, faults: Any) -> None:
    for number, film in enumerate(faults().values()):
        video = cv2.VideoCapture(str(write_clip(tmp_path / f"{number}.mp4", film, 8)))
        pictures = []
        while (read := video.read())[0]:
            pictures.append(np.array(read[1], dtype=np.float32))
        changes = [np.mean(cv2.absdiff(a, b)) for a, b in pairwise(pictures)]
        expected = (255.0 - np.mean(np.array(changes)).item()) / 255.0
        assert own.measure(film, 8, ["temporal_flickering"]) == {"temporal_flickering": expected}


def test_only_an_exact_formula_has_vbench_s_name() -> None:
    from diffcache.eval.vbench import suite

    assert set(KEYS) & set(suite.DIMENSIONS) == {"temporal_flickering"}
    assert all(key.startswith("lite_") for key in KEYS if key != "temporal_flickering")
