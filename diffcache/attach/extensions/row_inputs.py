"""Inputs of a call with a row plan, and keys and values that are held from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.errors import AttachError
from diffcache.foreign import version_of

PLAN = "row_plan"  # the argument of a call
IDS, VALID, POSITIONS = "input_ids", "attention_mask", "position_ids"
LayerT = TypeVar("LayerT")


@dataclass(eq=False)
class Held(Generic[LayerT]):
    """Keys and values of one run.

    Attributes:
        shape: Sequences and positions.
        layers: Keys and values of every attention, all positions long.
        positions: Rotary positions, int64 `[1 or B, T]`.
        mask: Positions that are no padding, bool `[B, 1, 1, T]`; None where there is no padding.
        mark: Attention mask that was given last, as `mark_of` returns it.
    """

    shape: tuple[int, int]
    layers: list[LayerT]
    positions: Tensor
    mask: Tensor | None = None
    mark: tuple[Tensor | None, int] = (None, 0)


def mark_of(valid: Tensor | None) -> tuple[Tensor | None, int]:
    """Return an attention mask and how often it was written to, which inference tensors hide."""
    return valid, 0 if valid is None or valid.is_inference() else version_of(valid)


def check_held(model: str, held: Held[Any] | None, ids: Tensor, valid: Tensor | None) -> None:
    """Raise unless keys and values of these sequences' size and padding are held.

    The host waits where the attention mask is another tensor than before, or was written to.

    Args:
        model: Name of the model.
        held: Keys and values of the run; None for nothing.
        ids: Tokens, int64 `[B, T]`.
        valid: Mask of the tokens that are no padding, `[B, T]`; None for all.

    Raises:
        AttachError: If they are not, so that rows that are left out cannot be served.
    """
    shape = ids.shape[0], ids.shape[1]
    if held is None or held.shape != shape:
        raise AttachError(
            f"{model}: {PLAN} leaves rows out, and nothing is held of {shape[0]} sequences of "
            f"{shape[1]} tokens in this run; let the first call compute all rows, and open "
            "diffcache.run(model) around the calls of one decoding"
        )
    mark = mark_of(valid)
    if mark[0] is held.mark[0] and mark[1] == held.mark[1]:
        return
    whole = torch.ones(shape, dtype=torch.bool, device=ids.device)
    before = whole if held.mask is None else held.mask[:, 0, 0]
    if not torch.equal(before, whole if valid is None else valid.bool()):
        raise AttachError(
            f"{model}: {VALID} names other padding than at the last call of all rows in this run, "
            f"whose keys and values are held; give the same one, or let {PLAN} compute all rows"
        )
    held.mark = mark


def given_tokens(model: str, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the tokens and which of them are no padding.

    Raises:
        AttachError: If the call is not that of all tokens, or brings a cache or positions.
    """
    ids, valid = given.get(IDS), given.get(VALID)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise AttachError(f"{model}: a call with {PLAN} takes {IDS}, int64 [B, T]")
    for name in (POSITIONS, "past_key_values", "inputs_embeds"):
        if given.get(name) is not None:
            raise AttachError(f"{model}: a call with {PLAN} takes no {name}; leave it out")
    if valid is not None and (not isinstance(valid, Tensor) or valid.shape != ids.shape):
        raise AttachError(f"{model}: {VALID} of a call with {PLAN} must be [B, T], as {IDS} is")
    return ids, valid


def places_of(ids: Tensor, valid: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return positions, int64 `[1 or B, T]`, and what is no padding, bool `[B, 1, 1, T]`.

    Args:
        ids: Tokens, int64 `[B, T]`.
        valid: Mask of the tokens that are no padding, bool `[B, T]`; None for all.
        first: Position of the first token.
    """
    if valid is None:
        return torch.arange(first, first + ids.shape[1], device=ids.device)[None], None
    mask = valid.to(torch.bool, copy=True)[:, None, None]  # whoever writes to theirs
    return (valid.long().cumsum(1) - 1).clamp_min(0) + first, mask


def first_position(model: nn.Module) -> int:
    """Return the position of a text's first token: RoBERTa's come after that of padding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def check_sees_all(
    model: str, site: AttentionSite, call: AttentionCall, mask: Tensor | None
) -> None:
    """Raise unless every row sees every other; the host waits, at a run's first call.

    Raises:
        AttachError: If the model is causal, or looks at a window.
    """
    seen = call.mask
    if seen is not None and seen.dtype != torch.bool:
        seen = seen >= 0
    expected = torch.ones((), dtype=torch.bool) if mask is None else mask
    if call.causal or (seen is not None and not bool((seen == expected.to(seen.device)).all())):
        raise AttachError(
            f"{model}: {site.path} hides tokens from each other (it is causal, or has a "
            "window), so that rows computed alone would see what they must not; a diffusion "
            "language model attends both ways: set model.config.is_causal = False if its "
            "weights are made for that"
        )
