"""Find the denoisers of a pipeline and their attachments, and check that they are free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from diffcache.anchor import Attached, Loop, described, owner_of
from diffcache.attach.denoiser import Denoiser, check_alone
from diffcache.attach.handle import Handle
from diffcache.attach.pipeline_hooks import called_elsewhere, shared_with
from diffcache.errors import AttachError
from diffcache.foreign import is_cached, is_compiled, is_compiled_in_place
from diffcache.step import Site

_DENOISER = re.compile(r"(transformer|unet|dit|denoiser|prior)(_\d+)?")


def attached_to(target: Any) -> Attached:
    """Return the attachment of a pipeline, model or video.

    A pipeline that shares a wrapped denoiser (`from_pipe`) answers with that denoiser's handle, and
    an object that calls a network in a loop of its own with that of the network.

    Raises:
        AttachError: If the target is not wrapped.
    """
    owner = owner_of(target)
    if owner is None and isinstance(target, Loop):
        owner = owner_of(target.network)
    elif owner is None and not isinstance(target, nn.Module):
        owner = shared_with(getattr(target, "components", {}).values())
    if isinstance(owner, Denoiser):
        owner = owner.handle
    if not isinstance(owner, Attached):
        raise AttachError(f"this {type(target).__name__} is not wrapped; call diffcache.wrap first")
    return owner


def method_of(target: Any) -> Any:
    """Return the method, recipe or policy that something is wrapped with."""
    return attached_to(target).method


def handle_of(target: Any) -> Handle:
    """Return the handle of a pipeline or denoiser that is wrapped with a method.

    Raises:
        AttachError: If the target is not wrapped, or with a recipe or a video policy.
    """
    owner = attached_to(target)
    if not isinstance(owner, Handle) and isinstance(target, Loop):
        owner = attached_to(target.network)  # a video can have a policy and a method
    if not isinstance(owner, Handle):
        raise AttachError(
            f"this {type(target).__name__} is wrapped with {described(owner)}, which skips no "
            "steps or rows: this is for feature methods and policies of diffusion language models"
        )
    return owner


def denoisers_of(target: Any, names: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the denoisers of a pipeline by name, or a bare one as `model`."""
    names = [names] if isinstance(names, str) else names if names is None else list(names)
    if isinstance(target, Loop):
        target = target.network
    if isinstance(target, nn.Module):
        if names is not None:
            raise AttachError(f"components={list(names)!r}: a bare model has none; pass a pipeline")
        return {"model": target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise AttachError(f"cannot wrap a {type(target).__name__}: pass a diffusers pipeline or a torch module")
    modules = {n: m for n, m in components.items() if isinstance(m, nn.Module)}
    if names is not None and not names:
        raise AttachError(
            f"components={names!r}: is empty; name at least one of {', '.join(modules)}, or leave it out"
        )
    if missing := [name for name in names or () if name not in modules]:
        raise AttachError(f"components: no {missing[0]!r}; the pipeline has {', '.join(modules)}")
    found = _default(modules) if names is None else {name: modules[name] for name in names}
    if not found:
        raise AttachError(
            f"{type(target).__name__} has no component called transformer, unet, prior or model; "
            f"name its denoiser: components=[...] out of {', '.join(modules)}"
        )
    return found


def _default(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the denoisers among the modules of a pipeline."""
    found = {name: m for name, m in modules.items() if _DENOISER.fullmatch(name)}
    if not found and "UNet" in type(modules.get("decoder")).__name__:  # of StableCascade
        found = {"decoder": modules["decoder"]}
    if not found and "model" in modules:  # of diffusion language models
        found = {"model": modules["model"]}
    return found


def check_free(target: Any, denoisers: dict[str, nn.Module], site: Site | str) -> None:
    """Raise AttachError unless nothing else caches the denoisers, and they can be cached at a site as compiled.

    It may be wrapped already, run under another cache, or be compiled as a whole or where features are taken inside.
    """
    for owner in [owner_of(target), *map(owner_of, denoisers.values())]:
        if owner is not None:
            raise AttachError(f"{type(target).__name__} already runs under {described(owner)}; unwrap it first")
    caller = called_elsewhere(denoisers.values())
    if caller is not None:
        raise AttachError(f"a {caller} is in a call of its own in another thread; wrap when it has returned")
    if is_cached(type(target)):
        raise AttachError("cache-dit is active on this pipeline class; disable it first")
    for model in denoisers.values():
        _check_compiled(model, Site.of(site))
        check_alone(model)


def _check_compiled(model: nn.Module, site: Site) -> None:
    name = type(model).__name__
    if is_compiled(model):
        raise AttachError(
            f"{name} is compiled as a whole, which fixes what runs; compile its blocks instead: "
            "model.compile_repeated_blocks(fullgraph=True)"
        )
    for path, module in model.named_modules():
        if site.is_module and is_compiled_in_place(module):
            raise AttachError(
                f"{path} is compiled, so its attention and feed-forward cannot be told apart; use "
                "site='stack' or site='block'"
            )
