"""What `export` writes, read back by the packages that it is for, where these are installed."""

import ast
import importlib
import importlib.util
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import diffusers
import pytest
import yaml
from typer.testing import CliRunner

import diffcache
from diffcache import FirstBlock, TaylorSeer
from diffcache.cli import app
from diffcache.features.dbcache import DBCache
from diffcache.features.magcache import MagCache
from diffcache.features.parts.when import steps_of
from diffcache.features.peer_configs import method_of_config
from diffcache.features.teacache import TeaCache
from diffcache.offline.export import export

TABLES = Path(__file__).parent / "tables"
MAG, TEA = TABLES / "magcache.safetensors", TABLES / "teacache.safetensors"
TUNED = TABLES / "tuned-4x.safetensors"  # a list of steps, order 2


def source_of(package, file):
    """The file of a package that is installed, without importing it; skip where it is not."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps --target DIR {package}")
    return Path(found.submodule_search_locations[0]) / file


def class_of(package, file, name, **names):
    """A class of a package's own source, which imports more than its tests need."""
    tree = ast.parse(source_of(package, file).read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    flags = importlib.import_module("__future__").annotations.compiler_flag
    code = compile(ast.Module([node], []), file, "exec", flags=flags)
    space = {"dataclass": dataclass, "field": field, "fields": fields, "Any": Any, **names}
    exec(code, space)
    return space[name]


def settings_of(made):
    return json.loads(made.text()) if made.form == "json" else yaml.safe_load(made.text())


@pytest.mark.parametrize("method", [str(MAG), FirstBlock(0.12, by_branch=True)], ids=["ratios", "gate"])
def test_diffusers_reads_back_the_same_method(method):
    found = settings_of(export(method, "diffusers"))
    again = method_of_config(getattr(diffusers, found.pop("class"))(**found))
    if not isinstance(method, str):
        assert again == method
        return
    own = MagCache(0.3, 5, 0.04, tables=method)
    assert (again.threshold, again.longest) == (own.threshold, own.longest)
    total = own.measured().steps
    assert steps_of(again.parts().when, total) == steps_of(own.parts().when, total)


@pytest.mark.parametrize("to", ["cache-dit", "sglang"])
@pytest.mark.parametrize(
    "method",
    [DBCache(0.12, lead=2, tail=1, warmup=4, longest=3, by_branch=True), DBCache(0.1, skips=9)],
    ids=["branches", "skips"],
)
def test_cache_dit_reads_back_the_same_gate(to, method, tmp_path):
    reader = pytest.importorskip("cache_dit", reason="pip install cache-dit")
    file = tmp_path / "cache.yaml"
    file.write_text(export(method, to).text())
    assert method_of_config(reader.load_configs(str(file))["cache_config"]) == method


def test_cache_dit_reads_a_tuned_list_of_steps(tmp_path):
    reader = pytest.importorskip("cache_dit", reason="pip install cache-dit")
    file = tmp_path / "cache.yaml"
    made = export(str(TUNED), "cache-dit")
    file.write_text(made.text())
    found = reader.load_configs(str(file))
    config, forecast = found["cache_config"], found["calibrator_config"]
    tuned = diffcache.Tables.load(TUNED)
    chosen = steps_of(diffcache.Tuned(tables=tuned).parts().when, tuned.steps)
    mask = config.steps_computation_mask
    assert tuple(step for step, computed in enumerate(mask) if computed) == chosen
    assert len(mask) == tuned.steps and config.steps_computation_policy == "static"
    assert forecast.taylorseer_order == 2 and "first block" in made.notes[0]
    assert forecast.enable_encoder_calibrator


def test_what_cache_dit_and_vllm_omni_do_otherwise_is_told():
    early, late = (export(DBCache(0.1, order=1, warmup=warmup), "cache-dit") for warmup in (3, 4))
    assert early.data["cache_config"]["enable_encoder_taylorseer"]  # off there by default: texts would be reused
    assert "from step 3" in early.notes[0] and "from step 3" not in "".join(late.notes)
    assert "from step 3" in export(TaylorSeer(every=4), "cache-dit", steps=9).notes[1]
    for method in (MagCache(tables=str(MAG)), DBCache(0.1, by_branch=True)):
        assert "two steps" in export(method, "vllm-omni").notes[-1]


def omni(made):
    """The configuration that vLLM-Omni makes of it, and that of the backend."""
    reader = class_of("vllm_omni", "diffusion/data.py", "DiffusionCacheConfig")
    found = settings_of(made)
    config = reader.from_dict(found["cache_config"])
    assert not config._extra_params, "it knows all of them"
    return found["cache_backend"], config


def test_vllm_omni_reads_a_polynomial():
    backend, config = omni(export(str(TEA), "vllm-omni", last=False))
    table = "diffusion/cache/teacache/config.py"
    known = {"_MODEL_COEFFICIENTS": {}, "_MODEL_DEFAULT_REL_L1_THRESH": {}}
    cls = class_of("vllm_omni", table, "TeaCacheConfig", **known, _DEFAULT_REL_L1_THRESH=0.2)
    made = cls(config.rel_l1_thresh, config.coefficients, "FluxTransformer2DModel")
    tables = diffcache.Tables.load(TEA)
    assert (backend, made.rel_l1_thresh) == ("tea_cache", 0.35)
    assert made.coefficients == pytest.approx(tables["coefficients"].tolist())


def test_vllm_omni_reads_ratios_and_a_gate():
    import torch

    backend, config = omni(export(str(MAG), "vllm-omni"))
    cls = class_of("vllm_omni", "diffusion/cache/magcache/config.py", "MagCacheConfig", torch=torch)
    limits = config.mag_threshold, config.mag_max_skip_steps, config.mag_retention_ratio
    made = cls(*limits, config.num_inference_steps, config.mag_ratios)
    tables = diffcache.Tables.load(MAG)
    assert (backend, made.num_inference_steps) == ("mag_cache", tables.steps)
    assert torch.equal(made.mag_ratios, tables["ratios"].float())
    backend, config = omni(export(DBCache(0.12, lead=2, warmup=4), "vllm-omni"))
    assert (backend, config.Fn_compute_blocks, config.max_warmup_steps) == ("cache_dit", 2, 4)


def test_sglang_reads_a_polynomial():
    from collections.abc import Callable

    file = "multimodal_gen/configs/sample/teacache.py"
    cls = class_of("sglang", file, "TeaCacheParams", CacheParams=object, Callable=Callable)
    time = TeaCache(0.35, coefficients=(1.0, 0.0), input="time", warmup=0.25)
    made = cls(**settings_of(export(time, "sglang", steps=10)))
    assert made.teacache_thresh == 0.35 and made.get_coefficients() == [0.0, 0.0, 0.0, 1.0, 0.0]
    projected = TeaCache(coefficients=(1.0, 0.0), input="time-projection", last=False)
    later = cls(**settings_of(export(projected, "sglang")))
    assert (made.use_ret_steps, later.use_ret_steps) == (False, True)
    new = hasattr(made, "get_skip_boundaries")  # the main branch calls it so, 0.5.23 otherwise
    spans = [
        one.get_skip_boundaries(10, do_cfg=False) if new else one.get_skip_step_range(10) for one in (made, later)
    ]
    assert spans == [(3, 9), (1, 10)]


# TensorRT-LLM has no package that installs here: its fields, as its public source names them


def test_tensorrt_llm_gets_the_fields_of_its_source():
    time = TeaCache(0.2, coefficients=(1.0, 2.0, 0.0), input="time")
    found = settings_of(export(time, "tensorrt-llm"))["cache_config"]
    assert found == dict(
        cache_backend="teacache", teacache_thresh=0.2, use_ret_steps=False, coefficients=[1.0, 2.0, 0.0]
    )
    gate = settings_of(export(DBCache(0.12, order=2), "tensorrt-llm"))["cache_config"]
    assert gate["cache_backend"] == "cache_dit" and gate["taylorseer_order"] == 2
    known = "cache_backend Fn_compute_blocks Bn_compute_blocks max_warmup_steps max_cached_steps "
    known += "max_continuous_cached_steps residual_diff_threshold enable_taylorseer taylorseer_order"
    assert set(gate) <= set(known.split())


@pytest.mark.parametrize("method", [TaylorSeer(every=4), DBCache(0.12), MagCache(tables=str(MAG))])
def test_the_node_reads_back_the_same_method(method):
    inputs = settings_of(export(method, "comfyui"))["1"]["inputs"]
    word = f"{inputs['method']}:{inputs['settings']}".removesuffix(":")
    again = diffcache.eval.methods.parse_method(word)
    assert type(again) is type(method) and "tables" not in word
    if isinstance(method, MagCache):
        assert again.ratios == pytest.approx(method.measured()["ratios"].tolist())
    else:
        assert again == method


BRANCHES = MagCache(ratios=((1.0, 0.9), (1.0, 0.8)))


def test_the_command_line_writes_and_warns(tmp_path):
    out = tmp_path / "cache.json"
    words = ["export", str(TEA), "--to", "vllm-omni", "--set", "threshold=0.2", "--set", "last=False"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["cache_config"]["rel_l1_thresh"] == 0.2
    assert "warning: changes outside" in done.output + done.stderr
    printed = CliRunner().invoke(app, ["export", "dbcache:threshold=0.12", "--to", "cache-dit"])
    assert yaml.safe_load(printed.stdout)["cache_config"]["residual_diff_threshold"] == 0.12
