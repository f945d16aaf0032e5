"""Run one attention layer of a transformers model as far as its cache, or as its attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.foreign import CACHES, cache_name

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ROWS = 4  # random tokens, so that no channel is near 0 in all of them
_AXES = (4, 3, 2)  # numbers of position axes that are tried


def refusal(module: Any, why: str) -> AttachError:
    """Return the error of a module whose rotation is not understood."""
    return AttachError(
        f"cannot tell how {type(module).__name__} turns keys: {why}. Methods that keep keys as the "
        "model made them still work; those that store keys unrotated or move them do not"
    )


class _Trial(Exception):  # noqa: N818 - no error: how a layer that is tried is left
    """A cache that keeps what it is given, and what attention is given afterwards.

    Args:
        ends: Leave the layer at once; else hand back what was given.
    """

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.ends = ends
        self.cached: tuple[Tensor, Tensor] | None = None
        self.met: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values, each `[B, H, S, D]`."""
        self.cached = key, value
        if self.ends:
            raise self
        return key, value

    def get_seq_length(self, *given: Any, **more: Any) -> int:
        """Return 0: there is nothing in it."""
        return 0


class LayerProbe:
    """Give the keys that a layer makes of the same random tokens at any positions.

    The layer's weights are used as they are, and no attention is computed. Hooks on the layer do
    not see it.

    Args:
        attention: Self-attention module.
        embedding: Rotary embedding module; called, so give a copy if calling it changes it.
        scale: Factor of cos and sin, as the embedding states it.
        extra: Arguments of the embedding after the positions.

    Raises:
        AttachError: If the layer has no such form.
    """

    def __init__(self, attention: Any, embedding: Any, scale: float, extra: tuple[Any, ...]):
        width = getattr(getattr(attention, "config", None), "hidden_size", None)
        known = inspect.signature(attention.forward).parameters
        cache = cache_name(attention.forward)
        if cache is None or "position_embeddings" not in known or not isinstance(width, int):
            needed = f"a forward with position_embeddings and one of {CACHES}"
            raise refusal(attention, f"it needs config.hidden_size and {needed}")
        self.attention = attention
        self.embedding = embedding
        self.scale = scale
        self.extra = extra
        weights = [p for p in attention.parameters() if not p.is_meta]
        dtype = next((p.dtype for p in weights if p.dtype in _FLOATS), torch.float32)
        self.device = weights[0].device if weights else torch.device("cpu")
        self.tolerance = max(1e-4, 4 * torch.finfo(dtype).eps)
        random = torch.Generator().manual_seed(0)
        tokens = torch.randn(_ROWS, 1, width, generator=random, dtype=torch.float64)
        self.tokens = tokens.to(self.device, dtype)
        extras = list(known.values())[1:]  # after the hidden states
        self.given: dict[str, Any] = {p.name: None for p in extras if p.default is p.empty and p.kind in _NAMED}
        self.given |= {"use_cache": True} if "use_cache" in known else {}
        self.given.pop("position_embeddings", None)
        self.cache = cache

    def axes(self) -> int:
        """Return how many rows of positions the embedding puts together into one table."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        for count in _AXES:
            try:
                made = self.embedding(self.tokens[:1], ids.expand(count, 1, 1), *self.extra)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # so many rows are not for this embedding
            if _table(made).ndim == 3:
                return count
        return 1

    def keys(self, ids: Tensor) -> Tensor:
        """Return the keys of the same tokens in every slot.

        Args:
            ids: `[A, S]` integer positions, one row for each axis; those of slot 0 must be 0.

        Returns:
            `[B, H, S, D]` float32.

        Raises:
            AttachError: If the layer cannot be run by itself, gives no keys to a cache, or does to
                its values or tables what is not rotary embedding of keys.
        """
        x, trial = self.tokens.expand(-1, ids.shape[-1], -1), _Trial(ends=True)
        ids = ids.to(self.device)[:, None]
        try:
            made = self.embedding(x[:1], ids if len(ids) > 1 else ids[0], *self.extra)
            self._check_scale(_table(made))
            self._run(x, made, trial)
        except _Trial:
            assert trial.cached is not None
            keys, values = (x.float() for x in trial.cached)
        except AttachError:
            raise
        except Exception as error:
            why = f"it could not be run by itself ({type(error).__name__}: {error})"
            raise refusal(self.attention, why) from error
        else:
            raise refusal(self.attention, "it gives no keys to its cache")
        if keys.ndim != 4 or not self.near(values, values[:, :, :1]):
            raise refusal(self.attention, "values turn too, as where a cache holds latents")
        return keys

    def attend(self, cache: Any) -> None:
        """Run the layer on one token, with a cache, as far as its attention function lets it."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        made = self.embedding(self.tokens[:1], ids, *self.extra)
        self._run(self.tokens[:1], made, cache)

    def _run(self, x: Tensor, made: Any, cache: Any) -> None:
        self.attention.forward(x, position_embeddings=made, **{**self.given, self.cache: cache})

    def near(self, ours: Tensor, theirs: Tensor) -> bool:
        """Say whether two tensors are equal up to the rounding of the layer's dtype."""
        return bool((ours - theirs).abs().max() <= self.tolerance * theirs.abs().max())

    def _check_scale(self, table: Tensor) -> None:
        """Check that cos at position 0 is the scale."""
        cos = table.select(-2, 0).abs().float()
        if (cos - self.scale).abs().max() > self.tolerance * self.scale:
            raise refusal(
                self.embedding, f"cos at position 0 is {float(cos.max()):.6g}, attention_scaling {self.scale:.6g}"
            )


def _table(made: Any) -> Tensor:
    """Return cos, or the complex table that some models use for both."""
    table: Tensor = made[0] if isinstance(made, tuple) else made
    return table


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
