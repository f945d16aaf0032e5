"""CPU seconds and bytes of 10,000 generated tokens, with every recipe that bounds what it holds.

The caches take one token each in turn, and so does the model without any cache, whose work never
changes: times are told in multiples of its, so that a slow spell of the machine falls out. A cache
that is bounded takes as long, and holds as much, in the last third as in the middle third, while
transformers' own `DynamicCache` grows.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from diffcache.eval.cost.interleave import Call, Turn
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.decode import STOCK, Decoded, build, contenders
from diffcache.eval.workshop.bench.runner import by_thirds
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import recipe_function, recipes

TOKENS, BUDGET = 10_000, 512
ALONE = "no cache"  # the model on one token


def bounded() -> dict[str, Recipe]:
    """Return recipes that evict while tokens are generated and bound what they hold, without tables, by name."""
    found = {}
    for name in recipes():
        make = recipe_function(name)
        settings = inspect.signature(make).parameters
        needed = any(setting.default is setting.empty for setting in settings.values())
        if "budget" in settings and settings["budget"].annotation == "Size" and not needed:
            recipe = make(budget=BUDGET)
            if recipe.bounded:
                found[name] = recipe
    return found


@torch.no_grad()
def measure(setting: Setting, *, tokens: int = TOKENS) -> dict[str, Any]:
    """Measure the generation of `tokens` tokens one by one, at least 9, and the bytes held after each third."""
    if tokens < 9:
        raise ValueError(f"tokens={tokens}: must be at least 9")
    chosen = {name: Decoded(recipe) for name, recipe in bounded().items()}
    run = contenders(chosen, build(1, BUDGET + tokens, setting), BUDGET + tokens)
    take_turns({n: partial(c.prefill, BUDGET) for n, c in run.items()}, 1, 0, setting)
    model, first = run[STOCK].model, run[STOCK].tokens[:, :1]
    steps: dict[str, Call | Turn] = {ALONE: lambda: model(input_ids=first, use_cache=False)}
    steps |= {name: each.step for name, each in run.items()}
    found = by_thirds(steps, {name: each.held for name, each in run.items()}, tokens, setting)
    return {
        "shapes": {"layers": 1, "prompt": BUDGET, "budget": BUDGET},
        "rounds": tokens,
        "rows": [{"name": name} | told for name, told in found.items()],
    }
