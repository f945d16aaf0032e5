"""Budgets that differ from layer to layer: by a rule, by a table, or by what layers attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, slots_for
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import window_variance
from diffcache.kv.settings import Count, Factor, Mode, Positive, Size, Whole

_STEPS = 64  # halvings, until neighboring doubles are reached
_ROUNDS = 60  # of bisection: far below what two slots may differ by


def apportion(weights: Tensor, total: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Share out slots in proportion to weights, where bounds allow it.

    Shares are `clip(c * weight, low, high)` with the one factor `c` that makes up the total; what
    rounding down leaves goes to the largest fractions, of equals to the first.

    Args:
        weights: [N, ...] float, not negative; where all are zero they count as equal.
        total: [...] int64. Less than all of `low` gives `low`, more than all of `high` gives
            `high`.
        low: int64 like `weights`.
        high: int64 like `weights`, at least `low`.

    Returns:
        int64 [N, ...].
    """
    weights = weights.double()
    most = weights.amax(0)
    weights = (weights / most.where(most > 0, 1)).where(most > 0, 1.0)
    weights = weights.clamp_min(1e-9)  # a weight of zero takes what the bounds leave
    least, greatest = low.double(), high.double()
    total = total.maximum(low.sum(0)).minimum(high.sum(0))
    small = torch.full_like(most, -30.0)
    large = torch.full_like(most, 60.0)
    for _ in range(_STEPS):  # on the logarithm of the factor
        middle = (small + large) / 2
        over = _clipped(weights, middle, least, greatest).sum(0) > total
        large, small = middle.where(over, large), small.where(over, middle)
    exact = _clipped(weights, small, least, greatest)
    whole = (exact + 1e-6).floor().long().maximum(low).minimum(high)
    left = total - whole.sum(0)
    fraction = (exact - whole).masked_fill(whole >= high, -2.0)
    order = torch.argsort(fraction, dim=0, descending=True, stable=True)
    rank = torch.argsort(order, dim=0)
    return (whole + (rank < left).long()).minimum(high)


def _clipped(weights: Tensor, log: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (weights * log.exp()).maximum(low).minimum(high)


@dataclass(frozen=True)
class Pyramid(Budget):
    """Slots that fall evenly from the first layer to the last.

    Besides its window, the last layer gets `1 / beta` of the mean and the first what is left of
    twice the mean. Where a prompt is too short for that, the first layer keeps all and the last
    layer gets more, so that the total stays.

    Args:
        size: Mean slots of a row, or a share of the tokens it has seen.
        beta: Steepness of the pyramid, at least 1; 1 gives all layers the same.
        window: Slots that every layer gets beforehand.
        mode: `"paper"` keeps an exact total. `"official"` rounds the least budget and the step from
            layer to layer down, so that more is held, and gives all layers the same where a prompt
            has fewer tokens than twice their mean beyond the window.

    Reference: PyramidKV, arXiv 2406.02069, section 4.2.1.
    """

    size: Size
    beta: Factor = 20.0
    window: Whole = 8
    mode: Mode = "paper"

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return an arithmetic sequence, rounded."""
        if self.mode == "official":
            return [self._stepped(each, index, len(seen)) for index, each in enumerate(seen)]
        held = torch.stack([each.lengths for each in seen])
        mean = torch.stack([slots_for(self.size, each.tokens) for each in seen]).minimum(held)
        spare = (mean - self.window).clamp_min(0).double().mean(0)
        room = (held[0] - self.window).clamp_min(0).double()
        first = (spare * (2 - 1 / self.beta)).minimum(room)
        step = torch.linspace(0, 1, len(seen), dtype=torch.float64, device=held.device)
        shape = first - (2 * first - 2 * spare) * step.view(-1, 1, 1) if len(seen) > 1 else spare
        weights = (shape + self.window).expand(held.shape)
        least = held.clamp_max(self.window).minimum(mean)
        return list(apportion(weights, mean.sum(0), least, held))

    def _stepped(self, seen: Observation, index: int, layers: int) -> Tensor:
        """Return the slots of one layer as the official code has them."""
        mean = slots_for(self.size, seen.tokens)
        spare = (mean - self.window).clamp_min(0)
        room = (seen.lengths - self.window).clamp_min(0)
        most = (2 * spare - (spare / self.beta).floor().long()).minimum(room)
        step = (2 * (most - spare)) // max(layers - 1, 1)
        slots = (most - index * step + self.window).where(seen.lengths >= 2 * spare, mean)
        return slots.clamp_min(1).minimum(seen.lengths)


@dataclass(frozen=True)
class Arithmetic(Budget):
    """Give groups of layers budgets that fall by equal steps, alike within a group.

    The last group gets the average divided by `beta`, the first twice the average less that, so
    that the average is `size` where the groups are equally large.

    Reference: WindowKV, arXiv 2503.17922, section 2.2.3 (groups of layers; the arithmetic sequence
    is that of PyramidKV, arXiv 2406.02069). Budgets are rounded down.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        group: Layers of a group; what is left over is a smaller last group.
        beta: Ratio of the average budget to the smallest one, at least 1.
    """

    size: Size
    group: Count = 4
    beta: Factor = 2.0

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the sequence; a budget above what is held leaves the rest of it unused."""
        groups = -(-len(seen) // self.group)
        found = []
        for index, each in enumerate(seen):
            place = (index // self.group) / (groups - 1) if groups > 1 else 0.5
            base = slots_for(self.size, each.tokens)
            if bool((base >= each.lengths).all()):
                found.append(each.lengths)
                continue
            least = 1 / self.beta
            factor = (2 - least) * (1 - place) + least * place
            slots = (base.double() * factor + 1e-9).floor().long()
            found.append(slots.clamp_min(1).minimum(each.lengths))
        return found


@dataclass(frozen=True)
class EntropyVariance(Budget):
    """Slots in proportion to a layer's preference, entropy^(1 / tau1) * variance^(1 / tau2).

    Both are of how the last queries attend to the slots before them: the entropy summed over heads
    and queries, the variance over queries summed over heads and slots. Every layer gets its window,
    and a share of what that leaves of the sizes of all layers, rounded down; what a layer cannot
    use, and then what rounding left, goes to the others in equal parts, the first ones first. All
    heads of a layer get the same.

    Args:
        size: Mean slots of a row, or a share of the tokens it has seen.
        window: The last queries, as many as the scorer keeps; and the least slots of a layer.
        tau1: Temperature of the entropy; the paper fits it to each model.
        tau2: Temperature of the variance; the paper fits it to each model.

    Reference: CAKE, arXiv 2503.12491.
    """

    size: Size
    window: Count = 32
    tau1: Positive = 1.0
    tau2: Positive = 1.0

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the same slots for all heads of a layer, with an exact total."""
        held = torch.stack([each.lengths for each in seen])
        mean = torch.stack([slots_for(self.size, each.tokens) for each in seen]).minimum(held)
        window = held.clamp_max(self.window).minimum(mean)
        total, room = (mean - window).sum(0), held - window
        weights = torch.stack([self.preference(each) for each in seen])[..., None]
        whole = weights.sum(0)
        share = (weights / whole).where(whole > 0, 1 / len(seen))
        slots = (share * total + 1e-9).floor().long()
        over = (slots - room).clamp_min(0).sum(0)
        slots = _evened(slots.minimum(room), over, room)
        slots = _evened(slots, total - slots.sum(0), room)
        while bool((slots > room).any()):
            slots = slots.minimum(room)
            slots = _evened(slots, total - slots.sum(0), room)
        return list(slots + window)

    def preference(self, seen: Observation) -> Tensor:
        """Return what a layer asks for, float64 [B]; dimensionless."""
        probs = seen.probs(self.window)[..., : max(seen.slots.width - self.window, 0)].double()
        entropy: Tensor = torch.special.entr(probs).sum((1, 2, 3, 4))
        variance = window_variance(seen, probs).sum((1, 2, 3))
        return entropy.pow(1 / self.tau1) * variance.pow(1 / self.tau2)


def _evened(slots: Tensor, more: Tensor, room: Tensor) -> Tensor:
    """Return slots [L, B, H] to which `more` [B, H] was added, evenly where there is room."""
    takes = slots < room
    count = takes.sum(0).clamp_min(1)
    first = takes.cumsum(0) <= more % count
    return slots + takes * (more // count + first.long())


@dataclass(frozen=True)
class CDFLevel(Budget):
    """Keep in every layer the fewest best slots that hold a share p of its score.

    p is the same in all layers and found by bisection, so that all layers together hold what
    `Uniform(size)` would, give or take one slot a layer. Scores are averaged over heads, which all
    get the same budget.

    Reference: PrefixKV, arXiv 2412.03409. The paper finds the shares of layers on a
    few samples and uses their average (`diffcache.kv.learn.prefixkv.layer_shares`, with
    `LayerTable`); here they are found for each row as it comes.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        least: Slots that every layer keeps.
    """

    size: Size
    least: Whole = 1

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the budgets; they follow the row's own level."""
        width = max(score.shape[-1] for score in scores)
        held = torch.stack([each.lengths.amax(1) for each in seen])
        total = torch.stack([slots_for(self.size, each.tokens[:, 0]) for each in seen]).sum(0)
        means, always = [], []
        for score in scores:
            mean = torch.nn.functional.pad(score.clamp_min(0).mean(1), (width - score.shape[-1], 0))
            always.append((mean == float("inf")).sum(-1))
            means.append(mean.masked_fill(mean == float("inf"), 0.0))
        stay = torch.stack(always)  # slots that are kept whatever the level
        rest = (total - stay.sum(0)).clamp_min(0)
        counts = stay + prefix_counts(torch.stack(means), held - stay, rest)
        counts = counts.maximum(held.clamp_max(self.least))
        return [count[:, None].minimum(each.lengths) for each, count in zip(seen, counts, strict=True)]


def prefix_counts(scores: Tensor, held: Tensor, total: Tensor) -> Tensor:
    """Return how many of the best slots of each layer reach the level that all layers share.

    Args:
        scores: Score of each slot, at least 0, [L, B, S]; 0 in empty slots.
        held: Slots of each layer that are not empty, int64 [L, B].
        total: Slots that the counts add up to, give or take L, int64 [B].

    Returns:
        int64 [L, B].
    """
    ranked = scores.double().sort(-1, descending=True).values
    there = torch.arange(scores.shape[-1], device=scores.device) < held[..., None]
    # A trace of mass for every slot, so that those without any are reached last, at level 1.
    trace = 1e-9 * ranked.sum(-1, keepdim=True).clamp_min(1e-30) / held[..., None].clamp_min(1)
    mass = (ranked + trace) * there
    reached = (mass.cumsum(-1) / mass.sum(-1, keepdim=True).clamp_min(1e-300)).masked_fill(~there, float("inf"))
    low, high = torch.zeros_like(total, dtype=torch.float64), torch.ones_like(total).double()
    for _ in range(_ROUNDS):
        level = (low + high) / 2
        fits = (reached <= level[:, None]).sum(-1).sum(0) <= total
        low, high = level.where(fits, low), high.where(fits, level)
    counts = (reached <= low[:, None]).sum(-1)
    return held.where(total >= held.sum(0), counts)


@dataclass(frozen=True)
class Scheduled(Budget):
    """Give every layer a budget of its own at every scale of a next-scale image model.

    The scale is known from the tokens that a row has seen.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3; `diffcache.kv.learn.scalekv.capacities`
    finds the table.

    Args:
        size: Slots where the table is empty, or a share of the tokens.
        scales: Tokens of each scale, first to last.
        table: Slots of each layer after each scale; empty is `size` everywhere.
        prompt: Tokens that come before the first scale.
    """

    size: Size
    scales: tuple[int, ...]
    table: tuple[tuple[int, ...], ...] = ()
    prompt: Whole = 0

    def check(self) -> None:
        """Raise ValueError if the numbers do not fit each other."""
        if not self.scales or min(self.scales) < 1:
            raise ValueError(f"scales={self.scales}: must be at least 1 token each")
        for layer, row in enumerate(self.table):
            if len(row) != len(self.scales) or min(row) < 1:
                raise ValueError(
                    f"table[{layer}]={row}: must be {len(self.scales)} numbers of slots, one for "
                    "each scale, at least 1"
                )

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the budgets of the scale that came last; ValueError if the table is not of as many layers."""
        if self.table and len(self.table) != len(seen):
            raise ValueError(
                f"table of {len(self.table)} layers, and the recipe is used on {len(seen)}; find "
                "it for this model with diffcache.kv.learn.scalekv.capacities"
            )
        found = []
        for index, each in enumerate(seen):
            slots = slots_for(self.size, each.tokens)
            if self.table:
                row = torch.tensor(self.table[index], device=slots.device)
                slots = row[self.scale(each.tokens)]
            found.append(slots.minimum(each.lengths))
        return found

    def scale(self, tokens: Tensor) -> Tensor:
        """Return the scale that the last of each row's `tokens` tokens belongs to, int64 like `tokens`."""
        ends = list(accumulate(self.scales, initial=self.prompt))[1:]
        edges = torch.tensor(ends, device=tokens.device)
        return torch.searchsorted(edges, tokens.contiguous()).clamp_max(len(ends) - 1)


@dataclass(frozen=True)
class LayerTable(Budget):
    """Share out the slots of all layers in given proportions.

    All heads of a layer get the same. Slots that a layer cannot use, as it holds less, go to the
    others, so that the total is that of `Uniform(size)`.

    Reference: PrefixKV, arXiv 2412.03409; CompressKV, arXiv 2508.02401; EpiCache, arXiv
    2509.17396: each finds the weights in its own way. Departure: a layer may get all that it can
    use, where CompressKV gives none more than three times the average.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        weights: Weight of each layer, in any unit; empty has all layers get the same.
        least: Slots that every layer gets, at most `size`.
    """

    size: Size
    weights: tuple[float, ...] = ()
    least: Whole = 1

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if self.weights and (min(self.weights) < 0 or not 0 < sum(self.weights) < float("inf")):
            raise ValueError(f"weights={self.weights}: must be numbers, none negative and not all 0")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the shares, or raise ValueError if there are more or fewer layers than weights."""
        weights = self.weights or (1.0,) * len(seen)
        if len(weights) != len(seen):
            raise ValueError(
                f"weights of {len(weights)} layers, and the recipe is used on {len(seen)}; find "
                "them for this model, without the layers that `skip` leaves out"
            )
        caps = torch.stack([each.lengths for each in seen])
        base = torch.stack([slots_for(self.size, each.tokens) for each in seen])
        given = torch.tensor(weights, dtype=torch.float64, device=caps.device).view(-1, 1, 1)
        least = base.clamp_max(self.least).minimum(caps)
        return list(apportion(given.expand(caps.shape), base.sum(0), least, caps))
