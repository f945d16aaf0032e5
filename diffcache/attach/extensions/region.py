"""Carries out a plan that computes only the edited tokens of an editing pipeline.

On a region step the denoiser is given the edited rows of its noisy tokens and nothing else of the
picture; its attention sees the other rows through keys and values kept at the last full step; and
its output is put back to full size, with the velocity of the last full step in the rows that were
left out. The published method lets those rows jump to the next full step's noise level at once.
Steps of Euler's method with a constant velocity add up to the same jump, so that the pipeline and
its scheduler go on as they are, and every step leaves complete latents behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.attach.attention import Door, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite, CallRotary
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.extensions.partial import HeldKV
from diffcache.attach.run import Run
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError
from diffcache.features.ertacache import EULER, other_than_euler
from diffcache.features.parts.region_mask import RegionPlan, edited_tokens, gather, rows_of, scatter
from diffcache.foreign import is_split
from diffcache.kv.slots import SlotIndex
from diffcache.step import CURRENT

PIPELINES = ("FluxKontextPipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline")
SAMPLE = "hidden_states"
TEXT = "encoder_hidden_states"
TOKENS = "tokens"  # the site they are counted at


def _flux_grid(given: dict[str, Any]) -> tuple[int, int]:
    ids = given["img_ids"]
    ids = ids[0] if ids.dim() == 3 else ids
    first = ids[ids[:, 0] == 0]
    height, width = (first[:, 1:].amax(dim=0) + 1).long().tolist()
    return int(height), int(width)


def _qwen_grid(given: dict[str, Any]) -> tuple[int, int]:
    shapes = given["img_shapes"][0]
    frames, height, width = shapes[0] if isinstance(shapes, list) else shapes
    return int(frames * height), int(width)


def _qwen_shapes(given: dict[str, Any], rows: int) -> dict[str, Any]:
    # which only tells it which rows are noisy: all that are present
    return {"img_shapes": [[(1, 1, rows)]] * len(given["img_shapes"])}


@dataclass(frozen=True)
class RegionKind:
    """Support of one class of denoisers."""

    # reads height and width of the token grid off a call's arguments
    grid: Callable[[dict[str, Any]], tuple[int, int]]
    # returns the other arguments to change when only M rows are given; None for none
    reshape: Callable[[dict[str, Any], int], dict[str, Any]] | None = None


KINDS = {
    "FluxTransformer2DModel": RegionKind(_flux_grid),
    "QwenImageTransformer2DModel": RegionKind(_qwen_grid, _qwen_shapes),
}


@dataclass(eq=False)
class Store:
    """Keys and values of one guidance branch, after norm and rotation, text rows first."""

    signature: Any  # signature of the calls that it is for
    text: int  # number of text rows
    velocity: Tensor | None = None  # the last full output of the denoiser, `[B, T, C]`
    layers: dict[AttentionSite, HeldKV] = field(default_factory=dict)  # site -> keys and values of all rows
    rotary: CallRotary | None = None  # rotation of all rows, as the model computed it
    # indices of the text rows and the edited rows, `[B, text + M]`, and their rotation; made at its first use
    present: tuple[Tensor, CallRotary | None] | None = None

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        held = [tensor for kept in self.layers.values() for tensor in kept.tensors()]
        held += [] if self.velocity is None else [self.velocity]
        return held + ([] if self.rotary is None else list(self.rotary.tables))


@dataclass(eq=False)
class RegionTurn:
    """Plan of the attention modules for one denoiser call."""

    store: Store  # store of the call's branch
    rows: Tensor | None  # indices of the present picture rows, `[B, M]`; None when all are there, to be kept
    visits: int = 0  # number of attention modules that took part

    def present(self) -> tuple[Tensor, CallRotary | None]:
        """Return the indices of the present rows among all, and their rotation.

        Raises ValueError if one is no row; CUDA raises its own error, later.
        """
        store = self.store
        if store.present is None:
            assert self.rows is not None
            text = torch.arange(store.text, device=self.rows.device).expand(len(self.rows), -1)
            rows = torch.cat([text, store.text + self.rows], dim=1)
            SlotIndex.of(rows, min(kept.length for kept in store.layers.values()))
            store.present = rows, None if store.rotary is None else store.rotary.at(rows)
        return store.present


@dataclass(eq=False)
class RegionState:
    """State of one run."""

    skips: dict[int, float]  # skipped step -> factor of the velocity
    given: dict[str, Any] | None = None  # arguments of the call at the split, until the edited tokens are chosen
    mask: Tensor | None = None  # edited tokens, bool `[B, T]`
    rows: Tensor | None = None  # their indices, `[B, M]`
    stores: dict[int, Store] = field(default_factory=dict)  # kept keys and values, by number of the guidance branch
    # plan of the attention modules in the current call; None where they attend as usual
    turn: RegionTurn | None = None
    # number of tokens, text and picture, that this call computes, and of those left out
    tokens: tuple[int, int] = (0, 0)


class Regions(Extension):
    """Computes only the edited tokens, where a plan says so.

    Args:
        denoiser: The attachment to the network.
        plan: Plan of the computation of every step.
        kind: Support of this class of denoisers.
    """

    def __init__(self, denoiser: Denoiser, plan: RegionPlan, kind: RegionKind) -> None:
        self.denoiser, self.plan, self.kind = denoiser, plan, kind
        self.model = denoiser.anatomy.model
        self.door = Door(denoiser.model, self)

    def remove(self) -> None:
        """Give every attention module its processor back."""
        self.door.remove()

    def turn(self) -> RegionTurn | None:
        """Return the attention turn of the current call."""
        call: Call | None = CURRENT.get()
        if call is None or call.owner is not self.denoiser or call.repeats:
            return None
        progress = self._progress(call.run)
        return None if progress is None else progress.turn

    def _progress(self, run: Run) -> RegionState | None:
        found: RegionState | None = run.storage.get(self)
        return found

    def held_bytes(self, runs: list[Run]) -> int:
        """Return the bytes of kept keys, values and velocities."""
        going = [progress for run in runs if (progress := self._progress(run)) is not None]
        stores = [store for progress in going for store in list(progress.stores.values())]
        return sum(tensor.nbytes for store in stores for tensor in store.tensors())

    # a run -----------------------------------------------------------------------------------

    def timesteps(self, run: Run, scheduler: Any) -> None:
        """Start a run: plan the steps that are skipped."""
        check_scheduler(self.model, scheduler)
        times = scheduler.timesteps.tolist()
        skips: dict[int, float] = {}
        if len(times) == self.plan.total:
            skips = self.plan.skips(times, scheduler.config.num_train_timesteps)
        run.storage[self] = RegionState(skips)
        run.left_out.update(skips)

    def stepping(self, run: Run, scheduler: Any, output: Tensor, timestep: Any, sample: Tensor) -> None:
        """Choose the edited tokens at the end of the first stage, from the guided velocity."""
        progress, timeline = self._progress(run), run.timelines.get(self.denoiser)
        if progress is None or progress.given is None or timeline is None:
            return
        given, progress.given = progress.given, None
        tokens, every = sample.shape[1], given[SAMPLE].shape[1]
        if every != 2 * tokens:
            raise AttachError(
                f"{self.model}: computing the edited region alone needs one reference picture of "
                f"the result's size; the denoiser sees {tokens} noisy and {every - tokens} other "
                "tokens; pass image=..., height and width to match it, and with "
                "FluxKontextPipeline _auto_resize=False"
            )
        sigmas = scheduler.sigmas.to(sample.device)
        clean = sample + (sigmas[-1] - sigmas[timeline.index + run.begin]) * output
        grid = self.kind.grid(given) if self.plan.morphology else None
        reference = given[SAMPLE][:, tokens:]
        progress.mask = edited_tokens(clean, reference, self.plan.threshold, grid)
        progress.rows = rows_of(progress.mask)
        if not progress.rows.shape[1]:  # nothing to compute until the next full step
            run.left_out |= self.plan.regions

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Give the denoiser the edited rows on a region step; keep the inputs of the split."""
        progress = self._progress(call.run)
        if progress is None or call.writes:  # features were dropped in the middle of a run
            return call
        index, given = call.step.index, self.denoiser.named(call.args, call.kwargs)
        text = given[TEXT].shape[1]
        count = len(given[SAMPLE]) * (text + given[SAMPLE].shape[1])
        progress.turn, progress.tokens = None, (count, 0)
        if not call.record.computed:
            progress.tokens = (0, count)
            return call
        phase = self.plan.phase(index)
        if phase == "full":
            progress.stores.clear()
            return call
        store = progress.stores.get(call.branch.number)
        fits = store is not None and store.signature == call.signature == call.branch.signature
        fits = fits and progress.rows is not None and len(progress.rows) == len(given[SAMPLE])
        if phase == "region" and fits and not call.learns:
            return replace(call, args=(), kwargs=self._rows_only(progress, store, given))
        store = progress.stores[call.branch.number] = Store(call.signature, text)
        progress.turn = RegionTurn(store, None)
        if index == self.plan.split and progress.given is None:
            progress.given = given
        return call

    def _rows_only(self, progress: RegionState, store: Store | None, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call with the edited rows alone."""
        rows, states = progress.rows, given[SAMPLE]
        assert rows is not None
        assert store is not None
        for name, value in given.items():
            if name.startswith("controlnet") and name.endswith("samples") and value is not None:
                raise AttachError(f"{self.model}: {name} cannot be given with the edited rows only")
        progress.turn = RegionTurn(store, rows)
        left = states.shape[0] * (states.shape[1] - rows.shape[1])
        progress.tokens = (sum(progress.tokens) - left, left)
        changed = {SAMPLE: gather(states, rows)}
        if self.kind.reshape is not None:
            changed |= self.kind.reshape(given, rows.shape[1])
        return {**given, **changed}

    def _factors(self, progress: RegionState, index: int, states: Tensor) -> Tensor | None:
        """Return the factors of the kept velocity: only edited rows decay."""
        if progress.mask is None or index not in progress.skips:
            return None
        factors = torch.ones(states.shape[:2], dtype=torch.float32, device=states.device)
        factors[:, : progress.mask.shape[1]][progress.mask] = progress.skips[index]
        return factors[..., None]

    def close(self, call: Call, out: Any) -> Any:
        """Bring the output of a region step to full size; keep that of a full one.

        On a skipped step `out` is the velocity of the last computed one, of which edited rows
        decay.
        """
        progress = self._progress(call.run)
        if progress is None:
            return None
        first, *others = leaves(out)
        if not call.record.computed:
            factors = self._factors(progress, call.step.index, first)
            if factors is None:
                return None
            return Template(out).build([(first * factors).to(first.dtype), *others])
        if progress.turn is None:
            return None
        turn, progress.turn = progress.turn, None
        count = len(self.door.sites)
        if turn.visits != count:
            raise AttachError(
                f"{self.model}: {turn.visits} of {count} attention modules took part; "
                "processors were replaced since it was wrapped: unwrap it and wrap it again"
            )
        if turn.rows is None:
            turn.store.velocity = first.detach().clone()
            return None
        kept, mask = turn.store.velocity, progress.mask
        assert kept is not None
        assert mask is not None
        whole = scatter(kept, turn.rows, first)
        # a sample in which nothing is edited takes none of the rows it was filled up with
        tokens = mask.shape[1]
        edited = torch.where(mask[..., None], whole[:, :tokens], kept[:, :tokens])
        return Template(out).build([torch.cat([edited, kept[:, tokens:]], dim=1), *others])

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Return the attention of the present rows over all; None where all are, which are kept.

        Rows that are not present have kept keys and values. A step writes its rows in place: the
        same rows are present until the store is made anew. The model's own attention is taken: over
        dense and exact keys no kernel of ours gains anything.
        """
        turn = self.turn()
        if turn is None:
            return None
        turn.visits += 1
        mask = call.mask
        if mask is not None and (mask.dim() != 4 or mask.shape[2] != 1):
            raise AttachError("attention_mask: cannot be given with attention over kept rows")
        store = turn.store
        if turn.rows is None:
            store.rotary, store.present = call.rotary, None
            kept = store.layers[site] = HeldKV()
            k = call.rotated()[1].detach()
            kept.write(range(k.shape[1]), k, call.v.detach())
            return None
        rows, angles = turn.present()
        q, k = call.q, call.k
        if angles is not None:
            q, k = angles.apply(q), angles.apply(k)
        kept = store.layers[site]
        kept.write(rows, k.detach(), call.v.detach())
        assert kept.k is not None
        assert kept.v is not None
        if mask is not None:  # which hides text; all picture rows are seen
            mask = functional.pad(mask, (0, kept.length - mask.shape[3]), value=True)
        return call.attend(q, kept.k.transpose(1, 2), kept.v.transpose(1, 2), mask)

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens of text and picture the call computed and left out.

        Operations are counted by tokens too: each costs the same in every block, since it attends
        to all tokens whether they are computed or not.
        """
        progress, record = self._progress(call.run), call.record
        if progress is None or call.writes:
            return {}
        if record.flops is not None:
            each = sum(record.flops) / max(sum(progress.tokens), 1)
            record.flops = progress.tokens[0] * each, progress.tokens[1] * each
        return {TOKENS: progress.tokens}


def check_scheduler(model: str, scheduler: Any) -> None:
    """Raise AttachError unless a scheduler takes deterministic steps of Euler's method."""
    unfit = other_than_euler(type(scheduler).__name__, getattr(scheduler, "config", {}))
    if unfit:
        raise AttachError(
            f"{model}: rows that are not edited move on a straight line, which needs {EULER}, not "
            f"{unfit}; replace the scheduler, or use another method"
        )


def install(denoiser: Denoiser, ability: RegionPlan) -> Regions:
    """Return the extension for a plan.

    Raises AttachError if the pipeline does not edit a reference picture, its denoiser or scheduler
    is of another class, or its attention is not plain.
    """
    model, pipeline = denoiser.model, denoiser.handle.target()
    name = denoiser.anatomy.model
    kinds = [KINDS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in KINDS]
    served = f"computing the edited region alone serves {', '.join(PIPELINES)}"
    if pipeline is model:
        raise AttachError(f"{name}: {served}, not a bare model, whose scheduler is not known")
    if type(pipeline).__name__ not in PIPELINES or not kinds:
        raise AttachError(f"{type(pipeline).__name__} with {name}: {served}; use another method")
    check_scheduler(name, denoiser.handle.scheduler)
    processors = [model.get_submodule(site.path).processor for site in attention_sites(model)]
    if any(map(is_split, processors)):
        raise AttachError(f"{name}: split over devices, its rows cannot be kept; {served}")
    return Regions(denoiser, ability, kinds[0])
