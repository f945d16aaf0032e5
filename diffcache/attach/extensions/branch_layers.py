"""Finds the layers of a model whose attention and feed-forward outputs are held, and holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.row_inputs import Held
from diffcache.attach.extensions.rows import linear_weights
from diffcache.attach.tap import Tap
from diffcache.dllm.dllm_cache import BranchPlan
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.foreign import is_compiled
from diffcache.kv.layer import KVLayer

# Linear layers of LLaDA's blocks, which attend and feed forward themselves: the first are given the
# rows that are computed, and the outputs of the last are held.
ENTRIES = ("q_proj", "k_proj", "v_proj", "ff_proj", "up_proj")
EXITS = {"attn_out": "attention", "ff_out": "mlp"}


@dataclass(frozen=True)
class Layer:
    """Place and size of one layer.

    Attributes:
        path: Its path in the model.
        attention: Name of its attention module; empty where the block itself attends.
        mlp: Name of its feed-forward module; empty where that is the block itself.
        weights: Weights of the linear layers of both.
        value_weights: Weights of the projection to values.
    """

    path: str
    attention: str
    mlp: str
    weights: int
    value_weights: int


@dataclass(eq=False)
class HeldLayer:
    """Keys, values and outputs of one layer in a run.

    Attributes:
        kv: Keys and values, all positions long.
        attention: Output of its attention, `[B, T, D]`.
        mlp: Output of its feed-forward, `[B, T, D]`.
        products: Multiply-adds of a row's attention.
    """

    kv: KVLayer
    attention: Tensor | None = None
    mlp: Tensor | None = None
    products: int = 0

    def values(self, start: int) -> Tensor:
        """Return the values of rows from `start` on, all heads together, `[B, T, D]`."""
        return self.kv.read().v[:, :, start:].transpose(1, 2).flatten(2)

    def renew_values(self, start: int, values: Tensor) -> None:
        """Write the values of rows from `start` on, `[B, T, D]`; their keys stay."""
        keys = self.kv.read().k[:, :, start:]
        fresh = values.unflatten(-1, (keys.shape[1], -1)).transpose(1, 2)
        self.kv.overwrite(range(start, start + keys.shape[2]), keys, fresh)


@dataclass(eq=False)
class BranchTurn:
    """Plan of the layers in one call.

    Attributes:
        plan: Plan of the call: the parts of each layer that are computed.
        held: Keys, values and outputs of the run.
        rows: Layer -> its rows; None where it computes none.
        number: Layer whose attention ran last.
        attended: Whether the door was met by that.
        finished: Layers whose feed-forward took part.
    """

    plan: BranchPlan
    held: Held[HeldLayer]
    rows: dict[int, RowPlan | None] = field(default_factory=dict)
    number: int = 0
    attended: bool = False
    finished: set[int] = field(default_factory=set)


class BranchTap(Tap):
    """An attention or feed-forward module that computes some of its rows."""

    __slots__ = ("serve",)

    def __init__(self, module: nn.Module, serve: Callable[..., Any]) -> None:
        super().__init__(module)
        self.serve = serve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the layer's call of the module."""
        return self.serve(self.module, *args, **kwargs)


def put(held: Tensor | None, rows: RowPlan, fresh: Tensor) -> Tensor:
    """Return what is held, `[B, T, D]`, with fresh rows in it, as a tensor of its own."""
    if rows.rows is None or held is None:
        return fresh
    index = rows.index(len(held), held.shape[1], held.device)
    return held.scatter(1, index[..., None].expand_as(fresh), fresh)


def layers_of(denoiser: Denoiser) -> list[Layer]:
    """Return the layers of a model.

    Raises:
        AttachError: If one has not one attention with a `v_proj` and one feed-forward, or is
            compiled.
    """
    anatomy, found = denoiser.anatomy, []
    for path in (f"{entry.key}.{i}" for entry in anatomy.lists for i in range(entry.depth)):
        block: Any = denoiser.model.get_submodule(path)
        check_plain(path, *block.modules())
        if all(hasattr(block, name) for name in (*ENTRIES, *EXITS)):
            found.append(Layer(path, "", "", linear_weights(block), linear_weights(block.v_proj)))
            continue
        own = {site.kind: site.child for site in anatomy.modules if site.parent == path}
        attention: Any = getattr(block, own.get("attention", ""), None)
        mlp: Any = getattr(block, own.get("feed-forward", ""), None)
        if mlp is None or not hasattr(attention, "v_proj"):
            raise AttachError(
                f"{anatomy.model}: {path} is not a layer of an attention with a v_proj and a "
                "feed-forward, whose outputs could be held; use a policy of rows, such as "
                "DKVCache()"
            )
        weights = linear_weights(attention) + linear_weights(mlp)
        values = linear_weights(attention.v_proj)
        found.append(Layer(path, own["attention"], own["feed-forward"], weights, values))
    return found


def check_plain(path: str, *modules: nn.Module) -> None:
    """Raise AttachError if one of a layer's modules is compiled."""
    if any(map(is_compiled, modules)):
        raise AttachError(
            f"{path} is compiled, so its attention and feed-forward cannot be told apart; wrap a "
            "model whose layers are not compiled"
        )


def check_same(model: str, path: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise AttachError unless two outputs of a row agree to half of their digits."""
    bound = torch.finfo(theirs.dtype).eps ** 0.5 * theirs.abs().max()
    if not bool((ours - theirs).abs().max() <= bound):
        raise AttachError(
            f"{model}: {path} computes another output for a row alone than among all (it "
            "mixes rows, or does more than softmax attention of its queries, keys and values), "
            "so that some rows cannot be computed without the others"
        )
