"""Pieces of text with their keys and values, and how new texts are laid out from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary import Rotary, Rotation
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens with their keys and values in every layer, as one forward made them.

    Attributes:
        ids: int64 [n].
        layers: Slots of each layer, [1, H, n, D], with the positions they were made at.
        rotated: True if the keys are rotated to these positions.
    """

    ids: Tensor
    layers: tuple[Slots, ...]
    rotated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(slots.k.nbytes + slots.v.nbytes for slots in self.layers)


def cut(store: KVStore, ids: Tensor, start: int = 0) -> Piece:
    """Return a copy of tokens that a store holds.

    Args:
        store: Store of one row, nothing of which is dropped.
        ids: int64 [n], the tokens at `start` and after it.
        start: Position of the first.

    Raises:
        ValueError: If the store does not hold them.
    """
    stop = start + len(ids)
    found = []
    for layer in store.layers:
        slots = layer.read()
        if len(slots.k) != 1 or layer.held != layer.seen or not 0 <= start <= stop <= layer.seen:
            raise ValueError(
                f"start={start}, ids={list(ids.shape)}: layer {layer.index} holds {layer.held} of "
                f"{layer.seen} tokens in {len(slots.k)} rows; cut one row of which all is held"
            )
        found.append(slots.narrow(start, stop).clone())
    return Piece(ids.clone(), tuple(found), store.layers[0].rotary is None)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return the tokens of pieces one after the other, each with the positions it was made at.

    Raises ValueError if there are none, or some are rotated and others are not.
    """
    if not pieces or len({piece.rotated for piece in pieces}) > 1:
        raise ValueError(f"pieces={len(pieces)}: give at least one, all rotated or all not")
    layers = []
    for parts in zip(*(piece.layers for piece in pieces), strict=True):
        meta = {"pos": torch.cat([part.rpos.to(torch.int32) for part in parts], -1)}
        k, v = torch.cat([part.k for part in parts], 2), torch.cat([part.v for part in parts], 2)
        layers.append(Slots(k, v, meta))
    return Piece(torch.cat([piece.ids for piece in pieces]), tuple(layers), pieces[0].rotated)


def lay_out(store: KVStore, piece: Piece, source: Tensor, rotary: Sequence[Rotation] | None = None) -> None:
    """Fill an empty store with tokens of a piece in a new order, keys turned to new positions.

    A store that holds keys before rotation takes them exactly, wherever they go. In one that holds
    rotated keys they are turned by the difference of the positions.

    Args:
        store: Empty store that the tokens go into.
        piece: Piece that the tokens come from.
        source: int64 [T], number in the piece of each new token; -1 where the piece has none,
            which leaves zeros that are to be computed.
        rotary: Rotation of each layer, where the store or the piece holds rotated keys that move:
            the `rotary` of the layers of a cache with `space="pre"`.

    Raises:
        ValueError: If the store is not empty, or keys move and `rotary` is missing.
    """
    if store.seen:
        raise ValueError(f"the store has seen {store.seen} tokens: reset it, or take a new one")
    turns = turns_of(store, piece, source, rotary)
    pos = torch.arange(len(source), dtype=torch.int32)
    there = source >= 0
    store.begin(len(source))
    for layer, slots, turn in zip(store.layers, piece.layers, turns, strict=True):
        index = source.to(slots.k.device).clamp_min(0).view(1, 1, -1)
        chosen = slots.gather(index)
        k = placed(layer, chosen, pos.to(slots.k.device), piece.rotated, turn)
        empty = ~there.to(slots.k.device).view(1, 1, -1, 1)
        layer.write(k.masked_fill(empty, 0), chosen.v.masked_fill(empty, 0))


def turns_of(store: KVStore, piece: Piece, source: Tensor, rotary: Sequence[Rotation] | None) -> list[Rotation | None]:
    """Return how the keys of each layer are turned, None where they need not be, given what `lay_out` is.

    Raises:
        ValueError: If keys move and `rotary` is missing, its frequencies change or it is of several axes, or the
            piece is of another model.
    """
    if len(piece.layers) != len(store.layers):
        raise ValueError(
            f"piece has {len(piece.layers)} layers, the store {len(store.layers)}: use a piece "
            "that was cut from a cache of this model"
        )
    turns = [layer.rotary or (rotary[layer.index] if rotary is not None else None) for layer in store.layers]
    at = source.cpu()
    known = piece.layers[0].rpos[0, 0].cpu()[at.clamp_min(0)]
    moves = piece.rotated and bool((known != torch.arange(len(at)))[at >= 0].any())
    if None in turns and (moves or not piece.rotated):
        raise ValueError(
            "rotary=None: keys move and are held rotated; give the rotation of each layer, or hold "
            "them before rotation (space='pre')"
        )
    for layer, turn in zip(store.layers, turns, strict=True):
        turned = moves or piece.rotated != (layer.rotary is None)
        if turn is not None and turn.varies and turned:
            raise ValueError(
                "this model's frequencies change with the length, so that rotated keys are not turned: hold "
                "those of pieces and of the store before rotation (space='pre')"
            )
        if (turned or not piece.rotated) and not isinstance(turn, Rotary):
            raise ValueError(
                "keys are rotated by positions on several axes, which pieces do not have: only a beginning that stays "
                "where it was is laid out, its keys held as they are (space='post')"
            )
    return turns


def placed(layer: KVLayer, slots: Slots, pos: Tensor, rotated: bool, turn: Rotation | None) -> Tensor:
    """Return keys of a piece at new positions, as the layer holds them."""
    if layer.rotary is not None:
        return layer.rotary.unrotate(slots.k, slots.rpos) if rotated else slots.k
    if turn is None:  # nothing moves
        return slots.k
    if not rotated:
        return turn.rotate(slots.k, pos)
    delta = pos - slots.rpos
    if slots.rpos.shape[1] == 1 and not bool(delta.any()):
        return slots.k
    return turn.shift(slots.k, delta)
