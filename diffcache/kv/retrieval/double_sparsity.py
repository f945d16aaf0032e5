"""Double Sparsity: logits from a few channels say which tokens are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.codec.base import TensorCodec
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.select import Ask, Selecting, top
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.slots import Slots

Channels = tuple[tuple[tuple[int, ...], ...], ...]


@final
@dataclass(frozen=True)
class LabelChannels(Selecting):
    """Read the tokens of the highest logits, found from the channels that matter most.

    Reference: Double Sparsity, arXiv 2408.07092: label channels are chosen offline
    (`diffcache.kv.learn.label_channels`), and the label cache may be held in 4 bits, in which
    queries are coded as well.

    Args:
        channels: Label channels of each head of each layer; all heads have as many.
        labels: Codec of the label cache and of queries; None keeps both exact.
    """

    channels: Channels = ()
    labels: TensorCodec | None = None

    def check(self) -> None:
        """Check the channels."""
        counts = {len(head) for layer in self.channels for head in layer}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"channels have {sorted(counts)} label channels a head: every head of every layer "
                "must have as many, at least 1; diffcache.kv.learn.label_channels chooses them"
            )
        if self.labels is not None and self.labels.multiple != 1:
            raise ValueError(f"labels={self.labels!r}: labels are coded token by token")

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Keep the label channels of new keys."""
        index = self._index(layer, fresh.k.shape[1], fresh.k)
        label = fresh.k.gather(3, index[None, :, None].expand(*fresh.k.shape[:3], -1))
        if self.labels is None:
            return replace(old, slots=old.slots_with(label=label))
        new = self.labels.encode(label)
        return replace(old, coded=new if old.coded is None else self.labels.join([old.coded, new]))

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the highest approximate logits."""
        summary = ask.summary
        label = summary.slots["label"] if summary.coded is None else summary.coded.decode()
        q = ask.query.grouped(label.shape[1])
        index = self._index(ask.layer, label.shape[1], q)[None, :, None, None]
        q = q.gather(4, index.expand(*q.shape[:4], -1)).float() * ask.query.scale
        if self.labels is not None:
            q = self.labels.encode(q.flatten(2, 3)).decode().view_as(q)
        score = torch.einsum("bhgnr,bhsr->bhgns", q, label.float())
        return top(over_groups(score, self.group), ask.free, ask.room)

    def _index(self, layer: KVLayer, heads: int, like: Tensor) -> Tensor:
        """Return the label channels of a layer, int64 [H, r], or raise ValueError if there are none for it."""
        size = like.shape[-1]
        if layer.index >= len(self.channels) or len(self.channels[layer.index]) != heads:
            raise ValueError(
                f"channels are of {len(self.channels)} layers, and layer {layer.index} has {heads} "
                "heads: choose label channels for this model"
            )
        found = torch.tensor(self.channels[layer.index], dtype=torch.int64, device=like.device)
        if int(found.min()) < 0 or int(found.max()) >= size:
            raise ValueError(
                f"channels of layer {layer.index} reach from {int(found.min())} to "
                f"{int(found.max())}: a key has channels 0 to {size - 1}"
            )
        return found
