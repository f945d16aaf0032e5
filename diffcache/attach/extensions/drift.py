"""Computes planned rows, and every row from a layer on where attention drifted (Elastic-Cache).

Every block's input is held at full length, beside the keys and values. From the block on at which a
sequence widens, blocks are given that input instead of the rows, with the arguments that the model
gave them at the last forward of all rows: its own loop hands on those of the rows. Sequences of the
batch that do not widen go along at full length, and nothing but their planned rows is written, so
that each is what it would be alone. The last block hands on the planned rows.

A compiled forward is of the rows alone, and notes the outcomes of all tests, which the host reads
at its end. Where one is a drift, the model runs once more, not compiled: blocks up to there hand on
what they are given, and those after it widen. They write over what the compiled forward left, but
for rows of sequences that do not widen, which are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_transformers import HELD
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import IDS, VALID, HeldKV, HeldRun, check_arguments, check_sites
from diffcache.attach.extensions.rows import HeldRows, Rows, RowTurn
from diffcache.attach.run import Run
from diffcache.attach.tap import ITEMS, ServedTap, Tap, tap_list, untap_list
from diffcache.attach.tree import leaves
from diffcache.dllm.elastic_cache import WatchedPlan, Watching, WideningRows
from diffcache.dllm.rows import RowPlan, numbers_of, picked, put
from diffcache.errors import AttachError
from diffcache.foreign import children_of
from diffcache.step import CURRENT


@dataclass(eq=False)
class HeldInputs(HeldRows):
    """Keys, values and inputs of one run; every row is as it was when it was last computed."""

    inputs: dict[int, Tensor] = field(default_factory=dict)  # hidden states that each block was given, `[B, T, C]`
    queries: dict[int, Tensor] = field(default_factory=dict)  # queries of each attention, `[B, T, H, D]`
    # other arguments that the model gave each block at the last forward of all rows
    arguments: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    tracked: Tensor | None = None  # tokens whose attention is compared, bool `[B, T]`
    # first block of each sequence that computed all rows at the last call; the number of blocks where none did
    starts: list[int] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)  # tensors among the arguments, each once


@dataclass(eq=False)
class Way(RowTurn):
    """One call on its way through the blocks."""

    held: HeldInputs
    plan: WatchedPlan = field(kw_only=True)  # the plan that was asked for
    # attention that is looked at: of the planned rows and the tracked tokens; at a forward of all rows of the window
    noting: Watching = field(kw_only=True)
    # first block of each sequence that computes all rows; the number of blocks for none
    starts: list[int] = field(kw_only=True)
    fed: Tensor | None = None  # positions that the current block computes, bool `[B, T]`; None where `index` tells
    is_whole: bool = field(kw_only=True)  # whether the call computes all rows in every layer
    is_wide: bool = field(kw_only=True)  # whether blocks run at full length
    is_full: bool = field(kw_only=True)  # whether every sequence computes all rows of the current block
    resumes: int = -1  # first block that runs once more after a compiled forward; less than 0 for none
    blocks: set[int] = field(default_factory=set)  # blocks that ran so far

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
            places = self.noting.places
            whole = [[start <= block] for start in self.starts]
            self.fed = RowPlan(places).mask(*self.held.shape, places.device)
            self.fed |= torch.tensor(whole, device=places.device)

    def merged(self, held: Tensor | None, fresh: Tensor) -> Tensor:
        """Return held rows, `[B, T, ...]` or None, with computed ones, `[B, n, ...]`, over them, maybe in place."""
        if held is None or self.is_full:
            return fresh.clone()
        if self.fed is not None:
            return fresh.where(self.fed.view(*self.fed.shape, *[1] * (fresh.dim() - 2)), held)
        return put(held, self.noting.places, fresh)


class Entrance:
    """Stands for a block in a compiled forward: its input is written over what is held."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.module: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        noting = kwargs[HELD].noting
        noting.blocks.append(self.number)
        noting.put(noting.inputs, self.number, hidden)
        return self.module(hidden, *args, **kwargs)


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
        if number < way.resumes:
            return (hidden,) if owner.hands_on_tuples else hidden
        if owner.widens:
            if number != way.resumes:
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
        owner.hands_on_tuples = isinstance(out, tuple)
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
        self.hands_on_tuples = False  # as blocks of code of its own do
        self.entrances: dict[str, list[Entrance]] = {}
        number = 0
        for entry in denoiser.anatomy.lists:
            self.lists[entry.key] = denoiser.model.get_submodule(entry.key)
            numbers = range(number, number := number + entry.depth)
            self.entrances[entry.key] = list(map(Entrance, numbers))
            tap_list(self.lists[entry.key], denoiser, entry.key, self.entrances[entry.key])

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
        noting = Watching(
            numbers_of(plan.window) if isinstance(turn.index, range) else turn.index,
            plan.window,
            plan.known,
            held.tracked if self.widens and not is_whole else None,
            None if held.mask is None else held.mask[:, 0, 0],
            self.ability.track,
            self.ability.similarity,
            held.inputs,
            held.queries,
            [],
            [],
            [],
        )
        return Way(
            held,
            turn.index,
            turn.rows,
            turn.mask,
            plan=plan,
            noting=noting,
            starts=[0 if is_whole else len(self.numbers)] * held.shape[0],
            is_whole=is_whole,
            is_wide=is_whole,
            is_full=is_whole,
        )

    def may_compile(self, plan: Any, held: Any) -> bool:
        """Return whether a forward can be compiled, and will hardly be in vain."""
        if not super().may_compile(plan, held) or (self.widens and len(self.compared) < len(self.numbers)):
            return False
        # half of the layers, not compiled, take as long as all that are: steps drift alike
        return not 0 < 2 * min(held.starts) < len(self.numbers)

    def begin(self, call: Call, plan: WatchedPlan, held: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Give the model the planned rows and the tracked tokens, and its blocks stand-ins."""
        some, way = super().begin(call, plan, held, given), call.storage[self]
        if HELD not in some:
            self._start(call, way)
            return some
        for key, entrances in self.entrances.items():
            for entrance, module in zip(entrances, children_of(self.lists[key]).values(), strict=True):
                entrance.module = module
        call.storage[ITEMS] = self.entrances  # for what is not compiled after all
        return some

    def _start(self, call: Call, way: Way) -> None:
        """Let blocks of a forward that is not compiled be on the way."""
        way.noting = way.noting.begun()
        items, number, last = call.storage.setdefault(ITEMS, {}), 0, len(self.numbers) - 1
        for key, blocks in self.lists.items():
            modules: list[Any] = list(children_of(blocks).values())
            for at, module in enumerate(modules):
                if self.widens or number + at == last:  # else all but the last stay as they are
                    modules[at] = Seam(module, self, number + at, way)
            items[key] = modules
            number += len(modules)

    def finish(self, out: Any, again: Callable[[], Any]) -> Any:
        """Return the output of a compiled forward, or run the blocks after a drift once more."""
        call, way = CURRENT.get(), self.turn()
        assert call is not None
        _, masses, alike, blocks = way.notes
        way.blocks.update(blocks)
        if alike is not None:
            drifted = (alike < self.ability.gamma).tolist()  # the host waits, once
            for number, row in enumerate(drifted):
                self._widen(way, number, row)
        first = min(way.starts)
        if first == len(self.numbers):
            out.logits = planned_rows(way, out.logits)
            return out
        way.notes, way.resumes = None, first
        way.noting = way.noting._replace(tracked=None)
        call.storage[ITEMS] = {}
        self._start(call, way)
        way.noting.masses.extend(masses[:first])
        return again()

    def close(self, call: Call, out: Any) -> Any:
        """Note the rows to track from now on; raise AttachError unless every block took part."""
        super().close(call, out)
        way = call.storage.get(self)
        if not isinstance(way, Way):
            return
        held, blocks, noting = way.held, len(self.numbers), way.noting
        if len(way.blocks) != (blocks if self.widens or way.notes else 1):
            raise AttachError(
                f"{self.model}: {len(way.blocks)} of {blocks} blocks were taken from "
                "its lists in a call, so that it cannot be widened; use another policy"
            )
        held.tracked, *_ = way.notes or noting.notes(out.logits)
        held.starts = way.starts
        # attention of the places in all layers, and of the tokens that were tested before it
        looked = [noting.places.numel()] * blocks
        if self.widens and not way.is_whole:
            tested = held.shape[0] * min(self.ability.track * blocks, held.shape[1])
            for number in range(min(max(way.starts), blocks - 1)):
                looked[number] += tested
        way.products = held.shape[1] * sum(n * size for n, size in zip(looked, self.channels.values(), strict=True))
        if way.is_whole:
            every = leaves(held.arguments)
            held.leaves = list({id(leaf): leaf for leaf in every}.values())

    def _try_alone(self, call: Call, held: HeldRun[HeldKV]) -> None:
        """Compute some rows alone, and let the last block hand on fewer than it was given; both must be right."""
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
        """Raise AttachError unless a block was given the same rows as in a whole call, once a block.

        If arguments depend on the tokens, those kept are out of date.
        """
        self.compared.add(number)
        places = way.noting.places
        for some, every in zip(_by_token(given), _by_token(whole), strict=True):
            rows = picked(every.expand(len(places), -1, -1), places)
            if not torch.equal(some.expand_as(rows), rows):
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
        layer, noting, before = held.layers[number], way.noting, None
        # who widens already is not asked
        earlier = noting.earlier(number) if len(self.numbers) in way.starts else None
        if earlier is not None:
            before = layer.weights(earlier, call.scale, held.mask)
        if way.is_wide and not way.is_full:
            assert layer.k is not None
            assert layer.v is not None
            # rows that are not computed stay as they are to the bit
            call.k = way.merged(layer.k.transpose(1, 2), call.k)
            call.v = way.merged(layer.v.transpose(1, 2), call.v)
        out = super().attend(site, call, way)
        queries = picked(call.q, noting.places) if way.is_wide else call.q
        if self.widens:
            held.queries[number] = way.merged(held.queries.get(number), call.q)
        # one product tells both how the tracked tokens attend now, and what the window looks at
        noting.see(layer.weights(queries, call.scale, held.mask), before)
        if before is not None:
            self._widen(way, number, (noting.alike[-1] < self.ability.gamma).tolist())  # the host waits
        return out

    def _widen(self, way: Way, number: int, drifted: list[bool]) -> None:
        """Let sequences whose attention drifted, and that do not widen yet, do so at the next block."""
        for row, has_drifted in enumerate(drifted):
            if has_drifted and way.starts[row] == len(self.numbers):
                way.starts[row] = number + 1


def planned_rows(way: Way, out: Any) -> Any:
    """Return the output of the last block, or logits, of the planned rows alone."""
    batch, width = way.held.shape
    # what fills up to a multiple may count as tracked tokens do
    alone = batch == way.plan.multiple == 1 and not way.is_wide
    if way.is_whole or (alone and way.rows == way.plan.count(width)):
        return out
    hidden = out if isinstance(out, Tensor) else out[0]
    places = way.plan.index(batch, width, hidden.device).contiguous()
    if not way.is_wide:
        assert isinstance(way.index, Tensor)
        places = torch.searchsorted(way.index.contiguous(), places)
    rows = picked(hidden, places)
    return rows if isinstance(out, Tensor) else (rows, *out[1:])


def _by_token(arguments: Any) -> list[Tensor]:
    """Return the tensors among a block's arguments that have numbers for each token."""
    return [leaf for leaf in leaves(arguments) if leaf.dim() == 3 and leaf.is_floating_point()]


def install(denoiser: Denoiser, ability: WideningRows) -> Rows:
    """Return the extension for row plans that widen.

    Raises AttachError if the model cannot have row plans, or a block has not just one attention.
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
