"""Host time of a skipped step above its floor, on a deep and narrow FLUX with random weights.

The floor of a method that skips every block is the same model without blocks (embedders and head);
of one that runs the first block, the model with that one block; of a method at module sites, the
model whose modules are replaced by ones that return a ready tensor. The 10th percentile of calls
that take turns is compared: what the machine's other work adds is left out. In its turn a variant
makes one call that is not timed and finds the processor's caches cold, and then a few that are:
skipped steps come in rows. Calls are made inside a `cache_context` that is open already, whose own
cost stands in a column of its own.

Whole runs of sticker-flux say what that comes to. The yardstick is the same pipeline whose blocks
are taken out in the steps that are skipped: it pays for embedders, head, guidance and scheduler of
all steps, and for blocks of the computed ones alone. Efficiency is its time over a method's, moved
along the line through the uncached run to as many computed steps as the method takes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, FluxTransformer2DModel, MagCacheConfig, TaylorSeerCacheConfig
from torch import Tensor, nn

import diffcache
from diffcache.errors import MissingError
from diffcache.eval.cost.interleave import Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting, stats
from diffcache.eval.runs.peers import make_peer
from diffcache.eval.workshop.small import sticker_flux
from diffcache.eval.workshop.small.stickers import held_out_captions
from diffcache.features.base import Method
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer
from diffcache.step import Site

NEVER = 10**9  # an interval that no run reaches the end of
TARGETS = {"TaylorSeer stack": 130.0, "TaylorSeer block": 300.0}  # microseconds above the floor
SITE_TARGET = 15.0  # microseconds a module site
_SITES = ("attention", "feed-forward", "module")
_OPENING = "context of {}"
_WARMUP = 8  # calls until every variant skips
EVERY = 5  # steps of a whole run, from a computed one to the next
HOLLOW = "no blocks in skipped steps"


@dataclass(frozen=True)
class Shape:
    """Sizes of a small FLUX transformer and of its inputs."""

    double: int = 19  # double-stream blocks
    single: int = 38  # single-stream blocks
    heads: int = 2  # attention heads of 16 channels
    image_tokens: int = 16  # tokens of the picture
    text_tokens: int = 8  # tokens of the prompt
    batch: int = 1  # samples in a call

    @property
    def width(self) -> int:
        """Channels of a stream."""
        return 16 * self.heads


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> FluxTransformer2DModel:
    """Build a transformer; the same shape gives the same weights in the blocks it has."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=shape.double,
        num_single_layers=shape.single,
        attention_head_dim=16,
        num_attention_heads=shape.heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    model = model.to(device) if dtype == model.dtype else model.to(device, dtype)
    return model.eval().requires_grad_(False)


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of one call, as `FluxPipeline` gives them."""
    generator = torch.Generator().manual_seed(1)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    places = torch.zeros(shape.image_tokens, 3)
    places[:, 2] = torch.arange(shape.image_tokens)
    return {
        "hidden_states": noise(shape.batch, shape.image_tokens, 16),
        "encoder_hidden_states": noise(shape.batch, shape.text_tokens, 32),
        "pooled_projections": noise(shape.batch, 32),
        "timestep": torch.full((shape.batch,), 0.5, device=device, dtype=dtype),
        "img_ids": places.to(device, dtype),
        "txt_ids": torch.zeros(shape.text_tokens, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


def hollow_out(model: nn.Module, paths: list[str], call: dict[str, Any]) -> None:
    """Have modules return what they returned in a call; in place."""
    modules = [model.get_submodule(path) for path in paths]
    seen: dict[nn.Module, Any] = {}
    hooks = [module.register_forward_hook(lambda module, args, out: seen.update({module: out})) for module in modules]
    model(**call)
    for hook in hooks:
        hook.remove()
    for module in modules:
        module.forward = lambda *_, out=seen[module], **__: out


class Ticker:
    """The least that counts as a scheduler: it has a number of steps, and marks the end of each."""

    timesteps = range(0)

    def set_timesteps(self, steps: int) -> None:
        """Start a run."""
        self.timesteps = range(steps)

    def step(self) -> None:
        """End a step."""


class Loop:
    """A denoiser under a method in a run without end, with the clock of a real pipeline."""

    def __init__(self, model: Any, method: Method) -> None:
        self.model, self.method, self.scheduler = model, method, Ticker()
        self.components = {"transformer": model, "scheduler": self.scheduler}

    def __call__(self) -> None:
        """Do nothing; a pipeline can be called."""

    def __enter__(self) -> Loop:
        diffcache.wrap(self, self.method)
        self.scheduler.set_timesteps(10**6)
        return self

    def __exit__(self, *_: object) -> None:
        diffcache.unwrap(self)


@dataclass(frozen=True)
class Variant:
    """One model to time."""

    floor: str  # name of the variant that it is compared with, empty for floors themselves
    model: Any
    tick: Callable[[], None] = lambda: None  # what happens between calls; not timed
    sites: int = 0  # module sites that a skipped step estimates, 0 where the floor is a model's
    calls: int = 5  # timed calls in a row

    def turn(self, call: dict[str, Any]) -> Turn:
        """Return what is timed: calls in an open context."""

        def step() -> Any:
            return self.model(**call)

        def first() -> None:
            step()
            self.tick()

        return Turn(step, lambda: self.model.cache_context("cond"), first, None, self.tick, self.calls)

    def open(self) -> None:
        """Open a context and close it."""
        with self.model.cache_context("cond"):
            pass


def methods() -> dict[str, tuple[Method, str]]:
    """Return the methods of diffcache to time, with their floors."""
    taylor: dict[str, tuple[Method, str]] = {
        f"TaylorSeer {site}": (TaylorSeer(NEVER, 1, site=site), f"{site} rest" if site in _SITES else "0 blocks")
        for site in ("stack", "model", "block", *_SITES)
    }
    return {
        **taylor,
        "Interval stack": (Interval(NEVER), "0 blocks"),
        "FirstBlock": (FirstBlock(float("inf")), "1 block"),
        "ConfidenceGatedTaylor": (ConfidenceGatedTaylor(float("inf")), "1 block"),
    }


def peers(steps: int) -> dict[str, tuple[Any, str]]:
    """Return the configurations of diffusers to time, with their floors."""
    lite, attention = (
        TaylorSeerCacheConfig(cache_interval=NEVER, use_lite_mode=lite, taylor_factors_dtype=torch.float32)
        for lite in (True, False)
    )
    mag = MagCacheConfig(
        threshold=1e9, max_skip_steps=NEVER, retention_ratio=0.0, num_inference_steps=steps, mag_ratios=[1.0] * steps
    )
    return {
        "diffusers MagCache": (mag, "0 blocks"),
        "diffusers TaylorSeer lite": (lite, "0 blocks"),
        "diffusers FirstBlockCache": (FirstBlockCacheConfig(threshold=1e9), "1 block"),
        "diffusers TaylorSeer": (attention, "attention rest"),
    }


class Variants(dict[str, Variant]):
    """Variants by name, on models of the same weights, each to be called `steps` times; `stack` unwraps them."""

    def __init__(self, setting: Setting, shape: Shape, steps: int, stack: ExitStack) -> None:
        super().__init__()
        self.setting, self.shape, self.stack = setting, shape, stack
        self.call = inputs(shape, setting.device, setting.dtype)
        self._floors()
        for name, (method, floor) in methods().items():
            self._ours(name, method, floor)
        for name, (config, floor) in peers(_WARMUP + steps).items():
            model = self._model()
            model.enable_cache(config)
            sites = shape.double + shape.single if floor.endswith("rest") else 0
            self._add(name, floor, model, sites=sites)

    def _model(self, **changes: int) -> Any:
        return build(replace(self.shape, **changes), self.setting.device, self.setting.dtype)

    def _add(self, name: str, floor: str, model: Any, **more: Any) -> Variant:
        is_long = name == "full step" or "rest" in name + floor
        variant = self[name] = Variant(floor, model, calls=2 if is_long else 5, **more)
        with model.cache_context("cond"):
            for _ in range(_WARMUP):
                model(**self.call)
                variant.tick()
        return variant

    def _floors(self) -> None:
        self._add("full step", "", self._model())
        self._add("0 blocks", "", self._model(double=0, single=0))
        self._add("1 block", "", self._model(double=1, single=0))
        for site in _SITES:
            model = self._model()
            entries = diffcache.inspect(model).modules_at(Site.of(site))
            hollow_out(model, [f"{entry.parent}.{entry.child}" for entry in entries], self.call)
            self._add(f"{site} rest", "", model)

    def _ours(self, name: str, method: Method, floor: str) -> None:
        model = self._model()
        loop = self.stack.enter_context(Loop(model, method))
        variant = self._add(name, floor, model, tick=loop.scheduler.step)
        counts = diffcache.report(loop).calls[-1].counts
        skipped = sum(left_out for _, left_out in counts.values())
        if not skipped:
            raise RuntimeError(f"{method!r} skips nothing; the benchmark would time full steps")
        if floor.endswith("rest"):
            self[name] = replace(variant, sites=skipped)


def measure(
    setting: Setting,
    *,
    rounds: int = 50,
    shape: Shape | None = None,
    batches: Sequence[int] = (1, 4),
    length: int = 28,
) -> dict[str, Any]:
    """Measure the host time of skipped steps.

    `rounds` are turns of every variant; whole runs, of each of `batches` pictures and of `length` steps, take a
    quarter as many, at least 2. The model has the depth of FLUX.1 by default.
    """
    shape = shape or Shape()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        variants = Variants(setting, shape, 6 * rounds, stack)
        turns: dict[str, Turn] = {}
        for name, variant in variants.items():
            turns[_OPENING.format(name)] = Turn(variant.open)  # as cold as a step finds it
            turns[name] = variant.turn(variants.call)
        seconds = take_turns(turns, rounds, 0, setting).cpu_seconds
    return {
        "shapes": {"device": setting.device.type, "model": "tiny FLUX, random weights", **asdict(shape)},
        "rounds": rounds,
        "clock": "CPU time of the process until a call returned, 10th percentile",
        "rows": rows(variants, seconds),
        "runs": [run for batch in batches for run in whole_runs(setting, max(rounds // 4, 2), batch, length)],
    }


def _run_peers(mask: str) -> dict[str, dict[str, Any]]:
    """Return settings of other libraries' forecasts that compute the steps of a mask, or nearly."""
    return {
        "diffusers/taylorseer": {"cache_interval": EVERY, "disable_cache_before_step": 1, "use_lite_mode": True},
        "cache-dit/dbcache": {
            "Fn_compute_blocks": 1,
            "max_warmup_steps": 1,
            "steps_computation_mask": mask,
            "steps_computation_policy": "static",
            "taylorseer_order": 1,
        },
    }


class TimedRuns(dict[str, Callable[[], None]]):
    """Whole runs of sticker-flux by name, each on a pipeline of its own; the stack ends what is put in.

    The number of computed steps of a run stands in `computed`, by name.
    """

    def __init__(self, setting: Setting, batch: int, length: int, stack: ExitStack) -> None:
        super().__init__()
        self.setting, self.texts, self.length = setting, held_out_captions(batch), length
        self.computed: dict[str, int] = {}
        self._add("uncached", self._pipe())
        pipe = self._pipe()
        self._hollow(pipe.transformer)
        self._add(HOLLOW, pipe)
        for name, method in (("TaylorSeer", TaylorSeer(every=EVERY, warmup=1)), ("Interval", Interval(every=EVERY))):
            pipe = self._pipe()
            diffcache.wrap(pipe, method)
            stack.callback(diffcache.unwrap, pipe)
            self._add(name, pipe)
        mask = "".join("01"[step % EVERY == 0] for step in range(length))
        for name, settings in _run_peers(mask).items():
            pipe = self._pipe()
            with suppress(MissingError):  # cache-dit is not installed
                stack.enter_context(make_peer(name, settings).applied(pipe, length))
                self._add(name, pipe)

    def _pipe(self) -> Any:
        pipe = sticker_flux.load(self.setting.dtype).to(self.setting.device)
        pipe.set_progress_bar_config(disable=True)
        # A layer inside the last block: caches that skip the block do not call it.
        self._last = pipe.transformer.single_transformer_blocks[-1].proj_mlp
        return pipe

    def _add(self, name: str, pipe: Any) -> None:
        def run() -> None:
            noise = torch.Generator().manual_seed(0)
            call = {**sticker_flux.CALL, "output_type": "latent", "num_inference_steps": self.length}
            pipe(self.texts, generator=noise, **call)

        run()  # what a first run alone does, such as learning the model's loop, is over
        seen: list[int] = []
        hook = self._last.register_forward_pre_hook(lambda *_: seen.append(1))
        run()
        hook.remove()
        self[name], self.computed[name] = run, len(seen) // 2  # guidance calls twice a step

    def _hollow(self, model: Any) -> None:
        kept, none = (model.transformer_blocks, model.single_transformer_blocks), (torch.nn.ModuleList(),) * 2
        calls = itertools.count()

        def choose(*_: Any) -> None:
            computes = next(calls) // 2 % self.length % EVERY == 0
            model.transformer_blocks, model.single_transformer_blocks = kept if computes else none

        model.register_forward_pre_hook(choose)


@torch.no_grad()
def whole_runs(setting: Setting, rounds: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Measure whole runs of some pictures and steps beside one whose skipped steps have no blocks."""
    with ExitStack() as stack:
        runs = TimedRuns(setting, batch, length, stack)
        seconds = take_turns(dict(runs), rounds, 1, setting).own(setting)
    found = []
    for name, computed in runs.computed.items():
        share = (computed - runs.computed[HOLLOW]) / (length - runs.computed[HOLLOW])
        rounds_of = zip(seconds["uncached"], seconds[HOLLOW], seconds[name], strict=True)
        of_floor = [(floor + share * (full - floor)) / own for full, floor, own in rounds_of]
        found.append(
            {
                "name": name,
                "batch": batch,
                "computed_steps": computed,
                "run_ms": stats(seconds[name], 1e3),
                "efficiency": summary(of_floor),
            }
        )
    return found


def rows(variants: dict[str, Variant], seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return what was measured, in microseconds, from seconds of the calls of each and of opening its context."""
    taken = {name: stats(samples, 1e6) for name, samples in seconds.items()}
    found = []
    for name, variant in variants.items():
        above = taken[name]["p10"] - taken[variant.floor]["p10"] if variant.floor else None
        sites = variant.sites or None
        is_ours = not name.startswith("diffusers")
        found.append(
            {
                "name": name,
                "step_us": taken[name],
                "floor": variant.floor or None,
                "above_floor_us": above,
                "sites": sites,
                "above_floor_us_a_site": above / sites if above is not None and sites else None,
                "cache_context_us": taken[_OPENING.format(name)]["p10"],
                "target_us": TARGETS.get(name),
                "target_us_a_site": SITE_TARGET if sites and is_ours else None,
            }
        )
    return found
