"""Compute some rows of a call beside held rows of the others: the core of all partial forwards.

A call of the wrapped model is given all tokens and a plan. Attention writes the keys and values of
the planned rows over those held, and lets their queries see all that is held. A call without a plan
is the model's own, and leaves what is held as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffcache.attach.attention import Door
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed, calls_sdpa, place_rows
from diffcache.attach.call import Call, in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.run import Run
from diffcache.errors import AttachError
from diffcache.foreign import CACHES, version_of
from diffcache.kernels.attention import attn_forward, takes
from diffcache.kernels.dense import scaled_dot_product_attention
from diffcache.kernels.move import kv_scatter
from diffcache.kv.slots import writable
from diffcache.step import CURRENT

PLAN = "row_plan"  # the argument of a call
IDS, VALID, POSITIONS = "input_ids", "attention_mask", "position_ids"
GROUPED = 256  # channels of a head up to which torch's fused attention groups query heads by itself


@dataclass(eq=False)
class HeldKV:
    """Keys and values of one attention, of all positions.

    Every position has its place in memory and none is ever dropped, so this is two tensors and no
    `KVLayer`.
    """

    k: Tensor | None = None  # keys as the model rotated them, `[B, H, T, D]`; None before the first write
    v: Tensor | None = None  # values, `[B, H, T, D]`

    def write(self, at: Tensor | range, k: Tensor, v: Tensor) -> None:
        """Write keys and values, `[B, n, H, D]`, of some positions; the first write is of all.

        The positions are int64 `[B, n]`, or `[n]` where all sequences have the same, which the
        caller has checked; or a run of them, which may go on after those that are there.
        """
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.k is None or self.v is None:
            self.k = k.clone(memory_format=torch.contiguous_format)
            self.v = v.clone(memory_format=torch.contiguous_format)
            return
        if not torch.compiler.is_compiling():
            self.k, self.v = writable(self.k), writable(self.v)
        if not isinstance(at, range):
            if at.dim() == 2 and (at.shape[0] == 1 or at.stride(0) == 0):
                at = at[0]
            k, v = k.to(self.k.dtype), v.to(self.v.dtype)
            if at.dim() == 1 and not at.is_cuda:  # the shortest way
                self.k.index_copy_(2, at, k)
                self.v.index_copy_(2, at, v)
            else:
                kv_scatter(self.k, self.v, k, v, at)
        elif at.stop <= self.k.shape[2]:
            self.k.narrow(2, at.start, len(at)).copy_(k)
            self.v.narrow(2, at.start, len(at)).copy_(v)
        else:
            self.k = torch.cat([self.k[:, :, : at.start], k], 2)
            self.v = torch.cat([self.v[:, :, : at.start], v], 2)

    def widen(self, width: int) -> None:
        """Make room for `width` positions, of which the new ones hold nothing yet, and nobody sees them."""
        if self.k is not None and self.v is not None:
            more = (0, 0, 0, width - self.k.shape[2])
            self.k, self.v = functional.pad(self.k, more), functional.pad(self.v, more)

    def attend(self, q: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """Return attention of queries, `[B, n, H, D]`, to all that is held, or by a mask, bool `[B, 1, n, T]`."""
        q, k, v = q.transpose(1, 2), self.k, self.v
        assert k is not None
        assert v is not None
        if mask is not None and takes(q, k, v, mask=mask):  # torch would copy keys of groups
            return attn_forward(q, k, v, scale, mask=mask)[0].transpose(1, 2)
        batch, heads, count, _ = q.shape
        groups, grouped = heads // k.shape[1], False
        if groups > 1:
            if mask is None and k.shape[3] == v.shape[3] <= GROUPED:
                grouped = True
            elif count == 1:  # the queries of a head stand where several of one would
                q = q.reshape(batch, heads // groups, groups, -1)
            else:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
        return out.reshape(batch, heads, count, -1).transpose(1, 2)

    def weights(self, q: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """Return attention weights, `[B, H, n, T]`, of queries `[B, n, H, D]`, by a mask, bool `[B, 1, n or 1, T]`."""
        assert self.k is not None
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch, count, heads, size = q.shape
        # queries of the heads that share keys are rows of one product
        queries = q.transpose(1, 2).to(dtype).reshape(batch, self.k.shape[1], -1, size)
        logits = queries @ self.k.to(dtype).mT * scale
        logits = logits.view(batch, heads, count, -1)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(-1)

    @property
    def length(self) -> int:
        """Positions that are held."""
        return 0 if self.k is None else self.k.shape[2]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the held tensors."""
        yield from (x for x in (self.k, self.v) if x is not None)


LayerT = TypeVar("LayerT", bound=HeldKV)
PartialT = TypeVar("PartialT", bound="Partial")


@dataclass(eq=False)
class HeldRun(Generic[LayerT]):
    """Keys and values of one run."""

    shape: tuple[int, int]  # sequences and positions
    layers: list[LayerT]  # keys and values of every attention, all positions long
    positions: Tensor  # rotary positions, int64 `[1 or B, T]`
    mask: Tensor | None = None  # positions that are no padding, bool `[B, 1, 1, T]`; None where there is no padding
    mark: tuple[Tensor | None, int] = (None, 0)  # attention mask that was given last, as `mark_of` returns it


class Partial(Extension):
    """Computes some rows of every call that brings a plan.

    Args:
        denoiser: The attachment to the model.
        plans: Class of the plans.

    Attributes:
        holds: Class of what is held of a run.
        layer: Class of what is held of an attention.
    """

    holds: ClassVar[type[HeldRun[Any]]] = HeldRun
    layer: ClassVar[type[HeldKV]] = HeldKV

    def __init__(self, denoiser: Denoiser, plans: type[Any]) -> None:
        self.denoiser, self.plans = denoiser, plans
        self.model = denoiser.anatomy.model
        self.is_direct = calls_sdpa(denoiser.model)  # and leaves padding to us
        self.takes_positions = POSITIONS in denoiser.arguments
        self.first = first_position(denoiser.model)
        self.door = Door(denoiser.model, self)
        self.numbers = {site.path: number for number, site in enumerate(self.door.sites)}
        self._displace: Callable[[], None] | None = None
        if not self.takes_positions:
            try:
                self._displace = place_rows(denoiser.model, self.door.sites, self._placed)
            except BaseException:
                self.door.remove()
                raise

    def remove(self) -> None:
        """Give the model its attention function back."""
        if self._displace is not None:
            self._displace()
        self.door.remove()

    def tensors(self, run: Run) -> Iterable[Tensor]:
        """Return what is held of the layers of a run."""
        held: HeldRun[Any] | None = run.storage.get(self)
        return [] if held is None else [tensor for layer in held.layers for tensor in layer.tensors()]

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the model the rows that a plan names.

        Raises AttachError if the call is not that of all tokens with a plan, or nothing is held of
        the rows that it leaves out.
        """
        given = self.denoiser.named(call.args, call.kwargs)
        plan = given.pop(PLAN, None)
        if plan is None:
            return call
        if not isinstance(plan, self.plans):
            raise AttachError(
                f"{PLAN}={plan!r}: must be a {self.plans.__name__} of diffcache.dllm, such as "
                f"plan() of {self.denoiser.method!r} returns"
            )
        ids, valid = given_tokens(self.model, given)
        run = call.timeline.run
        held: HeldRun[Any] | None = run.storage.get(self)
        if self.is_whole(plan):
            shape = ids.shape[0], ids.shape[1]
            at, mask = places_of(ids, valid, self.first)
            if held is None or held.shape != shape:
                held = self.holds(shape, [self.layer() for _ in self.numbers], at)
            held.positions, held.mask, held.mark = at, mask, mark_of(valid)
            if run.is_told or run.in_pipeline:  # else no call comes after this one
                run.storage[self] = held
        else:
            if held is not None and getattr(plan, "block", None) is not None:
                self._adapt(held, ids, valid)
            check_held(self.model, held, ids, valid)
        return replace(call, args=(), kwargs=self.begin(call, plan, held, given))

    def _adapt(self, held: HeldRun[Any], ids: Tensor, valid: Tensor | None) -> None:
        """Make room for text that grew or was replaced, where attention is causal over blocks.

        The plan has to compute all of a block before anything sees it.
        """
        batch, width = ids.shape
        if held.shape[0] == batch and held.shape[1] < width:
            held.shape = batch, width
            for layer in held.layers:
                layer.widen(width)
        elif valid is held.mark[0]:
            return
        held.positions, held.mask = places_of(ids, valid, self.first)
        held.mark = mark_of(valid)

    @abstractmethod
    def is_whole(self, plan: Any) -> bool:
        """Return whether a plan computes all rows, so that nothing has to be held."""

    @abstractmethod
    def begin(self, call: Call, plan: Any, held: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Note the attention turn in the call's storage; return the arguments of the model."""

    def turn(self, kind: object = None) -> Any:
        """Return the attention turn that this thread's call noted, under `kind`; None where it is the model's own."""
        call: Call | None = CURRENT.get()
        if call is None or call.owner is not self.denoiser:
            return None
        return call.storage.get(self if kind is None else kind)

    def again(self, call: Call, storage: dict[Any, Any], given: dict[str, Any]) -> Any:
        """Run the model once more inside a call, with storage of its own, to compare; the caller keeps what it may."""
        with torch.no_grad(), in_call(replace(call, repeats=True, storage=storage)):
            return self.denoiser.model.forward(**given)

    @abstractmethod
    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Return the attention of one call, `[B, T, H, D]`; None for the model's own."""

    @abstractmethod
    def _placed(self) -> Placed | None:
        """Return the rows of the call at hand, None where these are all or it has no plan."""


# what a call brings -------------------------------------------------------------------------------


def mark_of(valid: Tensor | None) -> tuple[Tensor | None, int]:
    """Return an attention mask and how often it was written to, which inference tensors hide."""
    return valid, 0 if valid is None or valid.is_inference() else version_of(valid)


def check_held(model: str, held: HeldRun[Any] | None, ids: Tensor, valid: Tensor | None) -> None:
    """Raise AttachError unless keys and values of these sequences' size and padding are held.

    Tokens are int64 `[B, T]`, and `valid` marks those that are no padding, `[B, T]`, None for all.
    The host waits where it is another tensor than before, or was written to.
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

    Raises AttachError if the call is not that of all tokens, or brings a cache or positions.
    """
    ids, valid = given.get(IDS), given.get(VALID)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise AttachError(f"{model}: a call with {PLAN} takes {IDS}, int64 [B, T]")
    for name in (POSITIONS, *CACHES, "inputs_embeds"):
        if given.get(name) is not None:
            raise AttachError(f"{model}: a call with {PLAN} takes no {name}; leave it out")
    if valid is not None and (not isinstance(valid, Tensor) or valid.shape != ids.shape):
        raise AttachError(f"{model}: {VALID} of a call with {PLAN} must be [B, T], as {IDS} is")
    return ids, valid


def places_of(ids: Tensor, valid: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return positions, int64 `[1 or B, T]`, from `first` on, and a mask of real tokens, bool `[B, 1, 1, T]`.

    Tokens are int64 `[B, T]`, and `valid` marks those that are no padding, bool `[B, T]`, None for all.
    """
    if valid is None:
        return torch.arange(first, first + ids.shape[1], device=ids.device)[None], None
    mask = valid.to(torch.bool, copy=True)[:, None, None]  # whoever writes to theirs
    return (valid.long().cumsum(1) - 1).clamp_min(0) + first, mask


def block_mask(rows: Tensor, positions: Tensor, block: int, valid: Tensor | None) -> Tensor:
    """Return the mask of rows where attention is causal over blocks of tokens, bool `[1 or B, 1, n, T]`.

    Rows are positions counted from 0, int64 `[1 or B, n]`, among those of all tokens, int64 `[1 or
    B, T]`; `valid` marks what is no padding, bool `[B, 1, 1, T]`, None for all.
    """
    seen = positions[:, None, None] // block <= rows[:, None, :, None] // block
    return seen if valid is None else seen & valid


def first_position(model: nn.Module) -> int:
    """Return the position of a text's first token: RoBERTa's come after that of padding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def check_sees_all(
    model: str, site: AttentionSite, call: AttentionCall, mask: Tensor | None, block: int | None = None
) -> None:
    """Raise AttachError unless every row sees all that it should; the host waits, at a run's first call.

    A model may be causal, look at a window, or have other blocks. `mask` is what rows should see,
    bool, None for all; `block` the tokens of a block where attention should be causal over blocks.
    """
    seen = call.mask
    if seen is not None and seen.dtype != torch.bool:
        seen = seen >= 0
    expected = torch.ones((), dtype=torch.bool) if mask is None else mask
    if call.causal or (seen is not None and not bool((seen == expected.to(seen.device)).all())):
        if block is not None:
            raise AttachError(
                f"{model}: {site.path} does not attend to blocks of {block} tokens and all before; "
                "give DiffusionLM(..., block=...) the block that the model's weights are made for"
            )
        raise AttachError(
            f"{model}: {site.path} hides tokens from each other (it is causal, or has a "
            "window), so that rows computed alone would see what they must not; a diffusion "
            "language model attends both ways: set model.config.is_causal = False if its "
            "weights are made for that"
        )


# what can be wrapped ------------------------------------------------------------------------------


def check_arguments(denoiser: Denoiser, *names: str, planned: bool = True) -> None:
    """Raise AttachError unless a model's forward takes some arguments, and plans where every call brings one.

    It may denoise a canvas after an encoder, be called by a pipeline, or be autoregressive.
    """
    name, target = denoiser.anatomy.model, denoiser.handle.target()
    if "decoder_input_ids" in denoiser.arguments:
        raise AttachError(
            f"{name}: its own encoder cache holds the keys and values of finished text exactly; in "
            "the canvas every step conditions every token on its last logits, so that no row can "
            "be left out; use a feature method, such as method='taylorseer', or run it as it is"
        )
    missing = [arg for arg in names if arg not in denoiser.arguments]
    if missing:
        raise AttachError(
            f"{name}: takes no {missing[0]}; computing some rows of a sequence serves language "
            f"models of transformers, whose forward has {', '.join(names)}"
        )
    if planned and target is not denoiser.model:
        raise AttachError(
            f"{denoiser.method!r} plans the rows of every call, which a "
            f"{type(target).__name__} does not ask for; use BlockCache(), or wrap its model and "
            "decode with DiffusionLM"
        )
    if planned and _is_causal(denoiser.model):
        raise AttachError(
            f"method={denoiser.handle.method!r}: {name} is autoregressive, each token sees only "
            "those before it, so that a policy of diffcache.dllm would save nothing; give it a "
            "recipe instead, such as diffcache.wrap(model, 'snapkv', budget=256), or set "
            "model.config.is_causal = False if its weights are made to fill in masks"
        )


def _is_causal(model: nn.Module) -> bool:
    """Return whether a model of transformers' own code hides later tokens from earlier ones.

    Other code may make masks of its own, which only a call shows: `check_sees_all`.
    """
    if not type(model).__module__.startswith("transformers."):
        return False
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    both_ways = any(
        getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None)
        for config in configs
    )
    marks = [getattr(part, "is_causal", None) for part in model.modules()]
    return True in marks and False not in marks and not both_ways


def check_sites(rows: PartialT) -> PartialT:
    """Return the extension, if the tokens of its model meet in self-attention alone; else raise AttachError."""
    blocks = sum(entry.depth for entry in rows.denoiser.anatomy.lists)
    if any(site.kind != "self" for site in rows.door.sites) or len(rows.numbers) < blocks:
        rows.remove()
        raise AttachError(
            f"{rows.model}: has {blocks} blocks and {len(rows.numbers)} attentions, not all of "
            "them self-attention; tokens must meet in self-attention alone"
        )
    return rows


def linear_weights(blocks: nn.Module) -> int:
    """Return the number of weights of all linear layers."""
    linear = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    return sum(module.weight.numel() for module in linear)
