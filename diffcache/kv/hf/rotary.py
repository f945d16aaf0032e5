"""Read the rotary embedding of a layer, prove it on the layer itself, and note its positions."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.hf.probe import LayerProbe, refusal
from diffcache.kv.rotary import Rotary, Rotation
from diffcache.kv.rotary_nd import RotaryND

_NEAR = (0, 1, 2, 5, 11, 29)
_FAR = 100_003  # times these, slow pairs turn too, and frequencies that vary have varied


@dataclass(frozen=True)
class PairLayout:
    """Pairs of channels of a key, the way they turn, and their axes.

    Args:
        interleaved: Pairs are channels `(2i, 2i + 1)` instead of `(i, i + P)`.
        start: First of the turned channels.
        sign: 1, or -1 where keys turn backwards.
        turns: False where the layer has no positions at all.
        axes: The axis of each pair, empty with one axis.
        count: Number of axes.
    """

    interleaved: bool = False
    start: int = 0
    sign: int = 1
    turns: bool = True
    axes: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True, eq=False)
class RotaryReader:
    """Read the frequencies of a rotary embedding as they are now.

    Args:
        embedding: The module that makes cos and sin, with `inv_freq` and `attention_scaling`.
        layout: Pairs of channels that turn, and their axes, as found on the layer.
        prefix: Beginning of the names of its tables, such as `"full_attention_"`.
        varies: Frequencies change with the length (dynamic NTK, LongRoPE): read them again in every
            forward, after the model has made its cos and sin.
    """

    embedding: Any
    layout: PairLayout
    prefix: str
    varies: bool

    def read(self) -> Rotation:
        """Return the rotation with the frequencies of now, which later changes do not reach."""
        freq = getattr(self.embedding, f"{self.prefix}inv_freq").detach().float()
        scale = float(getattr(self.embedding, f"{self.prefix}attention_scaling", 1.0))
        found = self.layout
        if not found.turns:
            return Rotary(freq[:0])
        shape = (freq * found.sign, scale, found.interleaved, found.start, self.varies)
        if found.axes:
            return RotaryND(*shape, axes=found.axes, count=found.count)
        return Rotary(*shape)


def rotary_of(attention: Any, embedding: Any, layer_type: str | None = None) -> RotaryReader:
    """Find out how a layer turns its keys.

    Frequencies and scale are read from the embedding. Which channels are pairs, which are turned
    at all, and along which axis is found on the layer itself, not in a table of models: it is
    given the same tokens at several positions, and the keys that it hands to a cache are compared
    with what each layout would make. Weights are used as they are; no attention is computed, and
    the embedding is copied first, as calling it may change its frequencies.

    Args:
        attention: Self-attention module of transformers: its forward takes `position_embeddings`
            and a cache, and calls `update(keys, values, ...)` of it.
        embedding: Rotary embedding module of the model, called as `(x, position_ids)`, or with the
            layer type as the third argument where it has a table for each.
        layer_type: Type of the layer, such as `"sliding_attention"`; of use only where the
            embedding has a table for each type.

    Raises:
        AttachError: If there are no frequencies to read, or keys turn in no layout known here.
    """
    prefix = _prefix(embedding, layer_type)
    kind = getattr(embedding, "rope_type", "default")
    kind = str(kind.get(layer_type) if isinstance(kind, dict) else kind)
    varies = "dynamic" in kind or "longrope" in kind
    trial = RotaryReader(copy.deepcopy(embedding), PairLayout(), prefix, varies)
    extra = (layer_type,) if prefix else ()
    probe = LayerProbe(attention, trial.embedding, trial.read().scale, extra)
    with torch.no_grad():
        layout = _layout(probe, trial)
    return RotaryReader(embedding, layout, prefix, varies)


def _prefix(embedding: Any, layer_type: str | None) -> str:
    """Return what comes before `inv_freq` in the names of the tables of this layer."""
    for prefix in ([f"{layer_type}_"] if layer_type else []) + [""]:
        table = getattr(embedding, f"{prefix}inv_freq", None)
        if isinstance(table, Tensor):
            if table.is_meta:
                raise refusal(embedding, "its frequencies are on the meta device, load the weights")
            return prefix
    end = "_inv_freq"
    names = [name for name, _ in embedding.named_buffers(recurse=False) if name.endswith(end)]
    types = [name.removesuffix(end) for name in names if not name.endswith("_original" + end)]
    if types:
        raise refusal(embedding, f"layer_type is {layer_type!r}, give one of {types}")
    raise refusal(embedding, "it has no inv_freq to read")


def _layout(probe: LayerProbe, trial: RotaryReader) -> PairLayout:
    """Return the layout that makes the keys that the layer makes."""
    count = probe.axes()
    near = torch.tensor(_NEAR).expand(count, -1)
    keys = probe.keys(near)
    if probe.near(keys, keys[:, :, :1]):
        return PairLayout(turns=False)
    channels = trial.read().channels
    spare = keys.shape[-1] - channels
    tried = [
        PairLayout(interleaved, start, sign)
        for start in sorted({0, spare})
        for interleaved in (False, True)
        for sign in (1, -1)
        if spare >= 0
    ]
    for layout in tried:
        if _makes(probe, replace(trial, layout=layout), keys, near[0]):
            return _proven(probe, replace(trial, layout=layout), count)
    raise refusal(
        probe.attention,
        f"its keys of {keys.shape[-1]} channels, with {channels // 2} frequencies, turn neither in "
        "halves nor in adjacent pairs, neither in the first channels nor in the last",
    )


def _proven(probe: LayerProbe, trial: RotaryReader, count: int) -> PairLayout:
    """Return the layout with the axis of each pair, if it holds far away too."""
    far = torch.tensor(_NEAR).expand(count, -1) * _FAR
    pos = far[0]
    why = f"its keys turn otherwise at positions above {_FAR}"
    if count > 1:
        why = f"its pairs of channels do not each turn along one of {count} axes"
        trial = replace(trial, layout=_with_axes(probe, trial, count))
        ends = [far[axis, 1:].roll(axis) for axis in range(count)]
        far = torch.cat((far[:, :1], torch.stack(ends)), dim=1)
        pos = far.T
    if not _makes(probe, trial, probe.keys(far), pos):
        raise refusal(probe.attention, why)
    return trial.layout


def _with_axes(probe: LayerProbe, trial: RotaryReader, count: int) -> PairLayout:
    """Return the layout with the axis of each pair, found by moving along one axis at a time."""
    now = trial.read()
    slow = float(now.inv_freq[now.inv_freq != 0].abs().min())
    moved = []
    for axis in range(count):
        ids = torch.zeros(count, 3, dtype=torch.long)
        # The slowest pair turns by a radian; twice, as another may come round to where it was.
        ids[axis, 1:] = torch.tensor([1 / slow, 1.7 / slow]).long()
        keys = probe.keys(ids)
        apart = (keys - keys[:, :, :1]).abs().amax((0, 1, 2))
        apart = apart[now.start : now.start + now.channels]
        moved.append((apart.view(-1, 2) if now.interleaved else apart.view(2, -1).T).amax(1))
    axes = tuple(torch.stack(moved).argmax(0).tolist())
    return replace(trial.layout, axes=axes, count=count)


def _makes(probe: LayerProbe, trial: RotaryReader, keys: Tensor, pos: Tensor) -> bool:
    """Say whether the rotation makes all keys of those in slot 0, which are at position 0."""
    rotation = trial.read()  # now: making the keys may have changed the frequencies
    plain = rotation.unrotate(keys[:, :, :1], pos[:1]).expand_as(keys)
    return probe.near(rotation.rotate(plain, pos), keys)


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
