"""Cache-Craft: each chunk remembers what it owed to its context, which says how much to repair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil, exp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, probabilities
from diffcache.kv.hf.model import last_logits
from diffcache.kv.hf.refresh import recompute
from diffcache.kv.reuse.piece import Piece, cut, joined, lay_out
from diffcache.kv.rotary import Rotation
from diffcache.kv.settings import NotNegative, check_setting
from diffcache.kv.slots import Slots

if TYPE_CHECKING:
    from diffcache.kv.hf.writer import Host

_BLOCK = 256  # queries whose probabilities are looked at together


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk, and what it owed to the chunks before it when it was computed.

    Attributes:
        name: Name that two chunks share if they are the same, such as a hash of the text.
        piece: Its tokens, keys and values.
        before: Names of the chunks it was computed after, in order.
        sizes: Tokens of each of these.
        inter: float64 [C], attention its tokens paid to each of them, summed.
        intra: Attention its tokens paid to itself, summed.
        owed: float64 [n], attention each of its tokens paid to the chunks before.
    """

    name: Hashable
    piece: Piece
    before: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    inter: Tensor
    intra: float
    owed: Tensor

    @property
    def impact(self) -> float:
        """Debt to its context rather than to itself, 0.5 to 1, dimensionless."""
        count = len(self.piece.ids)
        outside = sum(float(x) / (count * n) for x, n in zip(self.inter, self.sizes, strict=True))
        inside = self.intra / count**2
        return 1 / (1 + exp(-outside / inside)) if inside > 0 else 1.0

    def overlap(self, before: Sequence[Hashable]) -> float:
        """Return how much of the context that mattered is there again, in order, 0 to 1.

        The share of attention that went to chunks that are there again, times one minus Kendall's
        distance between their orders. A chunk that had no context has all of it if it has none
        now, and nothing otherwise, which the paper leaves open.

        Args:
            before: Names of the chunks before it now.
        """
        total = float(self.inter.sum())
        if not self.before or total == 0:
            return float(not before)
        again = [index for index, name in enumerate(self.before) if name in before]
        share = sum(float(self.inter[index]) for index in again) / total
        now = [list(before).index(self.before[index]) for index in again]
        pairs = [(a, b) for i, a in enumerate(now) for b in now[i + 1 :]]
        wrong = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
        return share * (1 - wrong)


def chunks_of(model: Any, cache: Host, texts: Sequence[Tensor], names: Sequence[Hashable]) -> list[Chunk]:
    """Compute chunks one after the other and note the attention each pays to those before it.

    The tokens are run a second time for that.

    Args:
        model: A model of transformers.
        cache: An empty cache of `cache_for(model, ..., mode="native")`.
        texts: Tokens of each chunk, int64 [n].
        names: Name of each text.

    Raises:
        ValueError: If the cache is not empty, or there are not as many names as texts.
    """
    if cache.store.seen or len(texts) != len(names) or not texts:
        raise ValueError(
            f"texts={len(texts)}, names={len(names)}, cache of {cache.store.seen} tokens: give one "
            "name a text, at least one, and an empty cache"
        )
    ids = torch.cat(list(texts))[None]
    of = torch.repeat_interleave(torch.tensor([len(text) for text in texts])).to(ids.device)
    paid = torch.zeros(ids.shape[1], len(texts), dtype=torch.float64, device=ids.device)

    def watch(number: int, query: Query, slots: Slots) -> None:
        for block, _, probs in probabilities(query, slots, _BLOCK):
            mean = probs.mean((0, 1, 2)).to(paid.dtype) / len(cache.store.layers)
            by_chunk = mean.new_zeros(len(mean), len(texts)).index_add_(1, of[: mean.shape[1]], mean)
            paid.index_put_((block.positions()[0],), by_chunk, True)

    with torch.no_grad():
        model(input_ids=ids, **last_logits(model), **with_cache(model, cache))
    every = torch.arange(ids.shape[1], device=ids.device)
    recompute(model, cache, ids, every, watch=watch, logits=False)
    found, start = [], 0
    for number, text in enumerate(texts):
        mine = paid[start : start + len(text)]
        inter, intra = mine[:, :number].sum(0), float(mine[:, number].sum())
        piece = cut(cache.store, text, start)
        owed = mine[:, :number].sum(1)
        before, sizes = tuple(names[:number]), tuple(len(each) for each in texts[:number])
        found.append(Chunk(names[number], piece, before, sizes, inter, intra, owed))
        start += len(text)
    return found


def cachecraft(
    model: Any, cache: Host, chunks: Sequence[Chunk], *, alpha: float = 1.0, rotary: Sequence[Rotation] | None = None
) -> Tensor:
    """Fill a cache with chunks in a new order, and compute anew the tokens that owe most.

    Of each chunk the share `alpha * impact * (1 - overlap)` is computed anew.

    Reference: Cache-Craft, arXiv 2502.15734, section 3. Departures: attention is averaged over all
    layers and heads; the early end of recomputation in chunks that turn out unimportant is left
    out.

    Args:
        model: A model of transformers.
        cache: An empty cache of `cache_for(model, ..., mode="native")`, of one row.
        chunks: Chunks in their new order, each computed by `chunks_of`.
        alpha: Strength of the repair, dimensionless; 0 for nothing.
        rotary: Rotation of each layer, where keys are held rotated (space="post").

    Returns:
        int64 [n], the tokens that were computed anew.

    Raises:
        ValueError: If a number is out of range, or the cache is not as said.
    """
    check_setting("alpha", alpha, NotNegative)
    whole = joined([chunk.piece for chunk in chunks])
    lay_out(cache.store, whole, torch.arange(len(whole.ids)), rotary)
    chosen, start = [], 0
    for number, chunk in enumerate(chunks):
        mine = to_fix(chunk, [each.name for each in chunks[:number]], alpha)
        chosen.append(mine + start)
        start += len(chunk.piece.ids)
    index = torch.cat(chosen)
    if len(index):
        recompute(model, cache, whole.ids[None], index, logits=False)
    return index


def to_fix(chunk: Chunk, before: Sequence[Hashable], alpha: float) -> Tensor:
    """Return the tokens of a chunk that are computed anew, int64 [n], in order.

    Args:
        chunk: The chunk.
        before: Names of the chunks before it now.
        alpha: Strength of the repair, dimensionless; 0 for nothing.
    """
    share = min(alpha * chunk.impact * (1 - chunk.overlap(before)), 1.0)
    count = ceil(round(share * len(chunk.piece.ids), 6))
    return chunk.owed.argsort(descending=True, stable=True)[:count].sort().values
