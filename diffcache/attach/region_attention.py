"""Attention of a few rows over all: processors that keep keys and values of the other rows."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from diffcache.features.region_mask import write


@dataclass(eq=False)
class Store:
    """Keys and values of one guidance branch, behind norm and rotation, text rows first.

    Attributes:
        signature: Of the calls that it is for.
        text: Number of text rows.
        velocity: The last full output of the denoiser, `[B, T, C]`.
        layers: Attention module -> keys and values, `[B, text + T, H, D]` each.
        rotary: Rotary embedding of all rows, as the model computed it.
        present: The same for text and edited rows only, made at its first use.
    """

    signature: Any
    text: int
    velocity: Tensor | None = None
    layers: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rotary: Any = None
    present: Any = None


@dataclass(eq=False)
class Turn:
    """What the attention modules do in one denoiser call.

    Attributes:
        store: Of the call's branch.
        rows: Indices of the present picture rows, `[B, M]`; None when all are there, to be kept.
        visits: How many attention modules took part.
    """

    store: Store
    rows: Tensor | None
    visits: int = 0


class Owner(Protocol):
    """Who tells a processor what to do."""

    def turn(self) -> Turn | None:
        """Return what to do in the current call, None for what the model does anyway."""


class RowProcessor:
    """Stands in for an attention processor of diffusers; copies and pickles are the original.

    What it does changes from step to step and with the size of the edit, so that compiled blocks
    leave it out: their graphs break around attention.
    """

    def __init__(self, original: Any, owner: Owner) -> None:
        self.original, self.owner = original, owner

    @property
    def _attention_backend(self) -> Any:  # which diffusers sets on a processor
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.original._parallel_config = config

    def __copy__(self) -> Any:
        return copy(self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.original,)

    def _turn(self) -> Turn | None:
        turn = self.owner.turn()
        if turn is not None:
            turn.visits += 1
        return turn

    def _attend(
        self,
        attn: nn.Module,
        turn: Turn,
        states: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend with the present rows, `[B, text + M, H, D]` each, over all; `[B, rows, H * D]`.

        Picture rows that are not present have the keys and values of the last full step. A step
        writes its rows in place: the same rows are present until the store is made anew.
        """
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        query, key, value = states
        store, rows = turn.store, turn.rows
        if rows is None:
            store.layers[attn] = key.detach(), value.detach()
        else:
            kept = store.layers[attn]
            for whole, fresh in zip(kept, (key, value), strict=True):
                whole[:, : store.text] = fresh[:, : store.text]
                write(whole[:, store.text :], rows, fresh[:, store.text :])
            key, value = kept
        out: Tensor = dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=self._attention_backend, parallel_config=None
        )
        return out.flatten(2, 3).to(query.dtype)
