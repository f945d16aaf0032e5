"""Computes the rows that a row plan names, in language models that attend both ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import (
    IDS,
    POSITIONS,
    VALID,
    Held,
    HeldKV,
    Partial,
    check_arguments,
    check_sees_all,
    check_sites,
    linear_weights,
)
from diffcache.attach.record import TOKEN_LAYERS
from diffcache.dllm.policy import FedRows
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.kv.slots import SlotIndex

TRIAL = "trial"  # in a call's storage: the turn of rows that are computed alone to compare them


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
    """

    held: Held[HeldKV]
    index: Tensor | range
    rows: int
    mask: Tensor | None
    visits: set[int] = field(default_factory=set)
    tokens: int = 0
    products: float = 0.0
    most: float = 0.0
    differs: bool = False


class Rows(Partial):
    """Computes the planned rows of every call.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the policy asks for.
    """

    plans: ClassVar[type[RowPlan]] = RowPlan
    wanted = "a RowPlan of diffcache.dllm"

    def __init__(self, denoiser: Denoiser, ability: FedRows) -> None:
        super().__init__(denoiser)
        self.checked: set[int] = set()  # attentions that were compared with the model's own
        self.is_tried = False  # whether rows alone were compared with the same among all
        self.weights = sum(
            linear_weights(denoiser.model.get_submodule(entry.key))
            for entry in denoiser.anatomy.lists
        )

    # a call ----------------------------------------------------------------------------------

    def is_whole(self, plan: RowPlan) -> bool:
        """Return whether a plan computes all rows."""
        return plan.rows is None

    def begin(
        self, call: Call, plan: Any, held: Held[HeldKV], given: dict[str, Any]
    ) -> dict[str, Any]:
        """Note what attention does, and give the model the planned rows alone."""
        rows, width, mask = self.rows_of(plan, held), held.shape[1], held.mask
        if rows is None:
            rows = range(width)
        elif isinstance(rows, Tensor):
            SlotIndex.of(rows, width)  # checked once for all layers
        elif not (rows.step == 1 and 0 <= rows.start < rows.stop <= width):
            raise ValueError(f"rows={rows!r}: must be a run of the {width} positions, with step 1")
        count = len(rows) if isinstance(rows, range) else rows.shape[1]
        if plan.seen is not None:
            seen = plan.seen[:, None, None]
            mask = seen if mask is None else mask & seen
        mask = None if mask is None else mask.expand(-1, -1, count, -1)
        turn = call.storage[self] = self.turn_of(plan, Turn(held, rows, count, mask))
        return self._cut(given, turn)

    def rows_of(self, plan: Any, held: Any) -> Tensor | range | None:
        """Return the rows that are computed: those of a plan, or more."""
        rows: Tensor | range | None = plan.rows
        return rows

    def turn_of(self, plan: Any, turn: Turn) -> Turn:
        """Return what attention does in a call, with what is noted besides."""
        return turn

    def _cut(self, given: dict[str, Any], turn: Turn) -> dict[str, Any]:
        """Return the arguments of a call of all tokens as those of its rows."""
        held, plan = turn.held, RowPlan(turn.index)
        ids, positions = plan.take(given[IDS], held.positions)
        some = given | {IDS: ids}
        if self.takes_positions:
            some[POSITIONS] = positions.expand(held.shape[0], -1)
        if self.is_direct:  # each takes padding in another form, and we mask it
            some[VALID] = None
        elif turn.rows < held.shape[1]:  # the model's own mask is that of all rows
            some[VALID] = turn.mask
        return some

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

    def _try_alone(self, call: Call, held: Held[HeldKV]) -> None:
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

    def run_alone(
        self, call: Call, held: Held[HeldKV], places: range, **storage: Any
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
        return turn, self.again(call, {TRIAL: turn, **storage}, self._cut(given, turn))

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

    def attend(
        self, site: AttentionSite, call: AttentionCall, turn: Turn | None = None
    ) -> Tensor | None:
        """Write the rows' keys and values, and attend to all that is held."""
        turn = turn or self.turn()
        if turn is None:
            return self._compared(site, call)
        number = self.numbers[site.path]
        layer = turn.held.layers[number]
        self.count(turn, number, call)
        if layer.k is None:
            check_sees_all(self.model, site, call, None if self.is_direct else turn.mask)
        layer.write(turn.index, call.k, call.v)
        out = layer.attend(call.q, call.scale, turn.mask)
        if number not in self.checked:
            if self.is_direct:
                call.mask = turn.mask
            self._check_output(site, out, call.plain())
            self.checked.add(number)
        return out.contiguous()

    def _compared(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend with rows that are computed alone, and compare their keys with those held."""
        turn: Turn | None = self.turn(TRIAL)
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

    def count(self, turn: Turn, number: int, call: AttentionCall) -> None:
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
