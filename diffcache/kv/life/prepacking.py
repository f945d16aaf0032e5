"""Prepacking: several short prompts in one row, each seeing only itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore


@dataclass(frozen=True, eq=False)
class Packing:
    """Prompts in rows.

    Attributes:
        ids: int64 [R, W], the prompts of each row one after the other, then padding.
        position_ids: int64 [R, W], from 0 in every prompt; 0 in padding.
        tags: int32 [R, W], number of the prompt, -1 in padding.
        places: Row, first slot and length of each prompt.
    """

    ids: Tensor
    position_ids: Tensor
    tags: Tensor
    places: tuple[tuple[int, int, int], ...]

    @property
    def mask(self) -> Tensor:
        """Mask of the tokens that see one another, bool [R, 1, W, W]: a prompt up to each token."""
        same = self.tags[:, :, None] == self.tags[:, None, :]
        return (same & (self.tags >= 0)[:, :, None]).tril()[:, None]

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """Row and slot of the last token of each prompt, int64 [P] both: where its logits are."""
        rows, starts, lengths = torch.tensor(self.places, device=self.ids.device).unbind(1)
        return rows, starts + lengths - 1

    def unpack(self, store: KVStore) -> list[list[Slots]]:
        """Return each prompt's slots, positions from 0: by prompt and layer, [1, H, n, D].

        Args:
            store: Store that a model filled when it was given `ids`, `position_ids` and `mask`.

        Raises:
            ValueError: If the store does not hold these rows.
        """
        for layer in store.layers:
            if layer.seen != self.ids.shape[1] or layer.held != layer.seen:
                raise ValueError(
                    f"layer {layer.index} holds {layer.held} of {layer.seen} tokens a row, the "
                    f"packing has {self.ids.shape[1]}: unpack right after the packed prefill"
                )
        found: list[list[Slots]] = []
        read = [layer.read() for layer in store.layers]
        for row, start, length in self.places:
            prompt = []
            for slots in read:
                part = slots.narrow(start, start + length)
                pos = torch.arange(length, dtype=torch.int32, device=part.k.device)
                k, v = (x[row : row + 1].clone() for x in (part.k, part.v))
                prompt.append(Slots(k, v, {"pos": pos.view(1, 1, -1)}))
            found.append(prompt)
        return found


def pack(prompts: Sequence[Tensor], width: int | None = None, pad: int = 0) -> Packing:
    """Put prompts into as few rows as first-fit-decreasing finds.

    Reference: Prepacking, arXiv 2404.09529.

    Args:
        prompts: int64 [n], each.
        width: Tokens a row; by default the longest prompt.
        pad: Token that fills the ends of rows.

    Raises:
        ValueError: If there are no prompts, or one is empty or longer than `width`.
    """
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths, default=0) if width is None else width
    if not lengths or not 0 < min(lengths) <= max(lengths) <= width:
        raise ValueError(f"prompts of {lengths} tokens, width={width}: give prompts of 1 to `width` tokens")
    used: list[int] = []
    places = [(0, 0, 0)] * len(prompts)
    for number in sorted(range(len(prompts)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, full in enumerate(used) if full + lengths[number] <= width), len(used))
        if row == len(used):
            used.append(0)
        places[number] = (row, used[row], lengths[number])
        used[row] += lengths[number]
    device = prompts[0].device
    ids = torch.full((len(used), width), pad, dtype=torch.long, device=device)
    position_ids = torch.zeros_like(ids)
    tags = torch.full_like(ids, -1, dtype=torch.int32)
    for number, (row, start, length) in enumerate(places):
        ids[row, start : start + length] = prompts[number]
        position_ids[row, start : start + length] = torch.arange(length, device=device)
        tags[row, start : start + length] = number
    return Packing(ids, position_ids, tags, tuple(places))
