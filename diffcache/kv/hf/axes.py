"""Note the positions of several axes that a model gives its rotary embedding."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.hf.rotary import RotaryReader


class NotedPositions:
    """The positions that a rotary embedding was last called with in this thread.

    A hook on the embedding notes them, which goes when this object goes.

    Args:
        embedding: The rotary embedding.
        axes: Number of axes.
    """

    def __init__(self, embedding: nn.Module, axes: int) -> None:
        self._axes = axes
        self._local = local = threading.local()

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            local.ids = args[1] if len(args) > 1 else kwargs.get("position_ids")

        handle = embedding.register_forward_pre_hook(note, with_kwargs=True)
        weakref.finalize(self, handle.remove)

    def after(self, table: Tensor | None, start: int, count: int) -> Tensor:
        """Return a table of positions, int32 [B or 1, T, A], with those of new tokens.

        Args:
            table: Table of the tokens before; None before the first.
            start: Tokens before.
            count: New tokens.

        Raises:
            AttachError: If the model gave its embedding others.
        """
        ids = getattr(self._local, "ids", None)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            ids = ids.expand(self._axes, *ids.shape)
        if not isinstance(ids, Tensor) or ids.dim() != 3 or ids.shape[::2] != (self._axes, count):
            given = list(ids.shape) if isinstance(ids, Tensor) else ids
            raise AttachError(
                f"position_ids={given} of the rotary embedding: must be [{self._axes}, B, {count}] "
                "for these tokens; use a recipe that holds keys as they are (space='post')"
            )
        new = ids.detach().permute(1, 2, 0).to(torch.int32)
        if table is None or not start:
            return new
        rows = max(len(table), len(new))
        old = table[:, :start].expand(rows, -1, -1)
        return torch.cat([old, new.expand(rows, -1, -1)], 1)


def noted_by(readers: Iterable[RotaryReader]) -> NotedPositions | None:
    """Return the positions of several axes that layers are rotated by, None if they have one."""
    several = [reader for reader in readers if reader.layout.axes]
    return NotedPositions(several[0].embedding, several[0].layout.count) if several else None
