"""Recipes of single layers as one recipe: each part asks which layer it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.budget import Budget
from diffcache.kv.codec.held import ByLayer, KVCodec
from diffcache.kv.layer import KVLayer
from diffcache.kv.merge import Merger
from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.score.base import Score
from diffcache.kv.slots import Slots
from diffcache.kv.view import View

_ALIKE = ("trigger", "ladder", "space", "positions", "layout")  # a cache has one of each


def per_layer(recipes: Sequence[Recipe]) -> Recipe:
    """Return the recipe that does to each layer what its own recipe says.

    The same recipe in all layers does what it does alone. `Recipe()` leaves a layer as it is, and
    the first layers that a recipe skips are those of the model.

    Args:
        recipes: Recipe of layer 0, 1, ..., the layers of the store.

    Raises:
        ValueError: If a recipe looks across layers, or two want to be done at other times, in
            another space, or to hold slots in another way.
    """
    if not recipes:
        raise ValueError("recipes=[]: give one for each layer")
    if all(recipe == recipes[0] for recipe in recipes):
        return recipes[0]
    for recipe in recipes:
        _check_alone(recipe)
    own = [replace(recipe, skip=0) for recipe in recipes]
    own = [Recipe() if n < recipes[n].skip else recipe for n, recipe in enumerate(own)]
    changes: dict[str, Any] = {name: _only(name, own) for name in _ALIKE}
    parts = {
        name: tuple(getattr(recipe, name) for recipe in own)
        for name in ("score", "budget", "plan", "merge", "codec", "retrieve")
    }
    classes: Mapping[str, Any] = {
        "score": LayerScores,
        "budget": LayerBudgets,
        "plan": LayerPlans,
        "merge": LayerMergers,
        "codec": ByLayer,
        "retrieve": LayerRetrievers,
    }
    for name, each in parts.items():
        if any(part is not None for part in each):
            changes[name] = classes[name](each)
    names = ", ".join(dict.fromkeys(recipe.name or "as it is" for recipe in own))
    return Recipe(f"per layer: {names}", **changes)


def _check_alone(recipe: Recipe) -> None:
    """Refuse a recipe whose parts look across layers."""
    looking = [
        f"{name}={part!r}"
        for name in ("score", "budget", "retrieve")
        if (part := getattr(recipe, name)) is not None and part.looks_across
    ]
    codecs: tuple[KVCodec | None, ...] = (recipe.codec, *recipe.ladder)
    looking += [f"codec={x!r}" for x in codecs if x is not None and x.scope > 1]
    if looking:
        raise ValueError(
            f"{recipe.name or 'a recipe'} looks across layers ({', '.join(looking)}) and cannot be "
            "that of single layers; use it for the whole cache"
        )


def _only(name: str, recipes: Iterable[Recipe]) -> Any:
    """Return what all recipes that do something say of a part."""
    said = {getattr(recipe, name): recipe.name for recipe in recipes if recipe != Recipe()}
    if name in ("trigger", "ladder"):
        said = {part: by for part, by in said.items() if part}  # the others have nothing to say
    if len(said) > 1:
        each = "; ".join(f"{by}: {part!r}" for part, by in said.items())
        raise ValueError(f"layers differ in {name} ({each}): a cache has one; give all the same")
    return next(iter(said), getattr(Recipe(), name))


@final
@dataclass(frozen=True)
class LayerScores(Score):
    """The score of layer 0, 1, ...; None for layers that drop nothing."""

    scores: tuple[Score | None, ...]

    def check(self) -> None:
        """Raise ValueError if two keep statistics, and not the same."""
        keeping = dict.fromkeys(each for each in self._all() if each.statistics)
        if len(keeping) > 1:
            raise ValueError(
                "layers keep statistics of their slots in different ways "
                f"({', '.join(map(repr, keeping))}); give all of them the same score"
            )

    def _all(self) -> list[Score]:
        return [each for each in self.scores if each is not None]

    def _keeping(self) -> Score | None:
        return next((each for each in self._all() if each.statistics), None)

    @property
    def window(self) -> int:
        """The longest of all windows."""
        return max(each.window for each in self._all())

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics, which are kept of all layers."""
        keeping = self._keeping()
        return () if keeping is None else keeping.statistics

    @property
    def wants_out(self) -> bool:
        """Return whether one reads the weight of the output projection."""
        return any(each.wants_out for each in self._all())

    @property
    def attends(self) -> bool:
        """Return whether the statistics are of attention."""
        keeping = self._keeping()
        return keeping is None or keeping.attends

    def __call__(self, seen: Observation) -> Tensor:
        """Return what the score of the layer says, by the last queries of its own window."""
        score = self.scores[seen.layer]
        if score is None:
            return seen.slots.pos.float()
        if seen.queries is not None:
            own = seen.last(score.window) if score.window else None
            seen = replace(seen, queries=own)
        return score(seen)

    def enter(self, stats: dict[str, Tensor], asked: Query, slots: Slots, layer: int) -> None:
        """Have the one that keeps statistics take note of tokens."""
        keeping = self._keeping()
        assert keeping is not None
        keeping.enter(stats, asked, slots, layer)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Have the one that keeps statistics take note of attention."""
        keeping = self._keeping()
        assert keeping is not None
        keeping.note(stats, attended)


@final
@dataclass(frozen=True)
class LayerBudgets(Budget):
    """The budget of layer 0, 1, ...; None for layers that hold everything."""

    budgets: tuple[Budget | None, ...]

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return what each says of its own layer."""
        found = []
        for score, each in zip(scores, seen, strict=True):
            budget = self.budgets[each.layer]
            found.append(each.lengths if budget is None else budget.allot([score], [each])[0])
        return found


@final
@dataclass(frozen=True)
class LayerPlans(Planner):
    """The plan of layer 0, 1, ...; None for layers that hold everything."""

    plans: tuple[Planner | None, ...]

    @property
    def wants_out(self) -> bool:
        """Return whether one reads the weight of the output projection."""
        return any(plan is not None and plan.wants_out for plan in self.plans)

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what the plan of the layer says."""
        plan = self.plans[seen.layer]
        if plan is None:
            kept = torch.where(seen.valid, KEEP, DROP).to(torch.int8)
            return kept.expand(score.shape)
        return plan(score, budget, seen)


@final
@dataclass(frozen=True)
class LayerMergers(Merger):
    """The merger of layer 0, 1, ...; None for layers that merge nothing."""

    mergers: tuple[Merger | None, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        spaces = {merger.space for merger in self.mergers if merger is not None}
        if len(spaces) > 1:
            raise ValueError(f"layers merge in different spaces {sorted(spaces)}: give all one")
        object.__setattr__(self, "space", spaces.pop())

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Let the merger of the layer do it."""
        merger = self.mergers[seen.layer]
        return (seen.slots, plan) if merger is None else merger(seen, score, plan)


@final
@dataclass(frozen=True)
class LayerRetrievers(Retriever):
    """The retriever of layer 0, 1, ...; None for layers that read everything."""

    retrievers: tuple[Retriever | None, ...]

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return what the retriever of the layer reads."""
        retriever = self.retrievers[layer.index]
        return layer.views() if retriever is None else retriever.views(query, layer, others)
