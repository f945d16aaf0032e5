"""Small tasks for diffusion language models: every token of the answer depends on the one before.

A prompt is `[BOS] a_1 ... a_N [EQ]`, its answer the N states that an automaton goes through as it
reads these letters, `s_i = table[s_(i-1)][a_i]`. The letters of an `automaton` are a reset, a soft
reset that rounds the state down to a multiple of 4, and random permutations of the states: after
one wrong state all are wrong, until a reset. The letters of a `walk` are moves that stop at both
ends: its states change little, and a wrong one is put right at an end.

    world = WORLDS["chain-llada"]
    batch = draw(8, world, torch.Generator().manual_seed(HELD_OUT))
    print(is_exact(answers, batch).float().mean())
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

STATES, LETTERS = 16, 8  # the most of any world; tokens 0..15 are states, 16..23 letters
BOS, EQ, EOS, MASK, PAD, UNK = range(STATES + LETTERS, STATES + LETTERS + 6)
VOCABULARY = 32
RESET = 3  # state after letter 0
ROUND = 4  # letter 1 rounds a state down to a multiple of it
REACH = 3  # of a walk's moves
HELD_OUT = 1 << 40  # seeds from here on are never trained on


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
