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
from diffcache.attach.extensions.partial import Held, HeldKV
from diffcache.attach.extensions.rows import Rows, Turn
from diffcache.attach.extensions.rows import install as install_rows
from diffcache.attach.run import Run
from diffcache.attach.tap import ITEMS, ServedTap, Tap, tap_list, untap_list
from diffcache.attach.tree import leaves
from diffcache.dllm.elastic_cache import WatchedPlan, WideningRows, likeness, most_attended
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.foreign import children_of
from diffcache.kv.refresh import slots_of


@dataclass(eq=False)
class HeldInputs(Held[HeldKV]):
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


@dataclass(frozen=True, eq=False)
class Spots:
    """Some positions of each sequence, filled up to one number.

    Attributes:
        places: Positions, int64 `[B, n]`.
        real: Mask of the positions that do not just fill up a sequence, bool `[B, n]`.
    """

    places: Tensor
    real: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> Spots:
        """Return the positions that a bool `[B, T]` names."""
        places = slots_of(chosen)
        number = torch.arange(places.shape[1], device=chosen.device)
        return cls(places, number < chosen.sum(1, keepdim=True))


@dataclass(eq=False)
class Way(Turn):
    """One call on its way through the blocks.

    Attributes:
        plan: The plan that was asked for.
        planned: Its rows and the tracked tokens, bool `[B, T]`.
        tracked: Tokens to compare; None at a forward of all rows.
        window: Positions whose queries choose the tokens to track.
        starts: First block of each sequence that computes all rows; the number of blocks for none.
        fed: Positions that the current block computes, bool `[B, T]`.
        is_wide: Whether blocks run at full length.
        found: Tokens to track next, bool `[B, T]`.
        batch: Numbers of the sequences, int64 `[B, 1]`.
        blocks: Blocks that ran so far.
    """

    held: HeldInputs
    plan: WatchedPlan = field(kw_only=True)
    planned: Tensor = field(kw_only=True)
    tracked: Spots | None = field(kw_only=True)
    window: Spots = field(kw_only=True)
    starts: list[int] = field(kw_only=True)
    fed: Tensor = field(kw_only=True)
    is_wide: bool = field(kw_only=True)
    found: Tensor = field(kw_only=True)
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
        whole = torch.tensor([[start <= block] for start in self.starts], device=self.fed.device)
        self.fed = self.planned | whole

    def merged(self, held: Tensor | None, fresh: Tensor) -> Tensor:
        """Return what is held with the computed rows written over it.

        Args:
            held: `[B, T, ...]`, which may be written into; None where nothing is held.
            fresh: `[B, n, ...]`, n = T at full length.
        """
        if held is None:
            return fresh.clone()
        if self.is_wide:
            return fresh.where(self.fed.view(*self.fed.shape, *[1] * (fresh.dim() - 2)), held)
        index = self.index
        assert isinstance(index, Tensor)
        held[self.batch, index] = fresh
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
        held.inputs[number] = way.merged(held.inputs.get(number), hidden)
        if way.tracked is None:
            held.arguments[number] = (rest, kwargs)
        elif min(way.starts) <= number:
            way.widen(number)
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

    plans = WatchedPlan
    wanted = "the plan of an ElasticCache, which says what to track"
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

    def turn_of(self, plan: WatchedPlan, turn: Turn) -> Turn:
        """Return the way of a call through the blocks."""
        held = turn.held
        assert isinstance(held, HeldInputs)
        is_whole, planned = True, torch.ones_like(plan.window)
        if isinstance(turn.index, Tensor):
            is_whole, planned = False, torch.zeros_like(plan.window).scatter_(1, turn.index, True)
        return Way(
            held,
            turn.index,
            turn.rows,
            turn.mask,
            plan=plan,
            planned=planned,
            tracked=None if held.tracked is None or is_whole else Spots.of(held.tracked),
            window=Spots.of(plan.window),
            starts=[0 if is_whole else len(self.numbers)] * len(planned),
            fed=planned,
            is_wide=is_whole,
            found=torch.zeros_like(planned),
            batch=torch.arange(len(planned), device=planned.device)[:, None],
        )

    def begin(
        self, call: Call, plan: WatchedPlan, held: Any, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Give the model the planned rows and the tracked tokens, and its blocks stand-ins."""
        some, way = super().begin(call, plan, held, given), call.storage[self]
        items, number = call.storage.setdefault(ITEMS, {}), 0
        for key, blocks in self.lists.items():
            modules = list(children_of(blocks).values())
            items[key] = [Seam(each, self, number + at, way) for at, each in enumerate(modules)]
            number += len(modules)
        return some

    def close(self, call: Call, out: Any) -> Any:
        """Check that every block took part, and note what is tracked from now on.

        Raises:
            AttachError: If one did not.
        """
        super().close(call, out)
        way = call.storage.get(self)
        if not isinstance(way, Way):
            return
        if len(way.blocks) != len(self.numbers):
            raise AttachError(
                f"{self.model}: {len(way.blocks)} of {len(self.numbers)} blocks were taken from "
                "its lists in a call, so that it cannot be widened; use another policy"
            )
        way.held.tracked, way.held.starts = way.found, way.starts
        if way.tracked is None:
            every = leaves(way.held.arguments)
            way.held.leaves = list({id(leaf): leaf for leaf in every}.values())

    def _try_alone(self, call: Call, held: Held[HeldKV]) -> None:
        """Compute some rows alone, and let the last block hand on fewer than the first was given.

        Raises:
            AttachError: If they come out otherwise, or the model counts on as many.
        """
        super()._try_alone(call, held)
        key, blocks = list(self.lists.items())[-1]
        *others, last = children_of(blocks).values()
        failure = None
        try:
            _, out = self.run_alone(
                call, held, range(2), **{ITEMS: {key: [*others, ServedTap(last, cut)]}}
            )
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
        """Raise unless a block was given of the rows what it was given of all, once a block.

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

    def attend(
        self, site: AttentionSite, call: AttentionCall, turn: Turn | None = None
    ) -> Tensor | None:
        """Attend as `Rows` does, compare the tracked tokens' attention, and track anew."""
        way = turn or self.turn()
        if not isinstance(way, Way):
            return super().attend(site, call, way)
        held, number = way.held, self.numbers[site.path]
        layer, blocks = held.layers[number], len(self.numbers)
        tests = blocks in way.starts and number + 1 < blocks  # no block follows the last
        tests = tests and self.ability.gamma > 0  # a cosine of weights is never negative
        tracked = way.tracked if tests else None
        seen, scale, asked = held.mask, call.scale, 0
        if tracked is not None:
            q = held.queries[number][way.batch, tracked.places]
            before, asked = layer.weights(q, scale, seen), 2 * q.numel()
        if way.is_wide and layer.k is not None and layer.v is not None:
            # rows that are not computed stay as they are to the bit
            call.k = way.merged(layer.k.transpose(1, 2), call.k)
            call.v = way.merged(layer.v.transpose(1, 2), call.v)
        out = super().attend(site, call, way)
        queries = held.queries[number] = way.merged(held.queries.get(number), call.q)
        if tracked is not None:
            after = layer.weights(queries[way.batch, tracked.places], scale, seen)
            self._test(way, number, before, after)
        q = queries[way.batch, way.window.places]
        weights = layer.weights(q, scale, seen)
        way.products += (asked + q.numel()) * held.shape[1]
        way.found |= most_attended(weights, way.window.real, way.plan.known, self.ability.track)
        return out

    def _test(self, way: Way, number: int, before: Tensor, after: Tensor) -> None:
        """Let sequences whose attention drifted widen at the next block; the host waits."""
        assert way.tracked is not None
        mask, blocks = way.held.mask, len(self.numbers)
        alike = likeness(
            before,
            after,
            way.tracked.real,
            None if mask is None else mask[:, 0, 0],
            self.ability.similarity,
        )
        drifted = ((alike < self.ability.gamma) & way.window.real.any(1)).tolist()
        if not any(drifted):
            return
        way.starts = [
            number + 1 if start == blocks and has_drifted else start
            for start, has_drifted in zip(way.starts, drifted, strict=True)
        ]


def planned_rows(way: Way, out: Any) -> Any:
    """Return the output of the last block, of the planned rows alone."""
    if way.plan.rows is None:
        return out
    hidden = out if isinstance(out, Tensor) else out[0]
    batch, width = way.fed.shape
    places = way.plan.index(batch, width, hidden.device).contiguous()
    if not way.is_wide:
        assert isinstance(way.index, Tensor)
        places = torch.searchsorted(way.index.contiguous(), places)
    picked = hidden[way.batch, places]
    return picked if isinstance(out, Tensor) else (picked, *out[1:])


def _by_token(arguments: Any) -> list[Tensor]:
    """Return the tensors among a block's arguments that have numbers for each token."""
    return [leaf for leaf in leaves(arguments) if leaf.dim() == 3 and leaf.is_floating_point()]


def install(denoiser: Denoiser, ability: WideningRows) -> Rows:
    """Return the extension for row plans that widen.

    Raises:
        AttachError: If the model cannot have row plans, or a block has not just one attention.
    """
    rows = install_rows(denoiser, ability, Drift)
    paths = [
        f"{entry.key}.{number}."
        for entry in denoiser.anatomy.lists
        for number in range(entry.depth)
    ]
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
