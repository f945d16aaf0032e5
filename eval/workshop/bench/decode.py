"""CPU seconds of a generated token with each cache, beside transformers' own `DynamicCache`, and of 10,000 in a row.

The model is SmolLM2-135M, or a Llama of about 130 M parameters with random weights, `BAR`, and the
prompt long, so that attention is a large part of a token. Every cache has a model object of its
own, all with the same weights: one that attention was exchanged in tells nothing of the stock one.
All read the same prompt and are given the same tokens, one each in turn. The vocabulary of the bar
goes with the number of layers, so that two layers show about the ratios of ten.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from diffcache.eval.cost.interleave import Call, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.runner import by_thirds
from diffcache.foreign import with_cache
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.hf.model import Mode
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import recipe_function, recipes
from diffcache.kv.recipes.eviction import h2o, snapkv, tova
from diffcache.kv.recipes.low_rank import xkv
from diffcache.kv.recipes.quantized import gear, kivi, mustafar, rotatekv
from diffcache.kv.recipes.retrieval import quest, shadowkv, tidal_decode
from diffcache.kv.recipes.streaming import streaming_llm
from diffcache.pipelines.fetched import fetched

LAYERS, PROMPT = 10, 4096
BAR, SMOLLM2 = "bar", "smollm2"
STOCK = "DynamicCache"
_HEADS, _KV_HEADS, _SIZE, _WIDTH, _INNER = 16, 4, 64, 1024, 2816
_WORDS_A_LAYER = 1600
_PEAK = 6  # factor of query and key projections, without which random attention is flat
_WARMUP = 2


@dataclass(frozen=True)
class Decoded:
    """A cache that is timed."""

    recipe: Recipe  # what it does
    target: float | None = None  # the most CPU time of a token, as a multiple of the stock cache's; None for none
    mode: Mode = "auto"  # how it goes with its model


def cases(layers: int = LAYERS, prompt: int = PROMPT) -> dict[str, Decoded]:
    """Return every cache that is timed, by name.

    Retrieval reads all in the first fifth of the layers. Evicting recipes hold a quarter of the prompt, and
    the others read at most half.
    """
    quarter, read, first = prompt // 4, min(256, prompt // 2), layers // 5
    select = (first, 3 * layers // 5) if layers >= 5 else (0,)
    chosen = quest(read, skip=first)
    return {
        "full": Decoded(Recipe(), mode="native"),
        "snapkv 25 %": Decoded(snapkv(quarter), 0.8),
        "streaming_llm 25 %": Decoded(streaming_llm(quarter), 0.85),
        "h2o 25 %": Decoded(h2o(quarter), 0.85),
        "tova 25 %": Decoded(tova(quarter), 0.85),
        "quest 256": Decoded(chosen, 0.85),
        "tidal_decode 256": Decoded(tidal_decode(read, select=select), 0.85),
        "kivi 4": Decoded(kivi(4), 1.2),
        "kivi 2": Decoded(kivi(2), 1.2),
        "kivi 4 + quest 256": Decoded(kivi(4) | chosen, 1.0),
        "snapkv 25 % + kivi 4": Decoded(snapkv(quarter) | kivi(4)),
        "xkv": Decoded(xkv(layers=min(4, layers)), 1.5, "native"),
        "shadowkv 512": Decoded(shadowkv(min(512, prompt // 2), outliers=min(16, prompt // 64)), 1.3),
        "gear 2": Decoded(gear(2), 1.5, "native"),
        "mustafar": Decoded(mustafar(), 1.5, "native"),
        "rotatekv 4": Decoded(rotatekv(4), 1.6, "native"),
    }


@dataclass
class Contender:
    """A model and its cache, which takes tokens one after the other."""

    model: LlamaForCausalLM  # shares its weights with those of the other contenders
    make: Callable[[LlamaForCausalLM], Any]  # makes an empty cache
    tokens: Tensor  # int64 [1, T], the prompt and what follows it
    cache: Any = field(default=None, repr=False)  # cache that holds the tokens so far
    taken: int = 0  # tokens so far

    def prefill(self, count: int) -> None:
        """Read the first tokens into a new cache."""
        self.cache, self.taken = self.make(self.model), 0
        self.read(count)

    def step(self) -> None:
        """Read one more token."""
        self.read(1)

    def read(self, count: int) -> None:
        """Read some tokens."""
        given = self.tokens[:, self.taken : self.taken + count]
        # As `generate` does, logits of the last token alone.
        self.model(input_ids=given, **with_cache(self.model, self.cache), logits_to_keep=1)
        self.taken += count

    def held(self) -> int:
        """Return the bytes of keys, values and whatever else is held."""
        if isinstance(self.cache, KVCache):
            return self.cache.nbytes
        return sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))


def build(layers: int, tokens: int, setting: Setting) -> LlamaForCausalLM:
    """Build the model, with random weights: layers of 16 query and 4 key-value heads of 64 channels."""
    config = LlamaConfig(
        vocab_size=_WORDS_A_LAYER * layers,
        hidden_size=_WIDTH,
        intermediate_size=_INNER,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_SIZE,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data.mul_(_PEAK)
    return model.to(setting.device, setting.dtype).eval()


def contenders(chosen: Mapping[str, Decoded], model: LlamaForCausalLM, tokens: int) -> dict[str, Contender]:
    """Return the contenders by name, the stock cache first; each has a copy of the model that shares its weights."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=generator)
    given = ids.to(model.device)
    makes: dict[str, Callable[[LlamaForCausalLM], Any]] = {STOCK: lambda model: DynamicCache(config=model.config)}
    for name, case in chosen.items():
        makes[name] = partial(cache_for, recipe=case.recipe, mode=case.mode)
    # Every contender has a model object of its own, which shares the weights.
    weights = {id(weight): weight for weight in model.parameters()}
    return {name: Contender(copy.deepcopy(model, dict(weights)), make, given) for name, make in makes.items()}


@torch.no_grad()
def measure(
    setting: Setting,
    *,
    rounds: int = 50,
    layers: int = LAYERS,
    prompt: int = PROMPT,
    recipes: Sequence[str] | None = None,
    model: str = BAR,
) -> dict[str, Any]:
    """Measure the time of a prompt of at least 256 tokens, the first token after it, and later ones, one a round.

    `layers` are those of the bar; SmolLM2, once it was fetched, has its own 30. `recipes` are names of caches beside
    the stock one; None for all.
    """
    for name, value, least in (("layers", layers, 2), ("prompt", prompt, 256)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    tokens, dtype = prompt + 1 + _WARMUP + rounds, setting.dtype
    if model == SMOLLM2:
        place = fetched(SMOLLM2)
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa")
        whole = loaded.to(setting.device).eval()
        layers = whole.config.num_hidden_layers
    else:
        whole = build(layers, tokens, setting)
    found = cases(layers, prompt)
    unknown = [name for name in recipes or () if name not in found]
    if unknown:
        raise ValueError(f"no cache {unknown[0]!r} is timed; there are {', '.join(found)}")
    chosen = {name: case for name, case in found.items() if recipes is None or name in recipes}
    run = contenders(chosen, whole, tokens)
    reads: dict[str, Call | Turn] = {name: partial(each.prefill, prompt) for name, each in run.items()}
    steps: dict[str, Call | Turn] = {name: each.step for name, each in run.items()}
    prefill = take_turns(reads, 1, 0, setting)
    first = take_turns(steps, 1, 0, setting)
    later = take_turns(steps, rounds, _WARMUP, setting)
    config = whole.config
    return {
        "shapes": {
            "device": setting.device.type,
            "layers": layers,
            "prompt": prompt,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_size": config.head_dim,
            "width": config.hidden_size,
            "model": model,
            "parameters": sum(p.numel() for p in run[STOCK].model.parameters()),
        },
        "rounds": rounds,
        "clock": setting.clock,
        "load": later.load,
        "cores": later.cores,
        "rows": rows(run, chosen, [each.own(setting) for each in (prefill, first, later)]),
    }


def rows(
    run: Mapping[str, Contender], chosen: Mapping[str, Decoded], taken: Sequence[Mapping[str, list[float]]]
) -> list[dict[str, Any]]:
    """Return the seconds of each cache for the prompt, the first token and later ones, and the bytes that it holds."""
    prefill, first, later = taken
    rows = []
    for name, each in run.items():
        case = chosen.get(name)
        ratios = [own / stock for own, stock in zip(later[name], later[STOCK], strict=True)]
        ratio, target = summary(ratios), None if case is None else case.target
        rows.append(
            {
                "name": name,
                "recipe": None if case is None else case.recipe.name,
                "mode": each.cache.mode if isinstance(each.cache, KVCache) else None,
                "token_ms": summary([1e3 * seconds for seconds in later[name]]),
                "ratio": ratio,
                "target": target,
                "missed": None if target is None else ratio["median"] > target,
                "bytes": each.held(),
                "share": each.held() / run[STOCK].held(),
                "first_ms": 1e3 * first[name][0],
                "prefill_seconds": prefill[name][0],
                "prefill_ratio": prefill[name][0] / prefill[STOCK][0],
            }
        )
    return rows


# tokens by the thousand --------------------------------------------------------------------------

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
def capacity(setting: Setting, *, tokens: int = TOKENS) -> dict[str, Any]:
    """Measure the generation of `tokens` tokens one by one, at least 9, and the bytes held after each third.

    The caches take one token each in turn, and so does the model without any cache, whose work never
    changes: times are told in multiples of its, so that a slow spell of the machine falls out. A cache
    that is bounded takes as long, and holds as much, in the last third as in the middle third, while
    transformers' own `DynamicCache` grows.
    """
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
