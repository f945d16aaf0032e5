"""Compute the rows that a row plan names, in language models that attend both ways.

Plans that take notes (d2Cache) are told how sure the model is of each position, and how much
attention flows from it. Weights of attention are computed for it besides the model's own attention,
which does not hand them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed, Replaced
from diffcache.attach.attention_transformers import HELD
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import (
    IDS,
    POSITIONS,
    VALID,
    HeldKV,
    HeldRun,
    Partial,
    block_mask,
    check_arguments,
    check_sees_all,
    check_sites,
    linear_weights,
)
from diffcache.attach.record import TOKEN_LAYERS
from diffcache.attach.run import Run
from diffcache.dllm.d2_cache import CONFIDENCE, INFLUENCE, NotedPlan, Noting
from diffcache.dllm.elastic_cache import Watching
from diffcache.dllm.entropy_cache import EntropyPlan
from diffcache.dllm.policy import FedRows
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.sparse_dllm import SparsePlan
from diffcache.errors import AttachError
from diffcache.kv.slots import SlotIndex

_COMPILING = Lock()
TRIAL = "trial"  # in a call's storage: the turn of rows that are computed alone to compare them


@dataclass(eq=False)
class HeldRows(HeldRun[HeldKV]):
    """Keys and values of one run, and notes for plans that take them."""

    # probability of the most probable token when each position was last computed, `[B, T]`; None where no plan takes
    # notes
    confidence: Tensor | None = None
    # positions that each attention has not evicted, bool `[B, T]`, where a plan evicts
    kept: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class RowTurn:
    """Plan of attention in one call."""

    held: HeldRun[HeldKV]  # keys and values that it writes to and reads
    # positions that are computed: a range where all sequences compute the same run, else int64 `[B, n]`
    index: Tensor | range
    rows: int  # rows of each sequence
    mask: Tensor | None  # positions that are seen, bool `[B, 1, n, T]`; None for all
    plan: RowPlan = ALL  # the plan that was asked for
    # rows and channels of the queries of each attention that took part so far
    visits: dict[int, tuple[int, int]] = field(default_factory=dict)
    products: int = 0  # multiply-adds besides those of the layers
    differs: bool = False  # whether rows that were computed alone had other keys than among all
    noting: Noting | Watching | None = None  # inputs of the notes that are taken; None where none are
    notes: Any = None  # notes that a compiled forward took; None where none did


class HeldTensors(NamedTuple):
    """Keys and values that compiled attention writes to and reads, of one call."""

    at: Tensor  # positions of the rows, int64 `[n]`, or `[B, n]`
    mask: Tensor | None  # positions that are seen, bool `[B, 1, n, T]`; None for all
    # keys and values of every attention, by its `layer_idx`, `[B, H, T, D]` each
    layers: tuple[tuple[Tensor, Tensor], ...]
    noting: Noting | Watching | None = None  # inputs of the notes that are taken; None where none are

    @classmethod
    def of(cls, turn: RowTurn) -> HeldTensors:
        """Return what the forward of a call writes to and reads."""
        held, at = turn.held, turn.index
        if isinstance(at, range):
            at = torch.arange(at.start, at.stop, device=held.positions.device)
        elif at.shape[0] == 1:
            at = at[0]
        layers: Any = tuple([(layer.k, layer.v) for layer in held.layers])
        return cls(at, turn.mask, layers, turn.noting)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Write the rows' keys and values, and attend to all that is held, in a compiled graph.

        Queries are `[B, H, n, D]`, keys and values `[B, H or fewer, n, D]`; `mask` takes the place of the model's.
        """
        number, noting, mask = module.layer_idx, self.noting, self.mask
        layer, before = HeldKV(*self.layers[number]), None
        rows, scale = query.transpose(1, 2), query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(noting, Watching):
            earlier = noting.earlier(number)
            if earlier is not None:
                before = layer.weights(earlier, scale, None if mask is None else mask[:, :, :1])
            noting.put(noting.queries, number, rows)
        layer.write(self.at, key.transpose(1, 2), value.transpose(1, 2))
        if noting is None:
            return layer.attend(rows, scale, mask).contiguous()
        weights = layer.weights(rows, scale, mask)
        if isinstance(noting, Watching):
            noting.see(weights, before)
        else:
            noting.attention.append(weights.mean(1))
        values = self.layers[number][1]
        of_group = weights.to(values.dtype).reshape(*values.shape[:2], -1, values.shape[2])
        out: Tensor = of_group @ values
        return out.view(query.shape).transpose(1, 2).contiguous()


class Rows(Partial):
    """Computes the planned rows of every call.

    Args:
        denoiser: The attachment to the model.
        plans: Class of the plans.
    """

    holds: ClassVar[type[HeldRun[Any]]] = HeldRows

    def __init__(self, denoiser: Denoiser, plans: type[RowPlan] = RowPlan) -> None:
        super().__init__(denoiser, plans)
        self.channels: dict[int, int] = {}  # of queries, where attention is known as the model's
        self._compiled: Replaced | None = None  # the model's forward, once rows are compiled
        self.is_tried = False  # whether rows alone were compared with the same among all
        self.weights = sum(linear_weights(denoiser.model.get_submodule(entry.key)) for entry in denoiser.anatomy.lists)

    def remove(self) -> None:
        """Give the model its forward and its attention function back."""
        if self._compiled is not None:
            self._compiled.undo()
        super().remove()

    def tensors(self, run: Run) -> Iterable[Tensor]:
        """Return the keys, values and confidence of a run."""
        found, held = list(super().tensors(run)), run.storage.get(self)
        if isinstance(held, HeldRows):
            found += held.kept.values()
            found += [] if held.confidence is None else [held.confidence]
        return found

    # a call ----------------------------------------------------------------------------------

    def is_whole(self, plan: RowPlan) -> bool:
        """Return whether a plan computes all rows."""
        return plan.rows is None

    def begin(self, call: Call, plan: Any, held: HeldRun[HeldKV], given: dict[str, Any]) -> dict[str, Any]:
        """Note the attention turn, and give the model the planned rows alone."""
        rows, width = self.rows_of(plan, held), held.shape[1]
        if rows is None:
            rows = range(width)
        elif isinstance(rows, Tensor):
            SlotIndex.of(rows, width)  # checked once for all layers
        elif not (rows.step == 1 and 0 <= rows.start < rows.stop <= width):
            raise ValueError(f"rows={rows!r}: must be a run of the {width} positions, with step 1")
        count = len(rows) if isinstance(rows, range) else rows.shape[1]
        mask = self._seen(held, rows, plan.block, plan.seen)
        mask = None if mask is None else mask.expand(-1, -1, count, -1)
        turn = call.storage[self] = self.turn_of(plan, RowTurn(held, rows, count, mask, plan))
        some = self._cut(given, turn)
        if plan.compiled and plan.rows is None and self._compiled is None:
            self._compile(turn)  # from the next call on: torch has asked for this one's forward
        if plan.compiled and self._compiled is not None and self.may_compile(plan, held):
            turn.visits = {number: (count, size) for number, size in self.channels.items()}
            # strides are guarded, and each other one would be compiled anew
            some |= {IDS: some[IDS].contiguous(), HELD: HeldTensors.of(turn)}
        return some

    def may_compile(self, plan: Any, held: HeldRun[HeldKV]) -> bool:
        """Return whether a forward is of some rows, all is checked, and compiled code can write."""
        if plan.rows is None or len(self.channels) < len(self.numbers):
            return False
        return all(layer.k is not None and not layer.k.is_inference() for layer in held.layers)

    def _compile(self, turn: RowTurn) -> None:
        """Let the model's forward be compiled where it is given what is held, if it hands that on to its attention."""
        model = self.denoiser.model
        sites = [model.get_submodule(site.path) for site in self.door.sites]
        numbers = [getattr(site, "layer_idx", None) for site in sites]
        if not turn.plan.compiles or self.is_direct or numbers != list(range(len(numbers))):
            raise AttachError(
                f"{self.model}: compiled=True serves policies whose layers compute the planned "
                "rows, and models whose attention goes through transformers' interface, with the "
                "number of its layer; leave it out"
            )
        with _COMPILING:
            if self._compiled is None:  # no other thread was first
                # Code of its own: graphs are counted by code, and past eight no more are compiled.
                compiled: Any = torch.compile(FunctionType(_forward.__code__.replace(), globals()))
                whole = model.forward

                def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
                    if HELD not in kwargs:
                        return forward(*args, **kwargs)
                    out, self.turn().notes = compiled(whole, *args, **kwargs)
                    del kwargs[HELD]
                    return self.finish(out, partial(forward, *args, **kwargs))

                self._compiled = Replaced(model, "forward", run)

    def finish(self, out: Any, again: Callable[[], Any]) -> Any:
        """Return the output of a compiled forward; `again` runs the model on the same rows, not compiled."""
        return out

    def _seen(
        self, held: HeldRun[HeldKV], rows: Tensor | range, block: int | None, shown: Tensor | None = None
    ) -> Tensor | None:
        """Return the mask of rows, bool `[1 or B, 1, 1 or n, T]`; None where they see all."""
        mask = held.mask
        if shown is not None:
            mask = shown[:, None, None] if mask is None else mask & shown[:, None, None]
        if block is None:
            return mask
        is_last = isinstance(rows, range) and rows[0] >= (held.shape[1] - 1) // block * block
        if is_last and held.mask is None:  # without padding, columns are positions
            return mask
        positions = held.positions - self.first
        (own,) = RowPlan(rows).take(positions)
        return block_mask(own, positions, block, mask)

    def rows_of(self, plan: Any, held: Any) -> Tensor | range | None:
        """Return the rows that are computed: those of a plan, or more."""
        rows: Tensor | range | None = plan.rows
        return rows

    def turn_of(self, plan: Any, turn: RowTurn) -> RowTurn:
        """Return the attention turn of a call, with the notes it takes."""
        if isinstance(plan, NotedPlan):
            held = turn.held
            assert isinstance(held, HeldRows)
            index = plan.index(*held.shape, held.positions.device)
            valid = None if held.mask is None else held.mask[:, 0, 0]
            turn.noting = Noting(index, valid, held.confidence, [])
        return turn

    def _cut(self, given: dict[str, Any], turn: RowTurn) -> dict[str, Any]:
        """Return the arguments of a call of all tokens as those of its rows."""
        held, plan = turn.held, RowPlan(turn.index)
        ids, positions = plan.take(given[IDS], held.positions)
        some = given | {IDS: ids}
        if self.takes_positions:
            some[POSITIONS] = positions.expand(held.shape[0], -1)
        if turn.plan.block is not None:
            seen = turn.mask
            if turn.plan.masks_itself:
                seen = torch.ones_like(ids)
            elif seen is None:  # SDAR's code asks for a mask
                seen = ids.new_ones(1, 1, turn.rows, held.shape[1], dtype=torch.bool)
            some[VALID] = seen
        elif self.is_direct:  # each takes padding in another form, and we mask it
            some[VALID] = None
        elif turn.rows < held.shape[1]:  # the model's own mask is that of all rows
            some[VALID] = turn.mask
        return some

    def close(self, call: Call, out: Any) -> Any:
        """Raise AttachError unless every attention took part, and once unless rows can be computed alone."""
        turn: RowTurn | None = call.storage.get(self)
        if turn is None:
            return
        self._check_visits(turn)
        if not self.is_tried and call.run.storage.get(self) is turn.held:
            self._try_alone(call, turn.held)
            self.is_tried = True
        if isinstance(turn.noting, Noting):
            assert isinstance(turn.plan, NotedPlan)
            assert isinstance(turn.held, HeldRows)
            batch, width = turn.held.shape
            turn.products = sum(self.channels.values()) * turn.rows * batch * width
            sure, flow = turn.notes or turn.noting.notes(out.logits)
            turn.held.confidence = sure
            turn.plan.notes.update({CONFIDENCE: sure, INFLUENCE: flow})
        elif isinstance(turn.plan, EntropyPlan):
            batch, width = turn.held.shape
            turn.plan.note(turn.plan.index(batch, width, out.logits.device), width, out.logits)

    def _check_visits(self, turn: RowTurn) -> None:
        """Raise AttachError unless every attention took part."""
        if len(turn.visits) != len(self.numbers):
            raise AttachError(
                f"{self.model}: {len(turn.visits)} of {len(self.numbers)} attention modules took "
                "part in a call; either its attention was replaced since it was wrapped: unwrap it "
                "and wrap it again; or code of its own attends without torch's fused attention: "
                "load it with attn_implementation='sdpa'"
            )

    def _try_alone(self, call: Call, held: HeldRun[HeldKV]) -> None:
        """Raise AttachError unless some rows of a whole call are the same when computed alone; held rows stay."""
        for place in range(held.shape[1] - 1, 0, -2)[:3] or [0]:  # one may go to other experts
            turn, _ = self.run_alone(call, held, range(place, place + 1))
            if not turn.differs:
                break
        else:
            raise AttachError(
                f"{self.model}: rows computed alone come out otherwise than among all: its code "
                "counts rows where it has position_ids (as copies of Dream's for other caches do), "
                "or tokens meet outside of attention; run it as it is"
            )

    def run_alone(self, call: Call, held: HeldRun[HeldKV], places: range, **storage: Any) -> tuple[RowTurn, Any]:
        """Return the model's output for rows at some places of a whole call; what that holds stays."""
        given = self.denoiser.named(call.args, call.kwargs)
        index = torch.tensor(places, device=given[IDS].device).expand(held.shape[0], -1)
        plan = call.storage[self].plan
        turn = RowTurn(held, index, len(places), self._seen(held, index, plan.block, plan.seen), plan)
        return turn, self.again(call, {TRIAL: turn, **storage}, self._cut(given, turn))

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens all layers together computed and left out.

        Operations are those of the blocks' linear layers and of attention.
        """
        turn: RowTurn | None = call.storage.get(self)
        if turn is None:
            return {}
        batch, width = turn.held.shape
        tokens, products, most = 0, float(turn.products), 0.0
        for rows, channels in turn.visits.values():
            row = batch * (self.weights / len(self.numbers) + 2 * width * channels)
            tokens += batch * rows
            products += rows * row
            most += width * row
        call.record.flops = 2 * products, 2 * (most - products)
        return {TOKEN_LAYERS: (tokens, batch * width * len(self.numbers) - tokens)}

    # attention -------------------------------------------------------------------------------

    def attend(self, site: AttentionSite, call: AttentionCall, turn: RowTurn | None = None) -> Tensor | None:
        """Write the rows' keys and values, and attend to all that is held."""
        turn = turn or self.turn()
        if turn is None:
            return self._compared(site, call)
        number = self.numbers[site.path]
        layer = turn.held.layers[number]
        turn.visits[number] = turn.rows, call.q.shape[2] * call.q.shape[3]
        if layer.k is None:
            self._check_seen(site, call, turn)
        layer.write(turn.index, call.k, call.v)
        out = layer.attend(call.q, call.scale, self._mask(number, call, turn))
        if isinstance(turn.noting, Noting):
            turn.noting.attention.append(layer.weights(call.q, call.scale, turn.mask).mean(1))
        if number not in self.channels:
            if self.is_direct or turn.plan.masks_itself or turn.plan.seen is not None:
                call.mask = turn.mask
            self._check_output(site, out, call.plain())
            self.channels[number] = call.q.shape[2] * call.q.shape[3]
        return out.contiguous()

    def _mask(self, number: int, call: AttentionCall, turn: RowTurn) -> Tensor | None:
        """Return what the rows of an attention see, and let it evict for the steps to come."""
        held, plan = turn.held, turn.plan
        if not isinstance(plan, SparsePlan):
            return turn.mask
        assert isinstance(held, HeldRows)
        before, keys = held.kept.get(number), held.layers[number].k
        assert keys is not None
        valid = None if held.mask is None else held.mask[:, 0, 0]
        kept = plan.chosen(call.q, keys, valid, before)
        if kept is not None:
            held.kept[number] = kept
        return plan.shown(before, turn.mask, turn.rows)

    def _check_seen(self, site: AttentionSite, call: AttentionCall, turn: RowTurn) -> None:
        """Raise AttachError unless the model's own mask is that of the rows, all of them."""
        block = turn.plan.block
        expected = self._seen(turn.held, turn.index, block)  # whatever a plan hides besides
        if self.is_direct and block is None:
            expected = None
        if block is not None and turn.plan.masks_itself:  # and knows nothing of padding
            at = torch.arange(turn.held.shape[1], device=call.q.device)[None]
            expected = block_mask(at, at, block, None)
        check_sees_all(self.model, site, call, expected, block)

    def _compared(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend with rows that are computed alone, and compare their keys with those held."""
        turn: RowTurn | None = self.turn(TRIAL)
        if turn is None:
            return None
        number = self.numbers[site.path]
        layer = turn.held.layers[number]
        if number < 2:  # the second shows what the first makes of its rows
            assert layer.k is not None
            (before,) = RowPlan(turn.index).take(layer.k.transpose(1, 2))
            eps = max(torch.finfo(x).eps for x in (call.k.dtype, torch.float32))
            bound = eps**0.5 * before.abs().amax((2, 3))
            agrees = (call.k - before).abs().amax((2, 3)) <= bound
            turn.differs |= bool(agrees.double().mean() < 0.5)
        return layer.attend(call.q, call.scale, turn.mask).contiguous()

    def _placed(self) -> Placed | None:
        """Return the rows of the call at hand, None where these are all or it has no plan."""
        turn = self.turn() or self.turn(TRIAL)
        if turn is None or (isinstance(turn.index, range) and turn.rows == turn.held.shape[1]):
            return None
        return turn.index, turn.held.shape[1]

    def _check_output(self, site: AttentionSite, ours: Tensor, theirs: Tensor) -> None:
        """Raise AttachError unless attention over held rows equals the model's own, once a module.

        It does not with a bias that depends on positions.
        """
        largest = theirs.abs().max()
        bound = 64 * torch.finfo(theirs.dtype).eps * largest
        if bool((ours.reshape(theirs.shape) - theirs).abs().max() > bound):
            raise AttachError(
                f"{self.model}: {site.path} computes more than softmax attention of its queries, "
                "keys and values (a bias of positions, say), which cannot be done for some rows"
            )


def _forward(forward: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run a model's forward on some rows, and take notes of it, all in one graph."""
    held: HeldTensors = kwargs[HELD]
    if held.noting is None:
        return forward(*args, **kwargs), None
    noting = held.noting.begun()  # lists of the call would be results of the graph
    out = forward(*args, **kwargs | {HELD: held._replace(noting=noting)})
    return out, noting.notes(out.logits)


def install(denoiser: Denoiser, ability: FedRows) -> Rows:
    """Return the extension for row plans.

    Raises AttachError if the model is none of transformers, takes no positions, or has blocks
    without attention, or a pipeline calls it.
    """
    check_arguments(denoiser, IDS, VALID)
    return check_sites(Rows(denoiser, ability.plans))
