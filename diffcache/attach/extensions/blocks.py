"""Serve finished blocks of a text that grows, where a pipeline owns the decoding loop.

Calls with a plan, of `DiffusionLM`, are those of `rows.py`. Every other call of the model brings
all tokens so far. The model runs on the last block, and on what changed before it since the last
call; its attention reads the keys and values of all that came before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import (
    IDS,
    PLAN,
    POSITIONS,
    VALID,
    HeldKV,
    HeldRun,
    block_mask,
    check_arguments,
    check_sites,
)
from diffcache.attach.extensions.rows import HeldRows, Rows, RowTurn
from diffcache.attach.run import Run
from diffcache.dllm.block_cache import FinishedBlocks
from diffcache.errors import AttachError

EXACT = "exact: attention is causal by blocks of {} tokens, checked against an uncached call"
APPROXIMATE = "approximate: attention goes both ways, so finished blocks keep the keys and values of a shorter text"
_TAKEN = (IDS, VALID, POSITIONS, "use_cache")


class CallKind(NamedTuple):
    """Kind of a call: those of one kind are checked once."""

    block: int  # tokens of a block
    size: int  # bits of the number of blocks, so that a text is checked again when it has doubled
    has_padding: bool  # whether there is padding
    ends_padded: bool  # whether there is padding in the last block


@dataclass(eq=False)
class Window(HeldRun[HeldKV]):
    """Keys, values and tokens of one run."""

    tokens: Tensor = field(kw_only=True)  # tokens, which of them are no padding, and positions, int64 `[3, B, T]`
    block: int | None = field(kw_only=True)  # tokens of a block; None as long as nobody said


@dataclass(eq=False)
class BlockTurn(RowTurn):
    """Plan of attention in one call of a pipeline."""

    held: Window  # keys, values and tokens that it writes to and reads
    # the first position that is computed; at 0 the model attends by itself
    start: int = field(default=0, kw_only=True)
    kind: CallKind | None = field(default=None, kw_only=True)  # kind of the call; None where it has no finished blocks
    # the first position that is computed with the cache, in a call that is checked
    cached: int = field(default=0, kw_only=True)
    # whether attention is causal by blocks, of the attentions that were looked at
    exact: set[bool] = field(default_factory=set, kw_only=True)


class BlockRows(Rows):
    """Computes the last block of every call, and changed positions before it.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that the method asks for.
    """

    def __init__(self, denoiser: Denoiser, ability: FinishedBlocks) -> None:
        super().__init__(denoiser)
        self.block = ability.block
        self.is_exact: dict[CallKind, bool] = {}  # of the kinds of calls that were checked

    def stepping(self, run: Run, scheduler: Any, output: Tensor, timestep: Any, sample: Tensor) -> None:
        """Learn the length of a block: the scheduler steps with the last one."""
        held: Window | None = run.storage.get(self)
        if held is not None and self.block is None and sample.dim() == 2:
            held.block = sample.shape[1]

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the model the last blocks alone, or all where a kind of call has to be checked."""
        run, given = call.run, self.denoiser.named(call.args, call.kwargs)
        if given.get(PLAN) is not None:  # of `DiffusionLM`
            return super().open(call)
        if not (run.in_pipeline or run.is_told):  # no call comes after this one
            return call
        if isinstance(run.storage.get(self), HeldRows):  # without a plan, of a plan's run
            return call
        if self.block is None and not run.in_pipeline:
            raise AttachError(
                f"{self.denoiser.method!r}: a bare model has no scheduler that tells how long a "
                "block is; wrap the pipeline, decode with DiffusionLM, or give block"
            )
        tokens = self._tokens(given)
        held: Window | None = run.storage.get(self)
        block = self.block if held is None else held.block
        start, kind = _start(held, tokens, block)
        if held is None or kind is None:
            part = self._whole(tokens, block)
            held = part.held
        else:
            held.shape, held.tokens = (tokens.shape[1], tokens.shape[2]), tokens
            if kind in self.is_exact:
                part = self._part(held, start, kind, self.is_exact[kind])
            else:  # what is held stays as it is, so that a check changes nothing
                part = self._whole(tokens, block, kind, cached=start)
        run.storage[self], call.storage[self] = held, part
        return replace(call, args=(), kwargs=_cut(given, part)) if part.start else call

    def close(self, call: Call, out: Any) -> Any:
        """Return logits as long as the tokens; those of positions that were left out are NaN.

        Raises AttachError if the call is checked, and the cache gives something else.
        """
        part = call.storage.get(self)
        if not isinstance(part, BlockTurn):
            return super().close(call, out)
        self._check_visits(part)
        if part.kind is None:
            return None
        if not part.start:
            part, out = self._checked_part(call, part, part.kind, out.logits)
        self._say(call.run, part.kind)
        logits = out.logits.new_full((*part.held.shape, out.logits.shape[-1]), float("nan"))
        logits[:, part.start :] = out.logits
        return type(out)(logits=logits)

    def _tokens(self, given: dict[str, Any]) -> Tensor:
        """Return all tokens of a call, which are no padding, and positions, int64 `[3, B, T]`, as a copy."""
        others = [n for n, value in given.items() if n not in _TAKEN and value is not None]
        if others:
            raise AttachError(f"{self.model}: a call under a block cache takes no {others[0]}")
        found: list[Tensor] = []
        for name in (IDS, VALID, POSITIONS):
            value = given.get(name)
            if not isinstance(value, Tensor) or value.dim() != 2:
                raise AttachError(f"{self.model}: a call under a block cache takes {name} [B, T]")
            found.append(value.to(torch.int64).expand_as(given[IDS]))
        return torch.stack(found)

    def _whole(self, tokens: Tensor, block: int | None, kind: CallKind | None = None, cached: int = 0) -> BlockTurn:
        """Return the attention turn of a call of the model's own, with an empty window."""
        batch, width = tokens.shape[1:]
        layers = [HeldKV() for _ in self.numbers]
        held = Window((batch, width), layers, tokens[2], tokens=tokens, block=block)
        return BlockTurn(held, range(width), width, None, kind=kind, cached=cached)

    def _part(self, held: Window, start: int, kind: CallKind, is_exact: bool) -> BlockTurn:
        """Return the attention turn where positions from `start` on are computed."""
        width = held.shape[1]
        mask: Tensor | None = None
        if kind.has_padding:
            mask = held.tokens[1].bool()[:, None, None].expand(-1, -1, width - start, -1)
        if is_exact and start < width - kind.block:
            at = torch.arange(width, device=held.tokens.device)[None]
            mask = block_mask(at[:, start:], at, kind.block, mask)
        return BlockTurn(held, range(start, width), width - start, mask, start=start, kind=kind)

    def _checked_part(self, call: Call, whole: BlockTurn, kind: CallKind, wanted: Tensor) -> tuple[BlockTurn, Any]:
        """Compare the cache with a call of the model's own; return the cache's part and output.

        Where finished blocks are stale by nature, the last block is compared next to fresh ones.
        Raises AttachError if they do not agree.
        """
        is_exact = whole.exact == {True}
        part = self._part(call.run.storage[self], whole.cached, kind, is_exact)
        out = again = self._alone(call, part)
        if not is_exact:
            fresh = self._part(whole.held, whole.rows - kind.block, kind, is_exact)
            again = self._alone(call, fresh)
        found, wanted = (x[:, -kind.block :].float() for x in (again.logits, wanted))
        bound = torch.finfo(out.logits.dtype).eps ** 0.5
        if not bool((found - wanted).norm() <= bound * wanted.norm()):
            raise AttachError(
                f"{self.model}: its last block comes out otherwise when it is computed alone, next "
                "to the keys and values of the tokens before it; unwrap it"
            )
        self.is_exact[kind] = is_exact
        return part, out

    def _alone(self, call: Call, part: BlockTurn) -> Any:
        """Return the model's output for the positions of a part alone."""
        given = _cut(self.denoiser.named(call.args, call.kwargs), part)
        return self.again(call, {self: part}, given)

    def _say(self, run: Run, kind: CallKind | None) -> None:
        """Put the role of the cache into the report."""
        assert kind is not None
        if not self.is_exact[kind]:
            self.denoiser.handle.remark(run, [f"{self.model}: {APPROXIMATE}"])
        elif (text := f"{self.model}: {EXACT.format(kind.block)}") not in run.record.remarks:
            run.record.remarks.append(text)

    # attention -------------------------------------------------------------------------------

    def attend(self, site: AttentionSite, call: AttentionCall, turn: RowTurn | None = None) -> Tensor | None:
        """Write the keys and values of computed positions, and attend to all that are held."""
        part = turn or self.turn()
        if not isinstance(part, BlockTurn):
            return super().attend(site, call, turn)
        number = self.numbers[site.path]
        part.visits[number] = part.rows, call.q.shape[2] * call.q.shape[3]
        layer = part.held.layers[number]
        if not part.start:
            self._look(site, call, part)
        layer.write(range(part.start, part.start + part.rows), call.k, call.v)
        if not part.start:
            return None
        return layer.attend(call.q, call.scale, part.mask).contiguous()

    def _look(self, site: AttentionSite, call: AttentionCall, part: BlockTurn) -> None:
        """Note who sees whom in a call of the model's own, which is not causal; the host waits where it is checked."""
        if part.kind is not None and not call.causal:
            block, width = part.kind.block, part.held.shape[1]
            seen = torch.ones((), dtype=torch.bool) if call.mask is None else call.mask
            seen = (seen if seen.dtype == torch.bool else seen >= 0).to(call.q.device)
            both = part.held.tokens[1].bool()[:, None, None]
            at = torch.arange(width, device=both.device)[None]
            by_blocks = block_mask(at, at, block, both)
            for is_exact, expected in ((True, by_blocks), (False, both)):
                if bool((seen == expected).all()):
                    part.exact.add(is_exact)
                    return
        if part.kind is not None or call.causal:
            blocks = "its blocks" if part.kind is None else f"blocks of {part.kind.block} tokens"
            raise AttachError(
                f"{self.model}: {site.path} neither attends both ways nor to {blocks} and all "
                "before (it is causal, has a window, or blocks of another length), so that rows "
                "computed alone would see what they must not; call the pipeline with the "
                "block_length that its weights are made for, or set model.config.is_causal = False "
                "if they are made to attend both ways"
            )


def _start(held: Window | None, tokens: Tensor, block: int | None) -> tuple[int, CallKind | None]:
    """Return the first position to compute, and the kind of the call; the host waits once.

    A call without finished blocks, or of another text, starts at 0 and has no kind.
    """
    batch, width = tokens.shape[1:]
    if held is None or block is None or width % block or held.shape[0] != batch:
        return 0, None
    known = held.shape[1]
    if known > width:
        return 0, None
    same = (tokens[:, :, :known] == held.tokens).flatten(0, 1).all(0)
    padding = tokens[1] == 0
    facts = torch.stack([same.long().cumprod(0).sum(), padding.any(), padding[:, -block:].any()])
    kept, some, last = facts.tolist()
    start = min(kept, width - block) // block * block
    kind = CallKind(block, (width // block).bit_length(), bool(some), bool(last))
    return start, kind if start else None


def _cut(given: dict[str, Any], part: BlockTurn) -> dict[str, Any]:
    """Return the arguments of a call as those of the positions that are computed."""
    return given | {name: given[name][:, part.start :] for name in (IDS, VALID, POSITIONS)}


def install(denoiser: Denoiser, ability: FinishedBlocks) -> BlockRows:
    """Return the extension for finished blocks; raise AttachError if the model cannot compute some rows."""
    check_arguments(denoiser, IDS, VALID, POSITIONS, planned=False)
    return check_sites(BlockRows(denoiser, ability))
