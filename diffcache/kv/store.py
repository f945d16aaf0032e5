"""The cache of a whole model: its layers, what was observed of them, and when they are settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend, attend_noting
from diffcache.kv.codec.base import nbytes, tensors
from diffcache.kv.layer import FIXED, KVLayer
from diffcache.kv.mover import Mover
from diffcache.kv.observe import Observation, Pending, Ring, lengthen, note, observe
from diffcache.kv.plan import KEEP
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.rotary import Rotation
from diffcache.kv.settle import carry_out, check_alone, check_queries, flush, planned, slots_to_drop
from diffcache.kv.slots import named
from diffcache.kv.trigger import Event
from diffcache.kv.view import View

_SEEN = attrgetter("seen")
P = ParamSpec("P")
T = TypeVar("T")
CUT_OFF = "an earlier forward was cut off and left the cache half changed: reset it, or use a fork"


def without_autocast(method: Callable[Concatenate[KVStore, P], T]) -> Callable[Concatenate[KVStore, P], T]:
    """Turn autocast off inside a method, so that scores, merges and codes are made in the dtypes that they say."""

    @wraps(method)
    def run(self: KVStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        form = self.layers[0].form if self.layers else None
        kind = "cpu" if form is None else form.device.type
        if not torch.is_autocast_enabled(kind):
            return method(self, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return method(self, *args, **kwargs)

    return run


class KVStore:
    """The cache of a model, or of those of its layers that are compressed.

    A recipe does its work at the start of the next forward (`begin`), when the tokens of the
    last one can no longer be taken back and all layers have been seen; after a prompt that is known
    to be whole, and not to be taken back, at its end (`end`).

    Attributes:
        recipe: Recipe of the cache.
        layers: Layers in the order of the model.
        read_once: True if layers keep the slots that were read of them, as `KVLayer` has it.
        speculative: True if `rollback` may take tokens back, as in assisted decoding.
        origin: Function that returns facts of the model, by which a saved cache is matched to it.
        taken_over: True if tokens were written whose queries were not seen, and not compressed yet.
        torn: True while what is held is half changed, as an error leaves it.
        opened: Tokens seen before a forward whose end, when it comes, sets this back to None.
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
        turns = rotary if rotary is not None and recipe.rotates else [None] * layers
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
        self.speculative = self.taken_over = self.torn = False
        self.origin: Callable[[], Mapping[str, str]] = dict
        self.out = out
        window = recipe.score.window if recipe.score is not None else 0
        self._rings = [Ring(window) for _ in range(layers)]
        self._wrote = self._since = self._noted = self._settled = 0  # noted: what scorers saw
        self._fresh = self._was_fresh = False  # a prompt waits, before and after the last forward
        self.opened: int | None = None

    # a forward -----------------------------------------------------------------------------

    def begin(self, count: int) -> None:
        """Settle what is due; call it before a forward writes `count` tokens.

        Raises:
            ValueError: If an earlier forward did not come to its end.
        """
        self._check_uncut()
        self.opened = None
        self._commit()
        if self._is_due(count):
            self.compress()
        if self.recipe.codec is not None:
            self._flush()
        self._wrote, self._was_fresh = count, self._fresh
        self._since += count
        self._fresh |= (count > 1 and not self.speculative) or not self.seen
        if self.speculative:
            for layer in self.layers:
                layer.mark()

    def end(self, prompt: bool) -> None:
        """Close a forward; a prompt that is known to end is compressed, unless it may be taken back."""
        self.opened = None
        if prompt and self._fresh and not self.speculative and self._is_due(1):
            self.compress()

    def attend(
        self,
        index: int,
        query: Query,
        valid: Tensor | None = None,
        *,
        observe: bool = True,
        noted: Query | None = None,
    ) -> Tensor:
        """Return the attention of queries over a layer, [B, Hq, n, Dv], and take note of them.

        Args:
            index: Number of the layer.
            query: The queries; their own keys are written already.
            valid: bool [B, n]; False are queries of padding.
            observe: Whether scorers take note; a chunk computed several times should count once.
            noted: The queries as scorers are told of them; None for `query`.
        """
        layer, whole, lse = self.layers[index], None, None
        if self.recipe.retrieve is not None:
            out = attend(query, self.views(index, query))
        elif layer.mover is not None:
            with layer.meeting() as views:
                out = attend(query, views)
        else:
            views = layer.views()
            # Scores by attention need what the softmax divides by, which this attention knows.
            scored = observe and index >= self.recipe.skip and not self.speculative
            scored = scored and self.recipe.notes_attention and (noted is None or noted is query)
            out, lse = attend_noting(query, views, note=scored)
            whole = views[0] if len(views) == 1 else None
        if observe and index >= self.recipe.skip:
            if not self.speculative:
                self._note(layer, noted or query, valid, whole, lse)
            elif self.recipe.observes or self.recipe.retrieve is not None:  # until nothing can be taken back any more
                self._rings[index].pending.append(Pending(noted or query, valid))
        return out

    def views(self, index: int, query: Query) -> list[View]:
        """Return what queries of a layer read."""
        layer, retrieve = self.layers[index], self.recipe.retrieve
        if retrieve is None or index < self.recipe.skip:
            return layer.views()
        if retrieve.projects:  # under the model's autocast, as the model made them
            return retrieve.views(query, layer, self.layers)
        return self._retrieved(retrieve, query, layer)

    @without_autocast
    def _retrieved(self, retrieve: Retriever, query: Query, layer: KVLayer) -> list[View]:
        return retrieve.views(query, layer, self.layers)

    def settle(self) -> None:
        """Compress, and hand to codecs what is theirs, due or not; raise ValueError if nothing was written."""
        if self.recipe.evicts:
            self.compress()
        self._flush()

    @without_autocast
    def compress(self) -> None:
        """Score all slots and carry out the plan, due or not; ValueError without a score or any slots."""
        self._commit()
        recipe = self.recipe
        layers = self.layers[recipe.skip :]
        if self.taken_over:
            check_queries(recipe, self._rings)
        queries = [self._rings[layer.index].kept() for layer in layers]
        dropped = slots_to_drop(recipe, layers, len(self.layers), queries)
        if dropped is None:
            seen = [self._observation(layer, self._rings[layer.index]) for layer in layers]
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
        self._since, self._fresh, self._settled = 0, False, self.seen
        if recipe.trigger is not None and not recipe.trigger.decoding:
            for ring in self._rings:
                ring.reset(self.seen)

    @without_autocast
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

        Its own tokens of the forward may be written already. The caller says whether it is due.

        Args:
            index: Number of the layer.
            query: Queries that scorers take note of; attend to them with `observe=False`.
            valid: bool [B, n]; False are queries of padding.
            last: Newest slots that stay in any case and can be overwritten and taken back.
            passing: Whether the queries, to be computed again, take part in this score alone.

        Raises:
            ValueError: If the recipe does more to a layer than drop slots, or looks across layers.

        Reference: Deep Forcing, arXiv 2512.05081 (Participative Compression, layer by layer).
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
            check_queries(recipe, self._rings)
        if recipe.codec is not None:
            recipe.codec.align(layer)
        seen = self._observation(layer, ring)
        ((_, plan),) = planned(recipe, [seen])
        wanted = plan >= KEEP
        if seen.order is not None:
            wanted = torch.zeros_like(wanted).scatter_(-1, seen.order.expand_as(wanted), wanted)
        layer.keep(wanted, last=last, flat=recipe.layout == "flat")

    @without_autocast
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
        self._settled = self.seen - last

    # going back, and sideways --------------------------------------------------------------

    def rollback(self, count: int) -> None:
        """Forget the last tokens, as if never written; or forget nothing and raise as `check_rollback` does."""
        self.check_rollback(count)
        for layer, ring in zip(self.layers, self._rings, strict=True):
            layer.rollback(count)
            ring.rollback(count)
        self._wrote = max(self._wrote - count, 0)
        self._since -= count
        if count and not self._wrote:
            self._fresh = self._was_fresh
        elif self.recipe.retrieve is not None:  # what is left of the forward chooses anew
            for layer, ring in zip(self.layers, self._rings, strict=True):
                for each in ring.pending:
                    self.views(layer.index, each.query)

    def check_rollback(self, count: int) -> None:
        """Raise ValueError if the last `count` tokens are settled, cannot be forgotten, or a forward was cut off."""
        self._check_uncut()
        if count > self.seen - self._settled:
            raise ValueError(FIXED.format(count, self.seen - self._settled))
        for layer in self.layers:
            layer.check_rollback(count)

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
        return other

    def reset(self) -> None:
        """Forget everything."""
        for layer, ring in zip(self.layers, self._rings, strict=True):
            layer.reset()
            ring.reset()
        self._wrote = self._since = self._noted = self._settled = 0
        self._fresh = self.torn = self.taken_over = False
        self.opened = None

    def state(self) -> dict[str, object]:
        """Return last queries and what was written when; raise ValueError if a forward did not come to its end."""
        self._check_uncut()
        self._commit()
        queries = [ring.query for ring in self._rings]
        wrote = [self._wrote, self._since, self._settled]
        rest = {"fresh": self._fresh, "taken over": self.taken_over}
        return {"queries": queries, "wrote": wrote, **rest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hold again what `state` returned."""
        for ring, query in zip(self._rings, state["queries"], strict=True):
            ring.query = query
        self._wrote, self._since, *settled = state["wrote"]
        self._settled = settled[0] if settled else self.seen
        self._fresh = state["fresh"]
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
        return max(map(_SEEN, self.layers), default=0)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        found = [tensor for layer in self.layers for tensor in layer.tensors()]
        for ring in self._rings:
            found += ring.tensors()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that are held: keys, values, metadata, statistics, queries, room at the end.

        Tensors of the recipe (bases, codebooks, trained heads) are like weights and do not count.
        """
        brought = {x.untyped_storage().data_ptr() for x in tensors(self.recipe)}
        return nbytes([x for x in self.tensors() if x.untyped_storage().data_ptr() not in brought])

    # within --------------------------------------------------------------------------------

    def _check_uncut(self) -> None:
        seen = set(map(_SEEN, self.layers))
        if self.torn or len(seen) > 1 or (self.opened is not None and seen != {self.opened}):
            raise ValueError(CUT_OFF)

    def _is_due(self, count: int) -> bool:
        """Return whether slots are scored before `count` tokens are written."""
        trigger = self.recipe.trigger
        if trigger is None or not self.recipe.evicts or not (self._fresh or trigger.decoding):
            return False  # what rests while tokens are generated is due after a prompt alone
        held, seen = max([layer.held for layer in self.layers]), self.seen
        event = Event(count, self._since, held, self._fresh, self.speculative, seen)
        return seen > 0 and trigger.due(event)

    def _commit(self) -> None:
        for layer, ring in zip(self.layers, self._rings, strict=True):
            layer.marked = None
            for each in ring.pending:
                self._note(layer, each.query, each.valid)
            ring.pending.clear()

    @without_autocast
    def _flush(self) -> None:
        codec, trigger = self.recipe.codec, self.recipe.trigger
        if codec is None or not self.seen:
            return
        if self._fresh and self.recipe.evicts and trigger is not None and not trigger.decoding:
            return  # a prompt that comes in chunks is scored exact before it is coded
        layers = self.layers[self.recipe.skip :]
        self.torn = True
        if flush(codec, layers):
            self._settled = self.seen
        self.torn = False

    @without_autocast
    def _note(
        self, layer: KVLayer, query: Query, valid: Tensor | None, view: View | None = None, lse: Tensor | None = None
    ) -> None:
        score, trigger = self.recipe.score, self.recipe.trigger
        if score is None or not self.recipe.observes:
            return
        if trigger is not None and not (trigger.decoding or query.count > 1 or self._fresh):
            return
        self._noted = max(self._noted, layer.seen)
        if score.window:
            self._rings[layer.index].push(query, valid)
        note(score, layer, query, valid, view, lse)

    def _observation(self, layer: KVLayer, ring: Ring) -> Observation:
        if self.recipe.score is not None:
            lengthen(layer, self.recipe.score.statistics)
        out = self.out[layer.index] if self.out is not None else None
        return observe(layer, len(self.layers), ring.kept(), out)
