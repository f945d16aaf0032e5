"""Computes the rows that a row plan names, in models of transformers that attend both ways.

A call of the wrapped model is given all tokens and a plan. The model runs on the planned rows
alone; its attention writes their keys and values over those held and lets their queries see all
that is held. A call without a plan is the model's own, and leaves what is held as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.attention import Door
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call, current_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.run import Run
from diffcache.dllm.policy import FedRows
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer

PLAN = "row_plan"  # the argument of a call
IDS, VALID, POSITIONS = "input_ids", "attention_mask", "position_ids"
SITE = "token-layers"  # what is counted


@dataclass(eq=False)
class Held:
    """What is held of one run.

    Attributes:
        shape: Sequences and positions.
        layers: Keys and values of every attention, all positions long.
        positions: Rotary positions, int64 `[1 or B, T]`.
        mask: Positions that are no padding, bool `[B, 1, 1, T]`; None where there is no padding.
    """

    shape: tuple[int, int]
    layers: list[KVLayer]
    positions: Tensor
    mask: Tensor | None = None


@dataclass(eq=False)
class Turn:
    """What attention does in one call.

    Attributes:
        held: What it writes to and reads.
        index: Positions that are computed: a range where all sequences compute the same run, else
            int64 `[B, n]`.
        rows: Rows of each sequence.
        mask: Positions that are seen, bool `[B, 1, n, T]`; None for all.
        visits: Attentions that took part so far.
        products: Multiply-adds of a row's attention, of those attentions together.
    """

    held: Held
    index: Tensor | range
    rows: int
    mask: Tensor | None
    visits: set[int] = field(default_factory=set)
    products: int = 0


class Rows(Extension):
    """Computes the planned rows of every call.

    Args:
        denoiser: The attachment to the model.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.model = denoiser.anatomy.model
        self.door = Door(denoiser.model, self)
        self.numbers = {site.path: number for number, site in enumerate(self.door.sites)}
        self.checked: set[int] = set()  # attentions that were compared with the model's own
        self.weights = sum(_weights(denoiser.model.get_submodule(entry.key))
                           for entry in denoiser.anatomy.lists)  # fmt: skip

    def remove(self) -> None:
        """Give the model its attention function back."""
        self.door.remove()

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the keys and values of a run."""
        held: Held | None = run.storage.get(self)
        for layer in [] if held is None else held.layers:
            yield from layer.tensors()

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the model the planned rows alone."""
        given = self.denoiser.named(call.args, call.kwargs)
        plan = given.pop(PLAN, None)
        if plan is None:
            return call
        if not isinstance(plan, RowPlan):
            raise AttachError(f"{PLAN}={plan!r}: must be a RowPlan of diffcache.dllm")
        ids, valid = self._checked(given)
        batch, width = ids.shape
        held: Held | None = call.run.storage.get(self)
        if plan.rows is None:
            held = self._start(call, held, ids, valid)
        elif held is None or held.shape != (batch, width):
            raise AttachError(
                f"{self.model}: {PLAN} names some rows, and nothing is held of {batch} sequences "
                f"of {width} tokens in this run; let the first call compute all rows, and open "
                "diffcache.run(model) around the calls of one decoding"
            )
        rows = plan.count(width)
        mask = None if held.mask is None else held.mask.expand(-1, -1, rows, -1)
        turn = Turn(held, range(width) if plan.rows is None else plan.rows, rows, mask)
        call.storage[self] = turn
        given |= {IDS: plan.take(ids), POSITIONS: plan.take(held.positions).expand(batch, -1)}
        if plan.rows is not None:  # the model's own mask is that of all rows
            given[VALID] = mask
        return replace(call, args=(), kwargs=given)

    def _checked(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens and which of them are no padding.

        Raises:
            AttachError: If the call is not that of all tokens, or brings a cache or positions.
        """
        ids, valid = given.get(IDS), given.get(VALID)
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise AttachError(f"{self.model}: a call with {PLAN} takes {IDS}, int64 [B, T]")
        for name in (POSITIONS, "past_key_values", "inputs_embeds"):
            if given.get(name) is not None:
                raise AttachError(f"{self.model}: a call with {PLAN} takes no {name}; leave it out")
        if valid is not None and (not isinstance(valid, Tensor) or valid.shape != ids.shape):
            raise AttachError(
                f"{self.model}: {VALID} of a call with {PLAN} must be [B, T], as {IDS} is"
            )
        return ids, valid

    def _start(self, call: Call, held: Held | None, ids: Tensor, valid: Tensor | None) -> Held:
        """Return what a forward of all rows writes to."""
        shape = ids.shape[0], ids.shape[1]
        if held is None or held.shape != shape:
            layers = [KVLayer(number) for number in range(len(self.numbers))]
            held = Held(shape, layers, torch.arange(shape[1], device=ids.device)[None])
        if valid is not None:
            held.positions = (valid.long().cumsum(1) - 1).clamp_min(0)
            held.mask = valid.bool()[:, None, None]
        if call.run.is_told or call.run.in_pipeline:  # else no call comes after this one
            call.run.storage[self] = held
        return held

    def close(self, call: Call, out: Any) -> Any:
        """Check that every attention took part.

        Raises:
            AttachError: If one did not.
        """
        turn: Turn | None = call.storage.get(self)
        if turn is not None and len(turn.visits) != len(self.numbers):
            raise AttachError(
                f"{self.model}: {len(turn.visits)} of {len(self.numbers)} attention modules took "
                "part in a call; its attention function was replaced since it was wrapped: unwrap "
                "it and wrap it again"
            )

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens all layers together computed and left out.

        Operations are those of the blocks' linear layers and of attention.
        """
        turn: Turn | None = call.storage.get(self)
        if turn is None:
            return {}
        batch, width = turn.held.shape
        computed, left_out = batch * turn.rows, batch * (width - turn.rows)
        each = 2 * (self.weights + turn.products)
        call.record.flops = float(computed * each), float(left_out * each)
        layers = len(self.numbers)
        return {SITE: (computed * layers, left_out * layers)}

    # attention -------------------------------------------------------------------------------

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Write the rows' keys and values, and attend to all that is held."""
        around = current_call()
        if around is None or around.owner is not self.denoiser:
            return None
        turn: Turn | None = around.storage.get(self)
        if turn is None:
            return None
        number = self.numbers[site.path]
        turn.visits.add(number)
        turn.products += 2 * turn.held.shape[1] * call.q.shape[2] * call.q.shape[3]
        layer = turn.held.layers[number]
        k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
        if layer.seen:
            layer.overwrite(turn.index, k, v)
        else:
            self._check_mask(site, call, turn)
            layer.write(k, v)
        query = Query(call.q.transpose(1, 2), 0, call.scale, mask=turn.mask, causal=False)
        out = attend(query, layer.views()).transpose(1, 2)
        if number not in self.checked:
            self._check_output(site, out, call.plain())
            self.checked.add(number)
        return out.contiguous()

    def _check_mask(self, site: AttentionSite, call: AttentionCall, turn: Turn) -> None:
        """Raise unless every row sees every other; the host waits, at a run's first call.

        Raises:
            AttachError: If the model is causal, or looks at a window.
        """
        seen = call.mask
        if seen is not None and seen.dtype != torch.bool:
            seen = seen >= 0
        expected = torch.ones((), dtype=torch.bool) if turn.mask is None else turn.mask
        if call.causal or (seen is not None and not bool((seen == expected.to(seen.device)).all())):
            raise AttachError(
                f"{self.model}: {site.path} hides tokens from each other (it is causal, or has a "
                "window), so that rows computed alone would see what they must not; a diffusion "
                "language model attends both ways: set model.config.is_causal = False if its "
                "weights are made for that"
            )

    def _check_output(self, site: AttentionSite, ours: Tensor, theirs: Tensor) -> None:
        """Raise unless attention over what is held is the model's own, once a module.

        Raises:
            AttachError: If it is not, as with a bias that depends on positions.
        """
        largest = theirs.abs().max()
        bound = 64 * torch.finfo(theirs.dtype).eps * largest
        if bool((ours.reshape(theirs.shape) - theirs).abs().max() > bound):
            raise AttachError(
                f"{self.model}: {site.path} computes more than softmax attention of its queries, "
                "keys and values (a bias of positions, say), which cannot be done for some rows"
            )


def _weights(blocks: nn.Module) -> int:
    """Return the number of weights of all linear layers."""
    linear = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    return sum(module.weight.numel() for module in linear)


def install(denoiser: Denoiser, ability: FedRows) -> Rows:
    """Return the extension for row plans.

    Raises:
        AttachError: If the model is none of transformers, takes no positions, or has blocks without
            attention.
    """
    name = denoiser.anatomy.model
    missing = [arg for arg in (IDS, VALID, POSITIONS) if arg not in denoiser.arguments]
    if missing:
        raise AttachError(
            f"{name}: takes no {missing[0]}; computing some rows of a sequence serves language "
            f"models of transformers, whose forward has {IDS}, {VALID} and {POSITIONS}"
        )
    rows = Rows(denoiser)
    blocks = sum(entry.depth for entry in denoiser.anatomy.lists)
    if any(site.kind != "self" for site in rows.door.sites) or len(rows.numbers) < blocks:
        rows.remove()
        raise AttachError(
            f"{name}: has {blocks} blocks and {len(rows.numbers)} attentions, not all of them "
            "self-attention; tokens must meet in self-attention alone"
        )
    return rows
