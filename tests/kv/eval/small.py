"""A tiny untrained model of the words of recall-llama, saved as the shipped one is."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from diffcache import cli
from diffcache.eval.kv.recall_cost import KVTask
from diffcache.pipelines.small.recall import VOCABULARY
from tests.kv.tiny import peaked

CONTEXT, FACTS = 33, 4


def save(folder: Path) -> Path:
    """Save a Llama of two layers with two key-value heads of 16."""
    torch.manual_seed(0)
    config = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, head_dim=16)
    config |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    peaked(LlamaForCausalLM(LlamaConfig(**config))).save_pretrained(folder)
    return folder


def task(folder: Path, **changes: object) -> KVTask:
    """Return a task of four short contexts."""
    given = {"context": CONTEXT, "facts": FACTS, "queries": 2, "samples": 4, "batch": 2, "dtype": "float32", **changes}
    return KVTask(model=str(folder), **given)  # type: ignore[arg-type]


def save_with_words(folder: Path, **changes: Any) -> Path:
    """Save a Llama of three layers and a tokenizer of bytes, which can write any text."""
    torch.manual_seed(1)
    config: dict[str, Any] = dict(vocab_size=260, hidden_size=32, intermediate_size=32, head_dim=8)
    config |= dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    config |= dict(bos_token_id=0, eos_token_id=1, max_position_embeddings=1024)
    peaked(LlamaForCausalLM(LlamaConfig(**config | changes))).save_pretrained(folder)
    known = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({sign: number for number, sign in enumerate(known)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def texts(folder: Path, count: int = 6, sentences: int = 20) -> Path:
    """Write texts of made-up sentences, one a line."""
    lots = random.Random(0).choices
    words = ["the", "a", "red", "blue", "ring", "cat", "road", "runs", "falls", "near", "under", "two", "nine", "old"]
    lines = [" ".join(" ".join(lots(words, k=7)).capitalize() + "." for _ in range(sentences)) for _ in range(count)]
    file = folder / "texts.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def call(*words: object) -> Any:
    """Run `diffcache kv`."""
    return CliRunner().invoke(cli.app, ["kv", *map(str, words)])
