"""Anatomy of a foreign model: its blocks, modules and sample, found by looking at it."""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass, replace

from torch import nn

from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site

SHARE = 0.05  # a list with less of the blocks' parameters is left alone
UNETS = (  # ways down, middles and ways up: of diffusers, and of the original code
    ("down_blocks", "mid_block", "up_blocks"),
    ("input_blocks", "middle_block", "output_blocks"),
)
TIMESTEPS = ("timestep", "timesteps", "t", "time", "sigma", "sigmas")
_ATTENTION = re.compile(r"(\w+_)?att(n|ention)(?!_?(norm|gate|scale))")
_FEED_FORWARD = re.compile(r"((img|txt|audio|video|image|text)_)?(ff|ffn|mlp|feed_?forward)(_|\d|$)|conv_ff")


@dataclass(frozen=True)
class BlockList:
    """One list of blocks."""

    key: str  # its path in the model, such as `transformer_blocks`
    depth: int  # number of blocks
    classes: tuple[str, ...]  # class names of the blocks
    share: float  # part of the parameters of all lists, 0 to 1


@dataclass(frozen=True)
class ModuleSite:
    """One attention or feed-forward module inside a block."""

    parent: str  # path of the module that calls it
    child: str  # its name there
    # `attention`, `feed-forward`, `fused` (the projection at the end of a fused single-stream block, or the second of
    # two linears that are a layer's feed-forward), `empty` (what only feeds that projection) or `inner` (the first of
    # the two linears)
    kind: str
    list_key: str  # the list of blocks it is in


@dataclass(frozen=True)
class Anatomy:
    """The parts of a denoiser that a cache can use."""

    model: str  # class name
    lists: tuple[BlockList, ...]  # the lists of blocks that methods work on
    excluded: tuple[BlockList, ...]  # other lists, which always run
    singles: tuple[str, ...]  # children that count as blocks of their own (a UNet's middle)
    timestep: str | None  # name of the forward argument that carries the timestep, None when there is none
    modules: tuple[ModuleSite, ...]  # attention and feed-forward modules inside the blocks
    is_unet: bool  # whether blocks change shapes and have long skips
    sample: str = "hidden_states"  # name of the forward argument that carries what is denoised
    opened: tuple[str, ...] = ()  # paths of blocks whose inner lists stand among the lists, instead of themselves

    def check_sites(self, parts: Combine) -> None:
        """Raise AttachError if a method names a site that the model has not."""
        site = Site.of(parts.site)
        if site.is_module:
            known = [f"{m.parent}.{m.child}" for m in self.modules_at(site) if m.kind != "empty"]
        elif site is Site.RUN:
            known = list(parts.blocks)
        else:
            known = [f"{entry.key}.{i}" for entry in self.lists for i in range(entry.depth)]
            known += [f"{key}.0" for key in self.singles]
        strange = [name for name in parts.when.sites if name not in known]
        if strange:
            close = difflib.get_close_matches(strange[0], known, n=1)
            raise AttachError(
                f"{self.model} has no {strange[0]!r} at site {site.value!r}; "
                + (f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}")
            )

    def modules_at(self, site: Site) -> list[ModuleSite]:
        """Return the modules that a module site covers, with those a fused block leaves out."""
        fused = {m.parent for m in self.modules if m.kind == "fused"} if site is Site.MODULE else set()
        kinds = {
            Site.ATTENTION: {"attention"},
            Site.FEED_FORWARD: {"feed-forward", "inner"},
            Site.MODULE: {"attention", "feed-forward", "fused", "empty", "inner"},
        }[site]
        pairs = {m.parent for m in self.modules if m.kind == "inner"}
        found = []
        for m in self.modules:
            kind = m.kind
            if kind == "inner" or (m.parent in fused and kind != "fused"):
                kind = "empty"
            elif m.parent in pairs and kind == "feed-forward":
                kind = "fused"
            if m.kind in kinds:
                found.append(replace(m, kind=kind))
        return found

    def supports(self, site: Site) -> bool:
        """Return whether the model has anything at a site."""
        return any(m.kind != "empty" for m in self.modules_at(site)) if site.is_module else bool(self.lists)


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return the anatomy of a denoiser; raise AttachError if it has no list of blocks to cache."""
    found = _lists(model)
    keys = {key for key, _, _ in found}
    middle = next((middle for down, middle, up in UNETS if {down, up} <= keys), "")
    if middle:  # it is one block, whatever lists it has inside
        found = [entry for entry in found if not entry[0].startswith(f"{middle}.")]
    # Blocks in a dictionary are not cached, but count, so that no small list beside them is taken for the body.
    dicts = (child for child in model.children() if isinstance(child, nn.ModuleDict))
    total = sum(size for _, _, size in found) + sum(p.numel() for blocks in dicts for p in blocks.parameters())
    lists: list[BlockList] = []
    excluded: list[BlockList] = []
    for key, blocks, size in found:
        classes = tuple(dict.fromkeys(type(block).__name__ for block in blocks))
        share = size / total if total else 0.0
        (lists if share >= SHARE else excluded).append(BlockList(key, len(blocks), classes, share))
    if not lists:
        raise AttachError(
            f"{type(model).__name__} has no list of blocks: a cache needs an nn.ModuleList of at "
            f"least two blocks, at most {'two levels' if _deepest(model) > 1 else 'one level'} "
            "below the model"
        )
    singles = (middle,) if isinstance(getattr(model, middle, None), nn.Module) else ()
    modules = [
        site
        for key in [*(entry.key for entry in lists), *singles]
        for site in _modules(model.get_submodule(key), key, key)
    ]
    return Anatomy(
        type(model).__name__,
        tuple(lists),
        tuple(excluded),
        singles,
        _timestep(model),
        tuple(modules),
        bool(middle),
        _sample(model),
    )


def _lists(model: nn.Module) -> list[tuple[str, nn.ModuleList, int]]:
    """Return the lists that look like lists of blocks, with their numbers of parameters."""
    deepest = _deepest(model)
    found: list[tuple[str, nn.ModuleList, int]] = []
    for key, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or key.count(".") > deepest:
            continue
        if any(key.startswith(other + ".") for other, _, _ in found):
            continue
        if not any(_is_plain(block) for block in module):
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((key, module, size))
    return found


def _deepest(model: nn.Module) -> int:
    """Return how many modules may lie between a model and its lists of blocks."""
    # a language model of transformers has a head around what holds the blocks.
    return 2 if hasattr(getattr(model, "config", None), "get_text_config") else 1


def _is_plain(module: nn.Module) -> bool:
    """Return whether a member of a list is one of torch's own modules that are no blocks."""
    home = type(module).__module__
    return home.startswith("torch.nn.") and home != nn.TransformerDecoderLayer.__module__


def _timestep(model: nn.Module) -> str | None:
    """Return the name of the argument that carries the timestep."""
    names = inspect.signature(type(model).forward).parameters
    exact = [name for name in TIMESTEPS if name in names]
    close = [name for name in names if is_time(name)]
    return next(iter(exact + close), None)


def is_time(name: str) -> bool:
    """Return whether an argument of that name tells where in the run a call is."""
    return name in TIMESTEPS or "timestep" in name or name.endswith("_time")


def _sample(model: nn.Module) -> str:
    """Return the name of the argument that carries the noisy sample."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    exact = [name for name in ("hidden_states", "sample", "x", "latents") if name in names]
    tokens = [name for name in names if name.endswith("_tokens")]
    return next(iter(exact + tokens), names[0])


def _modules(parent: nn.Module, path: str, list_key: str) -> list[ModuleSite]:
    """Return the attention and feed-forward modules below `parent`, in order.

    Torch's own encoder layer shows none: without gradients it runs as one fused operation, which
    calls none of its modules.
    """
    if type(parent).forward is nn.TransformerEncoderLayer.forward:
        return []
    children = dict(parent.named_children())
    sites: list[ModuleSite] = []
    for name, child in children.items():
        kind = _kind(name, child)
        if kind is not None:
            sites.append(ModuleSite(path, name, kind, list_key))
        else:
            sites += _modules(child, f"{path}.{name}", list_key)
    attends = any(site.kind == "attention" and site.parent == path for site in sites)
    if attends and {"proj_mlp", "proj_out"} <= set(children):
        sites.append(ModuleSite(path, "proj_mlp", "feed-forward", list_key))
        sites += [ModuleSite(path, name, "empty", list_key) for name in children if "act" in name]
        sites.append(ModuleSite(path, "proj_out", "fused", list_key))
    if attends and {"linear1", "linear2"} <= set(children):  # as torch's own layers
        sites.append(ModuleSite(path, "linear1", "inner", list_key))
        sites.append(ModuleSite(path, "linear2", "feed-forward", list_key))
    return sites


def _kind(name: str, module: nn.Module) -> str | None:
    """Return the kind of a block's child, judged by its name and its class."""
    cls = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.Linear)) or "norm" in name or "Norm" in cls:
        return None
    if _FEED_FORWARD.match(name) and any(True for _ in module.parameters()):
        return "feed-forward"
    if re.search(r"Block|Transformer|Layer$", cls):
        return None
    if _ATTENTION.match(name) or re.search(r"Attention|Attn", cls):
        return "attention"
    return "feed-forward" if re.search(r"FeedForward|FFN?$|MLP$|GLU|MoE", cls) else None
