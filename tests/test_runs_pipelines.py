"""Runs of other pipelines than the shipped one: classes, no condition, films, second order."""

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

import diffcache
from diffcache.eval.cost.flops import denoisers
from diffcache.eval.methods import parse_method
from diffcache.eval.runs import draw, measure
from diffcache.eval.runs.draw import Drawer, samples_of
from diffcache.eval.runs.evaluate import Plan, RunError
from diffcache.eval.runs.folder import CaseFolder
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Task
from diffcache.eval.samples.clips import read_fps
from diffcache.eval.samples.folders import open_films
from diffcache.pipelines.demo.saved import pipeline_of
from diffcache.pipelines.load import load
from tests.zoo.pipe import TEXT_DIM, component, tiny_vae
from tests.zoo.pipes import pipes

METHOD = "taylorseer:every=2,warmup=1"
LENGTH = 16
FILM = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": LENGTH}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    words = {"<pad>": 0, "<unk>": 1, **{c: 2 + i for i, c in enumerate(string.ascii_lowercase)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", model_max_length=LENGTH
    )


def clip() -> CLIPTextModel:
    sizes = dict(hidden_size=TEXT_DIM, intermediate_size=32, max_position_embeddings=LENGTH)
    layers = dict(num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    return CLIPTextModel(CLIPTextConfig(**sizes, **layers, eos_token_id=0)).eval()


def umt5() -> UMT5EncoderModel:
    sizes = dict(d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32)
    return UMT5EncoderModel(UMT5Config(**sizes)).eval()


def film_decoder() -> nn.Module:
    scales = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, scale_factor_temporal=4, scale_factor_spatial=4)
    sizes = dict(base_dim=8, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True])
    return component("AutoencoderKLWan", 0, **sizes, **scales)


def saved(place: Path, name: str, **parts: Any) -> Task:
    """Save a pipeline of the zoo with the parts that it lacks, and return a task for it."""
    torch.manual_seed(0)
    pipe = pipes()[name].build(0)
    pipe.register_modules(**parts)
    pipe.save_pretrained(place / "model")
    return Task(model=str(place / "model"), samples=3, batch_size=2, steps=4)


def evaluate(task: Task, out: Path, *methods: str) -> dict[str, Any]:
    plan = Plan(task, {name: parse_method(name) for name in methods}, out, rounds=0)
    return measure.evaluate(plan, Progress())


def check(task: Task, out: Path, record: dict[str, Any], condition: dict[str, Any]) -> None:
    """Compare every row with direct calls: pictures, and multiplications in linear layers."""
    pipe = load(task.model)[0]
    pipe.set_progress_bar_config(disable=True)
    done = [0.0]
    for module in (m for d in denoisers(pipe).values() for m in d.modules()):
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, given, out: done.__setitem__(0, done[0] + out.numel() * given[0].shape[-1])
            )
    full = 0.0
    for row in record["rows"]:
        done[0] = 0.0
        noise = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        given = {**task.call, **condition, "num_inference_steps": row["steps"], "generator": noise}
        if row["kind"] == "method":
            with diffcache.wrapped(pipe, parse_method(row["name"])):
                made = samples_of(pipe(**given))
        else:
            made = samples_of(pipe(**given))
        assert all(map(torch.equal, made, CaseFolder(out / row["folder"]).read([0, 1])))
        full = full or done[0] / task.steps
        tolerance = 0.03 if row["kind"] == "method" else 1e-9  # other layers are counted there, too
        assert row["evaluations"] == pytest.approx(done[0] / full, rel=tolerance)
        assert row["flops_ratio"] == pytest.approx(task.steps / row["evaluations"])


@pytest.mark.usefixtures("no_report")
def test_classes(tmp_path: Path) -> None:
    task = saved(tmp_path, "DiTPipeline")
    record = evaluate(task, tmp_path / "run", METHOD)
    assert record["task"]["prompts"]["source"] == "class numbers"
    check(task, tmp_path / "run", record, {"class_labels": [0, 1]})


def test_classes_are_those_that_the_pipeline_names() -> None:
    assert Drawer(Task("sticker-dit")).prompts.texts == tuple(map(str, range(12)))


@pytest.mark.usefixtures("no_report")
def test_the_bar_counts_timed_calls(tmp_path: Path) -> None:
    task = saved(tmp_path, "DiTPipeline")
    plan = Plan(task, {METHOD: parse_method(METHOD)}, tmp_path / "run", rounds=2)
    first, again = Progress(), Progress()
    rows = len(measure.evaluate(plan, first)["rows"])
    # Three samples of every row, then two timed rounds after a warm-up, of a batch of two.
    assert first.done == first.total == first.drawn == rows * (3 + 3 * 2)
    measure.evaluate(plan, again)
    assert (again.done, again.drawn) == (again.total, 0)


@pytest.mark.usefixtures("no_report")
def test_no_condition(tmp_path: Path) -> None:
    task = saved(tmp_path, "DDIMPipeline")
    record = evaluate(task, tmp_path / "run", "interval:every=2")
    assert record["task"]["prompts"]["source"] == "unconditional"
    check(task, tmp_path / "run", record, {"batch_size": 2})


@pytest.mark.usefixtures("no_report")
def test_second_order(tmp_path: Path) -> None:
    parts = dict(tokenizer=tokenizer(), text_encoder=clip(), vae=tiny_vae(0, 4))
    task = saved(tmp_path, "StableDiffusionPipeline-heun", **parts)
    task = Task(**{**vars(task), "call": {"height": 16, "width": 16}})
    record = evaluate(task, tmp_path / "run", "interval:every=2")
    texts = list(Drawer(task).prompts.texts[:2])
    check(task, tmp_path / "run", record, {"prompt": texts})
    method, control = record["rows"][1:]
    assert len(method["timeline"]) == 7  # two calls a step, one for the last
    assert control["evaluations"] >= method["evaluations"]


@pytest.mark.usefixtures("no_report")
def test_films_of_two_denoisers(tmp_path: Path) -> None:
    parts = dict(tokenizer=tokenizer(), text_encoder=umt5(), vae=film_decoder())
    task = saved(tmp_path, "WanPipeline-two", **parts)
    task = Task(**{**vars(task), "samples": 2, "call": FILM})
    record = evaluate(task, tmp_path / "run", METHOD)
    texts = list(Drawer(task).prompts.texts[:2])
    check(task, tmp_path / "run", record, {"prompt": texts})
    row = record["rows"][1]
    assert record["task"]["kind"] == "films" and "temporal_error" in row["fidelity"]
    case = tmp_path / "run" / row["folder"]
    # Two films are two films to whatever reads their folder, and play as fast as Wan's do.
    assert len(open_films(case / "clips")) == len(list((case / "clips").iterdir())) == 2
    assert {read_fps(film) for film in (case / "clips").iterdir()} == {16}
    assert {read_fps(film) for film in (case / "previews").iterdir()} == {16}


@pytest.mark.parametrize(
    ("name", "call", "fps"),
    [
        ("WanPipeline", {}, 16),  # its documentation exports the film so
        ("CogVideoXPipeline", {}, 8),
        ("HunyuanVideoPipeline", {}, 15),
        ("LTXPipeline", {}, 25),  # the default of its argument, not the 24 of the example
        ("LTXPipeline", {"frame_rate": 30}, 30),
        ("MochiPipeline", {}, 30),
        ("FluxPipeline", {}, None),
    ],
)
def test_films_have_the_frame_rate_of_their_pipeline(name: str, call: dict, fps: float | None, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{name}"}}')
    parameters = pipeline_of(tmp_path)[1]
    assert draw.frame_rate(name, parameters, Task(""), call) == fps
    if fps is None:
        with pytest.raises(ValueError, match="fps=12: FluxPipeline draws no films"):
            draw.frame_rate(name, parameters, Task("", fps=12), call)
    else:
        assert draw.frame_rate(name, parameters, Task("", fps=12), call) == 12


class TestRefused:
    @pytest.mark.parametrize("name", ["WanImageToVideoPipeline", "FluxKontextPipeline"])
    def test_a_pipeline_that_needs_a_picture(self, name: str, tmp_path: Path) -> None:
        task = saved(tmp_path, name)
        with pytest.raises(ValueError, match=f"{name} needs image"):
            evaluate(task, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_one_that_says_so_only_when_it_is_called(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # As for a pipeline whose input is not known by its name.
        monkeypatch.setattr(draw, "needed_inputs", lambda *_: ())
        parts = dict(tokenizer=tokenizer(), text_encoder=clip(), vae=tiny_vae(0, 4))
        task = saved(tmp_path, "StableDiffusionControlNetPipeline", **parts)
        with pytest.raises(RunError, match=r"cannot draw from prompts.*image must be passed"):
            evaluate(task, tmp_path / "run")
        assert not (tmp_path / "run" / "cases").exists()
