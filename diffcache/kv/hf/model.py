"""Find what recipes need in a model of transformers, by the names its modules have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.hf.rotary import RotaryReader, rotary_of
from diffcache.kv.recipe import Recipe

Mode = Literal["auto", "native", "stock"]
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True)
class Setup:
    """How a cache goes with its model.

    Attributes:
        mode: `"native"` or `"stock"`.
        why: Why this mode.
        owned: The layers of full attention, whose places in the store are 0, 1, ...
        config: Of the model, which names the attention function it uses.
    """

    mode: Mode
    why: str
    owned: tuple[int, ...]
    config: Any


def config_of(model: Any) -> Any:
    """Return the configuration of a model of transformers.

    Raises:
        AttachError: If it is no such model.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        given = "None" if model is None else f"a {type(model).__name__}"
        raise AttachError(
            f"model is {given}: pass a model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    return config


def decoder_config(model: nn.Module) -> Any:
    """Return the configuration of a model's decoder.

    Raises:
        AttachError: If it is no model of transformers, or has an encoder as well.
    """
    config = config_of(model)
    if getattr(config, "is_encoder_decoder", False):
        raise AttachError(
            f"{type(model).__name__} has an encoder, and layers that attend to it; use a "
            "decoder-only model, or the cache of transformers"
        )
    return config.get_text_config(decoder=True)


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
            (recipe.rebase, "keys are read at other positions"),
        )
        if wanted
    ]
    if mode == "stock" and (recipe.retrieve is not None or recipe.rebase or recipe.observes):
        why = "the recipe looks at queries" if recipe.observes else needs[-1]
        raise AttachError(f"mode='stock': {why}; use mode='native'")
    if mode != "auto":
        return mode, "asked for"
    return ("native", needs[0]) if needs else ("stock", "nothing is dropped and all is read")


def attentions(model: nn.Module, owned: list[int]) -> dict[int, nn.Module]:
    """Return the attention module of each layer, by what it is called in transformers."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index in owned and _is_attention(name):
            found.setdefault(index, module)
    return found


def _is_attention(name: str) -> bool:
    own = name.rsplit(".", 1)[-1].lower()
    return "attn" in own or "attention" in own


def reader(model: nn.Module, found: dict[int, nn.Module], index: int, config: Any) -> RotaryReader:
    """Return what tells how a layer rotates its keys.

    Raises:
        AttachError: If that cannot be found out.
    """
    if index not in found:
        raise AttachError(f"{type(model).__name__}: no attention module of layer {index} was found")
    embeddings = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    if not embeddings:
        raise AttachError(
            f"{type(model).__name__} has no rotary position embedding; use a recipe that holds "
            "keys as they are (space='post')"
        )
    types = getattr(config, "layer_types", None)
    made = rotary_of(found[index], embeddings[0], types[index] if types else None)
    if made.layout.axes:
        raise AttachError(
            f"{type(model).__name__} has positions of {made.layout.count} axes, and a slot notes "
            "one; use a recipe that holds keys as they are (space='post')"
        )
    return made


def output_of(found: dict[int, nn.Module], index: int) -> Tensor:
    """Return the weight of a layer's output projection, [hidden, Hq * Dv].

    Raises:
        AttachError: If there is none.
    """
    module = found.get(index)
    for name in _OUTPUTS:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Linear):
            return layer.weight
    raise AttachError(
        f"layer {index}: no output projection was found (looked for {', '.join(_OUTPUTS)}); use a "
        "scorer that does not need it"
    )
