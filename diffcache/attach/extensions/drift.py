"""Computes planned rows, and every row from a layer on where attention drifted (Elastic-Cache).

Every block's input is held at full length, beside the keys and values. From the block on at which a
sequence widens, blocks are given that input instead of the rows, with the arguments that the model
gave them at the last forward of all rows: its own loop hands on those of the rows. Sequences of the
batch that do not widen go along at full length, and nothing but their planned rows is written, so
that each is what it would be alone. The last block hands on the planned rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call, current_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.drift_state import HeldInputs, Spots, Way, batch_of, planned_rows
from diffcache.attach.extensions.row_inputs import PLAN, Held
from diffcache.attach.extensions.rows import Rows, Turn
from diffcache.attach.extensions.rows import install as install_rows
from diffcache.attach.run import Run
from diffcache.attach.tap import ITEMS, Tap, tap_list, untap_list
from diffcache.attach.tree import leaves
from diffcache.dllm.elastic_cache import WatchedPlan, WideningRows, likeness, most_attended
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.foreign import children_of
from diffcache.kv.attend import Query, logits
from diffcache.kv.layer import KVLayer

WAY = "way"  # in a call's storage


class Seam(Tap):
    """Stands for a block: gives it the rows or all tokens."""

    __slots__ = ("number", "owner")

    def __init__(self, module: nn.Module, owner: Drift, number: int) -> None:
        super().__init__(module)
        self.owner, self.number = owner, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        return self.owner.run_block(self, args, kwargs)


class Cut(Tap):
    """Stands for the last block: hands on the first row alone."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        out = self.module(*args, **kwargs)
        return out[:, :1] if isinstance(out, Tensor) else (out[0][:, :1], *out[1:])


class Drift(Rows):
    """Computes the planned rows, and all of them from the layer on after which attention drifted.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the policy asks for.
    """

    holds = HeldInputs

    def __init__(self, denoiser: Denoiser, ability: WideningRows) -> None:
        super().__init__(denoiser, ability)
        self.ability = ability
        self.compared: set[int] = set()  # blocks whose arguments were
        self.lists: dict[str, Any] = {}
        for entry in denoiser.anatomy.lists:
            self.lists[entry.key] = denoiser.model.get_submodule(entry.key)
            tap_list(self.lists[entry.key], denoiser, entry.key)

    def remove(self) -> None:
        """Give the model its attention function and its lists of blocks back."""
        super().remove()
        for blocks in self.lists.values():
            untap_list(blocks)

    def tensors(self, run: Run) -> Any:
        """Yield keys, values, inputs, queries and arguments of a run."""
        yield from super().tensors(run)
        held: HeldInputs | None = run.storage.get(self)
        if held is not None:
            yield from held.inputs.values()
            yield from held.queries.values()
            yield from {id(leaf): leaf for leaf in leaves(held.arguments)}.values()

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the model the planned rows and the tracked tokens, and its blocks stand-ins."""
        plan = self.denoiser.named(call.args, call.kwargs).get(PLAN)
        call = super().open(call)
        turn: Turn | None = call.storage.get(self)
        if plan is None or turn is None:
            return call
        held = turn.held
        assert isinstance(held, HeldInputs)
        is_whole = isinstance(turn.index, range)
        planned = RowPlan(turn.index).mask(*held.shape, plan.window.device)
        call.storage[WAY] = Way(
            held, turn, plan, planned,
            tracked=None if held.tracked is None or is_whole else Spots.of(held.tracked),
            window=Spots.of(plan.window),
            starts=[0 if is_whole else len(self.numbers)] * len(planned),
            fed=planned, is_wide=is_whole, found=torch.zeros_like(planned),
        )  # fmt: skip
        call.storage[ITEMS], number = {}, 0
        for key, blocks in self.lists.items():
            modules = list(children_of(blocks).values())
            call.storage[ITEMS][key] = [
                Seam(module, self, number + place) for place, module in enumerate(modules)
            ]
            number += len(modules)
        return call

    def completed(self, plan: RowPlan, held: Held[KVLayer]) -> RowPlan:
        """Return the plan with the tracked tokens.

        Raises:
            AttachError: If the plan does not say what to track.
        """
        if not isinstance(plan, WatchedPlan):
            raise AttachError(
                f"{PLAN}={plan!r}: must be the plan of an ElasticCache, which says what to track"
            )
        if plan.rows is None:
            return plan
        assert isinstance(held, HeldInputs)
        assert held.tracked is not None
        chosen = plan.mask(*held.shape, held.tracked.device) | held.tracked
        return RowPlan.of(chosen, plan.multiple)

    def close(self, call: Call, out: Any) -> Any:
        """Check that every block took part, and note what is tracked from now on.

        Raises:
            AttachError: If one did not.
        """
        super().close(call, out)
        way: Way | None = call.storage.get(WAY)
        if way is None:
            return
        if len(way.blocks) != len(self.numbers):
            raise AttachError(
                f"{self.model}: {len(way.blocks)} of {len(self.numbers)} blocks were taken from "
                "its lists in a call, so that it cannot be widened; use another policy"
            )
        way.held.tracked, way.held.starts = way.found, way.starts

    def _try_alone(self, call: Call, held: Held[KVLayer]) -> None:
        """Compute some rows alone, and let the last block hand on fewer than the first was given.

        Raises:
            AttachError: If they come out otherwise, or the model counts on as many.
        """
        super()._try_alone(call, held)
        key, blocks = list(self.lists.items())[-1]
        *others, last = children_of(blocks).values()
        failure = None
        try:
            _, out = self.run_alone(call, held, range(2), **{ITEMS: {key: [*others, Cut(last)]}})
            if out[0].shape[1] == 1:
                return
        except RuntimeError as error:  # of a shape
            failure = error
        raise AttachError(
            f"{self.model}: counts on as many rows after its last block as it gave the first, so "
            "that it cannot be widened; use another policy, such as DKVCache()"
        ) from failure

    # blocks ----------------------------------------------------------------------------------

    def run_block(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block on the rows, or on all tokens."""
        call, number = current_call(), seam.number
        assert call is not None
        way: Way = call.storage[WAY]
        held = way.held
        if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            raise AttachError(
                f"{self.model}: block {number} is not given its tokens [B, T, C] as the first "
                "argument, so that it cannot be widened; use another policy"
            )
        hidden, *rest = args
        held.inputs[number] = way.merged(held.inputs.get(number), hidden)
        if way.tracked is None:
            held.arguments[number] = (rest, kwargs)
        elif way.widen(number):
            hidden = held.inputs[number].clone()
            rest, kwargs = held.arguments[number]
        else:
            self._compare(number, (rest, kwargs), held.arguments[number], way.turn.index)
        way.blocks.add(number)
        out = seam.module(hidden, *rest, **kwargs)
        return out if number + 1 < len(self.numbers) else planned_rows(way, out)

    def _compare(self, number: int, given: Any, whole: Any, index: Any) -> None:
        """Raise unless a block was given of the rows what it was given of all, once a block.

        Raises:
            AttachError: If arguments depend on the tokens, so that those kept are out of date.
        """
        if number in self.compared:
            return
        self.compared.add(number)
        for some, every in zip(_by_token(given), _by_token(whole), strict=True):
            every = every.expand(len(index), -1, -1)
            if not torch.equal(some.expand(len(index), -1, -1), every[batch_of(index), index]):
                raise AttachError(
                    f"{self.model}: block {number} is given more than positions of its tokens "
                    "(what depends on the tokens themselves), so that it cannot be widened; use "
                    "another policy"
                )

    # attention -------------------------------------------------------------------------------

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend as `Rows` does, compare the tracked tokens' attention, and track anew."""
        around = current_call()
        if self.turn() is None or around is None:
            return super().attend(site, call)
        way: Way = around.storage[WAY]
        held, number = way.held, self.numbers[site.path]
        layer = held.layers[number]
        blocks = len(self.numbers)
        tests = blocks in way.starts and number + 1 < blocks  # no block follows the last
        tests = tests and self.ability.gamma > 0  # a cosine of weights is never negative
        before = self._weights(way, way.tracked, number, call) if tests else None
        if way.is_wide and layer.seen:  # rows that are not computed stay as they are to the bit
            kept = layer.read()
            call.k = way.merged(kept.k.transpose(1, 2), call.k)
            call.v = way.merged(kept.v.transpose(1, 2), call.v)
        out = super().attend(site, call)
        held.queries[number] = way.merged(held.queries.get(number), call.q)
        if before is not None:
            self._test(way, number, before, self._weights(way, way.tracked, number, call))
        weights = self._weights(way, way.window, number, call)
        way.found |= most_attended(weights, way.window.real, way.plan.known, self.ability.track)
        return out

    def _weights(self, way: Way, spots: Spots | None, number: int, call: AttentionCall) -> Tensor:
        """Return the attention of some positions to all, by what is held, `[B, H, n, T]`."""
        held = way.held
        assert spots is not None
        q = held.queries[number][batch_of(spots.places), spots.places].transpose(1, 2)
        mask = None if held.mask is None else held.mask.expand(-1, -1, q.shape[2], -1)
        way.turn.products += q.numel() * held.shape[1]
        query = Query(q, 0, call.scale, mask=mask, causal=False)
        return logits(query, held.layers[number].read()).softmax(-1).flatten(1, 2)

    def _test(self, way: Way, number: int, before: Tensor, after: Tensor) -> None:
        """Let sequences whose attention drifted widen at the next block; the host waits."""
        assert way.tracked is not None
        mask, blocks = way.held.mask, len(self.numbers)
        alike = likeness(
            before, after, way.tracked.real, None if mask is None else mask[:, 0, 0],
            self.ability.similarity,
        )  # fmt: skip
        drifted = ((alike < self.ability.gamma) & way.window.real.any(1)).tolist()
        way.starts = [
            number + 1 if start == blocks and has_drifted else start
            for start, has_drifted in zip(way.starts, drifted, strict=True)
        ]


def _by_token(arguments: Any) -> list[Tensor]:
    """Return the tensors among a block's arguments that have numbers for each token."""
    return [leaf for leaf in leaves(arguments) if leaf.dim() == 3 and leaf.is_floating_point()]


def install(denoiser: Denoiser, ability: WideningRows) -> Rows:
    """Return the extension for row plans that widen.

    Raises:
        AttachError: If the model cannot have row plans, or a block has not just one attention.
    """
    rows = install_rows(denoiser, ability, Drift)
    paths = [f"{entry.key}.{number}." for entry in denoiser.anatomy.lists
             for number in range(entry.depth)]  # fmt: skip
    sites = rows.door.sites
    if len(paths) != len(sites) or not all(
        f"{site.path}.".startswith(path) for site, path in zip(sites, paths, strict=True)
    ):
        rows.remove()
        raise AttachError(
            f"{denoiser.anatomy.model}: has {len(paths)} blocks and {len(sites)} attentions, which "
            "are not one a block, so that it cannot be widened; use another policy"
        )
    return rows
