"""Try one attention layer: does attention get the keys and values that the cache was given?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.hf.probe import LayerProbe


class _Trial(Exception):  # noqa: N818 - no error: how a layer that is tried is left
    """A cache that hands back what it is given, and what attention is given afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: tuple[Tensor, Tensor] | None = None
        self.met: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Any:
        """Take keys and values, and hand them back."""
        self.cached = key, value
        return key, value

    def get_seq_length(self, *given: Any, **more: Any) -> int:
        """Return 0: there is nothing in it."""
        return 0


TRIAL: ContextVar[_Trial | None] = ContextVar("diffcache_kv_trial", default=None)


def leave_trial(key: Tensor, value: Tensor) -> None:
    """Leave a layer that is tried, with the keys and values that attention is given."""
    trial = TRIAL.get()
    if trial is not None:
        trial.met = key, value
        raise trial


def check_hands_over(module: nn.Module, embedding: nn.Module | None) -> None:
    """Check on random tokens that attention gets the keys and values the cache was given.

    Layers that cannot be run by themselves are left to their first forward, which checks it too.

    Args:
        module: An attention module of a model that uses the attention function of caches.
        embedding: The rotary embedding of its model.

    Raises:
        AttachError: If it does not.
    """
    trial = _Trial()
    token = TRIAL.set(trial)
    try:
        with torch.no_grad(), suppress(Exception):
            LayerProbe(module, deepcopy(embedding), 1.0, ()).attend(trial)
    finally:
        TRIAL.reset(token)
    if trial.cached is None or trial.met is None:
        return
    pairs = zip(("keys", "values"), trial.cached, trial.met, strict=True)
    changed = [word for word, one, other in pairs if one is not other]
    if changed:
        raise AttachError(changes(type(module).__name__, changed))


def changes(name: str, changed: Sequence[str]) -> str:
    """Return what is said of a module that changes keys or values after the cache saw them."""
    return (
        f"{name} changes {' and '.join(changed)} between the cache and attention; use "
        "cache_for(..., mode='stock') with a recipe that drops nothing"
    )
