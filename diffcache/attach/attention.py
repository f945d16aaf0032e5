"""Hand a model's attention to a strategy: queries, keys and values in, its output back.

Three implementations stand behind it. Attention processors of diffusers are replaced by ones that
project as they do, so that a strategy gets queries and keys before rotation. Models of transformers
are given an attention function, which is called with keys that the model rotated. So are keys of
models that call torch's fused attention themselves, whose calls are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy, deepcopy
from functools import cache
from typing import Any

from torch import nn

from diffcache.attach import attention_sdpa, attention_transformers
from diffcache.attach.attention_call import AttentionSite, Strategy
from diffcache.attach.attention_families import FAMILIES
from diffcache.errors import AttachError
from diffcache.foreign import without_dynamo

_WAY = ("down_blocks", "mid_block", "up_blocks")  # a UNet runs its middle before its way up


class DoorProcessor:
    """Stands in for an attention processor of diffusers; copies and pickles are the original.

    What a strategy does changes from step to step, so that compiled blocks leave it out: their
    graphs break around attention.

    Args:
        original: The processor.
        strategy: Strategy that attends.
        sites: The module's attentions in the order of their calls; None for one that is the
            model's alone.
    """

    def __init__(self, original: Any, strategy: Strategy, sites: tuple[AttentionSite | None, ...]) -> None:
        self.original, self.sites = original, sites
        self.strategy: Strategy | None = strategy  # None once the door was removed
        self.serve = FAMILIES[type(original).__name__].serve

    def run(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the processor, its attention through the strategy."""
        strategy = self.strategy
        if strategy is None:
            return self.original(attn, *args, **kwargs)
        served = self.serve(self.original, attn, *args, **kwargs)
        call = next(served)
        for site in self.sites:
            out = None if site is None else strategy.attend(site, call)
            if out is None:
                out = call.plain()
            elif out.shape[:3] != call.q.shape[:3]:
                raise ValueError(
                    f"the strategy returned {list(out.shape)} at {site}: must be [B, T, H, D] as "
                    f"the queries, {list(call.q.shape)}"
                )
            try:
                call = served.send(out)
            except StopIteration as stop:
                return stop.value
        raise RuntimeError(f"{type(self.original).__name__} attends more than {self.sites} say")

    @property
    def _attention_backend(self) -> Any:  # which diffusers sets on a processor
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.original._parallel_config = config

    def __copy__(self) -> Any:
        return copy(self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.original,)


@cache
def _class_for(original: Any) -> type[DoorProcessor]:
    """Return the stand-in for a class of processors.

    Its call shows the original's arguments: attention modules look at them to know what to pass.
    """
    call: Any = without_dynamo(DoorProcessor.run)
    call.__wrapped__ = original.__call__  # where `inspect.signature` looks
    return type(f"Door{original.__name__}", (DoorProcessor,), {"__call__": call})


class Door:
    """Let a strategy attend in a model's place, until the door is removed.

    Args:
        model: A denoiser of diffusers, or a model of transformers.
        strategy: Strategy that attends.
        sites: Sites it is asked at, of `attention_sites`; None for all of them.

    Raises:
        AttachError: If the attention of a site cannot be served, or has a door already.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, sites: Iterable[AttentionSite] | None = None) -> None:
        self.sites = attention_sites(model) if sites is None else list(sites)
        install = _install_processors
        if _is_of_transformers(model):
            install = _language(model).install
        self._undo = install(model, strategy, self.sites)

    def remove(self) -> None:
        """Put the former processors back; leave later replacements alone."""
        self._undo()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the attentions of a model; raise AttachError if it has none, or one that no door is known for.

    They are in the order of the call, but for lists whose blocks take turns (the spatial and
    temporal blocks of Latte): those come one list after the other.
    """
    if _is_of_transformers(model):
        found: list[AttentionSite] = _language(model).sites_of(model)
        return found
    blocks: dict[str, int] = {}
    found = []
    for path, module in _in_call_order(model):
        # A list of attentions has each of them in a block of its own.
        parent, _, name = path.rpartition(".")
        layer = blocks.setdefault(path if name.isdigit() else parent, len(blocks))
        kind = _family(model, path, module).kind(module, path)
        if getattr(module, "add_k_proj", None) is not None and kind == "cross":
            found.append(AttentionSite(path, layer, module.heads, kind, "image"))
        found.append(AttentionSite(path, layer, module.heads, kind))
    if not found:
        raise AttachError(f"{type(model).__name__} has no attention processors; {_served()}")
    return found


def _in_call_order(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names and attention modules that have a processor."""
    pairs = [
        (name, module) for name, module in model.named_modules() if getattr(module, "processor", None) is not None
    ]
    place = {name: number for number, name in enumerate(_WAY)}
    pairs.sort(key=lambda pair: place.get(re.split(r"\.", pair[0])[0], -1))
    return iter(pairs)


def _family(model: nn.Module, path: str, module: Any) -> Any:
    """Return the family of a module's processor; raise AttachError if there is none, or a door already."""
    cls = type(_bare(module.processor))
    if issubclass(cls, DoorProcessor):
        raise AttachError(f"{type(model).__name__}: {path} has a door already; remove what was attached first")
    family = FAMILIES.get(cls.__name__) if cls.__module__.startswith("diffusers.") else None
    if family is None:
        raise AttachError(
            f"{type(model).__name__}: {path} has {cls.__name__}, which no door to attention is "
            f"known for; {_served()}: take adapters of attention off"
        )
    return family


def _bare(processor: Any) -> Any:
    """Return a processor, or the one behind a door that was removed.

    diffusers may have kept the stand-in meanwhile, and put it back (`unfuse_qkv_projections`).
    """
    if isinstance(processor, DoorProcessor) and processor.strategy is None:
        return processor.original
    return processor


def _served() -> str:
    return f"served are {', '.join(FAMILIES)}, and models of transformers"


def _language(model: nn.Module) -> Any:
    """Return the implementation of the door for a model of transformers."""
    return attention_sdpa if attention_sdpa.calls_sdpa(model) else attention_transformers


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "get_text_config")


def _install_processors(model: nn.Module, strategy: Strategy, sites: list[AttentionSite]) -> Callable[[], None]:
    """Replace the processors of the sites' modules; return a function that puts them back."""
    every = attention_sites(model)
    mine: list[tuple[Any, DoorProcessor]] = []
    for path in dict.fromkeys(site.path for site in sites):
        module: Any = model.get_submodule(path)
        parts = tuple(s if s in sites else None for s in every if s.path == path)
        bare = _bare(module.processor)
        cls: Any = type(bare)
        processor = _class_for(cls)(bare, strategy, parts)
        mine.append((module, processor))
    for module, processor in mine:
        module.processor = processor

    def undo() -> None:
        for module, processor in mine:
            processor.strategy = None  # wherever somebody kept it
            if module.processor is processor:
                module.processor = processor.original

    return undo
