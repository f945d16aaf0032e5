"""Find what recipes need in a model of transformers, by the names its modules have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ReferenceType, WeakSet

from torch import Tensor, nn

from diffcache.digest import digest, weights_digest
from diffcache.errors import AttachError
from diffcache.foreign import adapters_of, cache_name
from diffcache.kv.hf.rotary import RotaryReader, rotary_of
from diffcache.kv.recipe import Recipe

Mode = Literal["auto", "native", "stock"]
NAME = "diffcache"  # what the attention function of caches is registered as
_DIFFUSION = ("llada", "Dream")  # `model_type` of code that fills in masks and takes no cache
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True)
class CacheSetup:
    """Settings that tie a cache to its model.

    Attributes:
        mode: `"native"` or `"stock"`.
        why: Reason for this mode.
        owned: The layers of full attention, whose places in the store are 0, 1, ...
        config: Configuration of the decoder, which names the attention function it uses.
        windows: Most tokens that each of the `owned` layers sees; None for one that sees all.
        modules: The decoder's attention modules, as far as they were found.
        eager: Whether the model used eager attention, which is always given a mask.
    """

    mode: Mode
    why: str
    owned: tuple[int, ...]
    config: Any
    windows: tuple[int | None, ...]
    modules: WeakSet[nn.Module]
    eager: bool = False


def config_of(model: Any) -> Any:
    """Return the configuration of a model of transformers, or raise AttachError if it is no such model."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        given = "None" if model is None else f"a {type(model).__name__}"
        raise AttachError(
            f"model is {given}: pass a model of transformers, such as AutoModelForCausalLM.from_pretrained(...)"
        )
    return config


def last_logits(model: nn.Module) -> dict[str, Any]:
    """Return the argument by which a forward makes the logits of its last token alone.

    Empty where it takes none. Logits of a long context would fill the memory.
    """
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if takes else {}


def decoder_config(model: nn.Module) -> Any:
    """Return the configuration of a model's decoder.

    Raises:
        AttachError: If it is no model of transformers, has an encoder as well, takes no cache but
            its own, or is a diffusion language model of its own code.
    """
    config = config_of(model)
    if getattr(config, "model_type", None) in _DIFFUSION:
        raise AttachError(
            f"{type(model).__name__} fills in masks, every token seeing all others, and its own "
            "code takes no cache of transformers; wrap it with a policy of diffcache.dllm, such as "
            "diffcache.wrap(model, DKVCache()), and decode with DiffusionLM"
        )
    if getattr(config, "model_type", None) == "minimax":
        raise AttachError(f"{type(model).__name__} takes no cache but its own; leave it as it is")
    if getattr(config, "is_encoder_decoder", False):
        raise AttachError(
            f"{type(model).__name__} has an encoder, and layers that attend to it; use a "
            "decoder-only model, or the cache of transformers"
        )
    return config.get_text_config(decoder=True)


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a model that has the decoder's configuration: the model, or one within."""
    config = decoder_config(model)
    return next((p for p in model.modules() if getattr(p, "config", None) is config), model)


def choose(recipe: Recipe, mode: Mode) -> tuple[Mode, str]:
    """Return the mode a recipe is run in, and why.

    Raises:
        AttachError: If the mode that is asked for cannot do it.
        ValueError: If there is no such mode.
    """
    if mode not in ("auto", "native", "stock"):
        raise ValueError(f"mode={mode!r}: must be 'auto', 'native' or 'stock'")
    needs = [
        text
        for wanted, text in (
            (recipe.evicts, "slots are dropped, and positions say who sees what"),
            (recipe.retrieve is not None, "queries read chosen slots"),
            (recipe.positions is not None, "keys are read at other positions"),
        )
        if wanted
    ]
    if recipe.positions is not None and not recipe.positions.anchored:
        raise AttachError(
            f"positions={recipe.positions!r}: moves the newest tokens, and the model has rotated "
            "its queries before they are seen; use Slot(), or None"
        )
    moved = recipe.retrieve is not None or recipe.positions is not None
    if mode == "stock" and (moved or recipe.observes):
        why = "the recipe looks at queries" if recipe.observes else needs[-1]
        raise AttachError(f"mode='stock': {why}; use mode='native'")
    if mode != "auto":
        return mode, "asked for"
    return ("native", needs[0]) if needs else ("stock", "nothing is dropped and all is read")


def attentions(model: nn.Module, owned: Sequence[int]) -> dict[int, nn.Module]:
    """Return the attention module of each layer, or raise AttachError if one attends to other than tokens."""
    modules: dict[int, nn.Module] = {}
    for index, module in numbered(model):
        if index in owned and (index not in modules or _is_cross(modules[index])):
            modules[index] = module
    blocks = _blocks(model)
    for index in owned:
        if index not in modules and blocks is not None:  # as where layers share one module
            named = blocks[index].named_modules()
            inside = [module for name, module in named if _is_attention(name, module)]
            modules.update(zip([index], inside, strict=False))
    cross = [index for index, module in modules.items() if _is_cross(module)]
    if cross:
        kind = type(modules[cross[0]]).__name__
        raise AttachError(
            f"{type(model).__name__}: layers {cross} attend to something else than the tokens "
            f"({kind}), and their keys grow with no token; use the cache of transformers"
        )
    return modules


def numbered(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the attention modules of a decoder, each with the number of its layer."""
    for name, module in decoder_of(model).named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and _is_attention(name, module):
            yield index, module


def _blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the layers of a decoder, in order."""
    count = getattr(decoder_config(model), "num_hidden_layers", None)
    lists = (part for part in decoder_of(model).modules() if isinstance(part, nn.ModuleList))
    return next((part for part in lists if len(part) == count), None)


def _is_attention(name: str, module: nn.Module) -> bool:
    own = name.rsplit(".", 1)[-1].lower()
    return hasattr(module, "is_causal") or "attn" in own or "attention" in own


def _is_cross(module: nn.Module) -> bool:
    return "Cross" in type(module).__name__


def rotary_embedding(model: nn.Module) -> nn.Module | None:
    """Return the rotary embedding of a model's decoder, None if it has none."""
    named = decoder_of(model).named_modules()
    return next((module for name, module in named if name.endswith("rotary_emb")), None)


def reader(model: nn.Module, found: dict[int, nn.Module], index: int, config: Any) -> RotaryReader:
    """Return what tells how a layer rotates its keys, or raise AttachError if that cannot be found out."""
    if index not in found:
        raise AttachError(f"{type(model).__name__}: no attention module of layer {index} was found")
    embedding = rotary_embedding(model)
    if embedding is None:
        raise AttachError(
            f"{type(model).__name__} has no rotary position embedding; use a recipe that holds "
            "keys as they are (space='post')"
        )
    types = getattr(config, "layer_types", None)
    return rotary_of(found[index], embedding, types[index] if types else None)


def origin_of(decoder: ReferenceType[nn.Module]) -> dict[str, str]:
    """Return what the keys and values of a decoder are made by, as digests; nothing where it is gone."""
    model: Any = decoder()
    if model is None:
        return {}
    weights = getattr(model, "base_model", model).parameters()  # without its head
    rope = {name: getattr(model.config, name, None) for name in ("rope_parameters", "rope_scaling")}
    adapted = (each for each in model.modules() if any(adapters_of(each).values()))
    adapters = [(adapters_of(each), getattr(each, "scaling", None)) for each in adapted]
    digests = {"rotary embedding": digest(rope), "adapters": digest(adapters)}
    return {"weights": weights_digest(weights), **digests}


def check_takes_cache(model: nn.Module) -> None:
    """Check that a model reads from a cache what it wrote, as encoders of text do not.

    Raises:
        AttachError: If no part of it takes a cache, or it attends both ways as its class is made.
    """
    parts = [part for part in model.modules() if hasattr(part, "config")]
    takes = any(cache_name(type(part).forward) for part in parts)
    # only of a class that can be either, as BERT; decoders whose settings say no are causal
    decoder = getattr(decoder_config(model), "is_decoder", None)
    marks = [getattr(m, "is_causal", getattr(m, "is_decoder", None)) for m in model.modules()]
    if not takes or (decoder is False and not any(marks)):
        raise AttachError(
            f"{type(model).__name__} is an encoder: it keeps nothing from one call to the next; "
            "use a model that generates, such as AutoModelForCausalLM.from_pretrained(...)"
        )


def check_generates_with_cache(model: nn.Module) -> None:
    """Raise AttachError if settings have `generate` give a cache all tokens anew at each step."""
    if getattr(getattr(model, "generation_config", None), "use_cache", None) is False:
        raise AttachError(
            f"{type(model).__name__}: generation_config.use_cache=False has generate give all "
            "tokens to a cache anew at each step; set model.generation_config.use_cache = True"
        )


def output_of(found: dict[int, nn.Module], index: int) -> Tensor:
    """Return the weight of a layer's output projection, [hidden, Hq * Dv], or raise AttachError."""
    module = found.get(index)
    for name in _OUTPUTS:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Linear):
            return layer.weight
    raise AttachError(
        f"layer {index}: no output projection was found (looked for {', '.join(_OUTPUTS)}); use a "
        "scorer that does not need it"
    )
