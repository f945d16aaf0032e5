"""A task for small language models: recall the values of a key, hundreds of tokens later.

A context is `[BOS]` and a body of filler, a Markov chain of order one with four successors for each token, so that its
best perplexity is four. Facts `m k v1 v2` stand in some of the body's blocks of four tokens; `m` is `[MARK]` for one
half of them and `[SEP]` for the other. Queries `[Q] k v1 v2` follow the context, and ask for marked facts more often
than for others. So the share of a cache that matters is known, `v1` needs a look-up over distance, `v2` only a local
continuation, and the filler's perplexity stays good where recall is lost.

    batch = draw(8, Task(context=513, facts=64, queries=8), torch.Generator().manual_seed(0))
    logits = model(batch.ids).logits
    print(score(batch.answer_logits(logits), batch).float().mean())
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PAD, BOS, EOS, Q, UNK, SEP, MARK = range(7)
K0, NK = 16, 128
V0, NV = 144, 128
F0, NF = 272, 240
VOCABULARY = F0 + NF
BLOCK = 4  # tokens of a fact, of a query, and of what a fact replaces
SUCCESSORS = 4
MARKED = 0.5  # share of facts
BESIDES = 0.03  # weight of all tokens that are not answers
# torch's generator reads 32 bits, so that streams are those of small seeds, but of other sizes than in training.
HELD_OUT = 1 << 40


@dataclass(frozen=True)
class Task:
    """Sizes of the samples to draw.

    Attributes:
        context: Tokens of the context, `[BOS]` included, `1 + 4 n`.
        facts: Number of facts in the context, at most `n` and at most `NK`.
        queries: Number of queries after it, of distinct facts, so at most as many, unless `repeat`.
        odds: Factor by which a marked fact is likelier asked for than another, dimensionless; 1 is
            blind to marks, and a large number asks for marked facts as long as there are any.
        repeat: Draw queries with replacement from half of the facts. It lets look-ups emerge early
            in training, as the unused value is then no clue.
    """

    context: int = 257
    facts: int = 32
    queries: int = 8
    odds: float = 8.0
    repeat: bool = False

    def __post_init__(self) -> None:
        if self.context < 1 + BLOCK or (self.context - 1) % BLOCK:
            raise ValueError(f"context must be 1 + 4 n with n >= 1 (5, 9, ..., 257, ...), got {self.context}")
        most = min(self.blocks, NK)
        if not 1 <= self.facts <= most:
            raise ValueError(f"facts must be in 1..{most} (blocks of the context, and {NK} keys), got {self.facts}")
        if self.queries < 1 or (self.queries > self.facts and not self.repeat):
            raise ValueError(f"queries must be in 1..{self.facts} (facts; more with repeat=True), got {self.queries}")
        if not 0 < self.odds < math.inf:
            raise ValueError(f"odds must be positive and finite, got {self.odds}")

    @property
    def blocks(self) -> int:
        """Blocks of four tokens in the body."""
        return (self.context - 1) // BLOCK


@dataclass(frozen=True)
class RecallBatch:
    """Contexts and their queries, for B samples with F facts and N queries.

    Attributes:
        task: Task that was drawn.
        ids: Context and queries, int64 `[B, context + 4 N]`.
        weights: Weight of each token in a training loss, float32 `[B, context + 4 N]`: 1 for answers.
        answers: Places of v1 and v2 of the queries in `ids`, int64 `[N, 2]`.
        facts: Place of the first of a fact's four tokens, int64 `[B, F]`.
        marks: Mask of the marked facts, bool `[B, F]`.
        asked: The fact (0..F-1) that a query asks for, int64 `[B, N]`.
    """

    task: Task
    ids: Tensor
    weights: Tensor
    answers: Tensor
    facts: Tensor
    marks: Tensor
    asked: Tensor

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)

    def take(self, chosen: list[int]) -> RecallBatch:
        """Return some of the samples, by number."""
        same = ("task", "answers")  # shared by all samples
        own = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in same}
        return replace(self, **own)

    @property
    def context(self) -> Tensor:
        """Tokens that are read, and compressed, before any query is known, int64 `[B, context]`."""
        return self.ids[:, : self.task.context]

    @property
    def queries(self) -> Tensor:
        """Every query with its answer, `[Q] k v1 v2`, int64 `[B, N, 4]`."""
        return self.ids[:, self.task.context :].view(len(self), -1, BLOCK)

    @property
    def questions(self) -> Tensor:
        """Tokens that are fed to ask, `[Q] k`, int64 `[B, N, 2]`."""
        return self.queries[..., :2]

    @property
    def expected(self) -> Tensor:
        """The right answers `v1 v2`, int64 `[B, N, 2]`."""
        return self.queries[..., 2:]

    @property
    def asked_marks(self) -> Tensor:
        """True where the fact that a query asks for is marked, bool `[B, N]`."""
        return self.marks.gather(1, self.asked)

    def aware(self, query: int = 0) -> Tensor:
        """Return the context and question number `query`, for compression that knows it, int64 `[B, context + 2]`."""
        return torch.cat([self.context, self.questions[:, query]], 1)

    def fact_slots(self, chosen: Tensor | None = None) -> Tensor:
        """Return the places of facts in the context, which a perfect eviction keeps, bool `[B, context]`.

        `chosen` marks the facts to keep, bool `[B, F]`; None for all.
        """
        kept = torch.ones_like(self.marks) if chosen is None else chosen
        held = torch.zeros(self.context.shape, dtype=torch.bool)
        for offset in range(BLOCK):
            held.scatter_(1, self.facts + offset, kept)
        return held

    def answer_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that predict answers, `[B, N, 2, V]`, from those of all tokens, `[B, context + 4N, V]`."""
        return logits[:, self.answers - 1]


def score(given: Tensor, batch: RecallBatch) -> Tensor:
    """Return whether each token of the answers is right; an answer is right as a whole where both are.

    Args:
        given: Answers, int64 `[B, N, 2]`, or their logits, float `[B, N, 2, V]`.
        batch: Samples that the answers belong to.

    Returns:
        bool `[B, N, 2]`, of v1 and v2.
    """
    found = given.argmax(-1) if given.is_floating_point() else given
    if found.shape != batch.expected.shape:
        raise ValueError(
            f"given must hold answers {list(batch.expected.shape)} (samples, queries, v1 and v2) "
            f"or their logits with one more axis, got {list(given.shape)}"
        )
    return found.to(batch.expected.device) == batch.expected


def draw(count: int, task: Task, generator: torch.Generator) -> RecallBatch:
    """Draw samples on the CPU; the same generator state gives the same samples."""
    number = task.facts
    body = filler(count, task.blocks, generator)
    blocks = _some(count, task.blocks, number, generator)
    keys = K0 + _some(count, NK, number, generator)
    values = V0 + torch.randint(NV, (count, number, 2), generator=generator)
    marks = torch.rand(count, number, generator=generator) < MARKED
    facts = torch.cat([torch.where(marks, MARK, SEP)[..., None], keys[..., None], values], -1)
    body.scatter_(1, blocks[..., None].expand(-1, -1, BLOCK), facts)
    asked = _ask(marks, task, generator)
    queries = facts.gather(1, asked[..., None].expand(-1, -1, BLOCK))
    queries[..., 0] = Q
    start = torch.full((count, 1), BOS)
    ids = torch.cat([start, body.flatten(1), queries.flatten(1)], 1)
    answers = task.context + BLOCK * torch.arange(task.queries)[:, None] + torch.tensor([2, 3])
    weights = torch.full(ids.shape, BESIDES)
    weights[:, answers.flatten()] = 1.0
    return RecallBatch(task, ids, weights, answers, 1 + BLOCK * blocks, marks, asked)


def filler(count: int, blocks: int, generator: torch.Generator) -> Tensor:
    """Draw `count` chains of filler, each of a number of blocks of four tokens, int64 `[count, blocks, 4]`."""
    walks = _walks()
    ways = torch.randint(walks.shape[1], (blocks, count), generator=generator)
    state = torch.randint(NF, (count,), generator=generator)
    found = []
    for way in ways:
        found.append(walks[state, way])
        state = found[-1][:, -1]
    return F0 + torch.stack(found, 1)


def successors() -> Tensor:
    """Return the four tokens, less `F0`, that may follow each filler token, int64 `[NF, 4]`."""
    fixed = torch.Generator().manual_seed(1234)
    return _some(NF, NF, SUCCESSORS, fixed)


def filler_nats(logits: Tensor, batch: RecallBatch) -> Tensor:
    """Return the surprise of filler that follows filler; its exponential is at best 4.

    Logits are of all tokens of `ids`, float `[B, context + 4 N, V]`; returned are nats a token, float32 `[tokens]`.
    """
    filling = batch.context >= F0
    both = filling[:, :-1] & filling[:, 1:]
    known = logits[:, : batch.task.context - 1][both].float().log_softmax(-1)
    return -known.gather(1, batch.context[:, 1:][both][:, None])[:, 0]


def _walks() -> Tensor:
    # Where every four steps from every token lead, [NF, 4**4, 4].
    table = successors()
    choice = torch.cartesian_prod(*[torch.arange(SUCCESSORS)] * BLOCK)
    state = torch.arange(NF)[:, None].expand(-1, len(choice))
    steps = []
    for step in range(BLOCK):
        state = table[state, choice[:, step]]
        steps.append(state)
    return torch.stack(steps, -1)


def _some(count: int, of: int, number: int, generator: torch.Generator) -> Tensor:
    # `number` distinct numbers below `of`, in random order, [count, number].
    return torch.rand(count, of, generator=generator).argsort(1)[:, :number]


def _ask(marks: Tensor, task: Task, generator: torch.Generator) -> Tensor:
    # Exponential races draw without replacement in proportion to the odds.
    race = -torch.rand(marks.shape, generator=generator).log() / torch.where(marks, task.odds, 1.0)
    order = race.argsort(1)
    if not task.repeat:
        return order[:, : task.queries]
    half = max(task.facts // 2, 1)
    return order.gather(1, torch.randint(half, (len(marks), task.queries), generator=generator))
