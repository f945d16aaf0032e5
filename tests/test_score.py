"""Scores of a case: from files to intervals, with the shipped extractor and with a real one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diffcache.eval.metrics import intervals, lite
from diffcache.eval.metrics.distances import moments
from diffcache.eval.metrics.inception import Features
from diffcache.eval.metrics.sets import Reference, quality
from diffcache.eval.runs import score
from diffcache.eval.runs.extractors import Extractors, at_hand
from diffcache.eval.runs.folder import CaseFolder, batches
from diffcache.eval.workshop.small.sticker_features import corrupt, draw
from diffcache.eval.workshop.small.stickers import caption

COUNT = 48
NETWORKS = Extractors()


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    drawn = intervals._resampled_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_resampled_ids", lambda count, _, seed: drawn(count, 50, seed))
        yield


def written(path: Path, samples: list[Tensor], prompts: list[str]) -> score.Samples:
    """Store samples as a run does."""
    folder = CaseFolder(path, fps=8)
    (batch,) = batches(prompts, len(samples), len(samples), 0)
    folder.write(batch, samples, {})
    (line,) = folder.done([batch]).values()
    sums = {i: file["sha256"] for i, file in zip(batch.ids, line["files"], strict=True)}
    return score.Samples(folder, (batch,), sums)


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, list[str]]:
    scenes, pictures = draw(COUNT, 5, held=True)
    return pictures, [caption(scene) for scene in scenes]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, drawn: tuple) -> dict[str, score.Samples]:
    pictures, prompts = drawn
    place = tmp_path_factory.mktemp("cases")
    made = {"uncached": pictures, "same": pictures, "ghost": corrupt(pictures, "ghost", 0.3)}
    return {name: written(place / name, list(found), prompts) for name, found in made.items()}


@pytest.fixture(scope="module")
def reference() -> Reference:
    shipped = lite.reference()
    return Reference("stickers", {"_lite": (shipped.moments, shipped.features[:300])})


def qualities(cases: dict, name: str, reference: Reference | None) -> dict:
    base = score.values(cases["uncached"], None, NETWORKS)
    mine = base if name == "uncached" else score.values(cases[name], None, NETWORKS)
    return quality(mine, base, reference, is_film=False)


def test_equal_samples_are_equal_in_everything(cases: dict, reference: Reference) -> None:
    values = score.values(cases["same"], cases["uncached"], NETWORKS)
    found, _ = score.fidelity(values, cases["same"].ids)
    assert found["psnr_db"]["value"] == found["psnr_db"]["pooled"] == 100
    assert found["ssim"]["value"] == pytest.approx(1) == found["ms_ssim"]["value"]
    assert found["lpips_lite"]["value"] == 0
    same = qualities(cases, "same", reference)
    base = qualities(cases, "uncached", reference)
    assert same["fid_lite_to_uncached"]["value"] == 0
    assert same["fid_lite_change"]["value"] == 0 and same["fid_lite"] == base["fid_lite"]


def test_damage_is_seen_beyond_its_interval(cases: dict, reference: Reference) -> None:
    found = qualities(cases, "ghost", reference)
    assert found["fid_lite_change"]["low"] > 0 and found["fid_lite_change"]["paired"]
    assert found["fid_lite_to_uncached"]["low"] > 0
    assert found["fid_lite"]["floor"] < found["fid_lite"]["value"]


def test_worst_and_best_are_ranked_by_lpips(cases: dict) -> None:
    values = score.values(cases["ghost"], cases["uncached"], NETWORKS)
    _, picked = score.fidelity(values, cases["ghost"].ids)
    distances = values["lpips_lite"]
    assert picked["worst"][0] == int(distances.argmax())
    assert picked["best"][0] == int(distances.argmin())
    assert picked["count"] == COUNT


def test_values_are_kept_until_a_sample_changes(
    cases: dict, drawn: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score.values(cases["same"], None, NETWORKS)
    calls: list[int] = []
    embed = lite.embed_and_classify
    monkeypatch.setattr(lite, "embed_and_classify", lambda pictures: calls.append(1) or embed(pictures))
    score.values(cases["same"], None, NETWORKS)
    assert not calls
    other = written(tmp_path, list(drawn[0].flip(0)), drawn[1])
    kept = cases["same"].folder.path / "values" / "00000.safetensors"
    (tmp_path / "values").mkdir()
    (tmp_path / "values" / kept.name).write_bytes(kept.read_bytes())
    score.values(other, None, NETWORKS)
    assert calls


def test_real_networks_have_keys_of_their_own(tmp_path: Path, cases: dict, drawn: tuple) -> None:
    def network(pictures: Tensor) -> Features:
        flat = pictures.float().unflatten(2, (8, 8)).mean(dim=(3, 4)).flatten(1) / 255  # [N, 24]
        return Features(flat, flat[:, :9])

    with_real = Extractors(inception=network, entries={"fid": {"backend": "real"}})
    base = score.values(cases["uncached"], None, with_real)
    mine = score.values(cases["ghost"], None, with_real)
    real = base["features"].double()
    against = Reference("folder", {"": (moments(real), real)})
    found = quality(mine, base, against, is_film=False)
    assert found["fid"]["value"] == pytest.approx(found["fid_to_uncached"]["value"], rel=1e-6)
    assert {"kid", "is", "recall", "fid_change"} <= set(found)
    assert "fid_lite" not in found  # the reference has no features of that kind
    assert with_real.describe("fid_change") == {"backend": "real"}
    assert with_real.describe("fid_lite_change")["backend"] == "lite"


def test_wide_features_have_a_value_without_an_interval() -> None:
    wide = {"features": torch.randn(40, 300)}
    other = {"features": torch.randn(40, 300)}
    real = moments(torch.randn(400, 300).double())
    found = quality(other, wide, Reference("r", {"": (real, None)}), False)
    assert set(found["fid"]) == {"value", "n"} and set(found["fid_change"]) == {"value", "n", "paired"}


def test_films_are_compared_frame_by_frame(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    film = torch.randint(60, 190, (6, 3, 64, 64), generator=rng, dtype=torch.uint8)
    flicker = film.int() + 20 * torch.tensor([1, -1] * 3)[:, None, None, None]
    brighter = film.int() + 20
    uncached = written(tmp_path / "a", [film, film], ["a", "b"])
    mine = written(tmp_path / "b", [flicker.to(torch.uint8), brighter.to(torch.uint8)], ["a", "b"])
    values = score.values(mine, uncached, NETWORKS)
    expected = 20 * np.log10(255 / 20)
    assert values["psnr_db"].tolist() == pytest.approx([expected, expected])
    # The same PSNR, but only one of them flickers.
    assert values["temporal_error"].tolist() == pytest.approx([40 / 255, 0])
    assert score.values(mine, None, NETWORKS)["features_lite"].shape == (2, 64)


def test_a_missing_weight_leaves_a_network_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = at_hand("cpu", films=False)
    assert found.inception is found.lpips is found.clip is None
    assert found.entries == {}
    assert {"fid", "lpips", "clip_score"} <= set(found.lacking)
    assert found.lacking["fid"].startswith("no file weights-inception-2015-12-05-6726825d.pth")
    assert "looked for" not in found.lacking["fid"]
