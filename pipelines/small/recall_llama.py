"""A small language model of the Llama architecture that recalls facts from its context.

model, tokenizer = load(), load_tokenizer()
ids = tokenizer("[BOS] f3 [MARK] k7 v1 v2 f4 [Q] k7", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=2)[0, -2:]))
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffcache.pipelines.shipped_models import MODELS, present
from diffcache.pipelines.small.recall import BOS, EOS, K0, NF, NK, NV, PAD, VOCABULARY

DIRECTORY = MODELS / "recall-llama"
# Contexts that were trained on.
LENGTHS = (33, 65, 129, 193, 257, 321, 385, 513, 769, 1025, 2049)
LONGEST = LENGTHS[-1]
ANSWER = {"max_new_tokens": 2, "do_sample": False}  # arguments of `generate` for one question
MARKS = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


def configuration() -> LlamaConfig:
    """Return the architecture: 4 layers, 4 heads of 32 in 2 groups, 853 120 parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def build_model(attention: str = "eager") -> LlamaForCausalLM:
    """Build the model with random weights.

    `attention` is transformers' name of the attention; eager trains fastest on a CPU.
    """
    return LlamaForCausalLM._from_config(configuration(), attn_implementation=attention)


def words() -> list[str]:
    """Return the word of every token, in order: `[BOS]`, `k0`..., `v0`..., `f0`..."""
    named = ["[PAD]", "[BOS]", "[EOS]", "[Q]", "[UNK]", "[SEP]", "[MARK]"]
    named += [f"[SPARE{number}]" for number in range(len(named), K0)]
    named += [f"k{number}" for number in range(NK)]
    named += [f"v{number}" for number in range(NV)]
    return named + [f"f{number}" for number in range(NF)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of words between spaces; it adds nothing, `[BOS]` is written out."""
    known = {word: number for number, word in enumerate(words())}
    backend = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=configuration().max_position_embeddings,
        model_input_names=["input_ids", "attention_mask"],
        **MARKS,
    )


def load(
    dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY, attention: str = "sdpa"
) -> LlamaForCausalLM:
    """Load the trained model in a dtype, in evaluation mode; the file holds bfloat16.

    `attention` is transformers' name of the attention.
    """
    model = LlamaForCausalLM.from_pretrained(present(directory), dtype=dtype, attn_implementation=attention)
    return model.eval()


def load_tokenizer(directory: str | Path = DIRECTORY) -> PreTrainedTokenizerFast:
    """Load the tokenizer saved beside the model."""
    return PreTrainedTokenizerFast.from_pretrained(present(directory))
