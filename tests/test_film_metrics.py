"""The own film dimensions: limits, closed forms, planted faults, and folders of foreign films."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from diffcache.eval.clips import write_clip
from diffcache.eval.vbench import flow, own, summary
from diffcache.eval.vbench.__main__ import main

FRAMES = 13
KEYS = list(own.DIRECTIONS)


def texture(height: int, width: int, seed: int, blur: float = 3.0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((height, width, 3)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), blur)
    return 120 + 40 * smooth / smooth.std()


def moving_square(step: float = 1.5, seed: int = 0, side: int = 64) -> torch.Tensor:
    """A textured square of 20 px that moves by `step` px a frame over a still background."""
    ground, square = texture(side, side, seed), texture(20, 20, seed + 1, 1.5)
    square[..., 0] += 60
    frames = []
    for time in range(FRAMES):
        shift = np.array([[1, 0, 8 + step * time], [0, 1, 22 + step * time / 3]], np.float32)
        cover = cv2.warpAffine(np.ones((20, 20), np.float32), shift, (side, side))[..., None]
        drawn = cv2.warpAffine(square, shift, (side, side))
        frames.append(ground * (1 - cover) + drawn)
    film = np.clip(np.round(np.stack(frames)), 0, 255).astype(np.uint8)
    return torch.from_numpy(film).permute(0, 3, 1, 2).contiguous()


def pan(step: int, seed: int = 4, side: int = 64) -> torch.Tensor:
    """A camera that moves to the right by whole pixels."""
    wide = np.clip(texture(side, side + step * FRAMES, seed), 0, 255).round().astype(np.uint8)
    film = np.stack([wide[:, step * time : step * time + side] for time in range(FRAMES)])
    return torch.from_numpy(film).permute(0, 3, 1, 2).contiguous()


def as_bytes(film: torch.Tensor) -> torch.Tensor:
    return film.round().clamp(0, 255).to(torch.uint8)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def faults() -> dict[str, torch.Tensor]:
    film = moving_square()
    real = film.float()
    order = torch.randperm(FRAMES, generator=torch.Generator().manual_seed(2))
    patches = normal(FRAMES, 1, 16, 16).repeat_interleave(4, 2).repeat_interleave(4, 3)
    padded = functional.pad(real, (2, 2, 2, 2), mode="replicate")
    time = torch.arange(FRAMES)
    return {
        "clean": film,
        "static": film[:1].repeat(FRAMES, 1, 1, 1),
        "flicker": as_bytes(real + 3 * normal(FRAMES, 1, 1, 1)),
        "noise": as_bytes(real + 3 * normal(*film.shape)),
        "patches": as_bytes(real + 8 * patches),
        "shuffled": film[order],
        "stutter": film[time // 2 * 2],
        "frozen": film[time.clamp(max=FRAMES // 2)],
        "blurred": as_bytes(functional.avg_pool2d(padded, 5, 1)),
        "swapped": torch.cat([film[: FRAMES // 2], moving_square(seed=9)[FRAMES // 2 :]]),
    }


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
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


def test_flickering_is_vbench_s_formula_on_its_own_reader(tmp_path: Path) -> None:
    for number, film in enumerate(faults().values()):
        video = cv2.VideoCapture(str(write_clip(tmp_path / f"{number}.mp4", film, 8)))
        pictures = []
        while (read := video.read())[0]:
            pictures.append(np.array(read[1], dtype=np.float32))
        changes = [np.mean(cv2.absdiff(a, b)) for a, b in pairwise(pictures)]
        expected = (255.0 - np.mean(np.array(changes)).item()) / 255.0
        assert own.measure(film, 8, ["temporal_flickering"]) == {"temporal_flickering": expected}


def test_flickering_in_closed_form() -> None:
    levels = torch.tensor([0, 255, 0, 255, 0], dtype=torch.uint8)
    film = levels[:, None, None, None].repeat(1, 3, 20, 20)
    assert own.measure(film, 8, ["temporal_flickering"])["temporal_flickering"] == 0
    ramp = (torch.arange(5, dtype=torch.uint8) * 51)[:, None, None, None].repeat(1, 3, 20, 20)
    value = own.measure(ramp, 8, ["temporal_flickering"])["temporal_flickering"]
    assert value == pytest.approx(1 - 51 / 255)


@pytest.mark.parametrize(
    ("side", "step"), [(32, 0), (32, 1), (32, 3), (64, 0), (64, 1), (64, 3), (96, 5)]
)
def test_flow_finds_a_known_shift(side: int, step: int) -> None:
    film = pan(step, side=side).permute(0, 2, 3, 1).contiguous().numpy()
    found = flow.flow(flow.grey(film[0]), flow.grey(film[1]))
    inner = found[8:-8, 8:-8]
    assert np.hypot(inner[..., 0] + step, inner[..., 1]).mean() < 0.1
    assert flow.strongest(inner) == pytest.approx(step, abs=0.2)


def test_the_picture_half_way_is_the_one_between() -> None:
    film = pan(2).permute(0, 2, 3, 1).contiguous().numpy()
    guess = flow.midpoint(film[0], film[2])[:, 8:-8]
    assert np.abs(guess - film[1][:, 8:-8]).mean() < 1
    average = (film[0].astype(np.float32) + film[2]) / 2
    assert np.abs(average[:, 8:-8] - film[1][:, 8:-8]).mean() > 4


def test_sampling_with_a_whole_shift_moves_pixels() -> None:
    picture = np.arange(20, dtype=np.float32).reshape(4, 5)
    shift = np.zeros((4, 5, 2), dtype=np.float32)
    shift[..., 0] = 1
    expected = np.concatenate([picture[:, 1:], picture[:, -1:]], axis=1)
    assert np.array_equal(flow.sample(picture, shift), expected)


def test_flow_is_consistent_where_it_returns_and_stays_inside() -> None:
    there = np.zeros((6, 8, 2), dtype=np.float32)
    there[..., 0] = 2
    assert flow.consistent(there, -there)[:, :6].all()
    assert not flow.consistent(there, -there)[:, 6:].any()
    assert not flow.consistent(there, there).any()


@pytest.mark.parametrize(("gap", "agrees"), [(0.82, True), (0.86, False)])
def test_consistency_is_lost_where_the_paper_says(gap: float, agrees: bool) -> None:
    """|there + back|^2 < 0.01 (|there|^2 + |back|^2) + 0.5: at 3 and 3 px, a gap of 0.84 px."""
    there, back = np.zeros((2, 16, 16, 2), np.float32)
    there[..., 0], back[..., 0], back[..., 1] = 3, -3, gap
    limit = (0.01 * (9 + 9 + gap**2) + 0.5) ** 0.5
    assert (gap < limit) is agrees and flow.consistent(there, back)[:, :12].all() == agrees
    assert flow.consistent(there, back)[:, :12].any() == agrees


@pytest.mark.parametrize(
    ("film", "fps", "dynamic"),
    [
        (pan(1), 8, False),  # 1 px a frame, below the threshold of 6 * 64 / 256 = 1.5 px
        (pan(2), 8, True),
        (pan(1), 16, True),  # two frames apart: 2 px
        (pan(1), 11.9, False),
        # Thirteen frames need round(4 * 13 / 16) = 3 pairs that move.
        (torch.cat([pan(3)[:3], pan(3)[2:3].repeat(10, 1, 1, 1)]), 8, False),
        (torch.cat([pan(3)[:4], pan(3)[3:4].repeat(9, 1, 1, 1)]), 8, True),
        (pan(2)[:3], 240, True),
    ],
)
def test_dynamic_degree_follows_vbench_s_rule(
    film: torch.Tensor, fps: float, dynamic: bool
) -> None:
    keys = ["lite_dynamic_degree", "lite_dynamic_motion"]
    found = own.measure(film, fps, keys)
    assert found["lite_dynamic_degree"] == dynamic
    assert list(found) == keys


def test_motion_is_measured_relative_to_the_shorter_side() -> None:
    for side, step in ((64, 1), (128, 2)):
        found = own.measure(pan(step, side=side), 8, ["lite_dynamic_motion"])
        assert found["lite_dynamic_motion"] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("sigma", [1.0, 5.0, 10.0])
def test_noise_is_found_in_a_flat_and_in_a_sloping_picture(sigma: float) -> None:
    noise = np.random.default_rng(0).normal(0, sigma, (256, 256))
    slope = np.linspace(60, 190, 256)[None].repeat(256, 0)
    for picture in (np.full((256, 256), 128.0), slope):
        found = own.noise_sigma(np.round(picture + noise).astype(np.uint8))
        # Rounding adds a variance of 1 / 12.
        assert found == pytest.approx(np.sqrt(sigma**2 + 1 / 12), rel=0.03)
    assert own.noise_sigma(np.full((32, 32), 7, dtype=np.uint8)) == 0


def test_sharpness_of_one_point_in_closed_form() -> None:
    picture = np.zeros((20, 30), dtype=np.uint8)
    assert own.sharpness(picture) == 0
    picture[7, 9] = 50
    assert own.sharpness(picture) == pytest.approx(20 * 50**2 / 600)


def test_blocks_are_found_in_every_size_and_nothing_is_found_in_a_ramp() -> None:
    ramp = np.arange(64, dtype=np.uint8)[None].repeat(64, 0)
    assert own.blockiness(ramp) == pytest.approx(1)
    assert own.blockiness(np.zeros((64, 64), dtype=np.uint8)) == 1
    rng = np.random.default_rng(0)
    for side in own.BLOCK_SIDES:
        small = rng.integers(-6, 7, (64 // side, 64 // side))
        blocks = np.kron(small, np.ones((side, side), dtype=np.int64))
        assert own.blockiness((ramp + 64 + blocks).astype(np.uint8)) > 2


def test_consistency_in_closed_form() -> None:
    east, north, west = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    slant = torch.tensor([1.0, 1.0])
    half = 0.5**0.5
    assert own.consistency(torch.stack([east, 5 * east])) == pytest.approx(1)
    assert own.consistency(torch.stack([east, west])) == 0  # not -1
    # (0 + 0) / 2, then (1 + 0) / 2
    assert own.consistency(torch.stack([east, north, north])) == pytest.approx(0.25)
    # (s + s) / 2, then (s + 0) / 2
    assert own.consistency(torch.stack([east, slant, north])) == pytest.approx(0.75 * half)


def test_the_subject_is_what_moves_or_else_the_middle() -> None:
    greys = np.full((4, 40, 60), 100, dtype=np.uint8)
    middle = np.zeros((40, 60), dtype=bool)
    middle[10:30, 15:45] = True
    assert np.array_equal(own.subject(greys), middle)
    greys[2, 10:14, 20:26] = 200
    moved = np.zeros((40, 60), dtype=bool)
    moved[8:16, 18:28] = True
    assert np.array_equal(own.subject(greys), moved)
    noisy = np.random.default_rng(0).integers(0, 256, (4, 40, 60), dtype=np.uint8)
    assert np.array_equal(own.subject(noisy), middle)


def test_the_subject_is_painted_over_with_the_colour_of_the_rest() -> None:
    film = torch.full((4, 3, 40, 60), 90, dtype=torch.uint8)
    film[2, 0, 10:14, 20:26] = 250
    assert torch.equal(own.background(film), torch.full_like(film, 90))
    assert film[2, 0, 12, 22] == 250


@pytest.mark.parametrize(
    ("film", "fps", "keys", "message"),
    [
        (torch.zeros(5, 3, 32, 32), 8, None, "uint8"),
        (torch.zeros(5, 1, 32, 32, dtype=torch.uint8), 8, None, r"\[5, 1, 32, 32\]"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), 8, None, "needs 3 frames .* has 2 of 32"),
        (torch.zeros(5, 3, 16, 32, dtype=torch.uint8), 8, None, "17 px a side .* 5 of 16 x 32"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 0, None, "positive .* not 0"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 8, ["imaging_quality"], "unknown own"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 8, [], r"\(none given\)"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    film: torch.Tensor, fps: float, keys: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        own.measure(film, fps, keys)


def test_only_an_exact_formula_has_vbench_s_name() -> None:
    from diffcache.eval.vbench import suite

    assert set(KEYS) & set(suite.DIMENSIONS) == {"temporal_flickering"}
    assert all(key.startswith("lite_") for key in KEYS if key != "temporal_flickering")


# ---------------------------------------------------------------------------------------- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Films of three kinds that we did not make, and a note."""
    films = tmp_path / "films"
    (films / "c").mkdir(parents=True)
    write_clip(films / "a.mp4", moving_square(seed=1), 8)
    write_clip(films / "b.mkv", moving_square(seed=2), 24)
    for index, frame in enumerate(moving_square(seed=3)):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(films / "c" / f"{index}.png")
    (films / "notes.txt").write_text("not a film")
    return films


def test_a_folder_of_foreign_films_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["temporal_flickering", "lite_warp_error"]
    command = [str(folder), "--fps", "8", "--dimensions", *keys]
    assert main([*command, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["warnings"] == ["not films, left out: notes.txt"]
    assert (report["backend"], report["count"]) == ("own", 3)
    assert len(report["extractor"]["sha256"]) == 64
    assert list(report["summary"]) == list(report["results"]) == keys
    score, films = report["results"]["lite_warp_error"]
    assert [Path(film["video_path"]).name for film in films] == ["a.mp4", "b.mkv", "c"]
    alone = own.measure(moving_square(seed=2), 24, ["lite_warp_error"])["lite_warp_error"]
    assert films[1]["video_results"] == alone
    row = report["summary"]["lite_warp_error"]
    assert row["value"] == pytest.approx(score)
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["n"], row["direction"]) == (3, "down")
    assert not {"quality", "semantic", "total"} & set(report)

    target = folder.parent / "result.json"
    assert main([*command, "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "lite_warp_error" in shown and "none of the lite_ values is VBench's" in shown
    assert json.loads(target.read_text()) == report


def test_one_film_has_no_interval(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", moving_square(), 8)
    row = summary.measure_films([path], ["temporal_flickering"])["summary"]["temporal_flickering"]
    assert (row["low"], row["high"], row["n"]) == (None, None, 1)


def test_small_films_carry_a_warning_where_flow_is_used(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", pan(1, side=48), 8)
    (warning,) = summary.measure_films([path], ["lite_warp_error"])["warnings"]
    assert "48 x 48: with fewer than 64 px" in warning
    assert summary.measure_films([path], ["lite_sharpness"])["warnings"] == []
    with pytest.raises(ValueError, match="no film to measure"):
        summary.measure_films([])


def _shorten(folder: Path) -> None:
    write_clip(folder / "b.mkv", moving_square()[:2], 8)


def _enlarge(folder: Path) -> None:
    write_clip(folder / "b.mkv", moving_square(side=80), 8)


def _damage(folder: Path) -> None:
    data = (folder / "b.mkv").read_bytes()
    (folder / "b.mkv").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shorten, "b.mkv: a film needs 3 frames"),
        (_enlarge, "b.mkv has frames of 80 x 80, but .*a.mp4 of 64 x 64"),
        (_damage, "b.mkv (is|cannot)"),
        (lambda folder: (folder / "b.mkv").write_bytes(b""), "b.mkv is empty"),
        (lambda folder: None, "c does not say its frame rate: give it with --fps"),
    ],
)
def test_a_spoilt_film_is_named_before_anything_is_measured(
    folder: Path, spoil: Callable[[Path], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    films, _ = summary.find_films(folder)
    monkeypatch.setattr(own, "measure", lambda *_: pytest.fail("measured too early"))
    with pytest.raises(ValueError, match=message):
        summary.measure_films(films)


def test_folders_without_films_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("not a film")
    assert main([str(tmp_path)]) == 2
    assert "holds no film" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="no folder"):
        summary.find_films(tmp_path / "nowhere")


def test_films_missing_from_the_suite_are_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = folder.parent / "info.json"
    info.write_text(json.dumps([{"prompt_en": "a cat", "dimension": ["scene", "color"]}]))
    command = [str(folder), "--info", str(info), "--fps", "8", "--json", "-"]
    assert main([*command, "--dimensions", "temporal_flickering"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert warnings[1] == "films missing from VBench's suite: color 5, scene 5"
