"""Open the door to attention in models that call torch's fused attention themselves.

Remote code of LLaDA and Dream does so, and asks nobody which attention to use. While an attention
module of such a model runs, its call of `scaled_dot_product_attention` goes to the strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.attention_call import AttentionCall, AttentionSite, Strategy
from diffcache.errors import AttachError
from diffcache.foreign import names_attention_itself, without_dynamo

Placed = tuple[Tensor | range, int]  # rows of a call, int64 [B, n], and tokens of a sequence


class Replaced:
    """Runs in place of a method of one module; copies and pickles are the method.

    Args:
        module: The module.
        name: Name of the method.
        run: Function of the method and its arguments.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self.module, self.name = module, name
        self.before = module.__dict__.get(name)  # as where weights are moved for each call
        self.method: Callable[..., Any] = getattr(module, name)
        self.run: Callable[..., Any] | None = run
        module.__dict__[name] = self

    @without_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or the method once that was put back."""
        run = self.run
        return self.method(*args, **kwargs) if run is None else run(self.method, *args, **kwargs)

    def undo(self) -> None:
        """Put the method back, unless it was replaced since."""
        self.run = None  # wherever somebody kept it
        if self.module.__dict__.get(self.name) is not self:
            return
        del self.module.__dict__[self.name]
        if self.before is not None:
            self.module.__dict__[self.name] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.method, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.method,)


def _undo(replaced: Iterable[Replaced]) -> None:
    for each in replaced:
        each.undo()


# attention ---------------------------------------------------------------------------------------


def calls_sdpa(model: nn.Module) -> bool:
    """Return whether a model of transformers attends by itself, not by their interface.

    Code of its own that names an attention function as transformers 4 did (LLaDA2, Fast-dLLM v2)
    cannot be given another one, and calls torch's in the end.
    """
    if names_attention_itself(model):
        return True
    files = {type(module).__module__ for module in model.modules()}
    return not any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in files)


def sites_of(model: nn.Module) -> list[AttentionSite]:
    """Return the attentions of a model, of which there must be some: the module of each block, or the block itself."""
    anatomy = anatomy_of(model)
    heads = getattr(model.config, "num_attention_heads", 0)
    paths = [f"{site.parent}.{site.child}" for site in anatomy.modules if site.kind == "attention"]
    if not paths:  # LLaDA's blocks attend in a method of theirs
        paths = [f"{entry.key}.{i}" for entry in anatomy.lists for i in range(entry.depth)]
    return [AttentionSite(path, number, heads, "self") for number, path in enumerate(paths)]


def install(model: nn.Module, strategy: Strategy, sites: list[AttentionSite]) -> Callable[[], None]:
    """Hand the sites' attention to the strategy; return a function that undoes that."""
    replaced = []
    for site in sites:
        module = model.get_submodule(site.path)

        def run(forward: Any, *args: Any, of: nn.Module = module, at: Any = site, **kwargs: Any) -> Any:
            with _Attending(of, strategy, at):
                return forward(*args, **kwargs)

        replaced.append(Replaced(module, "forward", run))
    return partial(_undo, replaced)


class _Attending(TorchFunctionMode):
    """Takes the attention of one forward of a module; that of no other thread."""

    def __init__(self, module: nn.Module, strategy: Strategy, site: AttentionSite) -> None:
        super().__init__()
        self.module, self.strategy, self.site = module, strategy, site
        self.is_done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand attention to the strategy, and leave all else as it is."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if self.is_done:
            raise AttachError(f"{self.site.path} attends more than once a call")
        self.is_done = True
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Attend to `[B, H, T, D]` as the strategy does, or as torch does."""
        groups = _groups(self.module, query, key)
        kwargs |= {"dropout_p": dropout_p, "is_causal": is_causal}
        call = AttentionCall(
            query.transpose(1, 2),
            key[:, ::groups].transpose(1, 2),
            value[:, ::groups].transpose(1, 2),
            partial(_sdpa, groups, kwargs),
            mask=attn_mask,
            causal=is_causal,
            scaling=kwargs.get("scale"),
        )
        out = self.strategy.attend(self.site, call)
        if out is None:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, **kwargs)
        return out.transpose(1, 2)


def _groups(module: Any, query: Tensor, key: Tensor) -> int:
    """Return how many copies of each key the module made, one for every query head."""
    width = getattr(getattr(module, "k_proj", None), "out_features", 0)
    copies: int = getattr(module, "num_key_value_groups", 1)  # LLaDA2 has no projection of keys
    if width:
        copies = key.shape[1] * key.shape[3] // width
    # transformers stacks the queries of a head, where there is one row, instead of copying its key
    return copies if key.shape[1:3] == query.shape[1:3] else 1


def _sdpa(groups: int, kwargs: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask, **kwargs).transpose(1, 2)


# positions ---------------------------------------------------------------------------------------


def place_rows(
    model: nn.Module, sites: list[AttentionSite], placed: Callable[[], Placed | None]
) -> Callable[[], None]:
    """Let rotary embeddings that count rows rotate them by the positions they are told; return what undoes it.

    Each is the `rotary_emb` of an attention and makes its tables of sines and cosines, `[1, 1, T,
    D]`, by `get_rotary_embedding(T, device)`; raises AttachError where there is none. `placed`
    returns the rows of the call at hand, None where these are all.
    """
    embeddings = []
    for site in sites:
        rotary = getattr(model.get_submodule(site.path), "rotary_emb", None)
        if not isinstance(rotary, nn.Module) or not hasattr(rotary, "get_rotary_embedding"):
            raise AttachError(
                f"{type(model).__name__}: its forward takes no position_ids, and {site.path} has "
                "no rotary_emb.get_rotary_embedding, so that nothing can tell it which rows of a "
                "sequence it computes"
            )
        embeddings.append(rotary)

    def tables(original: Any, seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
        found = placed()
        if found is None:
            return tuple(original(seq_len, device))
        rows, width = found
        whole = original(width, device)
        if isinstance(rows, range):
            return tuple(table[:, :, rows.start : rows.stop] for table in whole)
        return tuple(table[0, 0][rows][:, None] for table in whole)

    return partial(_undo, [Replaced(each, "get_rotary_embedding", tables) for each in embeddings])
