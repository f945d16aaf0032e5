"""Caches of transformers of fixed memory, for compiled decoding."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache, StaticLayer

from diffcache.errors import AttachError
from diffcache.kv.hf.layer import query_count
from diffcache.kv.hf.model import decoder_config
from diffcache.method import check_int


def static_cache_for(model: nn.Module, capacity: int, *, sinks: int = 4) -> Cache:
    """Return a cache of fixed memory for compiled decoding: first tokens and the latest.

    Args:
        model: Model of transformers; its attention stays as it is. Prompts must not be padded.
        capacity: Slots of each layer of full attention.
        sinks: First tokens that always stay.

    Raises:
        AttachError: If it is no model of transformers, has an encoder as well, or has layers of
            states and full attention in one.
        ValueError: If `capacity` does not hold the `sinks` and one more; later, by the cache, of padded
            prompts, of other rows, and of tokens taken back once others were dropped.
    """
    config = decoder_config(model)
    layers = StaticCache(config=config, max_cache_len=2**30).layers  # nothing is allocated yet
    own = [x for x in layers if isinstance(x, StaticLayer) and not x.is_sliding]
    if any(type(x) is not StaticLayer for x in own):
        raise AttachError(
            f"{type(model).__name__} has layers of states and full attention in one, whose memory "
            "is that of the whole text; use cache_for(model, ...)"
        )
    return StaticWindows([StaticWindow(capacity, sinks) if type(x) is StaticLayer else x for x in layers])


class StaticWindows(Cache):  # type: ignore[misc]
    """A cache whose layers of full attention have fixed memory."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, up to -`tokens_to_remove`; raise ValueError if others were dropped for them."""
        lost = [x for x in self.layers if isinstance(x, StaticWindow) and int(x.seen) > x.capacity]
        whole = all(getattr(x, "is_croppable", False) for x in self.layers if not isinstance(x, StaticWindow))
        if tokens_to_remove > 0 or (tokens_to_remove and (lost or not whole)):
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove}: must be negative, and nothing dropped yet: the memory of "
                "the last tokens held others before; use cache_for(model, ...)"
            )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: memory that never moves has the rows of the prompt."""
        raise ValueError(
            "rows of fixed memory stay those of the prompt: repeat the prompt, or use cache_for(model, ...)"
        )

    batch_select_indices = batch_repeat_interleave


def _check_whole(frame: FrameType | None) -> None:
    """Raise ValueError if the attention mask of the first frame that has one names padding.

    The model hands layers no mask while it asks how long one has to be, so that it is found on the stack.
    """
    while frame is not None and "attention_mask" not in frame.f_locals:
        frame = frame.f_back
    mask = None if frame is None else frame.f_locals["attention_mask"]
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        raise ValueError(
            "attention_mask: names padding, which a cache of fixed memory cannot hide once its slots are full; give "
            "prompts of one length, or use cache_for(model, ...)"
        )


class StaticWindow(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of the first tokens and of the latest, in two buffers that never move.

    Decoding a token reads no number back from the device and changes no shape, so that a compiled
    graph, or a captured one, serves every step. Keys are stored as given: rotated, at the positions
    they had in the text. While the buffers are not full nothing is lost.

    Attributes:
        capacity: Slots.
        sinks: First tokens that always stay.
        seen: Tokens written, int64 [], changed in place.

    Reference: StreamingLLM, arXiv 2309.17453, section 3.2, without rotating keys anew.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, capacity: int, sinks: int = 4) -> None:
        super().__init__()
        check_int("capacity", capacity, 1)
        check_int("sinks", sinks, 0)
        if sinks >= capacity:
            raise ValueError(f"sinks={sinks}: must be from 0 to less than capacity={capacity} slots")
        self.capacity, self.sinks = capacity, sinks
        self.seen = torch.zeros((), dtype=torch.int64)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, and mark them as never moving, unless this is compiled already."""
        given = (key_states, value_states)
        self.keys, self.values = (x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in given)
        self.seen = self.seen.to(key_states.device)
        for tensor in () if torch.compiler.is_compiling() else (self.keys, self.values, self.seen):
            torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H, n, D] and return what their queries attend to.

        For one token these are the buffers, whole; for several what was held, in the order of positions, and the new.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v, count = key_states, value_states, key_states.shape[2]
        if count == 1:
            self._put(self._slot(self.seen)[None], k, v)
            self.seen.add_(1)
            return self.keys, self.values
        before = int(self.seen)
        held = self._slot(self._kept(before))
        whole = tuple(
            torch.cat([old.index_select(2, held), new], 2) for old, new in ((self.keys, k), (self.values, v))
        )
        at = self._kept(before + count)
        at = at[at >= before]
        self._put(self._slot(at), k.index_select(2, at - before), v.index_select(2, at - before))
        self.seen.add_(count)
        return whole[0], whole[1]

    def get_seq_length(self) -> Tensor | int:
        """Return the tokens seen, as a tensor that compiled code reads."""
        return self.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the mask is for, and the position it gives the first of them.

        For one token the mask covers the buffers, whose slots fill in order; once they are full every slot is seen.
        """
        count = query_count(query_length)
        if count == 1:
            return self.capacity, 0
        _check_whole(sys._getframe(1))
        before = int(self.seen)
        held = min(before, self.capacity)
        return held + count, before - held

    def get_max_length(self) -> int:
        """Return -1: any number of tokens can be written."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions

    def reset(self) -> None:
        """Forget everything, in place."""
        self.seen.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, where no slot was written twice."""
        self.seen.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search, in place."""
        for held in (self.keys, self.values) if self.is_initialized else ():
            held.copy_(held.index_select(0, beam_idx.to(held.device)))

    def _slot(self, pos: Tensor) -> Tensor:
        """Return the slots of positions."""
        ring = self.sinks + (pos - self.sinks).remainder(self.capacity - self.sinks)
        return torch.where(pos < self.sinks, pos, ring)

    def _kept(self, seen: int) -> Tensor:
        """Return the positions that are held after `seen` tokens."""
        device = self.seen.device
        if seen <= self.capacity:
            return torch.arange(seen, device=device)
        latest = torch.arange(seen - (self.capacity - self.sinks), seen, device=device)
        return torch.cat([torch.arange(self.sinks, device=device), latest])

    def _put(self, at: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
