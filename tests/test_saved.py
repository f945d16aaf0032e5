"""Folders that a pipeline's name leads to, and the device and dtype that `auto` stands for."""

import diffusers
import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from diffcache import cli
from diffcache.pipelines.demo import saved
from diffcache.pipelines.load import load
from diffcache.pipelines.shipped_models import MODELS

FLUX = saved.MODELS / "shapes-flux"


def call(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def test_auto_on_the_host():
    assert saved.dtype_of("auto", FLUX, torch.device("cpu")) == "float32"
    pipe, _ = load("shapes-flux")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pipe.device.type == expected


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_auto_on_an_accelerator_follows_the_weights(kept, dtype, tmp_path):
    (tmp_path / "transformer").mkdir()
    weights = {"a": torch.ones(2, dtype=saved.DTYPES[kept]), "b": torch.ones(1)}
    weights["c"] = weights["a"].clone()
    save_file(weights, tmp_path / "transformer" / "model.safetensors")
    assert saved.dtype_of("auto", tmp_path, torch.device("cuda")) == dtype
    assert saved.dtype_of("float32", tmp_path, torch.device("cuda")) == "float32"


def test_auto_without_safetensors(tmp_path):
    assert saved.dtype_of("auto", tmp_path, torch.device("cuda")) == "bfloat16"


def test_a_model_id_is_found_in_the_hub_cache(monkeypatch):
    asked = []

    def download(model, **_):
        asked.append(model)
        return str(FLUX)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert saved.locate("owner/name") == saved.locate("owner/name", configs_only=True)
    done = call("inspect", "owner/name")
    assert "transformer: FluxTransformer2DModel" in done.output
    assert asked == ["owner/name"] * 3


@pytest.mark.parametrize("name", ["shapes-flux", "shapes-unet"])
def test_every_command_knows_the_shipped_names(name):
    assert saved.locate(name) == MODELS / name
    assert call("inspect", name).exit_code == 0
