"""Weights with the names of Wan2.1's own code, as Self-Forcing and its kin release them."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AnyFlowFARTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from diffcache.pipelines.causal_checkpoint import CheckpointError, load_causal
from diffcache.pipelines.causal_video import CausalVideo
from tests.video.toys import HEAD, ONE, SIZE, text, wan

# diffusers' name -> the published one
PUBLISHED = {
    r"patch_embedding\.": "patch_embedding.",
    r"condition_embedder\.time_embedder\.linear_1\.": "time_embedding.0.",
    r"condition_embedder\.time_embedder\.linear_2\.": "time_embedding.2.",
    r"condition_embedder\.time_proj\.": "time_projection.1.",
    r"condition_embedder\.text_embedder\.linear_1\.": "text_embedding.0.",
    r"condition_embedder\.text_embedder\.linear_2\.": "text_embedding.2.",
    r"proj_out\.": "head.head.",
    r"scale_shift_table$": "head.modulation",
    r"blocks\.(\d+)\.attn1\.to_([qkv])\.": r"blocks.\1.self_attn.\2.",
    r"blocks\.(\d+)\.attn2\.to_([qkv])\.": r"blocks.\1.cross_attn.\2.",
    r"blocks\.(\d+)\.attn1\.to_out\.0\.": r"blocks.\1.self_attn.o.",
    r"blocks\.(\d+)\.attn2\.to_out\.0\.": r"blocks.\1.cross_attn.o.",
    r"blocks\.(\d+)\.attn1\.norm_([qk])\.": r"blocks.\1.self_attn.norm_\2.",
    r"blocks\.(\d+)\.attn2\.norm_([qk])\.": r"blocks.\1.cross_attn.norm_\2.",
    r"blocks\.(\d+)\.norm2\.": r"blocks.\1.norm3.",
    r"blocks\.(\d+)\.ffn\.net\.0\.proj\.": r"blocks.\1.ffn.0.",
    r"blocks\.(\d+)\.ffn\.net\.2\.": r"blocks.\1.ffn.2.",
    r"blocks\.(\d+)\.scale_shift_table$": r"blocks.\1.modulation",
}


def published(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model under the names of Wan2.1's own code."""
    found = {}
    for name, value in model.state_dict().items():
        ((pattern, theirs),) = [pair for pair in PUBLISHED.items() if re.match(pair[0], name)]
        found[re.sub(pattern, theirs, name)] = value.contiguous()
    return found


def wrapped(weights: dict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Return weights with the names that sharded training leaves."""
    return OrderedDict(
        (
            "model._fsdp_wrapped_module."
            + re.sub(r"^(blocks\.\d+\.)", r"\1_fsdp_wrapped_module._checkpoint_wrapped_module.", name),
            value,
        )
        for name, value in weights.items()
    )


def named(weights: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """Return weights as the wrapper of Wan in Self-Forcing's code and its kin names them."""
    return {prefix + name: value for name, value in weights.items()}


OTHER = {"blocks.0.self_attn.q.weight": torch.zeros(1)}  # is never taken
# How each code saves its generator, by what its public loader reads (`causal_checkpoint`).
LAYOUTS: dict[str, Any] = {
    "self-forcing": lambda w: {"generator": named(OTHER), "generator_ema": wrapped(w), "step": 600},
    "rolling-forcing": lambda w: {"generator_ema": named(w)},
    "causvid": lambda w: {"generator": named(w), "critic": named(OTHER)},
    "causvid image to video": lambda w: {"model": named(w)},
    "longlive": lambda w: {"generator": wrapped(w)},
    "krea": named,
    "compiled": lambda w: named(w, "_orig_mod.model."),
    "plain": dict,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_weights_load_whole_and_roll_out(layout: str, tmp_path: Path) -> None:
    model = wan(layers=2)
    weights = LAYOUTS[layout](published(model))
    is_plain = layout in ("krea", "plain")
    file = tmp_path / ("weights.safetensors" if is_plain else "weights.pt")
    (save_file if is_plain else torch.save)(weights, file)
    loaded = load_causal(file, head=HEAD)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    films = []
    for each in (model, loaded):
        with CausalVideo(each, sampler=ONE) as video:
            session = video.session(text(), size=SIZE)
            films.append(torch.cat([session.next() for _ in range(2)], 2))
    assert torch.equal(*films)


def lora_of(weights: dict[str, Tensor], rank: int = 2) -> dict[str, Tensor]:
    """Return updates of all linear layers of the blocks, named as peft saves LongLive's."""
    found = {}
    for name, value in weights.items():
        if re.match(r"blocks\.\d+\.(self_attn|cross_attn|ffn)\.\w+\.weight", name) and value.dim() == 2:
            stem = "base_model.model." + name.removesuffix(".weight")
            found[f"{stem}.lora_A.weight"] = torch.randn(rank, value.shape[1])
            found[f"{stem}.lora_B.weight"] = torch.randn(len(value), rank)
    return found


def test_low_rank_updates_are_added_as_peft_adds_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = wan(layers=1)
    weights, updates = published(model), lora_of(published(model))
    torch.save({"generator": named(weights)}, tmp_path / "base.pt")
    torch.save({"generator_lora": updates, "critic_lora": {}}, tmp_path / "lora.pt")
    loaded = load_causal(tmp_path / "base.pt", lora=tmp_path / "lora.pt", alpha=1, head=HEAD)
    name = "blocks.0.self_attn.q"
    layer = torch.nn.ModuleDict({"q": torch.nn.Linear(*weights[f"{name}.weight"].shape[::-1])})
    layer["q"].weight.data = weights[f"{name}.weight"].clone()
    config = peft.LoraConfig(r=2, lora_alpha=1, target_modules=["q"])
    theirs = peft.get_peft_model(layer, config)
    own = {key.replace(f"{name}.", "q."): v for key, v in updates.items() if f".{name}." in key}
    peft.set_peft_model_state_dict(theirs, own)
    merged = theirs.merge_and_unload()["q"].weight
    torch.testing.assert_close(loaded.blocks[0].attn1.to_q.weight, merged, atol=1e-6, rtol=1e-6)
    assert torch.equal(loaded.blocks[0].norm2.weight, model.blocks[0].norm2.weight)


def test_anyflow_is_refused_by_its_name(tmp_path: Path) -> None:
    sizes = dict(attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=24)
    model = AnyFlowFARTransformer3DModel(num_attention_heads=2, num_layers=1, **sizes)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="is of AnyFlow.* AnyFlowFARPipeline of diffusers"):
        load_causal(tmp_path / "a.safetensors")
