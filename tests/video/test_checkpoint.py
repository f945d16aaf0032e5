"""Weights with the names of Wan2.1's own code, as Self-Forcing and its kin release them."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diffcache.pipelines.causal_checkpoint import CheckpointError, load_causal
from diffcache.pipelines.causal_video import CausalVideo
from tests.video.toys import HEAD, SIZE, text, wan

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
        ("model._fsdp_wrapped_module." + re.sub(
            r"^(blocks\.\d+\.)", r"\1_fsdp_wrapped_module._checkpoint_wrapped_module.", name), value)
        for name, value in weights.items()
    )  # fmt: skip


def test_published_weights_load_whole_and_roll_out(tmp_path: Path) -> None:
    model = wan(layers=2)
    weights = published(model)
    other = {name: torch.zeros_like(value) for name, value in weights.items()}
    save_file(weights, tmp_path / "plain.safetensors")
    torch.save({"generator": wrapped(weights)}, tmp_path / "generator.pt")
    averaged = {"generator": wrapped(other), "generator_ema": wrapped(weights), "step": 600}
    torch.save(averaged, tmp_path / "averaged.pt")
    for name in ("plain.safetensors", "generator.pt", "averaged.pt"):
        loaded = load_causal(tmp_path / name, head=HEAD)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key
    films = []
    for each in (model, loaded):
        with CausalVideo(each) as video:
            session = video.session(text(), size=SIZE)
            films.append(torch.cat([session.next() for _ in range(2)], 2))
    assert torch.equal(*films)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("blocks.1.cross_attn.k.bias"), r"1 missing \(blocks.1.attn2.to_k.bias\)$"),
        (lambda w: w.update({"img_emb.proj.0.bias": torch.ones(3)}), "1 unexpected"),
        (lambda w: w.update({"head.head.bias": torch.ones(3)}), r"1 of another shape \(proj_out"),
        (lambda w: w.pop("patch_embedding.weight"), "no 'patch_embedding.weight' among its"),
        (lambda w: w.update(critic={"a": 1}), "must hold weights by name"),
        (lambda w: w.update(run=test_published_weights_load_whole_and_roll_out), "nothing else"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    weights: dict[str, Any] = published(wan(layers=2))
    change(weights)
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=said):
        load_causal(tmp_path / "weights.pt", head=HEAD)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_causal(tmp_path / "none.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_causal(tmp_path / "cut.safetensors")
    torch.save(published(wan(layers=1)), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="head=7: must divide"):
        load_causal(tmp_path / "weights.pt", head=7)
