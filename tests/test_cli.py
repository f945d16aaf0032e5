"""The command line: what it prints, what it writes, and how it fails."""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import diffusers
import pytest
import torch
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import diffcache
from diffcache import Tables, cli, command
from diffcache.errors import MissingError
from diffcache.eval import demo
from diffcache.eval.demo import PROMPTS
from diffcache.eval.metrics.weight_files import MissingWeightsError
from diffcache.eval.samples import output
from diffcache.eval.samples.clips import read_clip
from diffcache.features.bac import BAC
from diffcache.features.tuned import Tuned
from diffcache.pipelines.demo import generate, saved
from diffcache.pipelines.load import load
from tests import shipped as flux
from tests.shipped import GUIDED

PROMPT = "a fox left of an owl on grass"


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Copy the shipped pipeline."""
    return shutil.copytree(flux.DIRECTORY, tmp_path_factory.mktemp("model") / "sticker-flux")


class TestPlain:
    def test_version_citations_help_and_one_table_of_exit_codes(self):
        assert call("--version").output == f"diffcache {diffcache.__version__}\n"
        assert call("cite", "taylorseer").output.strip() == diffcache.TaylorSeer.bibtex
        page = Path(__file__).parents[1] / "docs" / "evaluation.md"
        assert command.EXIT_LINE in page.read_text(encoding="utf-8")
        text = call("--help").output
        assert all(name in text for name in ("demo", "run", "inspect", "methods", "cite"))
        assert command.EXIT_LINE in " ".join(text.split())

    @pytest.mark.parametrize("name", sorted(get_command(cli.app).commands))
    def test_help_has_an_example_and_the_exit_codes(self, name):
        text = " ".join(call(name, "--help").output.split())
        assert f"diffcache {name}" in text and command.EXIT_LINE in text

    def test_help_version_and_typos_import_no_model_library(self):
        code = """
import json, sys
from diffcache.cli import app
def words(command, path=()):
    yield [*path, "--help"]
    for name, inner in getattr(command, "commands", {}).items():
        if name not in ("doctor", "fid", "fidelity", "vbench", "report"):
            yield from words(inner, (*path, name))
import typer
from typer.main import get_command
from typer.testing import CliRunner
for line in [["--version"], ["runn"], ["methods"], *words(typer.main.get_command(app))]:
    done = CliRunner().invoke(app, line)
    assert done.exit_code == (2 if line == ["runn"] else 0), (line, done.output)
print(json.dumps([m for m in ("diffusers", "transformers", "matplotlib") if m in sys.modules]))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == []


class TestErrors:
    def test_debug_lets_the_exception_out_of_one_call(self):
        assert isinstance(call("--debug", "cite", "taylorser").exception, diffcache.UnknownMethodError)
        assert call("cite", "taylorser").exit_code == 2

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (RuntimeError("out of\nmemory"), 1, "error: RuntimeError: out of memory"),
            (ImportError("no av"), 3, "error: no av\n"),
            (MissingWeightsError("no weights"), 3, "error: no weights\n"),
            (MissingError("no cv2"), 3, "error: no cv2\n"),
            (KeyboardInterrupt(), 130, "interrupted\n"),
        ],
    )
    def test_what_failed_is_said_and_has_its_exit_code(self, error, code, said, monkeypatch):
        monkeypatch.setattr(cli, "bibtex", Mock(side_effect=error))
        done = call("cite", "taylorseer")
        assert done.exit_code == code and done.stderr.startswith(said)


def test_values_of_settings():
    texts = ["a=3", "b=0.5", "c=stack", "d='x'", "e=[1, 2]", "f=None", "g=b=c", "h="]
    values = [3, 0.5, "stack", "x", [1, 2], None, "b=c", ""]
    assert command.parse_settings(texts, "--call") == dict(zip("abcdefgh", values, strict=True))


class TestInspect:
    def test_class_name(self):
        done = call("inspect", "FluxTransformer2DModel")
        assert done.exit_code == 0
        assert "Of the default configuration of FluxTransformer2DModel" in done.output
        assert "single_transformer_blocks" in done.output
        assert "encoder_hidden_states" in done.output
        assert "fused" in done.output

    def test_pipeline_directory(self, directory):
        done = call("inspect", directory)
        assert done.exit_code == 0
        assert "transformer: FluxTransformer2DModel" in done.output
        assert "default configuration" not in done.output

    def test_model_directory(self, directory):
        assert "ff_context" in call("inspect", directory / "transformer").output


class TestRun:
    def test_picture_report_and_record(self, directory, tmp_path):
        out, record = tmp_path / "x" / "a.png", tmp_path / "a.json"
        order = ("run", directory, PROMPT, "--steps", 6, "--compare", "--method", "interval:every=2")
        done = call(*order, "--out", out, "--json", record)
        assert done.exit_code == 0, done.output
        assert "6: 3 computed, 3 skipped" in done.output
        assert Image.open(out).size == (64, 64)
        assert Image.open(out.with_name("a-uncached.png")).size == (64, 64)
        data = json.loads(record.read_text())
        assert data["report"]["skipped"] == 54
        assert data["uncached_seconds"] > 0

    def test_defaults_beside_the_model(self, directory):
        file = directory / "diffcache.json"
        before = file.read_text()
        assert load(str(directory))[1] == GUIDED
        try:
            file.write_text('{"call": {"height": 32}}')
            assert load(str(directory))[1] == {"height": 32}
            file.unlink()
            assert load(str(directory))[1] == {}
        finally:
            file.write_text(before)

    def test_a_size_that_does_not_divide_is_refused(self, directory, tmp_path):
        asked = ("run", directory, PROMPT, "--steps", 2, "--out", tmp_path / "a.png")
        for side, near in ((13, "8 or 16"), (3, "8")):
            done = call(*asked, "--height", side)
            said = f"--height {side}: must be a multiple of 8, such as {near}\n"
            assert done.exit_code == 2 and done.stderr.endswith(said), done.stderr

    def test_an_image_to_edit_is_read_and_changes_the_result(self, tmp_path):
        Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
        Image.new("L", (64, 64), 0).save(tmp_path / "black.png")
        made = []
        for name in ("red", "black"):
            out = tmp_path / "out.png"
            given = ("--image", tmp_path / f"{name}.png")
            edit = ("run", "sticker-kontext", "remove the fox", "--steps", 2, "--out", out)
            done = call(*edit, "--method", "interval:every=2", *given)
            assert done.exit_code == 0, done.output
            made.append(Image.open(out).tobytes())
        assert made[0] != made[1]

    def test_images_by_name(self, tmp_path):
        file = tmp_path / "a=b.png"
        Image.new("RGB", (8, 8), "red").save(file)
        taken = inspect.signature(diffusers.FluxControlNetImg2ImgPipeline.__call__).parameters
        texts = [str(file), f"control_image={file}"]
        found = generate.read_images(texts, "FluxControlNetImg2ImgPipeline", taken)
        assert {name: image.size for name, image in found.items()} == {"image": (8, 8), "control_image": (8, 8)}
        # control images come first where there is no other
        alone = inspect.signature(diffusers.FluxControlNetPipeline.__call__).parameters
        assert list(generate.read_images(texts[:1], "FluxControlNetPipeline", alone)) == ["control_image"]

    @pytest.mark.parametrize(
        ("name", "needed"),
        [
            ("FluxPipeline", ()),
            ("FluxKontextPipeline", ("image",)),
            ("Flux2Pipeline", ()),
            ("FluxImg2ImgPipeline", ("image",)),
            ("WanImageToVideoPipeline", ("image",)),
            ("StableDiffusionControlNetPipeline", ("image",)),
            ("WanVideoToVideoPipeline", ("video",)),
            ("FluxFillPipeline", ("image", "mask_image")),
            ("WanPipeline", ()),
        ],
    )
    def test_which_pipelines_work_on_an_image(self, name, needed):
        taken = inspect.signature(getattr(diffusers, name).__call__).parameters
        assert generate.needed_inputs(name, taken) == needed

    def test_class_numbers_and_names(self):
        config = SimpleNamespace(num_embeds_ada_norm=1000)
        pipe = SimpleNamespace(transformer=SimpleNamespace(config=config), labels={"ring": 0, "cross": 1, "star": 2})
        assert [generate.class_number(pipe, text) for text in ("2", "cross")] == [2, 1]

    def test_a_wrong_class_is_told_with_the_right_ones(self):
        done = call("run", "sticker-dit", 9999, "--steps", 2, "--method", "interval")
        assert done.exit_code == 2
        assert "prompt '9999': this pipeline takes a class number from 0 to 11: fox" in done.stderr

    @pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
    def test_videos(self, name, tmp_path):
        if name == "a.mp4":
            pytest.importorskip("av", reason="mp4 needs the extra eval")
        frames = [Image.new("RGB", (9, 8), (80 * i, 0, 0)) for i in range(3)]
        path = output.save(frames, output.target_of(tmp_path / "new" / name, is_video=True))
        film = read_clip(path)
        assert list(film.shape[:2]) == [3, 3] and film.shape[2] == 8
        assert (film[:, 0].float().mean((1, 2)) - torch.tensor([0.0, 80, 160])).abs().max() < 8

    def test_film_becomes_a_gif(self, tmp_path):
        frames = torch.rand(1, 3, 8, 8, 3).numpy()
        made = generate.pictures(type("Output", (), {"frames": frames})())
        path = output.save(made, tmp_path / "film.png")
        assert path.suffix == ".gif" and Image.open(path).n_frames == 3


class TestDemo:
    def test_figure_and_record(self, directory, tmp_path):
        out = tmp_path / "demo.png"
        words = ("--model", directory, "--method", "taylorseer:every=6", "--steps", 8)
        done = call("demo", *words, "--samples", 2, "--out", out)
        assert done.exit_code == 0, done.output
        assert f"picture 1: {PROMPTS[1]!r}, seed 1" in done.output
        assert "whole pipeline" in done.output and "decisions" not in done.output
        data = json.loads(out.with_suffix(".json").read_text())
        assert data["report"]["steps_computed"] == 3 and len(data["psnr_db"]) == 2
        assert len(data["cached"]["seconds"]) == demo.ROUNDS
        assert Image.open(out).size[0] > 3 * 256

    def test_closeness_is_the_psnr_of_8_bit_pictures(self):
        one, other = (Image.new("RGB", (4, 4), (value,) * 3) for value in (10, 15))
        assert generate.closeness([one, one], [other, one]) == pytest.approx([34.1514, 100], abs=1e-3)


def test_what_is_no_pipeline_is_told_by_what_it_is(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = call("run", "owner/none", PROMPT)
    assert done.exit_code == 2 and "HF_HUB_OFFLINE is set, and it is not in the" in done.stderr
    done = call("serve", saved.MODELS / "sticker-flux", "--port", 0)
    assert done.exit_code == 2 and "is a FluxPipeline, which makes no film chunk by chunk" in done.stderr


LARGE_RING = "a large red ring in the center, on a white background"


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_folder")
def test_calibrate_then_run() -> None:
    asked = "calibrate --method fitted-forecast:computed=2 --model sticker-flux --steps 4 --samples 2"
    done = call(*asked.split())
    assert done.exit_code == 0, done.stderr
    assert "wrote fitted-forecast.safetensors" in done.stdout
    method = "fitted-forecast:computed=2,tables=fitted-forecast.safetensors"
    run = ["run", "sticker-flux", LARGE_RING, "--method", method, "--compare"]
    again = call(*run, "--steps", "4")
    assert again.exit_code == 0, again.stderr
    assert "PSNR" in again.stdout
    other = call(*run, "--steps", "5")
    assert other.exit_code == 2
    assert "made for runs of 4 steps, this one has 5" in other.stderr


@pytest.mark.usefixtures("in_a_folder")
def test_tune_then_load(tmp_path: Path) -> None:
    done = call(
        "tune", "--model", "sticker-flux", "--speedup", "1.5", "--steps", "4",
        "--samples", "2", "--batch-size", "1", "--trials", "3",
        "--method", "interval:every=2", "--method", "taylorseer:every=2,warmup=1,site=model",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    best = Tuned(tmp_path / "tuned.safetensors")
    assert repr(best.method) in done.stdout
    held_out = f"{best.validation['psnr_db']:.1f} dB [{best.validation['low_db']:.1f}, "
    assert held_out in done.stdout and "on 1 samples not searched on" in done.stdout
    assert best.total == 4 and best.front


@pytest.mark.usefixtures("in_a_folder")
def test_models_that_take_more_than_prompts(tmp_path: Path) -> None:
    asked = "calibrate --method bac:count=3 --model reach-policy --steps 6 --samples 4 --out bac.safetensors"
    done = call(*asked.split())
    assert done.exit_code == 0, done.stderr
    assert Tables.load(tmp_path / "bac.safetensors").steps == 6
    assert BAC(count=3, tables=str(tmp_path / "bac.safetensors")).parts().when.total == 6
