"""Computes planned rows, and every row from a layer on where attention drifted (Elastic-Cache).

Every block's input is held at full length, beside the keys and values. From the block on at which a
sequence widens, blocks are given that input instead of the rows, with the arguments that the model
gave them at the last forward of all rows: its own loop hands on those of the rows. Sequences of the
batch that do not widen go along at full length, and nothing but their planned rows is written, so
that each is what it would be alone. The last block hands on the planned rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import IDS, VALID, HeldKV, HeldRun, check_arguments, check_sites
from diffcache.attach.extensions.rows import HeldRows, Rows, RowTurn
from diffcache.attach.run import Run
from diffcache.attach.tap import ITEMS, ServedTap, Tap, tap_list, untap_list
from diffcache.attach.tree import leaves
from diffcache.dllm.elastic_cache import WatchedPlan, WideningRows, likeness, most_attended
from diffcache.dllm.rows import RowPlan, numbers_of
from diffcache.errors import AttachError
from diffcache.foreign import children_of


@dataclass(eq=False)
class HeldInputs(HeldRows):
    """Keys, values and inputs of one run; every row is as it was when it was last computed.

    Attributes:
        inputs: Hidden states that each block was given, `[B, T, C]`.
        queries: Queries of each attention, `[B, T, H, D]`.
        arguments: Other arguments that the model gave each block at the last forward of all rows.
        tracked: Tokens whose attention is compared, bool `[B, T]`.
        starts: First block of each sequence that computed all rows at the last call; the number of
            blocks where none did.
        leaves: Tensors among the arguments, each once.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    arguments: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    tracked: Tensor | None = None
    starts: list[int] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Way(RowTurn):
    """One call on its way through the blocks.

    Attributes:
        plan: The plan that was asked for.
        planned: Its rows and the tracked tokens, bool `[B, T]`.
        places: Positions whose attention is looked at, int64 `[B, n]`: the planned ones; at a
            forward of all rows those of the window.
        looks: Which of these are of the window and do not just fill up a sequence, bool `[B, n]`.
        goes_on: Which sequences have a window, bool `[B]`.
        tested: Numbers among these of the tracked tokens, int64 `[B, t]`; None where no test is.
        real: Tracked tokens that do not just fill up a sequence, bool `[B, t]`; None for all.
        starts: First block of each sequence that computes all rows; the number of blocks for none.
        fed: Positions that the current block computes, bool `[B, T]`.
        is_whole: Whether the call computes all rows in every layer.
        is_wide: Whether blocks run at full length.
        is_full: Whether every sequence computes all rows of the current block.
        masses: Attention from the window to each token in the layers so far, `[B, T]` each.
        batch: Numbers of the sequences, int64 `[B, 1]`.
        blocks: Blocks that ran so far.
    """

    held: HeldInputs
    plan: WatchedPlan = field(kw_only=True)
    planned: Tensor = field(kw_only=True)
    places: Tensor = field(kw_only=True)
    looks: Tensor = field(kw_only=True)
    goes_on: Tensor = field(kw_only=True)
    tested: Tensor | None = field(default=None, kw_only=True)
    real: Tensor | None = field(default=None, kw_only=True)
    starts: list[int] = field(kw_only=True)
    fed: Tensor = field(kw_only=True)
    is_whole: bool = field(kw_only=True)
    is_wide: bool = field(kw_only=True)
    is_full: bool = field(kw_only=True)
    masses: list[Tensor] = field(default_factory=list)
    batch: Tensor = field(kw_only=True)
    blocks: set[int] = field(default_factory=set)

    def widen(self, block: int) -> None:
        """Go on to a block that runs at full length."""
        width = self.held.shape[1]
        if not self.is_wide:
            mask = self.held.mask
            self.index, self.rows = range(width), width
            self.mask = None if mask is None else mask.expand(-1, -1, width, -1)
            self.is_wide = True
        self.is_full = max(self.starts) <= block
        if not self.is_full:
            whole = [[start <= block] for start in self.starts]
            self.fed = self.planned | torch.tensor(whole, device=self.planned.device)

    def merged(self, held: Tensor | None, fresh: Tensor) -> Tensor:
        """Return held rows with the computed ones written over them.

        Args:
            held: `[B, T, ...]`, which may be written into; None where nothing is held.
            fresh: `[B, n, ...]`, n = T at full length.
        """
        if held is None or self.is_full:
            return fresh.clone()
        if self.is_wide:
            return fresh.where(self.fed.view(*self.fed.shape, *[1] * (fresh.dim() - 2)), held)
        if self.places.shape[0] == 1:  # copies whole rows, three times as fast
            return held.index_copy_(1, self.places[0], fresh)
        held[self.batch, self.places] = fresh
        return held


class Seam(Tap):
    """Stands for a block: gives it the rows or all tokens."""

    __slots__ = ("number", "owner", "way")

    def __init__(self, module: nn.Module, owner: Drift, number: int, way: Way) -> None:
        self.module, self.owner, self.number, self.way = module, owner, number, way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the rows, or on all tokens."""
        way, number, owner = self.way, self.number, self.owner
        held = way.held
        if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            raise AttachError(
                f"{owner.model}: block {number} is not given its tokens [B, T, C] as the first "
                "argument, so that it cannot be widened; use another policy"
            )
        hidden, *rest = args
        if owner.widens:
            held.inputs[number] = way.merged(held.inputs.get(number), hidden)
            if way.is_whole:
                held.arguments[number] = (rest, kwargs)
            elif min(way.starts) <= number:
                was_full = way.is_full
                way.widen(number)
                if not was_full:
                    hidden = held.inputs[number].clone()
                rest, kwargs = held.arguments[number]
            elif number not in owner.compared:
                owner.compare(number, (rest, kwargs), held.arguments[number], way)
        way.blocks.add(number)
        out = self.module(hidden, *rest, **kwargs)
        return out if number + 1 < len(owner.numbers) else planned_rows(way, out)


def cut(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the last block; hand on the first row alone."""
    out = block(*args, **kwargs)
    return out[:, :1] if isinstance(out, Tensor) else (out[0][:, :1], *out[1:])


class Drift(Rows):
    """Computes the planned rows, and all of them from the layer on after which attention drifted.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the policy asks for.
    """

    holds = HeldInputs

    def __init__(self, denoiser: Denoiser, ability: WideningRows) -> None:
        super().__init__(denoiser, ability.plans)
        self.ability = ability
        self.widens = ability.gamma > 0  # a cosine of weights is never negative
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

    def tensors(self, run: Run) -> Iterable[Tensor]:
        """Return keys, values, inputs, queries and arguments of a run."""
        held: HeldInputs | None = run.storage.get(self)
        if held is None:
            return []
        return [*super().tensors(run), *held.inputs.values(), *held.queries.values(), *held.leaves]

    # a call ----------------------------------------------------------------------------------

    def rows_of(self, plan: WatchedPlan, held: HeldInputs) -> Tensor | range | None:
        """Return the rows of a plan, and the tracked tokens."""
        if plan.rows is None:
            return None
        assert held.tracked is not None
        chosen = plan.mask(*held.shape, held.tracked.device) | held.tracked
        return RowPlan.of(chosen, plan.multiple).rows

    def turn_of(self, plan: WatchedPlan, turn: RowTurn) -> RowTurn:
        """Return the way of a call through the blocks."""
        held, is_whole = turn.held, isinstance(turn.index, range)
        assert isinstance(held, HeldInputs)
        batch = torch.arange(plan.window.shape[0], device=plan.window.device)[:, None]
        if isinstance(turn.index, range):
            planned, places = torch.ones_like(plan.window), numbers_of(plan.window)
        else:
            planned, places = torch.zeros_like(plan.window), turn.index
            planned.scatter_(1, places, True)
        real = torch.ones_like(places, dtype=torch.bool)
        real[:, 1:] = places[:, 1:] != places[:, :-1]  # others fill up
        looks = plan.window.gather(1, places) & real
        way = Way(
            held,
            turn.index,
            turn.rows,
            turn.mask,
            plan=plan,
            planned=planned,
            places=places,
            looks=looks,
            goes_on=looks.any(1),
            starts=[0 if is_whole else len(self.numbers)] * planned.shape[0],
            fed=planned,
            is_whole=is_whole,
            is_wide=is_whole,
            is_full=is_whole,
            batch=batch,
        )
        if self.widens and not is_whole and held.tracked is not None:
            is_tracked = held.tracked.gather(1, places) & real
            tested = numbers_of(is_tracked)
            if tested.shape[1]:
                way.tested = tested
            if tested.shape[0] > 1:
                numbers = torch.arange(tested.shape[1], device=tested.device)
                way.real = numbers < is_tracked.sum(1, keepdim=True)
        return way

    def begin(self, call: Call, plan: WatchedPlan, held: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Give the model the planned rows and the tracked tokens, and its blocks stand-ins."""
        some, way = super().begin(call, plan, held, given), call.storage[self]
        items, number, last = call.storage.setdefault(ITEMS, {}), 0, len(self.numbers) - 1
        for key, blocks in self.lists.items():
            modules: list[Any] = list(children_of(blocks).values())
            for at, module in enumerate(modules):
                if self.widens or number + at == last:  # else all but the last stay as they are
                    modules[at] = Seam(module, self, number + at, way)
            items[key] = modules
            number += len(modules)
        return some

    def close(self, call: Call, out: Any) -> Any:
        """Check that every block took part, and note the rows to track from now on.

        Raises:
            AttachError: If one did not.
        """
        super().close(call, out)
        way = call.storage.get(self)
        if not isinstance(way, Way):
            return
        if len(way.blocks) != (len(self.numbers) if self.widens else 1):
            raise AttachError(
                f"{self.model}: {len(way.blocks)} of {len(self.numbers)} blocks were taken from "
                "its lists in a call, so that it cannot be widened; use another policy"
            )
        found = most_attended(torch.stack(way.masses), way.plan.known, self.ability.track)
        way.held.tracked, way.held.starts = found, way.starts
        if way.is_whole:
            every = leaves(way.held.arguments)
            way.held.leaves = list({id(leaf): leaf for leaf in every}.values())

    def _try_alone(self, call: Call, held: HeldRun[HeldKV]) -> None:
        """Compute some rows alone, and let the last block hand on fewer than the first was given.

        Raises:
            AttachError: If they come out otherwise, or the model counts on as many.
        """
        super()._try_alone(call, held)
        key, blocks = list(self.lists.items())[-1]
        *others, last = children_of(blocks).values()
        failure = None
        try:
            _, out = self.run_alone(call, held, range(2), **{ITEMS: {key: [*others, ServedTap(last, cut)]}})
            if out[0].shape[1] == 1:
                return
        except RuntimeError as error:  # of a shape
            failure = error
        raise AttachError(
            f"{self.model}: counts on as many rows after its last block as it gave the first, so "
            "that it cannot be widened; use another policy, such as DKVCache()"
        ) from failure

    # blocks ----------------------------------------------------------------------------------

    def compare(self, number: int, given: Any, whole: Any, way: Way) -> None:
        """Raise unless a block was given the same rows as in a whole call, once a block.

        Raises:
            AttachError: If arguments depend on the tokens, so that those kept are out of date.
        """
        self.compared.add(number)
        index = way.index
        assert isinstance(index, Tensor)
        for some, every in zip(_by_token(given), _by_token(whole), strict=True):
            every = every.expand(len(index), -1, -1)
            if not torch.equal(some.expand(len(index), -1, -1), every[way.batch, index]):
                raise AttachError(
                    f"{self.model}: block {number} is given more than positions of its tokens "
                    "(what depends on the tokens themselves), so that it cannot be widened; use "
                    "another policy"
                )

    # attention -------------------------------------------------------------------------------

    def attend(self, site: AttentionSite, call: AttentionCall, turn: RowTurn | None = None) -> Tensor | None:
        """Attend as `Rows` does, compare the tracked tokens' attention, and track anew."""
        way = turn or self.turn()
        if not isinstance(way, Way):
            return super().attend(site, call, way)
        held, number = way.held, self.numbers[site.path]
        layer, blocks = held.layers[number], len(self.numbers)
        # no block follows the last, and who widens already is not asked
        is_tested = way.tested is not None and number + 1 < blocks and blocks in way.starts
        seen, before, products = held.mask, None, way.looks.numel()
        if is_tested:
            assert way.tested is not None
            places = way.places.gather(1, way.tested)
            before = layer.weights(_rows(held.queries[number], places), call.scale, seen)
            products += way.tested.numel()
        if way.is_wide and not way.is_full:
            assert layer.k is not None
            assert layer.v is not None
            # rows that are not computed stay as they are to the bit
            call.k = way.merged(layer.k.transpose(1, 2), call.k)
            call.v = way.merged(layer.v.transpose(1, 2), call.v)
        out = super().attend(site, call, way)
        queries = _rows(call.q, way.places) if way.is_wide else call.q
        if self.widens:
            held.queries[number] = way.merged(held.queries.get(number), call.q)
        # one product tells both how the tracked tokens attend now, and what the window looks at
        weights = layer.weights(queries, call.scale, seen)
        if before is not None:
            self._test(way, number, before, weights)
        way.products += products * call.q.shape[2] * call.q.shape[3] * held.shape[1]
        way.masses.append((weights * way.looks[:, None, :, None]).sum((1, 2)))
        return out

    def _test(self, way: Way, number: int, before: Tensor, weights: Tensor) -> None:
        """Let sequences whose attention drifted widen at the next block; the host waits."""
        assert way.tested is not None
        mask, blocks = way.held.mask, len(self.numbers)
        after = _rows(weights.transpose(1, 2), way.tested).transpose(1, 2)
        alike = likeness(before, after, way.real, None if mask is None else mask[:, 0, 0], self.ability.similarity)
        drifted = ((alike < self.ability.gamma) & way.goes_on).tolist()
        if not any(drifted):
            return
        way.starts = [
            number + 1 if start == blocks and has_drifted else start
            for start, has_drifted in zip(way.starts, drifted, strict=True)
        ]


def planned_rows(way: Way, out: Any) -> Any:
    """Return the output of the last block, of the planned rows alone."""
    # what fills up to a multiple may count as tracked tokens do
    alone = way.fed.shape[0] == way.plan.multiple == 1 and not way.is_wide
    if way.is_whole or (alone and way.rows == way.plan.count(way.fed.shape[1])):
        return out
    hidden = out if isinstance(out, Tensor) else out[0]
    batch, width = way.fed.shape
    places = way.plan.index(batch, width, hidden.device).contiguous()
    if not way.is_wide:
        assert isinstance(way.index, Tensor)
        places = torch.searchsorted(way.index.contiguous(), places)
    picked = _rows(hidden, places)
    return picked if isinstance(out, Tensor) else (picked, *out[1:])


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """Return some positions of each sequence, `[B, n, ...]` of `[B, T, ...]`."""
    if places.shape[0] == 1:
        return x.index_select(1, places[0])
    return x[torch.arange(places.shape[0], device=places.device)[:, None], places]


def _by_token(arguments: Any) -> list[Tensor]:
    """Return the tensors among a block's arguments that have numbers for each token."""
    return [leaf for leaf in leaves(arguments) if leaf.dim() == 3 and leaf.is_floating_point()]


def install(denoiser: Denoiser, ability: WideningRows) -> Rows:
    """Return the extension for row plans that widen.

    Raises:
        AttachError: If the model cannot have row plans, or a block has not just one attention.
    """
    check_arguments(denoiser, IDS, VALID)
    rows = check_sites(Drift(denoiser, ability))
    paths = [f"{entry.key}.{number}." for entry in denoiser.anatomy.lists for number in range(entry.depth)]
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
