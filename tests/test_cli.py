"""The command line: what it prints, what it writes, and how it fails."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import diffcache
from diffcache import cli, command
from diffcache.eval import output
from diffcache.pipelines.demo import compare, generate
from diffcache.pipelines.demo.panels import figure
from diffcache.pipelines.small import flux
from diffcache.pipelines.zoo import coverage
from diffcache.pipelines.zoo.catalog import EXCLUDED, cases
from diffcache.step import Site

PROMPT = "a small red ring on the left, on a yellow background"


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Save a pipeline built like the shipped one, untrained."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "shapes-flux"
    autoencoder = flux.build_autoencoder()
    autoencoder.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    flux.build_pipeline(autoencoder).save_pretrained(path)
    (path / "diffcache.json").write_text(json.dumps({"call": flux.CALL}))
    return path


class TestPlain:
    def test_version(self):
        assert call("--version").output == f"diffcache {diffcache.__version__}\n"

    def test_help_names_every_command_and_the_exit_codes(self):
        text = call("--help").output
        assert all(name in text for name in ("demo", "run", "inspect", "methods", "cite"))
        assert "Exit codes" in text

    @pytest.mark.parametrize("name", ["demo", "run", "inspect", "methods", "cite"])
    def test_help_has_an_example(self, name):
        assert f"diffcache {name}" in call(name, "--help").output

    def test_methods(self):
        done = call("methods")
        assert done.exit_code == 0
        assert all(name in done.output for name in diffcache.methods())
        assert "every=5, order=1" in done.output

    def test_cite(self):
        assert call("cite", "taylorseer").output.strip() == diffcache.TaylorSeer.bibtex


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("cite", "taylorser"), "unknown method 'taylorser'; did you mean 'taylorseer'?"),
            (("run", "nowhere", "x"), "no pipeline at 'nowhere': name a directory"),
            (("demo", "--method", "teacach"), "unknown method 'teacach'"),
            (("demo", "--method", "taylorseer:every=0"), "every=0: must be a whole number of at least 1"),
            (("demo", "--method", "taylorseer:evry=3"), "TaylorSeer has no setting 'evry'"),
            (("demo", "--method", "taylorseer:every"), "'every' must be a setting and its value"),
            (("inspect",), "name one model, or pass --all"),
            (("inspect", "FluxTransformer"), "did you mean FluxTransformer2DModel?"),
            (("inspect", next(iter(EXCLUDED))), "is not cached: control network"),
        ],
    )
    def test_one_line_and_two(self, arguments, message):
        done = call(*arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert message in done.stderr
        assert "Traceback" not in done.output

    def test_debug_lets_the_exception_out(self):
        done = call("--debug", "cite", "taylorser")
        assert isinstance(done.exception, diffcache.UnknownMethodError)

    def test_debug_lasts_one_call(self):
        call("--debug", "methods")
        assert call("cite", "taylorser").exit_code == 2

    def test_failed_run_ends_with_one(self, monkeypatch):
        def fail(name):
            raise RuntimeError("out of\nmemory")

        monkeypatch.setattr(cli, "bibtex", fail)
        done = call("cite", "taylorseer")
        assert done.exit_code == 1
        assert done.stderr.startswith("error: RuntimeError: out of memory")

    def test_interrupt(self, monkeypatch):
        def interrupt(name):
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "bibtex", interrupt)
        done = call("cite", "taylorseer")
        assert (done.exit_code, done.stderr) == (130, "interrupted\n")

    def test_usage(self):
        assert call("demo", "--samples", 9).exit_code == 2
        assert call("nothing").exit_code == 2


class TestSettings:
    @pytest.mark.parametrize(
        ("pair", "value"),
        [("a=3", 3), ("a=0.5", 0.5), ("a=stack", "stack"), ("a='x'", "x"), ("a=[1, 2]", [1, 2]),
         ("a=None", None), ("a=b=c", "b=c"), ("a=", "")],
    )  # fmt: skip
    def test_values(self, pair, value):
        assert command.parse_settings([pair], "--call") == {"a": value}


class TestInspect:
    def test_class_name(self):
        done = call("inspect", "FluxTransformer2DModel")
        assert done.exit_code == 0
        assert "single_transformer_blocks" in done.output
        assert "encoder_hidden_states" in done.output
        assert "fused" in done.output

    def test_pipeline_directory(self, directory):
        done = call("inspect", directory)
        assert done.exit_code == 0
        assert "transformer: FluxTransformer2DModel" in done.output

    def test_model_directory(self, directory):
        assert "ff_context" in call("inspect", directory / "transformer").output

    def test_coverage_of_some_cases(self, monkeypatch, tmp_path):
        names = ("FluxTransformer2DModel", "UVit2DModel", "TransformerTemporalModel")
        chosen = {name: cases()[name] for name in names}
        monkeypatch.setattr(coverage, "cases", lambda: chosen)
        out = tmp_path / "coverage.md"
        arguments = ("inspect", "--all", "--out", out)
        assert call(*arguments, "--check").exit_code == 1
        assert call(*arguments).exit_code == 0
        text = out.read_text(encoding="utf-8")
        flux_row = next(line for line in text.splitlines() if line.startswith("| `FluxTr"))
        assert "| 64/96 | 64/96 |" in flux_row
        assert "`transformer_blocks` (4), `single_transformer_blocks` (4)" in flux_row
        assert "the call has no timestep" in text
        assert "0 → `encoder_hidden_states`, 1 → `hidden_states` | identity" in text
        assert all(name in text for name in EXCLUDED)
        assert call(*arguments, "--check").exit_code == 0
        out.write_text(text + "x", encoding="utf-8")
        assert call(*arguments, "--check").exit_code == 1

    def test_temporal_part_is_told_its_steps(self):
        case = cases()["TransformerTemporalModel"]
        outcome = coverage.run(case, case.build(0), Site.STACK)
        assert (outcome.computed, outcome.skipped) == (16, 32)


class TestRun:
    def test_picture_report_and_record(self, directory, tmp_path):
        out, record = tmp_path / "x" / "a.png", tmp_path / "a.json"
        done = call(
            "run", directory, PROMPT, "--steps", 6, "--compare", "--method", "interval:every=2",
            "--out", out, "--json", record,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "6: 3 computed, 3 skipped" in done.output
        assert Image.open(out).size == (64, 64)
        assert Image.open(out.with_name("a-uncached.png")).size == (64, 64)
        data = json.loads(record.read_text())
        assert data["report"]["skipped"] == 36
        assert data["uncached_seconds"] > 0

    def test_defaults_beside_the_model(self, directory):
        file = directory / "diffcache.json"
        before = file.read_text()
        assert generate.load(str(directory))[1] == flux.CALL
        try:
            file.write_text('{"call": {"height": 32}}')
            assert generate.load(str(directory))[1] == {"height": 32}
            file.unlink()
            assert generate.load(str(directory))[1] == {}
        finally:
            file.write_text(before)

    def test_film_becomes_a_gif(self, tmp_path):
        frames = torch.rand(1, 3, 8, 8, 3).numpy()
        made = generate.pictures(type("Output", (), {"frames": frames})())
        path = output.save(made, tmp_path / "film.png")
        assert path.suffix == ".gif" and Image.open(path).n_frames == 3

    def test_other_outputs_are_refused(self):
        with pytest.raises(ValueError, match="neither images nor frames but audios"):
            generate.pictures({"audios": [0]})


class TestDemo:
    def test_figure_and_record(self, directory, tmp_path):
        out = tmp_path / "demo.png"
        done = call("demo", "--model", directory, "--steps", 8, "--samples", 2, "--out", out)
        assert done.exit_code == 0, done.output
        assert "whole pipeline" in done.output and "decisions" not in done.output
        data = json.loads(out.with_suffix(".json").read_text())
        assert data["report"]["steps_computed"] == 3 and len(data["psnr_db"]) == 2
        assert len(data["cached"]["seconds"]) == compare.ROUNDS
        assert Image.open(out).size[0] > 3 * 256

    def test_cache_that_is_off_is_identical(self, directory):
        task = compare.Task(PROMPT, steps=3)
        with pytest.warns(diffcache.CacheWarning, match="skipped nothing"):
            result = compare.compare(task, diffcache.Interval(every=1), directory)
        assert result.psnr == [float("inf")]
        assert result.to_dict()["psnr_db"] == [None]
        assert ("PSNR to uncached (8 bit, peak 255)", "-", "identical") in result.rows()
        assert figure(result).mode == "RGB"

    def test_psnr(self):
        one, other = (Image.new("RGB", (4, 4), (value,) * 3) for value in (10, 15))
        assert compare.psnr(one, other) == pytest.approx(34.1514, abs=1e-3)
        assert compare.psnr(one, one) == float("inf")

    @pytest.mark.skipif(
        not (flux.DIRECTORY / "model_index.json").exists(), reason="the model is not trained yet"
    )
    def test_shipped_model(self, tmp_path):
        out = tmp_path / "demo.png"
        done = call("demo", "--steps", 12, "--out", out)
        assert done.exit_code == 0, done.output
        assert "picture 0 shows" in done.output
