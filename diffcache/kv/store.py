"""The cache of a whole model: its layers, what was observed of them, and when they are settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.kv.attend import Query, View, attend
from diffcache.kv.codec.base import tensors
from diffcache.kv.in_place import slots_to_drop
from diffcache.kv.layer import KVLayer
from diffcache.kv.mover import Mover
from diffcache.kv.observe import Observation, Pending, Ring, lengthen, note, observe, shorten
from diffcache.kv.plan import KEEP
from diffcache.kv.planned import check_alone, planned
from diffcache.kv.recipe import Recipe
from diffcache.kv.rotary import Rotation
from diffcache.kv.settle import carry_out
from diffcache.kv.slots import named
from diffcache.kv.trigger import Event

CUT_OFF = "an earlier forward was cut off and left the cache half changed: reset it, or use a fork"


class KVStore:
    """The cache of a model, or of those of its layers that are compressed.

    A recipe does its work at the start of the next forward (`begin`), when the tokens of the
    last one can no longer be taken back and all layers have been seen.

    Attributes:
        recipe: Recipe of the cache.
        layers: Layers in the order of the model.
        read_once: True if layers keep the slots that were read of them, as `KVLayer` has it.
        speculative: True if `rollback` may take tokens back, as in assisted decoding.
        origin: Function that returns facts of the model, by which a saved cache is matched to it.
        taken_over: True if tokens were written whose queries were not seen, and not compressed yet.
        torn: True while what is held is half changed, as an error leaves it.
        opened: Tokens seen before the forward that is under way, where its end sets this back to
            None; None where there is none, or its end will not be told.
    """

    def __init__(
        self,
        layers: int,
        recipe: Recipe,
        *,
        rotary: Sequence[Rotation] | None = None,
        out: Sequence[Tensor] | None = None,
        read_once: bool = False,
    ) -> None:
        if rotary is None and recipe.rotates:
            raise ValueError(f"{recipe.name}: keys are rotated when read, which takes `rotary`")
        self.recipe, self.read_once = recipe, read_once
        turns: list[Rotation | None] = [None] * layers
        if rotary is not None and recipe.rotates:
            turns = list(rotary)
        unrotated = recipe.space == "pre"
        self.layers = [
            KVLayer(
                index,
                rotary=turn if unrotated else None,
                positions=recipe.positions,
                mover=None if unrotated or turn is None else Mover(turn),
                read_once=read_once,
            )
            for index, turn in enumerate(turns)
        ]
        self.speculative = self.taken_over = False
        self.origin: Callable[[], Mapping[str, str]] = dict
        self.out = out
        window = recipe.score.window if recipe.score is not None else 0
        self._rings = [Ring(window) for _ in range(layers)]
        self._pending: list[list[Pending]] = [[] for _ in range(layers)]
        self._wrote = self._since = self._noted = 0  # noted: up to the last query scorers saw
        self._fresh = False
        self.torn = False
        self.opened: int | None = None

    # a forward -----------------------------------------------------------------------------

    def begin(self, count: int) -> None:
        """Settle what is due; call it before a forward writes.

        Args:
            count: Tokens the forward will write.

        Raises:
            ValueError: If an earlier forward did not come to its end.
        """
        self._check_uncut()
        self.opened = None
        self._commit()
        trigger = self.recipe.trigger
        if self.recipe.evicts and trigger is not None and self.seen:
            held = max(layer.held for layer in self.layers)
            event = Event(
                count, self._wrote, self._since, held, self._fresh, self.speculative, self.seen
            )
            if trigger.due(event):
                self.compress()
        self._flush()
        self._wrote = count
        self._since += count
        self._fresh |= (count > 1 and not self.speculative) or not self.seen

    def attend(
        self, index: int, query: Query, valid: Tensor | None = None, *, observe: bool = True
    ) -> Tensor:
        """Return the attention of queries over a layer, [B, Hq, n, Dv], and take note of them.

        Args:
            index: Number of the layer.
            query: The queries; their own keys are written already.
            valid: bool [B, n]; False are queries of padding.
            observe: Whether scorers take note of the queries. Of a chunk that is computed several
                times, one time should count.
        """
        layer = self.layers[index]
        if layer.mover is not None and self.recipe.retrieve is None:
            with layer.meeting() as views:
                out = attend(query, views)
        else:
            out = attend(query, self.views(index, query))
        if observe:
            self.take_note(index, query, valid)
        return out

    def take_note(self, index: int, query: Query, valid: Tensor | None = None) -> None:
        """Let scorers look at queries, as `attend` does, if these will ever be looked at."""
        trigger = self.recipe.trigger
        counts = trigger is None or trigger.decoding or query.count > 1 or self._fresh
        if not self.recipe.observes or index < self.recipe.skip or not counts:
            return
        if self.speculative:
            self._pending[index].append(Pending(query, valid))
        else:
            self._note(self.layers[index], query, valid)

    def views(self, index: int, query: Query) -> list[View]:
        """Return what queries of a layer read."""
        layer, retrieve = self.layers[index], self.recipe.retrieve
        if retrieve is None or index < self.recipe.skip:
            return layer.views()
        return retrieve.views(query, layer, self.layers)

    def settle(self) -> None:
        """Compress, and hand to codecs what is theirs, whether or not it is due.

        Raises:
            ValueError: If nothing was written.
        """
        if self.recipe.evicts:
            self.compress()
        self._flush()

    def compress(self) -> None:
        """Score all slots and carry out what the plan says, whether or not it is due.

        Raises:
            ValueError: If the recipe has nothing to score with, or nothing was written.
        """
        self._commit()
        recipe = self.recipe
        layers = self.layers[recipe.skip :]
        if self.taken_over:
            self._check_queries()
        queries = [self._rings[layer.index].kept() for layer in layers]
        dropped = slots_to_drop(recipe, layers, len(self.layers), queries)
        if dropped is None:
            seen = [self._observation(layer) for layer in layers]
            plans = planned(recipe, seen)
            self.torn = True
            for layer, each, (score, plan) in zip(layers, seen, plans, strict=True):
                carry_out(layer, each, score, plan, recipe)
        else:
            self.torn = True
            for layer, index in zip(layers, dropped, strict=True):
                if index is not None:
                    layer.refill(index, oldest=recipe.score is not None and recipe.score.by_age)
        self.torn = self.taken_over = False
        self._since, self._fresh = 0, False
        if recipe.trigger is not None and not recipe.trigger.decoding:
            for ring in self._rings:
                ring.clear(self.seen)

    def compress_layer(
        self,
        index: int,
        query: Query | None = None,
        valid: Tensor | None = None,
        *,
        last: int = 0,
        passing: bool = False,
    ) -> None:
        """Score the slots of one layer and keep what the plan says, within a forward if need be.

        The layer's own tokens of the forward may be written already, and their queries take part
        in the score. Whether it is due is for the caller to say.

        Args:
            index: Number of the layer.
            query: Queries that scorers take note of before; attend to them with `observe=False`
                then, so that they count once.
            valid: bool [B, n]; False are queries of padding.
            last: Newest slots that stay in any case and can be overwritten and taken back.
            passing: Whether the queries take part in this score alone, as their tokens will be
                computed again; statistics are not told of them.

        Raises:
            ValueError: If the recipe does more to a layer than drop slots, or looks across layers.

        Reference: Deep Forcing, arXiv 2512.05081 (Participative Compression: scores of the queries
        of the block that is denoised, layer by layer).
        """
        recipe, layer = self.recipe, self.layers[index]
        check_alone(recipe)
        if index < recipe.skip:
            return
        self._commit()
        ring = self._rings[index]
        if query is not None and passing:
            ring = ring.fork()
            ring.push(query, valid)
        elif query is not None and recipe.observes:
            self._note(layer, query, valid)
        if self.taken_over:
            self._check_queries()
        if recipe.codec is not None:
            recipe.codec.align(layer)
        seen = self._observation(layer, ring)
        ((_, plan),) = planned(recipe, [seen])
        wanted = plan >= KEEP
        if seen.order is not None:
            wanted = torch.zeros_like(wanted).scatter_(-1, seen.order.expand_as(wanted), wanted)
        layer.keep(wanted, last=last, flat=recipe.layout == "flat")

    def keep(self, choose: Callable[[KVLayer], Tensor], *, last: int = 0) -> None:
        """Hold the slots that are named in each layer and no others.

        Args:
            choose: Returns the slots of a layer that are kept, as `KVLayer.keep` takes them.
            last: Newest slots that stay in any case and can be overwritten and taken back.
        """
        self._commit()
        if self.recipe.codec is not None:
            for layer in self.layers:
                self.recipe.codec.align(layer)
        wanted = [named(choose(layer), layer.meta()["pos"]) for layer in self.layers]
        self.torn = True
        for layer, which in zip(self.layers, wanted, strict=True):
            layer.keep(which, last=last)
        self.torn = False

    # going back, and sideways --------------------------------------------------------------

    def rollback(self, count: int) -> None:
        """Forget the last tokens, as if they had never been written.

        Raises:
            ValueError: If they are settled already; nothing is forgotten then. If an earlier
                forward did not come to its end.
        """
        self._check_uncut()
        for layer in self.layers:
            layer.check_rollback(count)
        for layer, ring, pending in zip(self.layers, self._rings, self._pending, strict=True):
            layer.rollback(count)
            if pending:
                shorten(pending, count)
            else:
                ring.rollback(count)
        self._wrote = max(self._wrote - count, 0)
        self._since -= count

    def rows(self, index: Tensor) -> None:
        """Keep batch rows, int64 [m]."""
        self._commit()
        for layer, ring in zip(self.layers, self._rings, strict=True):
            layer.rows(index)
            ring.rows(index)

    def fork(self) -> KVStore:
        """Return a store with the same content; writing to either leaves the other as it is."""
        self._commit()
        other = object.__new__(KVStore)
        other.__dict__.update(self.__dict__)
        other.layers = [layer.fork() for layer in self.layers]
        other._rings = [ring.fork() for ring in self._rings]
        other._pending = [[] for _ in self.layers]
        return other

    def reset(self) -> None:
        """Forget everything."""
        for layer, ring, pending in zip(self.layers, self._rings, self._pending, strict=True):
            layer.reset()
            ring.clear()
            pending.clear()
        self._wrote = self._since = self._noted = 0
        self._fresh = self.torn = self.taken_over = False
        self.opened = None

    def state(self) -> dict[str, object]:
        """Return what is held beside the layers: the last queries, and what was written when.

        Raises:
            ValueError: If an earlier forward did not come to its end.
        """
        self._check_uncut()
        self._commit()
        queries = [ring.query for ring in self._rings]
        return {
            "queries": queries, "wrote": [self._wrote, self._since], "fresh": self._fresh,
            "taken over": self.taken_over,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hold again what `state` returned."""
        for ring, query in zip(self._rings, state["queries"], strict=True):
            ring.query = query
        (self._wrote, self._since), self._fresh = state["wrote"], state["fresh"]
        self.taken_over = bool(state.get("taken over", False))
        self._noted = self.seen

    def has_noted(self, count: int) -> bool:
        """Return whether scorers looked at the last tokens, so that these cannot be forgotten."""
        score, left = self.recipe.score, self.seen - count
        if score is None or not count or self._noted <= left:
            return False
        rings = self._rings[self.recipe.skip :]
        return bool(score.statistics) or any(ring.misses(count, left) for ring in rings)

    # account -------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Logical length in tokens."""
        return max((layer.seen for layer in self.layers), default=0)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        found = [tensor for layer in self.layers for tensor in layer.tensors()]
        for ring in self._rings:
            if ring.query is not None:
                found += [ring.query.q, ring.query.positions()]
        found += [each.query.q for pending in self._pending for each in pending]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that are held: keys, values, metadata, statistics, queries, room at the end.

        Tensors of the recipe (bases, codebooks, trained heads) are like weights and do not count.
        """
        brought = {_storage(tensor) for tensor in tensors(self.recipe)}
        storages = {_storage(x): x.untyped_storage().nbytes() for x in self.tensors()}
        return sum(size for place, size in storages.items() if place not in brought)

    # within --------------------------------------------------------------------------------

    def _check_uncut(self) -> None:
        seen = {layer.seen for layer in self.layers}
        if self.torn or len(seen) > 1 or (self.opened is not None and seen != {self.opened}):
            raise ValueError(CUT_OFF)

    def _check_queries(self) -> None:
        """Refuse to score by fewer queries than the recipe looks at, others being unknown."""
        window = self.recipe.score.window if self.recipe.score is not None else 0
        kept = [ring.kept() for ring in self._rings[self.recipe.skip :]]
        count = min(0 if query is None else query.count for query in kept)
        if count < window:
            raise ValueError(
                f"{self.recipe.name} looks at the last {window} queries, and {count} came after "
                f"the tokens that were taken over: give at least {window} tokens after `past`, or "
                "a recipe that looks at fewer"
            )

    def _commit(self) -> None:
        for layer, pending in zip(self.layers, self._pending, strict=True):
            for each in pending:
                self._note(layer, each.query, each.valid)
            pending.clear()

    def _flush(self) -> None:
        codec, trigger = self.recipe.codec, self.recipe.trigger
        if codec is None or not self.seen:
            return
        if self._fresh and self.recipe.evicts and trigger is not None and not trigger.decoding:
            return  # a prompt that comes in chunks is scored exact before it is coded
        layers = self.layers[self.recipe.skip :]
        self.torn = True
        for first in range(0, len(layers), codec.scope):
            codec.flush(layers[first : first + codec.scope])
        self.torn = False

    def _note(self, layer: KVLayer, query: Query, valid: Tensor | None) -> None:
        score = self.recipe.score
        assert score is not None
        self._noted = max(self._noted, layer.seen)
        if score.window:
            self._rings[layer.index].push(query, valid)
        if score.statistics:
            note(score, layer, query, valid)

    def _observation(self, layer: KVLayer, ring: Ring | None = None) -> Observation:
        if self.recipe.score is not None:
            lengthen(layer, self.recipe.score.statistics)
        out = self.out[layer.index] if self.out is not None else None
        ring = self._rings[layer.index] if ring is None else ring
        return observe(layer, len(self.layers), ring.kept(), out)


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
