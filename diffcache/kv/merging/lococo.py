"""LoCoCo: a fixed memory whose slots are mixed by weights that a convolution predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import work_dtype
from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import parted
from diffcache.kv.observe import Observation
from diffcache.kv.settings import Settings, Whole
from diffcache.kv.slots import Slots, chosen


@dataclass(frozen=True, eq=False)
class MixWeights(Settings):
    """Trained weights: a convolution over slots and a gate for each layer.

    Attributes:
        weight: [L, M, D + Dv, w], for M memory slots, w odd.
        bias: [L, M].
        gate: [L], logits; the sigmoid is the weight of a slot's own token.
    """

    weight: Tensor
    bias: Tensor
    gate: Tensor

    def check(self) -> None:
        """Raise ValueError unless shapes go together."""
        layers, memory = self.bias.shape
        if self.weight.dim() != 4 or self.weight.shape[:2] != (layers, memory):
            raise ValueError(
                f"weight={list(self.weight.shape)}: must be [{layers}, {memory}, D + Dv, w], as bias says"
            )
        if self.weight.shape[3] % 2 == 0:
            raise ValueError(f"weight has {self.weight.shape[3]} taps: must be odd")

    @property
    def memory(self) -> int:
        """Memory slots of a row."""
        return self.bias.shape[1]

    def __repr__(self) -> str:
        """Return shapes, as numbers would not be read."""
        return f"MixWeights(weight={list(self.weight.shape)})"


@dataclass(frozen=True)
class ConvolutionMerge(Merger):
    """Mix kept slots from all that is not recent, by weights that a convolution predicts.

    Memory slot m, in order of position, becomes g times itself plus (1 - g) times the mean of all
    slots that are not recent, weighted by the softmax over slots of channel m of a convolution
    over keys and values. Keys and values are mixed alike.

    Reference: LoCoCo, arXiv 2406.05317. One convolution serves all heads of a layer.

    Args:
        weights: Convolution and gates that `diffcache.kv.learn.lococo.train` returned.
        recent: Last tokens that stay as they are.
        space: Whether keys are mixed rotated, as cached, or unrotated.
    """

    weights: MixWeights
    recent: Whole = 0
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with mixed ones and the same plan; ValueError if others were trained."""
        slots = seen.slots
        goes, stays = parted(slots, plan)
        old = torch.arange(slots.width, device=plan.device) < slots.width - self.recent
        hit = goes.any(-1, keepdim=True)
        if not bool(hit.any()):
            return slots, plan
        index, there = chosen(stays & old & hit)
        self._check(index.shape[2], slots, seen.layer)
        source = (goes | stays) & old
        mix = self.mixed(slots, source, seen.layer)[:, :, : index.shape[2]]
        own = self.weights.gate[seen.layer].to(plan.device, mix.dtype).sigmoid()
        columns = {}
        for name, x in (("k", slots.k), ("v", slots.v)):
            work = x.to(mix.dtype)
            new = own * gather_slots(work, index) + (1 - own) * (mix @ work)
            slot = index.where(there, slots.width)[..., None].expand_as(new)
            longer = torch.cat([x, torch.zeros_like(x[:, :, :1])], 2)
            columns[name] = longer.scatter(2, slot, new.to(x.dtype))[:, :, :-1]
        return replace(slots, k=columns["k"], v=columns["v"]), plan

    def mixed(self, slots: Slots, source: Tensor, layer: int) -> Tensor:
        """Return the weights of all slots in each memory slot, [B, H, M, S]; rows sum to 1."""
        work = work_dtype(slots.k.dtype)
        x = torch.cat([slots.k, slots.v], -1).to(work) * source[..., None]
        weight, bias = (each[layer].to(x.device, work) for each in (self.weights.weight, self.weights.bias))
        found = conv1d(x.flatten(0, 1).mT, weight, bias, padding=weight.shape[2] // 2)
        found = found.unflatten(0, slots.k.shape[:2])
        seen = found.masked_fill(~source[:, :, None], float("-inf"))
        mix: Tensor = seen.softmax(-1).nan_to_num(0)
        return mix

    def _check(self, memory: int, slots: Slots, layer: int) -> None:
        trained = self.weights
        if memory > trained.memory:
            raise ValueError(
                f"{memory} memory slots: {trained.memory} were trained; lower the budget to "
                f"{trained.memory} and the recent tokens ({self.recent}), or train more"
            )
        size = slots.k.shape[3] + slots.v.shape[3]
        if trained.weight.shape[2] != size or layer >= len(trained.weight):
            raise ValueError(
                f"layer {layer} with {size} channels: {list(trained.weight.shape)} was trained, "
                "which is [layers, memory, channels, taps]"
            )
