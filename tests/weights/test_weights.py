"""Weights: the registry of files, the table of metrics, and the doctor."""

import dataclasses
import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from diffcache.errors import DiffcacheError
from diffcache.eval import doctor
from diffcache.eval.metrics import definitions, weight_files
from diffcache.eval.metrics.definitions import METRICS
from diffcache.eval.metrics.inception import MissingPackageError, load_package
from diffcache.eval.metrics.weight_files import WEIGHTS, MissingWeightsError, WeightFile, WrongWeightsError, find


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without caches, and no variable that names any."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("DIFFCACHE_WEIGHTS", "HF_HOME", "HF_HUB_CACHE", "VBENCH_CACHE_DIR", "VBENCH_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TORCH_HOME", str(home / "torch"))
    return home


CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def known(monkeypatch: pytest.MonkeyPatch, name: str, sha256: str | None) -> WeightFile:
    """Give an entry another hash, so that a small file can stand for it."""
    changed = dataclasses.replace(WEIGHTS[name], sha256=sha256)
    monkeypatch.setitem(WEIGHTS, name, changed)
    return changed


def put(path: Path, content: bytes = CONTENT) -> Path:
    """Write a file, with the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_entry_is_whole(name: str) -> None:
    weight = WEIGHTS[name]
    assert weight.url.startswith("https://")
    assert weight.sha256 is None or re.fullmatch(r"[0-9a-f]{8,64}", weight.sha256)
    assert weight.used_by and set(weight.used_by) <= set(METRICS)
    # Names after the custom of torch hub carry the first digits of the hash.
    carried = re.search(r"-([0-9a-f]{8})\.pth$", weight.file)
    if carried:
        assert weight.sha256 is not None and weight.sha256.startswith(carried.group(1))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_missing_file_says_which_where_from_and_its_hash(name: str) -> None:
    weight = WEIGHTS[name]
    with pytest.raises(MissingWeightsError) as raised:
        find(name)
    message = str(raised.value)
    assert isinstance(raised.value, DiffcacheError)
    for wanted in (weight.file, weight.url, weight.sha256 or "no published hash", "looked for"):
        assert wanted in message
    assert "DIFFCACHE_WEIGHTS" in message and str(Path.home()) in message


def test_places_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weight = known(monkeypatch, "alexnet", DIGEST)
    hub = put(tmp_path / "home" / "torch" / "hub" / "checkpoints" / weight.file)
    assert find("alexnet") == hub
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path / "own"))
    assert find("alexnet") == hub
    own = put(tmp_path / "own" / weight.file)
    assert find("alexnet") == own
    given = put(tmp_path / "given" / "any-name.pth")
    assert find("alexnet", given) == given
    inside = put(tmp_path / "folder" / weight.file)
    assert find("alexnet", tmp_path / "folder") == inside
    with pytest.raises(MissingWeightsError, match="nowhere"):
        find("alexnet", tmp_path / "nowhere")  # a path that was given is never replaced


def test_other_caches_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    vbench = put(home / ".cache" / "vbench" / "amt_model" / "amt-s.pth")
    assert find("vbench-amt") == vbench
    monkeypatch.setenv("VBENCH_CACHE_DIR", str(tmp_path / "v"))
    moved = put(tmp_path / "v" / "amt_model" / "amt-s.pth")
    assert find("vbench-amt") == moved
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path / "own"))
    own = put(tmp_path / "own" / "amt_model" / "amt-s.pth")
    assert find("vbench-amt") == own

    snapshots = home / ".cache" / "huggingface" / "hub" / "models--openai--clip-vit-large-patch14"
    put(snapshots / "snapshots" / "abc" / "config.json")
    assert find("clip") == snapshots / "snapshots" / "abc"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with pytest.raises(MissingWeightsError):
        find("clip")


def test_a_wrong_file_is_named_with_both_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = put(tmp_path / "alexnet-owt-7be5be79.pth")
    with pytest.raises(WrongWeightsError) as raised:
        find("alexnet", file)
    expected = WEIGHTS["alexnet"].sha256
    assert expected and all(text in str(raised.value) for text in (str(file), expected, DIGEST))

    known(monkeypatch, "alexnet", DIGEST[:8])
    assert find("alexnet", file) == file
    known(monkeypatch, "alexnet", "0" * 8)
    with pytest.raises(WrongWeightsError, match="must be 00000000 and is " + DIGEST):
        find("alexnet", file)
    known(monkeypatch, "alexnet", None)
    assert find("alexnet", file) == file


def test_a_hash_is_computed_once_and_again_after_a_change(tmp_path: Path) -> None:
    file = put(tmp_path / "f")
    weight_files._sha256.cache_clear()
    assert weight_files.sha256(file) == weight_files.sha256(file) == DIGEST
    assert weight_files._sha256.cache_info().misses == 1
    put(file, b"longer weights")
    assert weight_files.sha256(file) == hashlib.sha256(b"longer weights").hexdigest()
    put(tmp_path / "folder" / "a.safetensors", b"1")
    before = weight_files.sha256(tmp_path / "folder")
    put(tmp_path / "folder" / "b.safetensors", b"2")
    assert weight_files.sha256(tmp_path / "folder") != before


ROOT = Path(__file__).parents[2]


def test_every_metric_is_described() -> None:
    for key, metric in METRICS.items():
        assert metric.key == key and metric.title and metric.definition and metric.source
        assert metric.call and metric.direction in ("up", "down", "none")
        assert not metric.stand_in or METRICS[metric.stand_in].is_lite
        assert set(metric.weights) <= set(WEIGHTS)
        for name in metric.weights:
            assert not metric.is_lite, f"{key}: a stand-in needs no published weights"
            assert WEIGHTS[name].used_by.count(key) <= 1
        if metric.is_lite:
            assert "-lite" in metric.title, f"{key}: the title must say what it is"
    for name, weight in WEIGHTS.items():
        for key in weight.used_by:
            assert name in METRICS[key].weights or name == "inception-clean"


def test_the_vbench_dimensions_are_those_of_the_suite() -> None:
    suite = pytest.importorskip("diffcache.eval.vbench.suite")
    listed = {key: metric for key, metric in METRICS.items() if key.startswith("vbench_")}
    assert set(listed) == {f"vbench_{name}" for name in suite.DIMENSIONS} and len(listed) == 16
    for name, dimension in suite.DIMENSIONS.items():
        assert {weight.name for weight in dimension.files} == set(listed[f"vbench_{name}"].weights)


def test_the_page_holds_the_table() -> None:
    page = ROOT / "docs" / "evaluation.md"
    assert definitions.main(["--check", str(page)]) == 0, "run --write docs/evaluation.md"
    text = page.read_text()
    assert all(f"Key `{key}`" in text for key in METRICS)


def test_the_table_is_written_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert definitions.main(["--check", str(page)]) == 2
    page.write_text("no markers")
    assert definitions.main(["--write", str(page)]) == 2
    assert "needs the lines" in capsys.readouterr().err
    page.write_text(f"above\n{definitions.BEGIN}\nold\n{definitions.END}\nbelow\n")
    assert definitions.main(["--check", str(page)]) == 1
    assert definitions.main(["--write", str(page)]) == 0
    assert definitions.main(["--check", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("above\n") and written.endswith("\nbelow\n") and "old" not in written
    assert written.count("\n- ") == len(METRICS)


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
    with pytest.raises(MissingPackageError, match=r"no_such_lib is not installed: pip install 'dif"):
        load_package("no_such_lib.part", "fid")
    broken_package(packages, "torchvision", "raise RuntimeError('operator nms does not exist')")
    with pytest.raises(MissingPackageError, match=r"cannot be imported \(RuntimeError: operator nms"):
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
    assert found["pick_score"].backend == found["vbench_scene"].backend == "none"
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
    assert any(line.startswith("sticker-features") for line in doctor.missing(doctor.rows()))


def test_the_doctor_asks_the_other_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_the_doctor_runs_as_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--help"])
    monkeypatch.delitem(sys.modules, "diffcache.eval.doctor")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("diffcache.eval.doctor", run_name="__main__")
    assert not ended.value.code and "--json" in capsys.readouterr().out
