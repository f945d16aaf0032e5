"""Compute attention and feed-forward of some rows in each layer, and serve held outputs.

A call of the wrapped model is given all tokens and a `BranchPlan`. Every layer's own forward runs
on all rows; its attention and feed-forward modules are given the rows that are computed, and return
those outputs among the ones held of the other rows. Of blocks that attend themselves, as LLaDA's,
the linear layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import (
    IDS,
    POSITIONS,
    VALID,
    HeldKV,
    HeldRun,
    Partial,
    check_arguments,
    check_sees_all,
    linear_weights,
)
from diffcache.attach.record import TOKEN_LAYERS
from diffcache.attach.tap import ServedTap, Tap, tap_children, untap_children
from diffcache.dllm.dllm_cache import BranchPlan, BranchRows
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.errors import AttachError
from diffcache.foreign import CACHES, is_compiled

HIDDEN, TABLES = "hidden_states", "position_embeddings"  # of attention

# Linear layers of LLaDA's blocks, which attend and feed forward themselves: the first are given the
# rows that are computed, and the outputs of the last are held.
ENTRIES = ("q_proj", "k_proj", "v_proj", "ff_proj", "up_proj")
EXITS = {"attn_out": "attention", "ff_out": "mlp"}


@dataclass(frozen=True)
class RowLayer:
    """Place and size of one layer."""

    path: str  # its path in the model
    attention: str  # name of its attention module; empty where the block itself attends
    mlp: str  # name of its feed-forward module; empty where that is the block itself
    weights: int  # weights of the linear layers of both
    value_weights: int  # weights of the projection to values


@dataclass(eq=False)
class HeldLayer(HeldKV):
    """Keys, values and outputs of one layer in a run."""

    attention: Tensor | None = None  # output of its attention, `[B, T, D]`
    mlp: Tensor | None = None  # output of its feed-forward, `[B, T, D]`
    products: int = 0  # multiply-adds of a row's attention

    def tensors(self) -> Iterator[Tensor]:
        """Yield the held tensors."""
        yield from (x for x in (*super().tensors(), self.attention, self.mlp) if x is not None)

    def renew_values(self, start: int, values: Tensor) -> None:
        """Write the values of rows from `start` on, `[B, T, D]`; their keys stay."""
        assert self.v is not None
        if self.v.is_inference() and not torch.is_inference_mode_enabled():  # torch lets none write
            self.v = self.v.clone()
        self.v[:, :, start:] = values.unflatten(-1, (self.v.shape[1], -1)).transpose(1, 2)

    def fork(self) -> HeldLayer:
        """Return a copy whose keys and values are its own."""
        assert self.k is not None
        assert self.v is not None
        return replace(self, k=self.k.clone(), v=self.v.clone())


@dataclass(eq=False)
class BranchTurn:
    """Plan of the layers in one call."""

    plan: BranchPlan  # plan of the call: the parts of each layer that are computed
    held: HeldRun[HeldLayer]  # keys, values and outputs of the run
    looks: bool  # whether layers after the first choose rows of the answer by their values
    rows: dict[int, RowPlan | None] = field(default_factory=dict)  # layer -> its rows; None where it computes none
    number: int = 0  # layer whose attention ran last
    attended: bool = False  # whether the door was met by that
    finished: set[int] = field(default_factory=set)  # layers whose feed-forward took part


class Branches(Partial):
    """Computes the rows of every layer that are due, and serves the others.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that chooses rows of the answer.
    """

    layer = HeldLayer

    def __init__(self, denoiser: Denoiser, ability: BranchRows) -> None:
        self.layers = layers_of(denoiser)
        super().__init__(denoiser, BranchPlan)
        self.ability = ability
        self.paths = [f"{layer.path}.{layer.attention}".rstrip(".") for layer in self.layers]
        self.numbers = {path: number for number, path in enumerate(self.paths)}
        self.others: tuple[None, ...] = (None,)  # that attention returns besides its output
        self.is_tried = False  # whether a row alone was computed of blocks that attend themselves
        self.parents = [denoiser.model.get_submodule(layer.path) for layer in self.layers]
        self.values = [getattr(parent, "v_proj", None) for parent in self.parents]
        for number, (parent, layer) in enumerate(zip(self.parents, self.layers, strict=True)):
            serve: dict[str, Callable[..., Any]] = {layer.attention: self.attention, layer.mlp: self.feed_forward}
            if not layer.attention:
                serve = {name: partial(self.linear, name) for name in (*ENTRIES, *EXITS)}
            taps: dict[str, Tap] = {
                name: ServedTap(parent.get_submodule(name), partial(method, number)) for name, method in serve.items()
            }
            tap_children(parent, denoiser, taps)

    def remove(self) -> None:
        """Give the model its attention function and modules back."""
        super().remove()
        for parent in self.parents:
            untap_children(parent)

    # a call ----------------------------------------------------------------------------------

    def is_whole(self, plan: BranchPlan) -> bool:
        """Return whether a plan computes all rows."""
        return plan.renews_prompt and plan.renews_answer

    def begin(self, call: Call, plan: BranchPlan, held: HeldRun[HeldLayer], given: dict[str, Any]) -> dict[str, Any]:
        """Note the turns of layers in this call, and give the model all rows."""
        for layer, parent in zip(self.layers, self.parents, strict=True):
            if is_compiled(parent):  # since it was wrapped
                check_plain(layer.path, parent)
        looks = not plan.renews_answer and self.ability.ratio > 0
        call.storage[self] = BranchTurn(plan, held, looks)
        if self.is_direct:  # each takes padding in another form, and we mask it
            given[VALID] = None
        if self.takes_positions:
            given[POSITIONS] = held.positions.expand(*held.shape)
        return given

    def close(self, call: Call, out: Any) -> Any:
        """Raise AttachError unless every layer took part, and once unless rows can be alone."""
        turn: BranchTurn | None = call.storage.get(self)
        if turn is not None and len(turn.finished) != len(self.layers):
            raise AttachError(
                f"{self.model}: {len(turn.finished)} of {len(self.layers)} layers took part in a "
                "call; call the model without what leaves layers out"
            )
        if turn is not None and not (self.is_tried or self.layers[0].attention):
            self._check_alone(call, turn, out[0])
            self.is_tried = True
        return out

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens all layers together computed and left out.

        Operations are those of the linear layers, values of the answer's rows among them, and of
        attention.
        """
        turn: BranchTurn | None = call.storage.get(self)
        if turn is None:
            return {}
        batch, width = turn.held.shape
        rows, computed, whole = 0, 0, 0
        looked = width - turn.plan.prompt if turn.looks else 0
        for number, layer in enumerate(self.layers):
            plan = turn.rows[number]
            count = 0 if plan is None else plan.count(width)
            each = layer.weights + turn.held.layers[number].products
            rows += count
            whole += width * each
            computed += count * each
            if number:
                computed += looked * layer.value_weights
        call.record.flops = float(2 * batch * computed), float(2 * batch * (whole - computed))
        return {TOKEN_LAYERS: (batch * rows, batch * (width * len(self.layers) - rows))}

    # the parts of a layer ----------------------------------------------------------------------

    def attention(self, number: int, module: Any, *args: Any, **given: Any) -> Any:
        """Return the output of a layer's attention, some rows of it computed."""
        turn: BranchTurn | None = self.turn()
        if turn is None:
            return module(*args, **given)
        held = turn.held.layers[number]
        if args or not isinstance(given.get(HIDDEN), Tensor):
            raise AttachError(f"{self.model}: {self.paths[number]} is not called with {HIDDEN}=...")
        rows = turn.rows[number] = self._rows(turn, number, module.v_proj, given[HIDDEN])
        if rows is None:
            return held.attention, *self.others
        is_first = held.k is None
        out = self._run(turn, number, module, given)
        held.attention = out if rows.rows is None else put(held.attention, rows, out)
        if is_first:
            self._check_row(turn, number, module, given)
        return held.attention, *self.others

    def feed_forward(self, number: int, module: Any, *args: Any, **given: Any) -> Any:
        """Return the output of a layer's feed-forward, some rows of it computed."""
        turn: BranchTurn | None = self.turn()
        if turn is None:
            return module(*args, **given)
        path = f"{self.layers[number].path}.{self.layers[number].mlp}"
        if number not in turn.rows or len(args) != 1 or given:
            raise AttachError(f"{self.model}: {path} is not called with one tensor, after the layer's attention")
        rows, held = turn.rows[number], turn.held.layers[number]
        turn.finished.add(number)
        if rows is None:
            return held.mlp
        fresh = module(*rows.take(args[0]))
        if not isinstance(fresh, Tensor):
            raise AttachError(
                f"{self.model}: {path} returns {type(fresh).__name__}, not a tensor of its rows "
                "(a mixture of experts may add its routing); use a policy of rows, such as "
                "DKVCache()"
            )
        if held.mlp is None:
            check_same(self.model, path, module(args[0][:, -1:]), fresh[:, -1:])
        held.mlp = fresh if rows.rows is None else put(held.mlp, rows, fresh)
        return held.mlp

    def linear(self, name: str, number: int, module: Any, x: Tensor) -> Tensor:
        """Return the output of a linear layer of a block that attends itself."""
        turn: BranchTurn | None = self.turn()
        if turn is None:
            return module(x)  # type: ignore[no-any-return]
        if name == ENTRIES[0]:
            turn.number = number
            if number not in turn.rows:
                turn.rows[number] = self._rows(turn, number, self.values[number], x)
        rows = turn.rows[number] or RowPlan(range(0))
        if name in ENTRIES:
            return module(*rows.take(x))  # type: ignore[no-any-return]
        held, kind = turn.held.layers[number], EXITS[name]
        out = put(getattr(held, kind), rows, module(x))
        setattr(held, kind, out)
        if kind == "mlp":
            turn.finished.add(number)
        return out

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Write keys and values of the rows; where they are some, attend to all that is held."""
        turn: BranchTurn | None = self.turn()
        if turn is None:
            return None
        number = self.numbers[site.path]
        held, rows = turn.held.layers[number], turn.rows[number]
        if rows is None:  # of a block that attends itself
            return call.q
        turn.attended = True
        held.products = 2 * turn.held.shape[1] * call.q.shape[2] * call.q.shape[3]
        if held.k is None:
            check_sees_all(self.model, site, call, None if self.is_direct else turn.held.mask)
        # rows that are chosen are found among the answer's, so that all are there
        held.write(range(call.k.shape[1]) if rows.rows is None else rows.rows, call.k, call.v)
        if rows.rows is None and not self.is_direct:
            return None  # the model's own
        mask = turn.held.mask
        mask = None if mask is None else mask.expand(-1, -1, call.q.shape[1], -1)
        return held.attend(call.q, call.scale, mask).contiguous()

    # rows ------------------------------------------------------------------------------------

    def _placed(self) -> Placed | None:
        """Return the rows of the layer at hand, None where these are all or there is no plan."""
        turn: BranchTurn | None = self.turn()
        rows = ALL if turn is None else turn.rows[turn.number] or RowPlan(range(0))
        return None if turn is None or rows.rows is None else (rows.rows, turn.held.shape[1])

    def _rows(self, turn: BranchTurn, number: int, v_proj: Any, x: Tensor) -> RowPlan | None:
        """Return the rows that a layer computes, None for none; renew values that it looks at."""
        plan, width = turn.plan, turn.held.shape[1]
        if number == 0 or (plan.renews_prompt and plan.renews_answer):
            return ALL
        if plan.renews_answer:
            return RowPlan(range(plan.prompt, width))
        if not turn.looks:
            return RowPlan(range(plan.prompt)) if plan.renews_prompt and plan.prompt else None
        held = turn.held.layers[number]
        new = v_proj(x[:, plan.prompt :])
        assert held.v is not None
        before = held.v[:, :, plan.prompt :].transpose(1, 2).flatten(2)  # all heads of a row
        rows = plan.prompt + self.ability.choose(new, before)
        held.renew_values(plan.prompt, new)
        if plan.renews_prompt:
            every = torch.arange(plan.prompt, device=rows.device).expand(len(rows), -1)
            rows = torch.cat([every, rows], dim=1)
        return RowPlan(rows) if rows.shape[1] else None

    def _run(self, turn: BranchTurn, number: int, module: Any, given: dict[str, Any]) -> Tensor:
        """Return the output of a layer's attention for its rows, `[B, n, D]`."""
        rows = turn.rows[number]
        assert rows is not None
        given = given if rows.rows is None else given | self._some(rows, given)
        for name in CACHES:  # a cache would take every row once more
            if given.get(name) is not None:
                given = given | {name: None}
        turn.attended = False
        out = module(**given)
        if not turn.attended or not isinstance(out, tuple):
            raise AttachError(
                f"{self.model}: {self.paths[number]} did not attend as wrapped; its attention "
                "function was replaced since: unwrap the model and wrap it again"
            )
        fresh: Tensor = out[0]
        self.others = (None,) * (len(out) - 1)
        return fresh

    def _some(self, rows: RowPlan, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of attention that have a row for every token, of some rows."""
        some: dict[str, Any] = {HIDDEN: given[HIDDEN]}
        if given.get(POSITIONS) is not None:
            some[POSITIONS] = given[POSITIONS]
        tables = given.get(TABLES)
        if isinstance(tables, Tensor):  # one complex table, as in Llama 4
            some[TABLES] = tables
        more = tables if isinstance(tables, (tuple, list)) else ()
        taken = rows.take(*some.values(), *more)
        some = dict(zip(some, taken, strict=False))
        return {**some, TABLES: tuple(taken[len(some) :])} if more else some

    # checks ------------------------------------------------------------------------------------

    def _check_row(self, turn: BranchTurn, number: int, module: Any, given: dict[str, Any]) -> None:
        """Raise AttachError unless the last row alone gives the same output; the host waits."""
        held, prompt, width = turn.held.layers[number], turn.plan.prompt, turn.held.shape[1]
        assert held.attention is not None
        kept = held.fork()
        turn.rows[number] = RowPlan(range(width - 1, width))
        held.renew_values(prompt, module.v_proj(given[HIDDEN][:, prompt:]))
        row = self._run(turn, number, module, given)
        check_same(self.model, self.paths[number], row, held.attention[:, -1:])
        turn.held.layers[number], turn.rows[number] = kept, ALL

    def _check_alone(self, call: Call, turn: BranchTurn, logits: Tensor) -> None:
        """Raise AttachError unless the last row alone gives the same output in every layer."""
        width, held = turn.held.shape[1], turn.held
        layers = [layer.fork() for layer in held.layers]
        trial = BranchTurn(turn.plan, replace(held, layers=layers), turn.looks)
        trial.rows |= dict.fromkeys(range(len(layers)), RowPlan(range(width - 1, width)))
        given = self.denoiser.named(call.args, call.kwargs)
        again = self.again(call, {self: trial}, given)[0]
        check_same(self.model, self.layers[0].path, again[:, -1:], logits[:, -1:])


def put(held: Tensor | None, rows: RowPlan, fresh: Tensor) -> Tensor:
    """Return held outputs, `[B, T, D]`, with fresh rows in them, as a tensor of its own."""
    if rows.rows is None or held is None:
        return fresh
    index = rows.rows
    if isinstance(index, range):
        index = rows.index(len(held), held.shape[1], held.device)
    return held.scatter(1, index[..., None].expand_as(fresh), fresh)


def layers_of(denoiser: Denoiser) -> list[RowLayer]:
    """Return the layers of a model; raise AttachError for one of other modules than `RowLayer` has, or compiled."""
    anatomy, found = denoiser.anatomy, []
    for path in (f"{entry.key}.{i}" for entry in anatomy.lists for i in range(entry.depth)):
        block: Any = denoiser.model.get_submodule(path)
        check_plain(path, *block.modules())
        if all(hasattr(block, name) for name in (*ENTRIES, *EXITS)):
            found.append(RowLayer(path, "", "", linear_weights(block), linear_weights(block.v_proj)))
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
        found.append(RowLayer(path, own["attention"], own["feed-forward"], weights, values))
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


def install(denoiser: Denoiser, ability: BranchRows) -> Branches:
    """Return the extension that holds outputs of attention and feed-forward.

    Raises AttachError if the model is none of transformers, takes no positions, or has layers of another kind.
    """
    check_arguments(denoiser, IDS, VALID)
    branches = Branches(denoiser, ability)
    if {site.path for site in branches.door.sites} != set(branches.paths):
        branches.remove()
        raise AttachError(
            f"{branches.model}: has {len(branches.layers)} layers and {len(branches.door.sites)} "
            "attentions; tokens must meet in the attention of its layers alone"
        )
    return branches
