"""Pipelines as their users run them: saved, adapted, compiled, live; and names that lead to them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from diffcache import cli
from diffcache.eval.methods import parse_method
from diffcache.eval.runs import measure
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.evaluate import Plan
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Task, weights_sha256
from diffcache.pipelines.demo import saved
from diffcache.pipelines.demo.saved import locate
from diffcache.pipelines.load import Loading, identity_of, load

pytestmark = pytest.mark.usefixtures("no_report")
TASK = Task(model="sticker-flux", samples=2, batch_size=2, steps=2)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an adapter that moves every query."""
    peft = pytest.importorskip("peft")
    pipe, _ = load("sticker-flux")
    config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    torch.manual_seed(0)
    pipe.transformer.add_adapter(config)
    folder = tmp_path_factory.mktemp("adapter")
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(folder, transformer_lora_layers=layers)
    return folder / "pytorch_lora_weights.safetensors"


def weight(pipe: Any) -> torch.Tensor:
    """Return what the first query layer makes of ones."""
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    with torch.no_grad():
        return layer(torch.ones(1, layer.in_features))


def test_adapters_are_scaled_and_part_of_the_identity(adapter: Path, tmp_path: Path) -> None:
    plain, _ = load("sticker-flux")
    whole, half, folder = (
        load("sticker-flux", loading=Loading(loras=(text,)))[0]
        for text in (str(adapter), f"{adapter}:0.5", str(adapter.parent))
    )
    moved = weight(whole) - weight(plain)
    assert moved.abs().max() > 1e-3 and torch.equal(weight(folder), weight(whole))
    torch.testing.assert_close(weight(half) - weight(plain), moved / 2, rtol=1e-4, atol=1e-5)
    assert weights_sha256(whole) == weights_sha256(folder) != weights_sha256(half)
    half.disable_lora()
    off = weights_sha256(half)
    half.enable_lora()
    on = weights_sha256(half)
    half.vae.enable_tiling()
    assert len({on, off, weights_sha256(half)}) == 3
    about = Drawer(replace(TASK, loading=Loading(loras=(str(adapter),)))).about
    assert about["loading"] == identity_of(Loading(loras=(str(adapter),)))
    assert "loading" not in Drawer(TASK).about
    other = tmp_path / "other.safetensors"
    save_file({"unet.to_q.lora_A.weight": torch.ones(2, 8), "unet.to_q.lora_B.weight": torch.ones(8, 2)}, other)
    with pytest.raises(ValueError, match=r"other\.safetensors: has no weights for a FluxPipeline"):
        load("sticker-flux", loading=Loading(loras=(str(adapter), str(other))))
    other.write_bytes(adapter.read_bytes() + b" ")
    sums = [identity_of(Loading(loras=(str(file),)))["adapters"] for file in (adapter, other)]
    assert [*sums[0].values()] != [*sums[1].values()]


def test_a_variant_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "flux"
    shutil.copytree(locate("sticker-flux"), folder)
    for file in folder.rglob("*.safetensors"):
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))
    pipe, defaults = load(str(folder), loading=Loading(variant="fp16"))
    plain, known = load("sticker-flux")
    assert defaults == known and torch.equal(weight(pipe), weight(plain))
    with pytest.raises(ValueError, match="cannot be loaded with {'variant': 'bf16'}"):
        load(str(folder), loading=Loading(variant="bf16"))


def test_compiled_blocks_are_those_that_repeat() -> None:
    pipe, _ = load("sticker-flux", loading=Loading(compile=True))
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    assert all(block._compiled_call_impl is not None for block in blocks)


def test_a_live_pipeline_draws_what_the_saved_one_does(tmp_path: Path) -> None:
    def evaluate(out: Path, task: Task, pipe: Any = None) -> dict[str, Any]:
        methods = {"interval": parse_method("interval:every=2")}
        plan = Plan(task, methods, out, rounds=0, pipe=pipe)
        record = measure.evaluate(plan, Progress())
        assert record is not None
        return record

    pipe, call = load("sticker-flux")
    live = replace(TASK, model="sticker-mine", call=call)
    one = evaluate(tmp_path / "saved", TASK)
    two = evaluate(tmp_path / "live", live, pipe)
    files = [sorted((tmp_path / n).rglob("samples/*.png")) for n in ("saved", "live")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert two["task"]["model"] == "sticker-mine" and two["task"]["kind"] == "pictures"
    assert [row["fidelity"] for row in one["rows"]] == [row["fidelity"] for row in two["rows"]]
    known = two["task"]["model_sha256"]
    assert Drawer(live, live=pipe).about["model"] == known
    with torch.no_grad():
        pipe.transformer.proj_out.bias[0] += 1e-3
    assert Drawer(live, live=pipe).about["model"] != known
    with pytest.raises(ValueError, match="dtype='float32': a loaded pipeline has its own"):
        Drawer(replace(live, dtype="float32"), live=pipe)


FLUX = saved.MODELS / "sticker-flux"


def call(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def test_auto_on_the_host():
    assert saved.dtype_of("auto", FLUX, torch.device("cpu")) == "float32"
    pipe, _ = load("sticker-flux")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pipe.device.type == expected


@pytest.mark.parametrize(
    ("kept", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_auto_on_an_accelerator_follows_the_weights(kept, dtype, tmp_path):
    (tmp_path / "transformer").mkdir()
    weights = {"a": torch.ones(2, dtype=saved.DTYPES[kept]), "b": torch.ones(1)}
    weights["c"] = weights["a"].clone()
    save_file(weights, tmp_path / "transformer" / "model.safetensors")
    assert saved.dtype_of("auto", tmp_path, torch.device("cuda")) == dtype
    assert saved.dtype_of("float32", tmp_path, torch.device("cuda")) == "float32"


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


def test_auto_without_safetensors(tmp_path):
    assert saved.dtype_of("auto", tmp_path, torch.device("cuda")) == "bfloat16"
