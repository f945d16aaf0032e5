"""A2ATS: logits from a codebook of keys that does not depend on positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn.codebook import Codebook, covariance, fit, nearest
from diffcache.kv.retrieval.select import Ask, Selecting, top
from diffcache.kv.retrieval.summary import Summary, news, query_valid
from diffcache.kv.rotary import Rotation
from diffcache.kv.settings import Count, Whole
from diffcache.kv.slots import Slots

_LEAST = 32  # keys below which no codebook is fitted


@final
@dataclass(frozen=True)
class KeyCodes(Selecting):
    """Read the tokens of the highest logits, found from codes of their keys.

    Windowed rotary embedding: a query meets every key further away than `far` as if it were `far`
    positions before it, so that one codebook of keys before rotation serves all positions, and
    logits are looked up by code.

    Reference: A2ATS, arXiv 2502.12665. Two departures: the exact attention
    over what was chosen uses the model's own rotation, so that reading everything is the model as
    it is; and without a `codebook` fitted beforehand one is fitted to the prompt, with the prompt's
    own queries. Tokens that come twice have equal keys there, which tie in k-means: rounding may
    change such a codebook, and what is read, in another precision or with kernels.

    Args:
        codes: Vectors of a codebook that is fitted to the prompt.
        far: Distance at which far keys are met, in positions.
        steps: Rounds of k-means.
        codebook: Fitted beforehand, of all layers; None fits one to each prompt.
    """

    stored: ClassVar[bool] = True

    codes: Count = 256
    far: Whole = 64
    steps: Whole = 8
    codebook: Codebook | None = None

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Code new keys, and fit a codebook where there is none."""
        state = dict(old.state)
        first = fresh
        if "book" not in state:
            if self.codebook is not None:
                book, weight = self.codebook.of_layer(layer.index, fresh.k)
            else:
                first = news(layer, 0, stored=True)
                valid = first.valid.expand(first.k.shape[:3])
                if first.width < _LEAST and first.width < self.codes:
                    return old  # all of it is read until a codebook is worth fitting
                weight = far_weight(query, layer, self.far)
                book = fit(first.k, valid, weight, self.codes, self.steps)
            state |= {"book": book, "weight": weight}
            first = news(layer, 0, stored=True)
        code = nearest(first.k, state["book"], state["weight"])
        known = old if first is fresh else replace(old, slots={"pos": old.pos})
        return replace(known, slots=known.slots_with(code=code), state=state)

    def choose(self, ask: Ask) -> Tensor | None:
        """Return the slots of the highest logits that their codes give."""
        state = ask.summary.state
        if "book" not in state:
            return None
        rotary = rotary_of(ask.layer)
        own = news(ask.layer, ask.layer.held - ask.query.count, stored=True).rpos[:, :1]
        score = []
        for number in range(ask.query.count):
            part = ask.query.narrow(number, number + 1)
            at = (own[..., number : number + 1] - self.far).float()
            met = rotary.rotate(state["book"], at).float()
            q = part.grouped(met.shape[1]).float() * part.scale
            score.append(torch.einsum("bhgnd,bhcd->bhgnc", q, met))
        by_code = over_groups(torch.cat(score, 3), self.group)
        code = ask.summary.slots["code"].long()[:, :, None]
        return top(by_code.gather(3, code.expand(-1, -1, by_code.shape[2], -1)), ask.free, ask.room)


def far_weight(query: Query, layer: KVLayer, far: int) -> Tensor:
    """Return the covariance [B, H, D, D] of the newest queries as they meet keys `far` positions before them."""
    rotary, own = rotary_of(layer), news(layer, layer.held - query.count, stored=True)
    q = rotary.rotate(rotary.unrotate(query.q, own.rpos[:, :1]), float(far))
    met = replace(query, q=q).grouped(own.k.shape[1])
    return covariance(met.flatten(2, 3), query_valid(query).repeat(1, met.shape[2]))


def rotary_of(layer: KVLayer) -> Rotation:
    """Return how a layer rotates its keys, or raise ValueError if its keys are stored rotated."""
    if layer.rotary is None:
        raise ValueError(
            f"layer {layer.index} holds its keys rotated: a codebook of keys that serves all "
            "positions takes a recipe with space='pre'"
        )
    return layer.rotary
