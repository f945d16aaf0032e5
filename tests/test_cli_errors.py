"""Broken folders and seeds out of range on the command line."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli, command
from diffcache.pipelines.demo import saved

PROMPT = "a small red ring on the left, on a yellow background"


def call(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def broken(tmp_path: Path, text: str) -> Path:
    """Make a directory whose model_index.json holds `text`."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model_index.json names no pipeline"),
        ("[]", "model_index.json names no pipeline"),
        ('{"_class_name": "NoSuchPipeline"}', "has no NoSuchPipeline; it may need a newer one"),
        (
            '{"_class_name": "FluxPipeline", "transformer": ["diffusers", "NoSuchModel"]}',
            "has no NoSuchModel; it may need a newer one",
        ),
        (
            '{"_class_name": "FluxPipeline", "transformer": ["diffusers", "logging"]}',
            "has no logging; it may need a newer one",
        ),
        ('{"_class_name": "FluxPipeline", "vae": [7, 8]}', "[7, 8]: must be a library and a class"),
        ('{"_class_name": "FluxTransformer2DModel"}', "must be a pipeline of diffusers"),
    ],
)
def test_a_broken_index(text, message, tmp_path):
    done = call("run", broken(tmp_path, text), PROMPT)
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize(
    "text", ["[1,2", "[]", '{"call": 7}', '{"call": {"callback": "os.system"}}']
)
def test_broken_defaults_of_a_call(text, tmp_path):
    (tmp_path / "diffcache.json").write_text(text)
    with pytest.raises(ValueError, match=r"diffcache\.json: .*must be (an object|a number)"):
        saved.call_defaults(tmp_path)


def test_parts_that_claim_more_layers_than_can_be_built(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text('{"num_layers": 1000000000}')
    with pytest.raises(ValueError, match="num_layers=1000000000: must be at most 10,000"):
        saved.check_depth(tmp_path)


def test_what_is_no_pipeline_is_told_by_what_it_is(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = call("run", "owner/none", PROMPT)
    assert done.exit_code == 2 and "HF_HUB_OFFLINE is set, and it is not in the" in done.stderr
    done = call("serve", saved.MODELS / "shapes-flux", "--port", 0)
    assert done.exit_code == 2 and "its transformer is a FluxTransformer2DModel" in done.stderr


@pytest.mark.parametrize("name", ["demo", "run", "tune", "calibrate", "eval", "kv"])
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_the_range_of_seeds(name, seed):
    done = call(name, "--seed", seed)
    assert done.exit_code == 2
    limit = "0" if seed < 0 else str(command.MAX_SEED)
    assert "'--seed'" in done.stderr and limit in done.stderr.partition("--seed")[2]


def test_the_largest_seed_fits():
    torch.Generator("cpu").manual_seed(command.MAX_SEED + 1_000_000)
