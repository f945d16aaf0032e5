"""Match slots that go with those that take them over, as all mergers do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import work_dtype
from diffcache.kv.plan import KEEP
from diffcache.kv.slots import Slots, chosen

_BLOCK = 512  # slots that are compared with all kept ones together


@dataclass(frozen=True)
class Match:
    """Slots that go, and the kept slot that each of them meets.

    Attributes:
        source: Slots that go, int64 [B, H, n].
        target: Slots that stay, int64 [B, H, n].
        found: Bool [B, H, n]; False where a row is filled up or keeps nothing.
        likeness: Likeness of the two, [B, H, n] float.
    """

    source: Tensor
    target: Tensor
    found: Tensor
    likeness: Tensor

    def only(self, mask: Tensor) -> Match:
        """Return the match without the pairs that a mask leaves out."""
        return replace(self, found=self.found & mask)


def parted(slots: Slots, plan: Tensor) -> tuple[Tensor, Tensor]:
    """Return which slots go and which stay, bool [B, H, S]; empty ones do neither."""
    valid = slots.valid.expand(plan.shape)
    return (plan < KEEP) & valid, (plan >= KEEP) & valid


def by_cosine(k: Tensor, goes: Tensor, stays: Tensor) -> Match:
    """Match every slot that goes with the most similar key that stays, by cosine.

    Args:
        k: [B, H, S, D].
        goes: Bool [B, H, S].
        stays: Bool [B, H, S].
    """
    source, found = chosen(goes)
    kept, there = chosen(stays)
    if not source.shape[2] or not kept.shape[2]:
        none = found & False
        zero = torch.zeros_like(source)
        return Match(source, zero, none, zero.to(work_dtype(k.dtype)))
    unit = normalize(k.to(work_dtype(k.dtype)), dim=-1)
    anchors = gather_slots(unit, kept).transpose(-1, -2)
    best, where = [], []
    for first in range(0, source.shape[2], _BLOCK):
        part = gather_slots(unit, source[..., first : first + _BLOCK]) @ anchors
        top = part.masked_fill(~there[..., None, :], float("-inf")).max(-1)
        best.append(top.values)
        where.append(top.indices)
    likeness = torch.cat(best, -1)
    found = found & there.any(-1, keepdim=True)
    return Match(source, kept.gather(2, torch.cat(where, -1)), found, likeness.where(found, 0))


def by_position(pos: Tensor, goes: Tensor, stays: Tensor) -> Match:
    """Match every slot that goes with the slot nearest in position that stays.

    Of two that are equally near it is the earlier one. The likeness is minus the distance.

    Args:
        pos: Int32 [B, 1 or H, S], ascending.
        goes: Bool [B, H, S].
        stays: Bool [B, H, S].
    """
    width = goes.shape[2]
    place = torch.arange(width, device=goes.device).expand_as(goes)
    before = place.where(stays, -1).cummax(-1).values
    after = place.where(stays, width).flip(-1).cummin(-1).values.flip(-1)
    source, found = chosen(goes)
    before, after = before.gather(2, source), after.gather(2, source)
    at = pos.long().expand_as(goes)
    far = torch.iinfo(torch.int64).max // 4
    here = at.gather(2, source)
    left = (here - at.gather(2, before.clamp_min(0))).where(before >= 0, far)
    right = (at.gather(2, after.clamp_max(width - 1)) - here).where(after < width, far)
    target = before.where(left <= right, after).clamp(0, max(width - 1, 0))
    distance = left.minimum(right)
    return Match(source, target, found & (distance < far), -distance.float())


def total(match: Match, weight: Tensor, width: int) -> Tensor:
    """Return the sum of weights that arrive at each slot, [B, H, S].

    Args:
        match: Pairs of a slot that goes and the kept slot that it meets.
        weight: Weight of each pair, [B, H, n].
        width: Number of slots, S.
    """
    found = weight * match.found
    return found.new_zeros(*found.shape[:2], width).scatter_add_(2, match.target, found)


def absorb(slots: Slots, match: Match, weight: Tensor, own: Tensor, divisor: Tensor | None = None) -> Slots:
    """Add keys and values of slots that go to those that stay; the others come out bit for bit.

    A slot x becomes `(own * x + sum of weight * source) / divisor`.

    Args:
        slots: All slots.
        match: Pairs of a slot that goes and the kept slot that it meets.
        weight: Weight of each pair, [B, H, n].
        own: Weight of the slots themselves, [B, H, S] or a scalar tensor.
        divisor: [B, H, S]; the sum of all weights where it is left out.
    """
    width = slots.width
    hit = total(match, torch.ones_like(weight), width) > 0
    weight = weight * match.found
    own = own.expand(hit.shape)
    if divisor is None:
        divisor = own + total(match, weight, width)
    return replace(
        slots,
        k=_mixed(slots.k, match, weight, own / divisor, (hit, divisor)),
        v=_mixed(slots.v, match, weight, own / divisor, (hit, divisor)),
    )


def _mixed(x: Tensor, match: Match, weight: Tensor, own: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    hit, divisor = at
    work = x.to(work_dtype(x.dtype))
    share = weight / divisor.gather(2, match.target)
    share = share.where(match.found, 0).to(work.dtype)
    new = work * own[..., None].to(work.dtype)
    place = match.target[..., None].expand(-1, -1, -1, x.shape[-1])
    new = new.scatter_add(2, place, gather_slots(work, match.source) * share[..., None])
    return new.to(x.dtype).where(hit[..., None], x)
