"""Small tasks for diffusion language models: every token of the answer depends on the one before.

A prompt is `[BOS] a_1 ... a_N [EQ]`, its answer the N states that an automaton goes through as it
reads these letters, `s_i = table[s_(i-1)][a_i]`. The letters of an `automaton` are a reset, a soft
reset that rounds the state down to a multiple of 4, and random permutations of the states: after
one wrong state all are wrong, until a reset. The letters of a `walk` are moves that stop at both
ends: its states change little, and a wrong one is put right at an end.

    world = WORLDS["chain-llada"]
    batch = draw(8, world, torch.Generator().manual_seed(HELD_OUT))
    print(is_exact(answers, batch).float().mean())

Four diffusion models and two guides answer. The diffusion models are of LLaDA's kind, a Llama without
a causal mask that predicts every `[MASK]` of its input at once. `chain-block` is of LLaDA2's, whose
attention is causal over blocks: a token sees its own block of 16, counted from the first token of the
prompt, and those before it. `chain-guide` and `chain-guide-probe` are causal Llamas.

    model, tokenizer = load(), load_tokenizer()
    ids = tokenizer("a c b ...", return_tensors="pt").input_ids  # [BOS] a c b ... [EQ]

What was easy to get wrong in their training: a block decoder asks for states of a kind that masks at
random do not show, an answer that is clean up to some point and masked from there on. So half of the
rows are such. The weight `1 / p` of the diffusion loss lets rows of few masks dominate, so it is tamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffcache.eval.workshop.small.job import Job
from diffcache.eval.workshop.small.shipping import save_language_model
from diffcache.files import write_json
from diffcache.pipelines.shipped_models import MODELS

STATES, LETTERS = 16, 8  # the most of any world; tokens 0..15 are states, 16..23 letters
BOS, EQ, EOS, MASK, PAD, UNK = range(STATES + LETTERS, STATES + LETTERS + 6)
VOCABULARY = 32
RESET = 3  # state after letter 0
ROUND = 4  # letter 1 rounds a state down to a multiple of it
REACH = 3  # of a walk's moves
HELD_OUT = 1 << 31  # seeds from here on are never trained on; torch reads 32 bits of a seed


@dataclass(frozen=True)
class World:
    """A task: an automaton and the length of its prompts.

    Args:
        kind: `automaton` or `walk`.
        states: Number of states, 4 to 16.
        letters: Number of letters, 3 to 8; 7 for a walk, whose moves are -3 to 3.
        length: Number of letters of a prompt, and of states of its answer.

    Raises:
        ValueError: If a number is out of its range.
    """

    kind: Literal["automaton", "walk"] = "automaton"
    states: int = 8
    letters: int = 6
    length: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("automaton", "walk"):
            raise ValueError(f"kind={self.kind!r}: must be one of 'automaton', 'walk'")
        if not ROUND <= self.states <= STATES:
            raise ValueError(f"states={self.states}: must be in {ROUND}..{STATES}")
        if self.kind == "walk" and self.letters != 2 * REACH + 1:
            raise ValueError(f"letters={self.letters}: must be {2 * REACH + 1}, the moves of a walk")
        if not 3 <= self.letters <= LETTERS:
            raise ValueError(f"letters={self.letters}: must be in 3..{LETTERS}")
        if self.length < 1:
            raise ValueError(f"length={self.length}: must be at least 1")

    @property
    def start(self) -> int:
        """State before the first letter."""
        return self.states // 2 if self.kind == "walk" else 0

    @cached_property
    def table(self) -> Tensor:
        """State after each state and letter, int64 `[states, letters]`."""
        state = torch.arange(self.states)
        if self.kind == "walk":
            moves = torch.arange(-REACH, REACH + 1)
            return (state[:, None] + moves).clamp(0, self.states - 1)
        fixed = torch.Generator().manual_seed(1234)
        columns = [torch.full_like(state, RESET), state // ROUND * ROUND]
        columns += [torch.randperm(self.states, generator=fixed) for _ in range(2, self.letters)]
        return torch.stack(columns, 1)

    def words(self) -> list[str]:
        """Return the word of every token, in order: `0`..., `a`... or `-3`..., `[BOS]`..."""
        if self.kind == "walk":
            letters = [f"{move:+d}" for move in range(-REACH, REACH + 1)]
        else:
            letters = [chr(ord("a") + letter) for letter in range(self.letters)]
        letters += [f"[SPARE{number}]" for number in range(len(letters), LETTERS)]
        marks = ["[BOS]", "[EQ]", "[EOS]", "[MASK]", "[PAD]", "[UNK]"]
        named = [str(state) for state in range(STATES)] + letters + marks
        return named + [f"[SPARE{number}]" for number in range(len(named), VOCABULARY)]


WORLDS = {
    "chain-llada": World(),
    "chain-llada-probe": World(states=16, letters=8, length=48),
    "chain-llada-walk": World("walk", states=16, letters=7, length=48),
    "chain-block": World(states=16, letters=8, length=47),  # a block of 16 ends where answers do
    "chain-guide": World(),
    "chain-guide-probe": World(states=16, letters=8, length=48),
}


@dataclass(frozen=True)
class ChainBatch:
    """Prompts and their answers, for B samples.

    Attributes:
        world: Task that they are of.
        prompts: Tokens `[BOS] a_1 ... a_N [EQ]`, int64 `[B, N + 2]`.
        answers: Tokens of the states, int64 `[B, N]`.
    """

    world: World
    prompts: Tensor
    answers: Tensor

    @property
    def ids(self) -> Tensor:
        """Prompts with their answers, int64 `[B, 2 N + 2]`."""
        return torch.cat([self.prompts, self.answers], 1)

    @property
    def texts(self) -> list[str]:
        """The letters of each prompt as text, which the tokenizer turns into the prompt."""
        words = self.world.words()
        return [" ".join(words[token] for token in row[1:-1]) for row in self.prompts.tolist()]


def draw(count: int, world: World, generator: torch.Generator) -> ChainBatch:
    """Draw samples; the same state of the generator gives the same samples.

    Args:
        count: Number of samples.
        world: Task.
        generator: Generator on the CPU.
    """
    letters = torch.randint(world.letters, (count, world.length), generator=generator)
    ends = [torch.full((count, 1), token) for token in (BOS, EQ)]
    prompts = torch.cat([ends[0], STATES + letters, ends[1]], 1)
    return ChainBatch(world, prompts, solve(world, letters))


def solve(world: World, letters: Tensor) -> Tensor:
    """Return the states that an automaton goes through.

    Args:
        world: Task.
        letters: Letters from 0, int64 `[B, N]`.

    Returns:
        int64 `[B, N]`.
    """
    state = torch.full((len(letters),), world.start)
    states = []
    for column in letters.unbind(1):
        state = world.table[state, column]
        states.append(state)
    return torch.stack(states, 1)


def is_exact(answers: Tensor, batch: ChainBatch) -> Tensor:
    """Return which answers are right from the first token to the last, bool `[B]`.

    Args:
        answers: Answers, int64 `[B, N]`.
        batch: Samples that they answer.
    """
    return (answers == batch.answers).all(1)


MARKS = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


BLOCKS = {"chain-llada": 32, "chain-llada-probe": 16, "chain-llada-walk": 16, "chain-block": 16}  # of a decoding
CAUSAL = ("chain-block",)  # those of them whose attention has these blocks, too
SIZES = {  # channels, layers, channels within an MLP
    "chain-llada": (96, 4, 256),  # 449 376 parameters
    "chain-llada-probe": (64, 3, 160),  # 145 856 parameters
    "chain-llada-walk": (64, 3, 160),
    "chain-block": (64, 3, 160),
    "chain-guide": (64, 3, 160),
    "chain-guide-probe": (16, 1, 32),  # 3 632 parameters, too few for the table of 16 states
}
GUIDES = {"chain-llada": "chain-guide", "chain-llada-probe": "chain-guide-probe"}


def configuration(name: str) -> LlamaConfig:
    """Return the architecture of a model.

    Args:
        name: Name of a model, as in `SIZES`.
    """
    (width, layers, inner), length = SIZES[name], WORLDS[name].length
    diffusion = {"is_causal": False, "mask_token_id": MASK} if name in BLOCKS else {}
    if name in CAUSAL:
        diffusion["block_size"] = BLOCKS[name]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
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


def build_model(name: str) -> LlamaForCausalLM:
    """Build a model of a name, as in `SIZES`, with random weights."""
    # Compiled, eager attention trains fastest on a CPU.
    return LlamaForCausalLM._from_config(configuration(name), attn_implementation="eager")


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


WINDOW = 32  # tokens of a block that is partly decided
TAMED = 4  # masks that are added to those of a row, in its weight


def masks(count: int, world: World, generator: torch.Generator) -> Tensor:
    """Draw which tokens of answers are masked: half of them anywhere, half as a block decoder does.

    Args:
        count: Number of answers.
        world: Task.
        generator: Generator on the CPU.

    Returns:
        bool `[count, N]`.
    """
    share = torch.rand(count, 1, generator=generator)
    masked = torch.rand(count, world.length, generator=generator) < share
    cut = torch.randint(world.length, (count, 1), generator=generator)
    at = torch.arange(world.length)
    later = (at >= cut) & (masked | (at >= cut + WINDOW))
    return torch.where(torch.arange(count)[:, None] % 2 == 0, masked, later)


def block_masks(count: int, size: int, prompt: int, world: World, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw which tokens of answers are masked for attention that is causal over blocks.

    A block of each answer is decided: all before it is known, and what comes after it is not seen.

    Args:
        count: Number of answers.
        size: Tokens of a block.
        prompt: Tokens of a prompt, from whose first one blocks are counted.
        world: Task.
        generator: Generator on the CPU.

    Returns:
        Masked tokens, and those of them that are asked for, bool `[count, N]` each.
    """
    of = torch.arange(prompt, prompt + world.length) // size
    chosen = torch.randint(int(of[0]), int(of[-1]) + 1, (count, 1), generator=generator)
    share = torch.rand(count, 1, generator=generator)
    masked = (of > chosen) | ((of == chosen) & (torch.rand(count, world.length, generator=generator) < share))
    return masked, masked & (of == chosen)


class Chain(Job):
    """Fill in masked answers; every step draws new ones.

    A guide is a model without blocks, which reads from left to right: all of its answer is masked.
    """

    @property
    def world(self) -> World:
        """The task of the model."""
        return WORLDS[self.settings.model]

    @property
    def block(self) -> int | None:
        """Tokens that the model decides at a time, None for a guide."""
        return BLOCKS.get(self.settings.model)

    def build(self) -> nn.ModuleDict:
        """Build the model."""
        return nn.ModuleDict({"model": build_model(self.settings.model)})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the weighted cross-entropy of a step's masked tokens."""
        batch = draw(len(drawn["chosen"]), self.world, generator)
        logits, masked = self._predict(self.compile(models["model"]), batch, generator)
        error = cross_entropy(logits.float().mT, batch.answers, reduction="none")
        return ((error * masked).sum(1) / (masked.sum(1) + TAMED)).mean()

    def _predict(self, model: nn.Module, batch: ChainBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return logits of answers [B, N, V], and which of their tokens are asked for [B, N]."""
        length, more = self.world.length, {}
        if self.settings.model in CAUSAL and self.block is not None:
            prompt = batch.prompts.shape[1]
            hidden, masked = block_masks(len(batch.answers), self.block, prompt, self.world, generator)
            given = torch.cat([batch.prompts, batch.answers.masked_fill(hidden, MASK)], 1)
            at = torch.arange(given.shape[1]) // self.block
            seen = torch.zeros(len(at), len(at)).masked_fill(at[:, None] < at, -torch.inf)
            more = {"attention_mask": seen[None, None].to(given.device)}
        elif self.block is not None:
            masked = masks(len(batch.answers), self.world, generator)
            shown = batch.answers.masked_fill(masked, MASK)
            given = torch.cat([batch.prompts, shown], 1)
        else:
            masked = torch.ones_like(batch.answers, dtype=torch.bool)
            given = batch.ids[:, :-1]
        return model(input_ids=given, use_cache=False, **more).logits[:, -length:], masked

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure how many masked tokens are right, and of those whose left neighbor is known."""
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        batch = draw(64, self.world, generator)
        logits, masked = self._predict(models["model"], batch, generator)
        known = torch.ones_like(masked)
        if self.block is not None:
            known[:, 1:] = ~masked[:, :-1]
        right = (logits.argmax(-1) == batch.answers).float()
        return {"masked": float(right[masked].mean()), "frontier": float(right[masked & known].mean())}

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save model and tokenizer, with what a call needs."""
        tokenizer = build_tokenizer(self.world)
        save_language_model(models["model"], tokenizer, directory)
        if self.block is not None:
            (directory / "generation_config.json").unlink()  # it does not generate word by word
            call: dict[str, int] = {"length": self.world.length}
            if self.settings.model not in CAUSAL:
                call["block"] = self.block
            write_json(directory / "diffcache.json", {"call": call})
