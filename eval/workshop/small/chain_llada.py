"""Small language models that trace an automaton: four diffusion models and two guides.

    model, tokenizer = load(), load_tokenizer()
    ids = tokenizer("a c b ...", return_tensors="pt").input_ids  # [BOS] a c b ... [EQ]

The diffusion models are of LLaDA's kind, a Llama without a causal mask that predicts every `[MASK]`
of its input at once. `chain-block` is of LLaDA2's, whose attention is causal over blocks: a token
sees its own block of 16, counted from the first token of the prompt, and those before it.
`chain-guide` and `chain-guide-probe` are causal Llamas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffcache.eval.workshop.small.chain import BOS, EOS, EQ, MASK, PAD, VOCABULARY, WORLDS, World
from diffcache.pipelines.shipped_models import MODELS

MARKS = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


@dataclass(frozen=True)
class ChainSize:
    """Architecture of a model.

    Attributes:
        width: Channels.
        layers: Number of layers.
        inner: Channels within an MLP.
    """

    width: int
    layers: int
    inner: int


BLOCKS = {"chain-llada": 32, "chain-llada-probe": 16, "chain-llada-walk": 16, "chain-block": 16}  # of a decoding
CAUSAL = ("chain-block",)  # those of them whose attention has these blocks, too
LARGE = ChainSize(96, 4, 256)  # 449 376 parameters
SMALL = ChainSize(64, 3, 160)  # 145 856 parameters
TINY = ChainSize(16, 1, 32)  # 3 632 parameters, too few for the table of 16 states
SIZES = {
    "chain-llada": LARGE,
    "chain-llada-probe": SMALL,
    "chain-llada-walk": SMALL,
    "chain-block": SMALL,
    "chain-guide": SMALL,
    "chain-guide-probe": TINY,
}
GUIDES = {"chain-llada": "chain-guide", "chain-llada-probe": "chain-guide-probe"}


def configuration(name: str) -> LlamaConfig:
    """Return the architecture of a model.

    Args:
        name: Name of a model, as in `SIZES`.
    """
    size, length = SIZES[name], WORLDS[name].length
    diffusion = {"is_causal": False, "mask_token_id": MASK} if name in BLOCKS else {}
    if name in CAUSAL:
        diffusion["block_size"] = BLOCKS[name]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * length + 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **diffusion,
    )


def build_model(name: str, attention: str = "eager") -> LlamaForCausalLM:
    """Build a model with random weights.

    Args:
        name: Name of a model, as in `SIZES`.
        attention: transformers' name of the attention; compiled, eager trains fastest on a CPU.
    """
    return LlamaForCausalLM._from_config(configuration(name), attn_implementation=attention)


def build_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Build a tokenizer of words between spaces; `[BOS]` comes before them and `[EQ]` after."""
    known = {word: number for number, word in enumerate(world.words())}
    backend = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="[BOS] $A [EQ]", special_tokens=[("[BOS]", BOS), ("[EQ]", EQ)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=2 * world.length + 2,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        mask_token="[MASK]",
        additional_special_tokens=["[EQ]"],
        **MARKS,
    )


def load(name: str = "chain-llada", dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> LlamaForCausalLM:
    """Load a trained model, in evaluation mode.

    Args:
        name: Name of a model, as in `SIZES`, or its directory.
        dtype: Data type of the weights; the file holds bfloat16.
        attention: transformers' name of the attention.
    """
    model = LlamaForCausalLM.from_pretrained(str(MODELS / name), dtype=dtype, attn_implementation=attention)
    return model.eval()


def load_tokenizer(name: str = "chain-llada") -> PreTrainedTokenizerFast:
    """Load the tokenizer saved beside a model.

    Args:
        name: Name of a model, as in `SIZES`, or its directory.
    """
    return PreTrainedTokenizerFast.from_pretrained(str(MODELS / name))
