"""Computes the rows that a row plan names, in language models that attend both ways.

A call of the wrapped model is given all tokens and a plan. The model runs on the planned rows
alone; its attention writes their keys and values over those held and lets their queries see all
that is held. A call without a plan is the model's own, and leaves what is held as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffcache.attach.attention import Door
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed, calls_sdpa, place_rows
from diffcache.attach.call import Call, current_call, in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.extensions.row_inputs import (
    IDS,
    PLAN,
    POSITIONS,
    VALID,
    Held,
    check_held,
    check_sees_all,
    first_position,
    given_tokens,
    mark_of,
    places_of,
)
from diffcache.attach.record import TOKEN_LAYERS
from diffcache.attach.run import Run
from diffcache.dllm.policy import FedRows
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex, checked

TRIAL = "trial"  # in a call's storage: the turn of rows that are computed alone to compare them
Extending = TypeVar("Extending", bound="Rows")


@dataclass(eq=False)
class Turn:
    """Plan of attention in one call.

    Attributes:
        held: Keys and values that it writes to and reads.
        index: Positions that are computed: a range where all sequences compute the same run, else
            int64 `[B, n]`.
        rows: Rows of each sequence.
        mask: Positions that are seen, bool `[B, 1, n, T]`; None for all.
        visits: Attentions that took part so far.
        tokens: Tokens that they computed, all together.
        products: Multiply-adds of those tokens' layers.
        most: Multiply-adds of the same layers, had they computed all tokens.
        differs: Whether rows that were computed alone had other keys than among all.
        slots: `index`, checked once for all layers.
    """

    held: Held[KVLayer]
    index: Tensor | range
    rows: int
    mask: Tensor | None
    visits: set[int] = field(default_factory=set)
    tokens: int = 0
    products: float = 0.0
    most: float = 0.0
    differs: bool = False
    slots: SlotIndex | range | None = None


class Rows(Extension):
    """Computes the planned rows of every call.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the policy asks for.
    """

    holds: type[Held[KVLayer]] = Held  # class of what is held of a run

    def __init__(self, denoiser: Denoiser, ability: FedRows) -> None:
        self.denoiser = denoiser
        self.model = denoiser.anatomy.model
        self.is_direct = calls_sdpa(denoiser.model)  # and leaves padding to us
        self.takes_positions = POSITIONS in denoiser.arguments
        self.first = first_position(denoiser.model)
        self.door = Door(denoiser.model, self)
        self.numbers = {site.path: number for number, site in enumerate(self.door.sites)}
        self.checked: set[int] = set()  # attentions that were compared with the model's own
        self.is_tried = False  # whether rows alone were compared with the same among all
        self.weights = sum(linear_weights(denoiser.model.get_submodule(entry.key))
                           for entry in denoiser.anatomy.lists)  # fmt: skip
        self._displace: Callable[[], None] | None = None
        if not self.takes_positions:
            try:
                self._displace = place_rows(denoiser.model, self.door.sites, self._placed)
            except BaseException:
                self.door.remove()
                raise

    def remove(self) -> None:
        """Give the model its attention function back."""
        if self._displace is not None:
            self._displace()
        self.door.remove()

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the keys and values of a run."""
        held: Held[KVLayer] | None = run.storage.get(self)
        for layer in [] if held is None else held.layers:
            yield from layer.tensors()

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the model the planned rows alone."""
        given = self.denoiser.named(call.args, call.kwargs)
        plan = given.pop(PLAN, None)
        if plan is None:
            return call
        if not isinstance(plan, RowPlan):
            raise AttachError(f"{PLAN}={plan!r}: must be a RowPlan of diffcache.dllm")
        ids, valid = given_tokens(self.model, given)
        held: Held[KVLayer] | None = call.run.storage.get(self)
        if plan.rows is None:
            held = self._start(call, held, ids, valid)
        else:
            check_held(self.model, held, ids, valid)
        assert held is not None
        plan = self.completed(plan, held)
        rows = plan.count(ids.shape[1])
        mask = _both(held.mask, plan.seen)
        mask = None if mask is None else mask.expand(-1, -1, rows, -1)
        turn = Turn(held, range(rows) if plan.rows is None else plan.rows, rows, mask)
        call.storage[self] = turn
        return replace(call, args=(), kwargs=self._cut(given, turn, ids))

    def _cut(self, given: dict[str, Any], turn: Turn, ids: Tensor) -> dict[str, Any]:
        """Return the arguments of a call as those of its rows; `ids` are all tokens."""
        held, plan = turn.held, RowPlan(turn.index)
        given = given | {IDS: plan.take(ids)}
        if self.takes_positions:
            given[POSITIONS] = plan.take(held.positions).expand(held.shape[0], -1)
        if self.is_direct:  # each takes padding in another form, and we mask it
            given[VALID] = None
        elif turn.rows < held.shape[1]:  # the model's own mask is that of all rows
            given[VALID] = turn.mask
        return given

    def completed(self, plan: RowPlan, held: Held[KVLayer]) -> RowPlan:
        """Return the plan with rows that are computed besides."""
        return plan

    def _start(
        self, call: Call, held: Held[KVLayer] | None, ids: Tensor, valid: Tensor | None
    ) -> Held[KVLayer]:
        """Return what a forward of all rows writes to."""
        shape = ids.shape[0], ids.shape[1]
        at, mask = places_of(ids, valid, self.first)
        if held is None or held.shape != shape:
            layers = [KVLayer(number) for number in range(len(self.numbers))]
            held = self.holds(shape, layers, at)
        held.positions, held.mask, held.mark = at, mask, mark_of(valid)
        if call.run.is_told or call.run.in_pipeline:  # else no call comes after this one
            call.run.storage[self] = held
        return held

    def close(self, call: Call, out: Any) -> Any:
        """Check that every attention took part, and once that rows can be computed alone.

        Raises:
            AttachError: If one did not, or they cannot.
        """
        turn: Turn | None = call.storage.get(self)
        if turn is not None and len(turn.visits) != len(self.numbers):
            raise AttachError(
                f"{self.model}: {len(turn.visits)} of {len(self.numbers)} attention modules took "
                "part in a call; either its attention was replaced since it was wrapped: unwrap it "
                "and wrap it again; or code of its own attends without torch's fused attention: "
                "load it with attn_implementation='sdpa'"
            )
        if turn is not None and not self.is_tried and call.run.storage.get(self) is turn.held:
            self._try_alone(call, turn.held)
            self.is_tried = True

    def _try_alone(self, call: Call, held: Held[KVLayer]) -> None:
        """Compute some rows of a call of all rows alone, to compare them; what is held stays.

        Raises:
            AttachError: If they come out otherwise.
        """
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

    @torch.no_grad()
    def run_alone(
        self, call: Call, held: Held[KVLayer], places: range, **storage: Any
    ) -> tuple[Turn, Any]:
        """Return what the model makes of some rows of a call of all rows; what is held stays.

        Args:
            call: The call of all rows.
            held: Keys and values that it wrote to.
            places: Positions of the rows.
            storage: More of the inner call's storage.
        """
        given = self.denoiser.named(call.args, call.kwargs)
        index = torch.tensor(places, device=given[IDS].device).expand(held.shape[0], -1)
        turn = Turn(held, index, len(places), held.mask)
        with in_call(replace(call, repeats=True, storage={TRIAL: turn, **storage})):
            return turn, self.denoiser.model.forward(**self._cut(given, turn, given[IDS]))

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens all layers together computed and left out.

        Operations are those of the blocks' linear layers and of attention.
        """
        turn: Turn | None = call.storage.get(self)
        if turn is None:
            return {}
        batch, width = turn.held.shape
        call.record.flops = 2 * turn.products, 2 * (turn.most - turn.products)
        return {TOKEN_LAYERS: (turn.tokens, batch * width * len(self.numbers) - turn.tokens)}

    # attention -------------------------------------------------------------------------------

    def turn(self, kind: object = None) -> Turn | None:
        """Return what attention does in the current call, None where it is the model's own.

        Args:
            kind: `TRIAL` for that of rows that are computed alone to compare them.
        """
        call = current_call()
        if call is None or call.owner is not self.denoiser:
            return None
        turn: Turn | None = call.storage.get(self if kind is None else kind)
        return turn

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Write the rows' keys and values, and attend to all that is held."""
        turn = self.turn()
        if turn is None:
            return self._compared(site, call)
        number = self.numbers[site.path]
        self._count(turn, number, call)
        layer = turn.held.layers[number]
        k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
        if layer.seen:
            turn.slots = checked(turn.index, turn.held.shape[1], turn.slots)
            layer.overwrite(turn.slots, k, v)
        else:
            check_sees_all(self.model, site, call, None if self.is_direct else turn.mask)
            layer.write(k, v)
        query = Query(call.q.transpose(1, 2), 0, call.scale, mask=turn.mask, causal=False)
        out = attend(query, layer.views()).transpose(1, 2)
        if number not in self.checked:
            if self.is_direct:
                call.mask = turn.mask
            self._check_output(site, out, call.plain())
            self.checked.add(number)
        return out.contiguous()

    def _compared(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend with rows that are computed alone, and compare their keys with those held."""
        turn = self.turn(TRIAL)
        if turn is None:
            return None
        number = self.numbers[site.path]
        layer = turn.held.layers[number]
        if number < 2:  # the second shows what the first makes of its rows
            before = RowPlan(turn.index).take(layer.read().k.transpose(1, 2))
            eps = max(torch.finfo(x).eps for x in (call.k.dtype, torch.float32))
            bound = eps**0.5 * before.abs().amax((2, 3))
            agrees = (call.k - before).abs().amax((2, 3)) <= bound
            turn.differs |= bool(agrees.double().mean() < 0.5)
        query = Query(call.q.transpose(1, 2), 0, call.scale, mask=turn.mask, causal=False)
        return attend(query, layer.views()).transpose(1, 2).contiguous()

    def _placed(self) -> Placed | None:
        """Return the rows of the call at hand, None where these are all or it has no plan."""
        turn = self.turn() or self.turn(TRIAL)
        if turn is None or (isinstance(turn.index, range) and turn.rows == turn.held.shape[1]):
            return None
        return turn.index, turn.held.shape[1]

    def _count(self, turn: Turn, number: int, call: AttentionCall) -> None:
        """Note that a layer computes the rows of a turn."""
        batch, width = turn.held.shape
        row = self.weights / len(self.numbers) + 2 * width * call.q.shape[2] * call.q.shape[3]
        turn.visits.add(number)
        turn.tokens += batch * turn.rows
        turn.products += batch * turn.rows * row
        turn.most += batch * width * row

    def _check_output(self, site: AttentionSite, ours: Tensor, theirs: Tensor) -> None:
        """Raise unless attention over what is held is the model's own, once a module.

        Raises:
            AttachError: If it is not, as with a bias that depends on positions.
        """
        largest = theirs.abs().max()
        bound = 64 * torch.finfo(theirs.dtype).eps * largest
        if bool((ours.reshape(theirs.shape) - theirs).abs().max() > bound):
            raise AttachError(
                f"{self.model}: {site.path} computes more than softmax attention of its queries, "
                "keys and values (a bias of positions, say), which cannot be done for some rows"
            )


def _both(mask: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """Return the positions that are no padding and seen, bool `[B, 1, 1, T]`; None for all."""
    if seen is None:
        return mask
    return seen[:, None, None] if mask is None else mask & seen[:, None, None]


def linear_weights(blocks: nn.Module) -> int:
    """Return the number of weights of all linear layers."""
    linear = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    return sum(module.weight.numel() for module in linear)


def check_arguments(denoiser: Denoiser, *names: str, planned: bool = True) -> None:
    """Raise unless a model's forward takes some arguments.

    Args:
        denoiser: The attachment to the model.
        names: Names of the arguments.
        planned: Whether every call brings a plan, which those of a pipeline do not.

    Raises:
        AttachError: If it does not, denoises a canvas after an encoder, or is called by a pipeline.
    """
    name, target = denoiser.anatomy.model, denoiser.handle.target()
    if "decoder_input_ids" in denoiser.arguments:
        raise AttachError(
            f"{name}: its own encoder cache holds the keys and values of finished text exactly; in "
            "the canvas every step conditions every token on its last logits, so that no row can "
            "be left out; use a feature method, such as method='taylorseer', or run it as it is"
        )
    missing = [arg for arg in names if arg not in denoiser.arguments]
    if missing:
        raise AttachError(
            f"{name}: takes no {missing[0]}; computing some rows of a sequence serves language "
            f"models of transformers, whose forward has {', '.join(names)}"
        )
    if planned and target is not denoiser.model:
        raise AttachError(
            f"{denoiser.handle.method!r} plans the rows of every call, which a "
            f"{type(target).__name__} does not ask for; use BlockCache(), or wrap its model and "
            "decode with DiffusionLM"
        )


def install(denoiser: Denoiser, ability: FedRows, kind: type[Rows] = Rows) -> Rows:
    """Return the extension for row plans.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the policy asks for.
        kind: Class of the extension.

    Raises:
        AttachError: If the model is none of transformers, takes no positions, or has blocks without
            attention, or a pipeline calls it.
    """
    check_arguments(denoiser, IDS, VALID)
    return check_sites(kind(denoiser, ability))


def check_sites(rows: Extending) -> Extending:
    """Return the extension, if the tokens of its model meet in self-attention alone.

    Raises:
        AttachError: If blocks have no attention, or attend to something else.
    """
    blocks = sum(entry.depth for entry in rows.denoiser.anatomy.lists)
    if any(site.kind != "self" for site in rows.door.sites) or len(rows.numbers) < blocks:
        rows.remove()
        raise AttachError(
            f"{rows.model}: has {blocks} blocks and {len(rows.numbers)} attentions, not all of "
            "them self-attention; tokens must meet in self-attention alone"
        )
    return rows
