"""Files that stand for published weights, small random networks, and pictures for them."""

import dataclasses
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.eval.metrics import clip, weight_files

TOKENIZER = Path(__file__).parents[2] / "assets" / "models" / "sticker-flux" / "tokenizer"
LONGEST = 12  # tokens of a prompt
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)  # of CLIP's pictures
SPREAD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)


def accept(monkeypatch: pytest.MonkeyPatch, name: str, file: Path) -> None:
    """Make the registry take a file for the real one."""
    entry = dataclasses.replace(weight_files.WEIGHTS[name], sha256=weight_files.sha256(file))
    monkeypatch.setitem(weight_files.WEIGHTS, name, entry)


def pictures(count: int, height: int = 40, width: int = 48, seed: int = 0) -> Tensor:
    """Draw pictures of noise."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Let a name import as a module of some content."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def save_clip(folder: Path, **config: Any) -> tuple[Any, Any]:
    """Save a small random CLIP model with the tokenizer of the shipped pipeline; return both."""
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**sizes, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": LONGEST}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8, **config)
    model = CLIPModel(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _, processor, _ = clip.classes()
    square = {"height": 32, "width": 32}
    processor(size={"shortest_edge": 32}, crop_size=square).save_pretrained(folder)
    return model, tokenizer


def seen_by_clip(model: Any, tokenizer: Any, picture: Tensor, prompt: str) -> Any:
    """Return what a CLIP model makes of a picture and a prompt."""
    tokens = tokenizer([prompt], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=tokens, pixel_values=((picture / 255 - MEAN) / SPREAD)[None])
