"""Call a masked language model: facts about its family, its arguments, and a trial of its blocks."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.extensions.partial import block_mask, first_position, places_of
from diffcache.dllm.decode import Decoding, Schedule
from diffcache.dllm.rows import RowPlan
from diffcache.foreign import device_of_model
from diffcache.method import check_int


@dataclass(frozen=True)
class Family:
    """Facts about a family of models, used where a model's configuration does not tell.

    Attributes:
        shift: Whether a row predicts the token after its own; None where it is not known.
        block: Tokens of a block of attention; None where attention goes both ways.
        named: Name of that number in the configuration.
        mask_id: Token of the mask in the released tokenizers.
    """

    shift: bool | None = None
    block: int | None = None
    named: str = ""
    mask_id: int | None = None


FAMILIES = {  # by the configuration's `model_type`
    "Dream": Family(True),
    "llada": Family(False),
    "llama": Family(named="block_size"),  # no Llama of transformers has it; chain-block does
    "llada2_moe": Family(False, 32, "block_length", 156895),
    "sdar": Family(False, 4, "block_size", 151669),
    "Fast_dLLM_Qwen": Family(True, 32, "bd_size", 151665),
}


class MaskedModel:
    """A masked language model, wrapped or not, as a decoding calls it.

    `block` is the number of tokens of a block of attention; None where attention goes both ways.
    """

    def __init__(self, model: nn.Module, block: int | None) -> None:
        self.model, self.block = model, block
        self.first = first_position(model)
        takes = "block_size" in inspect.signature(type(model).forward).parameters
        self.more = {"block_size": block} if takes and block else {}  # Fast-dLLM v2

    @cached_property
    @torch.no_grad()
    def masks_itself(self) -> bool:
        """Return True if the model makes the mask of blocks itself, False if it has to be given one.

        Tried once: the logits of a block must change with a token inside it, and not with tokens after it.

        Raises:
            ValueError: If its attention is not causal over blocks, or not both ways inside.
        """
        assert self.block is not None
        size = self.block
        vocabulary = min(self.size("vocab_size"), 1000)
        ids = torch.arange(2 * size, device=device_of_model(self.model))[None] % vocabulary
        inside, after = ids.clone(), ids.clone()
        inside[0, size - 1] = (ids[0, size - 1] + 1) % vocabulary
        after[0, size:] = (ids[0, size:] + 7) % vocabulary
        failure = None
        for masks_itself in (True, False):
            plan = RowPlan(block=size, masks_itself=masks_itself)
            try:
                plain, seen, unseen = (
                    self.model(**self._arguments(x, None, plan), use_cache=False).logits[0, :size]
                    for x in (ids, inside, after)  # all of one shape, so that they round alike
                )
            except (RuntimeError, ValueError) as error:  # raised by a model that does not take this mask
                failure = error
                continue
            near = max(1e-3, torch.finfo(plain.dtype).eps) * plain.float().norm()
            differs = (seen - plain)[0].norm() > 0
            if (unseen - plain).float().norm() <= near and (size == 1 or differs):
                return masks_itself
        raise ValueError(
            f"block={size}: attention of {type(self.model).__name__} is not causal over blocks of "
            "that many tokens, going both ways inside; give the block that its weights are made "
            "for, or none if it attends both ways"
        ) from failure

    def _arguments(self, ids: Tensor, valid: Tensor | None, plan: RowPlan) -> dict[str, Any]:
        """Return the arguments of a call that computes all rows, for a model that is not wrapped.

        `ids` are int64 `[B, T]`; `valid`, bool `[B, T]`, is True for tokens that are no padding, None for all.
        """
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": valid, **self.more}
        if plan.block is None and valid is None and not self.first:
            return given
        at, mask = places_of(ids, valid, self.first)
        given["position_ids"] = at.expand_as(ids)  # some models number padded rows differently
        if plan.masks_itself:
            given["attention_mask"] = torch.ones_like(ids)
        elif plan.block is not None:
            seen = block_mask(at - self.first, at - self.first, plan.block, mask)
            given["attention_mask"] = seen.expand(len(ids), -1, -1, -1)
        return given

    @torch.no_grad()
    def logits(self, decoding: Decoding, plan: RowPlan, is_wrapped: bool) -> Tensor:
        """Return the logits of the planned rows, `[B, n, V]`, guided where the sampler says so."""
        ids, valid = decoding.ids[:, : decoding.width], decoding.valid_now
        scale = decoding.sampler.cfg_scale
        if scale:
            blank = ids.clone()
            blank[:, : decoding.prompt] = decoding.mask_id
            ids, plan = torch.cat([ids, blank]), plan.twice()
            valid = None if valid is None else torch.cat([valid, valid])
        if is_wrapped:
            given = {"input_ids": ids, "attention_mask": valid, "row_plan": plan, **self.more}
        else:
            given = self._arguments(ids, valid, plan)
        found: Tensor = self.model(**given, use_cache=False).logits
        if not scale:
            return found
        found, without = found.chunk(2)
        return without + (scale + 1) * (found - without)

    def size(self, name: str) -> int:
        """Return a size from the model's configuration; the largest integer where it is missing."""
        found = getattr(getattr(self.model, "config", None), name, None)
        return sys.maxsize if found is None else int(found)

    def check_token(self, name: str, token: int | None) -> None:
        """Raise ValueError unless a token is in the model's vocabulary, or None."""
        vocabulary = self.size("vocab_size")
        if token is not None:
            check_int(name, token, 0)
            if token >= vocabulary:
                raise ValueError(f"{name}={token}: is no token of the model, which has {vocabulary}; give another")

    def check_sizes(self, prompt: int, schedule: Schedule) -> None:
        """Raise ValueError unless the model knows the end token, and has positions for prompt and answer."""
        self.check_token("eos_id", schedule.eos_id)
        whole = prompt + schedule.length
        whole += -whole % (self.block or 1)  # the last block is decoded to the end
        most = min(map(self.size, ("max_sequence_length", "max_position_embeddings"))) - self.first
        if whole > most:
            raise ValueError(
                f"prompts: {prompt} tokens and an answer of length={schedule.length} are more than "
                f"the {most} positions of the model; shorten one of them"
            )


def parts_of(pipe: Any, tokenizer: Any, block: int | None) -> tuple[nn.Module, Any, int | None]:
    """Return the model of a `LLaDA2Pipeline`, its tokenizer, and the tokens of its scheduler's blocks.

    A tokenizer or block that is given takes the place of the pipeline's.

    Raises:
        ValueError: If it is no pipeline that fills in masks block by block.
    """
    model, scheduler = getattr(pipe, "model", None), getattr(pipe, "scheduler", None)
    length = getattr(getattr(scheduler, "config", None), "block_length", None)
    name = type(pipe).__name__
    if not isinstance(model, nn.Module) or length is None or hasattr(model.config, "canvas_length"):
        raise ValueError(
            f"model={name}: must be a model, or a LLaDA2Pipeline; a DiffusionGemmaPipeline has no "
            "masks to fill in, call it as it is, wrapped with a feature method if at all"
        )
    own = getattr(pipe, "tokenizer", None)
    return model, own if tokenizer is None else tokenizer, length if block is None else block
