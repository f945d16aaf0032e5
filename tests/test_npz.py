"""Pictures and statistics in .npz files: the layout, pairs, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffcache.eval.samples import folders, npz
from tests.picture_files import filled, noise


def test_npz_round_trip_and_the_layout_of_the_adm_evaluator(tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(5)])
    file = npz.write_npz(tmp_path / "a.npz", iter(made), 5)
    with np.load(file) as data:  # as the evaluator reads it
        assert data.files == ["arr_0"] and data["arr_0"].dtype == np.uint8
        assert (data["arr_0"] == made.permute(0, 2, 3, 1).numpy()).all()
    found = folders.open_pictures(file)
    assert found.names == ("0", "1", "2", "3", "4") and folders.common_size(found) == (12, 16)
    assert torch.stack(list(found.pictures())).equal(made)
    assert torch.stack(list(found.pictures([1, 4]))).equal(made[[1, 4]])
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("save_npz", [np.savez, np.savez_compressed])
def test_npz_of_numpy_is_read(save_npz: object, tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(3)])
    save_npz(tmp_path / "a.npz", made.permute(0, 2, 3, 1).contiguous().numpy())  # type: ignore[operator]
    assert torch.stack(list(folders.open_pictures(tmp_path / "a.npz").pictures())).equal(made)


def test_damaged_npz_is_an_error(tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(3)])
    file = npz.write_npz(tmp_path / "a.npz", iter(made), 3)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz"):
        folders.open_pictures(file)
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz.*CRC"):
        list(folders.open_pictures(file).pictures())


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    made = [noise(), noise(), noise(8, 8)]
    for pictures_given, count, message in (
        (made[:2], 3, r"a\.npz: 2 pictures, not 3"),
        (made, 3, r"a\.npz: picture 2 is \[3, 8, 8\], those before \[3, 12, 16\]"),
        ([noise().float()], 1, r"a\.npz: picture 0 is torch\.float32"),
        ([], 0, r"a\.npz: 0 pictures"),
    ):
        with pytest.raises(ValueError, match=message):
            npz.write_npz(tmp_path / "a.npz", pictures_given, count)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"a\.zip: pictures are written as \.npz"):
        npz.write_npz(tmp_path / "a.zip", made[:1], 1)


def test_npz_pairs_with_npz_only(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 3), ("c", 2)):
        npz.write_npz(tmp_path / f"{name}.npz", (noise(seed=s) for s in range(count)), count)
    a, b, c = (folders.open_pictures(tmp_path / f"{name}.npz") for name in "abc")
    assert folders.pair(a, b) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match=r"c\.npz lacks 1 of .*a\.npz: 2"):
        folders.pair(a, c)
    other = folders.open_pictures(filled(tmp_path / "d", ["0.png", "1.png", "2.png"]))
    with pytest.raises(ValueError, match=r"an \.npz has no file names"):
        folders.pair(a, other)


def test_statistics(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(50, 4))
    mu, sigma = features.mean(0), np.cov(features.T)
    np.savez(tmp_path / "a.npz", mu=mu, sigma=sigma)
    found = npz.read_statistics(tmp_path / "a.npz")
    assert found is not None and found.count is None
    assert np.allclose(found.mean, mu) and np.allclose(found.cov, sigma)
    np.savez(tmp_path / "b.npz", arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    assert npz.read_statistics(tmp_path / "b.npz") is None
    skew = sigma + np.triu(np.ones((4, 4)), 1)
    for arrays, message in (
        ({"mu": mu[:3], "sigma": sigma}, r"c\.npz: mu \[3\] and sigma \[4, 4\]"),
        ({"mu": mu * np.nan, "sigma": sigma}, r"c\.npz: mu or sigma holds NaN"),
        ({"mu": mu, "sigma": skew}, r"c\.npz: sigma must be symmetric"),
    ):
        np.savez(tmp_path / "c.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            npz.read_statistics(tmp_path / "c.npz")
