"""The doctor, and packages that are missing or broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffcache.eval import doctor
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.inception import MissingPackageError, load_package
from diffcache.eval.metrics.weights import WEIGHTS
from tests.weights.files import DIGEST, known, put

ROOT = Path(__file__).parents[2]


def broken_package(folder: Path, name: str, body: str) -> None:
    put(folder / name / "__init__.py", body.encode())


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on the path; what is imported from it is forgotten afterwards."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("torchvision", "torch_fidelity"):
        sys.modules.pop(name, None)


def test_a_broken_package_is_told_from_a_missing_one(packages: Path) -> None:
    with pytest.raises(
        MissingPackageError, match=r"no_such_lib is not installed: pip install 'dif"
    ):
        load_package("no_such_lib.part", "fid")
    broken_package(packages, "torchvision", "raise RuntimeError('operator nms does not exist')")
    with pytest.raises(
        MissingPackageError, match=r"cannot be imported \(RuntimeError: operator nms"
    ):
        load_package("torchvision", "fid")
    broken_package(packages, "torch_fidelity", "import no_such_lib")
    with pytest.raises(MissingPackageError, match="torch_fidelity needs no_such_lib"):
        load_package("torch_fidelity", "fid")


def rows() -> dict[str, doctor.Row]:
    return {row.key: row for row in doctor.rows()}


def test_the_doctor_says_what_each_metric_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: Path
) -> None:
    monkeypatch.setattr(doctor, "_shipped", lambda name: name)
    broken_package(packages, "torchvision", "raise RuntimeError('operator nms does not exist')")
    broken_package(packages, "torch_fidelity", "")
    found = rows()
    assert list(found) == list(METRICS)
    assert (found["psnr_db"].backend, found["psnr_db"].parts) == ("exact", ())
    assert (found["fid"].backend, found["fid"].computed) == ("lite", "fid_lite")
    parts = {part.name: part for part in found["fid"].parts}
    assert parts["torch_fidelity"].found
    assert parts["torchvision"].note.startswith("broken: ")
    assert "operator nms does not exist" in parts["torchvision"].note
    assert found["image_reward"].backend == found["vbench_scene"].backend == "none"
    assert (found["lpips"].backend, found["lpips"].computed) == ("lite", "lpips_lite")

    file = put(tmp_path / "own" / WEIGHTS["alexnet"].file)
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(file.parent))
    wrong = {part.name: part for part in rows()["lpips"].parts}[file.name]
    assert not wrong.found and DIGEST in wrong.note
    known(monkeypatch, "alexnet", DIGEST)
    assert rows()["lpips"].backend == "real"


def test_without_the_shipped_model_there_is_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise FileNotFoundError(name)

    monkeypatch.setattr(doctor, "_shipped", absent)
    found = rows()
    assert found["fid_lite"].backend == found["fid"].backend == "none"
    assert any(line.startswith("shapes-features") for line in doctor.missing(doctor.rows()))


def test_the_doctor_asks_the_other_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VBENCH_PYTHON", str(tmp_path / "none" / "python"))
    assert "no such interpreter" in doctor.probe("VBENCH_PYTHON", "interpreter").note
    monkeypatch.setenv("VBENCH_PYTHON", sys.executable)
    assert "has no package vbench" in doctor.probe("VBENCH_PYTHON", "interpreter").note
    put(tmp_path / "other" / "vbench" / "__init__.py", b"raise RuntimeError('never imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    part = doctor.probe("VBENCH_PYTHON", "interpreter")
    assert part.found and part.note == sys.executable


def test_the_doctor_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor.rows()
    monkeypatch.setattr(doctor, "rows", lambda: found)
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "alexnet-owt-7be5be79.pth" in text and WEIGHTS["alexnet"].url in text
    assert doctor.main(["--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in printed["metrics"]] == list(METRICS)
    assert printed["selftest"] is None


@pytest.mark.parametrize(
    ("clean", "ghost", "code"), [(0.1, 90.0, 0), (9.0, 90.0, 1), (0.1, 0.1, 1)]
)
def test_a_failed_self_test_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    clean: float,
    ghost: float,
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "rows", list)
    monkeypatch.setattr(doctor, "packages", list)
    monkeypatch.setattr(doctor, "_distances", lambda: (clean, ghost))
    assert doctor.main(["--selftest"]) == code
    assert ("FAILED" in capsys.readouterr().out) is bool(code)


def test_the_self_test_measures_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SELFTEST_PICTURES", 256)
    found = doctor.selftest()
    assert found["pictures"] == 256
    # A set this small is farther from the reference than one of 2,000, but not as far as ghosts.
    assert 0 < 2 * found["clean"] < found["ghost"] and found["ghost"] > doctor.GHOST_AT_LEAST


def test_the_doctor_runs_as_a_script() -> None:
    command = [sys.executable, "-m", "diffcache.eval.doctor", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--selftest" in done.stdout


def test_seconds_of_every_value_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--time", "64", "--json", "-"]) == 0
    taken = list(json.loads(capsys.readouterr().out)["seconds_a_picture"].values())
    assert {"write PNG", "ssim and ms_ssim", "lpips_lite", "features_lite"} <= set(taken[0])
    assert all(0 < value < 10 for value in taken[0].values())
    assert doctor.main(["--time", "32"]) == 0
    assert "seconds a picture of 32 x 32" in capsys.readouterr().out
