"""Tiny models and files under the names that the pages say."""

import json
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from diffcache.eval.samples.clips import write_clip
from tests import shipped as flux
from tests.dllm.toys import bidirectional
from tests.kv.eval.small import save_with_words, texts
from tests.pages.blocks import ROOT
from tests.picture_files import noise, save
from tests.video.test_streaming_vae import tiny_wan

CALL = {"height": 16, "width": 16, "num_inference_steps": 6}


def make(folder: Path) -> Path:
    """Fill a folder with what the pages name, so that their lines run in it."""
    (folder / "assets").symlink_to(ROOT / "assets")
    small_flux(folder / "my-pipeline")
    adapter(folder)
    for name in ("sticker-flux", "black-forest-labs/FLUX.1-dev"):
        link(folder / name, folder / "my-pipeline")
    save_with_words(folder / "my-llm")
    language_model(folder / "my-llada")
    link(folder / "GSAI-ML/LLaDA-8B-Instruct", folder / "my-llada")
    texts(folder).rename(folder / "notes.txt")
    link(folder / "DIR", folder / "my-llm")
    link(folder / "FILE", folder / "notes.txt")
    pipeline, weights = tiny_wan(folder)
    link(folder / "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", pipeline)
    link(folder / "self_forcing_dmd.pt", weights)
    (folder / "FILMS").mkdir()
    for number in range(2):
        write_clip(folder / "FILMS" / f"{number}.mp4", torch.stack([noise(seed=number)] * 4), 8)
    for seed, name in enumerate(("REAL", "FAKE", "UNCACHED", "CACHED")):
        for number in range(6):
            save(folder / name / f"{number}.png", noise(64, 64, 6 * seed + number))
    return folder


def link(place: Path, target: Path) -> None:
    """Give a folder another name."""
    place.parent.mkdir(exist_ok=True, parents=True)
    place.symlink_to(target)


def small_flux(folder: Path) -> None:
    """Save an untrained `FluxPipeline` of four blocks that reads any text."""
    torch.manual_seed(0)
    pipe = flux.load()
    config = {**pipe.transformer.config, "num_layers": 2, "num_single_layers": 2}
    transformer = FluxTransformer2DModel(**config)
    for parameter in transformer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
    pipe.register_modules(transformer=transformer)
    pipe.save_pretrained(folder)
    (folder / "diffcache.json").write_text(json.dumps({"call": CALL}))


def adapter(folder: Path) -> None:
    """Save a LoRA of the small pipeline."""
    pipe = FluxPipeline.from_pretrained(folder / "my-pipeline")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    layers = get_peft_model_state_dict(pipe.transformer)
    FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers, weight_name="my-lora.safetensors")


def language_model(folder: Path) -> None:
    """Save a diffusion language model of three layers whose tokens are bytes."""
    save_with_words(folder)
    bidirectional(torch.float32, vocab_size=260).save_pretrained(folder)
    (folder / "diffcache.json").write_text(json.dumps({"call": {"length": 8, "block": 4}}))
