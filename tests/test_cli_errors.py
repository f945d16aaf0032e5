"""Wrong requests on the command line: one line that names the option and the way out, exit code 2."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli, command
from diffcache.pipelines import load
from diffcache.pipelines.demo import saved
from diffcache.pipelines.demo.describe import EXCLUDED

PROMPT = "a small red ring on the left, on a yellow background"
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")


def call(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def broken(tmp_path: Path, text: str) -> Path:
    """Make a directory whose model_index.json holds `text`."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    return folder


@pytest.fixture
def no_loading(monkeypatch):
    """Make loading a pipeline an error: a wrong request must end before it."""

    def refuse(*_):
        raise AssertionError("the pipeline was loaded")

    monkeypatch.setattr(load, "load", refuse)


RUN = ("run", "shapes-flux", PROMPT)
TUNE = ("tune", "--model", "shapes-flux")
SHIPPED = "shapes-dit, shapes-flux, shapes-kontext, shapes-unet, shapes-wan"


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((*RUN, "--device", "cuda"), "torch sees no CUDA device", marks=CPU_ONLY),
        ((*RUN, "--device", "banana"), "--device 'banana': must be auto, cpu, cuda"),
        ((*RUN, "--device", "cpu:3"), "--device 'cpu:3': torch sees 1 cpu device here"),
        ((*RUN, "--method", "tuned"), "`diffcache tune --speedup 3 --model MODEL"),
        (("demo", "--method", "bac"), "then take --method bac:tables=bac.safetensors"),
        (("run", "nosuch", "x"), SHIPPED),
        (("run", "recall-llama", "x"), SHIPPED),
        (("run", "nobody/nothing", "x"), "the hub did not give one"),
        (("run", "reach-policy", "x"), "DiffusionPolicyPipeline is run from Python"),
        (("run", "shapes-kontext", "x"), "FluxKontextPipeline works on an image: pass --image"),
        ((*RUN, "--image", "x.png"), "--image x.png: FluxPipeline takes no image"),
        ((*RUN, "--out", "x.mp4"), "--out x.mp4: an image is written as .png, .jpg"),
        ((*RUN, "--out", "noext"), "--out noext: an image is written as"),
        ((*RUN, "--out", "/dev/null/x.png"), "--out /dev/null/x.png: cannot be written"),
        ((*RUN, "--json", "/dev/null/x"), "--json /dev/null/x: cannot be written"),
        (("run", "shapes-wan", "x", "--out", "x.png"), "a video is written as .gif, .mp4"),
        (("demo", "--out", "."), "--out .: the name must end in .png"),
        (("demo", "--out", "/dev/null/x.png"), "--out /dev/null/x.png: cannot be written"),
        (("demo", "--model", "nowhere"), "--model takes a directory of a pipeline built like"),
        (TUNE, "one of --speedup, --psnr and --seconds"),
        ((*TUNE, "--speedup", 4, "--psnr", 40), "one of --speedup, --psnr and --seconds"),
        ((*TUNE, "--speedup", 4, "--samples", 2), "--samples 2 --batch-size 8: two batches"),
        ((*TUNE, "--speedup", 4, "--out", "/dev/null/x"), "--out /dev/null/x: cannot be"),
        (("calibrate", "--method", "bac", "--model", "shapes-flux", "--out", "/dev/null/x"),
         "--out /dev/null/x: cannot be written"),
        (("eval", "--model", "shapes-flux", "--json", "/dev/null/x"), "--json /dev/null/x: cannot"),
        (("eval", "--model", "shapes-kontext", "--method", "interval"), "needs image: only"),
        (("eval", "--model", "shapes-flux", "--method", "interval", "--device", "banana"), "'banana'"),
        (("cite", "taylorser"), "unknown method 'taylorser'; did you mean 'taylorseer'?"),
        (("run", "nowhere", "x"), "no pipeline at 'nowhere': name a directory"),
        (("run", "recall-llama", "x"), "is for `diffcache kv --model recall-llama`"),
        (("demo", "--method", "teacach"), "unknown method 'teacach'"),
        (("demo", "--method", "taylorseer:every=0"), "every=0: must be a whole number of at least 1"),
        (("demo", "--method", "taylorseer:evry=3"), "TaylorSeer has no setting 'evry'"),
        (("demo", "--method", "taylorseer:every"), "'every' must be a setting and its value"),
        (("inspect", "FluxTransformer"), "did you mean FluxTransformer2DModel?"),
        (("inspect", next(iter(EXCLUDED))), "is not cached: control network"),
        (("inspect", "nosuch"), "nor a shipped model"),
        (("inspect", "HiDreamImageTransformer2DModel"), "has no default configuration that is"),
        (("kv", "--recipe", "h2o", "--out", "x.png"), "--out x.png: the name must end in .json"),
    ],
)  # fmt: skip
def test_one_line_and_two(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


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
