"""The registry of weight files: where they are looked for, and their hashes."""

import hashlib
import re
from pathlib import Path

import pytest

from diffcache.errors import DiffcacheError
from diffcache.eval.metrics import weights
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.weights import WEIGHTS, MissingWeightsError, WrongWeightsError, find
from tests.weights.files import DIGEST, known, put


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


def test_a_wrong_file_is_named_with_both_hashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    weights._sha256.cache_clear()
    assert weights.sha256(file) == weights.sha256(file) == DIGEST
    assert weights._sha256.cache_info().misses == 1
    put(file, b"longer weights")
    assert weights.sha256(file) == hashlib.sha256(b"longer weights").hexdigest()
    put(tmp_path / "folder" / "a.safetensors", b"1")
    before = weights.sha256(tmp_path / "folder")
    put(tmp_path / "folder" / "b.safetensors", b"2")
    assert weights.sha256(tmp_path / "folder") != before


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown weights 'alexnett'.*alexnet.*inception"):
        find("alexnett")
