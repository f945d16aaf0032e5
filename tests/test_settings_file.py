"""Settings of a wrapped cache as YAML: what is written is wrapped again, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

import diffcache
from diffcache import AttachError, Combine, Gate, Held, Interval, Newton, Table, TeaCache
from diffcache.catalog import make_method
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.load import load
from diffcache.settings_file import read_settings
from diffcache.targets import method_of
from diffcache.video import Window
from tests.dllm.toys import bidirectional
from tests.kv.tiny import llama
from tests.methods import ON
from tests.shipped import CALL
from tests.video.toys import wan
from tests.zoo_runs import CASES, PIPES

MODEL = "FluxTransformer2DModel"
MADE = [
    Held(Interval(every=4, site="block"), "int8"),
    Combine(Gate(float("inf"), of="output"), Newton(2), "block", lead=2, tail=1),
    Combine(Table({"transformer_blocks.0": [0, 3], "transformer_blocks.1": [0]}, 5), Newton(1), "block"),
    *(make_method(name, **settings) for name, settings in ON.items()),
]


@pytest.fixture
def model() -> Any:
    return CASES[MODEL].build(0)


@pytest.mark.parametrize("method", MADE, ids=lambda method: repr(method)[:60])
def test_what_was_saved_is_wrapped_again(method: Any, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    try:
        diffcache.wrap(model, method)
    except AttachError:
        pytest.skip("serves another model")
    diffcache.save(model, path)
    diffcache.unwrap(model)
    for given in (path, str(path)):
        with diffcache.wrapped(model, given):
            assert method_of(model) == method
    assert make_method(str(path)) == method
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_readable(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    diffcache.save(diffcache.wrap(model, "first-block", hold="bf16", threshold=0.1), path)
    title, *lines = path.read_text().splitlines()
    assert title == f'# diffcache {diffcache.__version__}: diffcache.wrap(pipe, "cache.yaml")'
    assert lines == ["method: first-block", "settings: {threshold: 0.1, warmup: 1, by_branch: false}", "hold: bf16"]
    diffcache.update(diffcache.unwrap(model) and diffcache.wrap(model, path), threshold=0.2)
    diffcache.save(model, path)
    assert read_settings(path).settings["threshold"] == 0.2


def test_measured_tables_stand_beside_it(tmp_path: Path) -> None:
    pipe, _ = load("sticker-flux")
    measured = diffcache.calibrate(pipe, TeaCache(threshold=0.2), ["a fox"], steps=4, **CALL)
    method = TeaCache(threshold=0.2, tables=measured.tables.save(tmp_path / "measured.safetensors"))
    diffcache.save(diffcache.wrap(pipe, method), tmp_path / "deep" / "cache.yaml")
    diffcache.unwrap(pipe)
    moved = (tmp_path / "deep").rename(tmp_path / "moved")
    assert sorted(file.name for file in moved.iterdir()) == ["cache.safetensors", "cache.yaml"]
    with diffcache.wrapped(pipe, moved / "cache.yaml") as handle:
        assert handle.method == method and handle.method.tables.path == moved / "cache.safetensors"
    text = (moved / "cache.yaml").read_text()
    for elsewhere in ("../moved/cache.safetensors", str(moved / "cache.safetensors")):
        (moved / "cache.yaml").write_text(text.replace("cache.safetensors", elsewhere))
        with pytest.raises(ValueError, match="must be the name of a file beside this one"):
            diffcache.wrap(pipe, moved / "cache.yaml")


def test_components_are_those_that_were_wrapped(tmp_path: Path) -> None:
    pipe, path = PIPES["WanPipeline-two"].build(0), tmp_path / "cache.yml"
    diffcache.save(diffcache.wrap(pipe, "interval", components="transformer_2"), path)
    diffcache.unwrap(pipe)
    with diffcache.wrapped(pipe, path) as handle:
        assert [denoiser.name for denoiser in handle.denoisers] == ["transformer_2"]
    for verb in (diffcache.expected_bytes, lambda pipe, path: make_method(str(path))):
        with pytest.raises(ValueError, match=r"is for components=\['transformer_2'\]"):
            verb(pipe, str(path))
    with pytest.raises(ValueError, match=r"\['components'\] are given besides"):
        diffcache.wrap(pipe, path, components="transformer")
    diffcache.save(diffcache.wrap(pipe, "interval"), path)
    assert read_settings(path).components is None


def test_every_kind_of_cache_is_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.yaml")
    lm = diffcache.wrap(bidirectional(), "dkv-cache", every=4)
    diffcache.save(lm, path)
    assert method_of(diffcache.wrap(diffcache.unwrap(lm), path)).every == 4
    with CausalVideo(wan(layers=1)) as video:
        diffcache.save(diffcache.wrap(video, "window:window=5,sinks=2"), path)
        diffcache.wrap(diffcache.unwrap(video), path)
        assert video.policy == Window(window=5, sinks=2)
        diffcache.unwrap(video)
    model = llama()
    diffcache.save(diffcache.wrap(model, "snapkv", budget=16, window=4), path)
    recipe = method_of(model)
    diffcache.wrap(diffcache.unwrap(model), path)
    assert method_of(model) == recipe
    diffcache.unwrap(model)
    said = "given as an object.*wrap with its name and settings"
    with diffcache.wrapped(model, diffcache.kv.snapkv(budget=16)), pytest.raises(ValueError, match=said):
        diffcache.save(model, path)
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.save(model, path)


class Own(Interval):
    """A method that no other process has."""
