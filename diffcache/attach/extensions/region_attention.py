"""Attention of a few rows over all: a strategy that keeps keys and values of the other rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.attach.attention_call import AttentionCall, AttentionSite, Rotary
from diffcache.errors import AttachError
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex


class Held(NamedTuple):
    """The keys and values of one attention, and views of all of them.

    Rows are written in place, so that the views stay true.

    Attributes:
        layer: Layer of a store that keeps them.
        k: Its keys, `[B, text + T, H, D]`.
        v: Its values, alike.
    """

    layer: KVLayer
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, number: int, k: Tensor, v: Tensor) -> Held:
        """Keep keys and values, `[B, text + T, H, D]` each."""
        layer = KVLayer(number)
        layer.write(k.detach().transpose(1, 2), v.detach().transpose(1, 2))
        slots = layer.read()
        return cls(layer, slots.k.transpose(1, 2), slots.v.transpose(1, 2))


@dataclass(eq=False)
class Store:
    """Keys and values of one guidance branch, after norm and rotation, text rows first.

    Attributes:
        signature: Signature of the calls that it is for.
        text: Number of text rows.
        velocity: The last full output of the denoiser, `[B, T, C]`.
        layers: Site -> keys and values of all rows.
        rotary: Rotation of all rows, as the model computed it.
        present: Indices of the text rows and the edited rows, `[B, text + M]`, and their rotation;
            made at its first use.
    """

    signature: Any
    text: int
    velocity: Tensor | None = None
    layers: dict[AttentionSite, Held] = field(default_factory=dict)
    rotary: Rotary | None = None
    present: tuple[SlotIndex, Rotary | None] | None = None

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        held = [tensor for kept in self.layers.values() for tensor in kept.layer.tensors()]
        held += [] if self.velocity is None else [self.velocity]
        return held + ([] if self.rotary is None else list(self.rotary.tables))


@dataclass(eq=False)
class Turn:
    """Plan of the attention modules for one denoiser call.

    Attributes:
        store: Store of the call's branch.
        rows: Indices of the present picture rows, `[B, M]`; None when all are there, to be kept.
        visits: Number of attention modules that took part.
    """

    store: Store
    rows: Tensor | None
    visits: int = 0

    def present(self) -> tuple[SlotIndex, Rotary | None]:
        """Return the indices of the present rows among all, and their rotation.

        Raises:
            ValueError: If one is no row; on CUDA, its own error, later.
        """
        store = self.store
        if store.present is None:
            assert self.rows is not None
            text = torch.arange(store.text, device=self.rows.device).expand(len(self.rows), -1)
            rows = torch.cat([text, store.text + self.rows], dim=1)
            slots = SlotIndex.of(rows, min(kept.layer.held for kept in store.layers.values()))
            store.present = slots, None if store.rotary is None else store.rotary.at(rows)
        return store.present


class Owner(Protocol):
    """Owner of the plan of the current call."""

    def turn(self) -> Turn | None:
        """Return what to do in the current call, None for what the model does anyway."""


class KeptRows:
    """Attends with the present rows over all; rows that are not present have kept keys and values.

    A step writes its rows in place: the same rows are present until the store is made anew.

    Args:
        owner: Owner of the plan of the current call, which its `turn` returns.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Return the attention of the present rows; None where all are, which are kept."""
        turn = self.owner.turn()
        if turn is None:
            return None
        turn.visits += 1
        mask = call.mask
        if mask is not None and (mask.dim() != 4 or mask.shape[2] != 1):
            raise AttachError("attention_mask: cannot be given with attention over kept rows")
        store = turn.store
        if turn.rows is None:
            store.rotary, store.present = call.rotary, None
            store.layers[site] = Held.of(site.layer, call.rotated()[1], call.v)
            return None
        rows, angles = turn.present()
        q, k = call.q, call.k
        if angles is not None:
            q, k = angles.apply(q), angles.apply(k)
        kept = store.layers[site]
        kept.layer.overwrite(rows, k.detach().transpose(1, 2), call.v.detach().transpose(1, 2))
        if mask is not None:  # which hides text; all picture rows are seen
            mask = functional.pad(mask, (0, kept.k.shape[1] - mask.shape[3]), value=True)
        return call.attend(q, kept.k, kept.v, mask)
