"""The front door: wrap, unwrap, report, expected_bytes, reset, run, stream, inspect.

`branch` and `writing`, which say what a call is, are here as well.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Union, overload

from torch import Tensor, nn

from diffcache.anchor import Attached, Loop, described, owner_of
from diffcache.attach.anatomy import Anatomy, anatomy_of
from diffcache.attach.cache_context import branch as branch
from diffcache.attach.cache_context import writing as writing
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.handle import WRAPPED, Handle
from diffcache.attach.run import RunStream
from diffcache.attach.runs import ATTACHING
from diffcache.catalog import changed, has_settings, make_method, method_class, settings_of
from diffcache.errors import AttachError
from diffcache.features.base import Method, check_int
from diffcache.features.combine import reuse_of
from diffcache.features.each import Each
from diffcache.features.parts.hold import Form, Held
from diffcache.memory import bytes_of, compression_of, size_of
from diffcache.method import Configuration
from diffcache.presets.choose import ChosenMethod, choose
from diffcache.registry import WORDS, Kind, check_settings, find, unknown
from diffcache.run_report import Report
from diffcache.settings_file import is_settings_file, read_settings, save_settings
from diffcache.step import Site
from diffcache.targets import attached_to, check_free, denoisers_of, handle_of

if TYPE_CHECKING:
    from diffcache.kv.recipe import Recipe
    from diffcache.video.policy import VideoPolicy

T = TypeVar("T")
# What `wrap` takes: a name, a method or policy, a configuration of another library, a recipe, or
# recipes of single layers.
Wrapper = Union[
    str,
    "os.PathLike[str]",
    Method,
    Configuration,
    "Recipe",
    "VideoPolicy",
    "Sequence[Recipe | str]",
    "Mapping[int, Recipe | str]",
]
_LOG = logging.getLogger("diffcache")


def wrap(
    target: T,
    method: Wrapper | None = None,
    *,
    preset: str | None = None,
    components: str | Sequence[str] | None = None,
    hold: Form | None = None,
    text_bytes: int | None = None,
    **settings: Any,
) -> T:
    """Put a cache into a pipeline or model, in place.

    | cache | target | what it does |
    |---|---|---|
    | feature method | pipeline of diffusers, or a denoiser | skips parts of steps |
    | policy of `diffcache.dllm` | diffusion language model, `DiffusionLM` | skips rows |
    | recipe of `diffcache.kv` | language model of transformers | caches for calls without one |
    | policy of `diffcache.video` | `CausalVideo` | holds some frames of new streams |

    Calls of a language model that bring a cache of their own stay as they are, and so do streams that are open or name
    a policy of their own; see `diffcache.kv.caching` and `CausalVideo`.

    Args:
        target: What is wrapped. A bare denoiser (any module with lists of blocks) tells its steps by its timestep
            argument: a run starts where the timestep turns back, where the sample is not correlated with the one
            before, or at `diffcache.reset(model)`; `diffcache.run` and `diffcache.branch` say which calls belong
            together, and what cannot be told is computed, with a warning: samples of fewer than 64 numbers without
            conditions, and samplers that draw new noise at every step. Trajectories of the same conditions whose
            samples are alike, or that small, need `diffcache.run`. Calls that gradients go through are computed. Of an
            object that calls a network in a loop of its own, a `DiffusionLM` or `CausalVideo`, it is the network.
        method: A method, policy or recipe, or its name, after which settings may follow as on the command line,
            `taylorseer:every=4`; or a method for each denoiser of a pipeline, `{"transformer": ..., "transformer_2":
            ...}`. A method with tables that is given by name and without them takes the settings that its authors
            published for the model, if any are. `FirstBlockCacheConfig`, `MagCacheConfig` and `TaylorSeerCacheConfig`
            of diffusers and `DBCacheConfig` of cache-dit are taken as the methods that compute the same steps, and a
            file that `diffcache.save` wrote, `cache.yaml`, as what it says. None takes the preset of the model, and
            `taylorseer` where it has none; which and why is logged by the logger `diffcache` at level INFO, and stands
            in the report.
        preset: Preset to take in place of a method: `quality`, `balanced`, `fast`, or with the name of its model,
            `flux.1-dev/fast`. `diffcache presets` lists them.
        components: Name or names of the pipeline's denoisers to wrap; all of them by default.
        hold: Form of the held features of a method: `bf16`; `int8`, with a scale a token, in about half the memory of
            bf16; `host`, in the host's memory, fetched back ahead of use. None leaves them as they are.
        text_bytes: Most bytes of outputs of a pipeline's text encoders that are kept from call to call, until it is
            unwrapped or reset; a prompt that is asked for again is then looked up and its pictures stay bit for bit
            the same. None keeps none.
        **settings: Settings of what is given by name, such as `every=4`; of a recipe `mode` too, as for
            `diffcache.kv.cache_for`.

    Returns:
        `target` itself.

    Raises:
        AttachError: If the target is none that takes it, is cached already, its pipeline or network is in a call in
            another thread, or it has no such preset.
        UnknownMethodError: If nothing has that name.
        ValueError: If a setting is unknown or out of its range.

    Examples:
        >>> pipe = diffcache.wrap(pipe)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, TaylorSeer(every=5, order=1))  # doctest: +SKIP
        >>> model = diffcache.wrap(model, "snapkv", budget=256)  # doctest: +SKIP
        >>> video = diffcache.wrap(video, "deep-forcing")  # doctest: +SKIP
    """
    where = {"preset": preset, "components": components}
    wrapped(target, method, **where, hold=hold, text_bytes=text_bytes, **settings)
    return target


@overload
def wrapped(
    target: Any,
    method: str | Method | Configuration | None = None,
    *,
    preset: str | None = None,
    components: str | Sequence[str] | None = None,
    hold: Form | None = None,
    text_bytes: int | None = None,
    **settings: Any,
) -> Handle: ...
@overload
def wrapped(target: Any, method: Wrapper | None = None, **settings: Any) -> Any: ...
def wrapped(
    target: Any,
    method: Wrapper | None = None,
    *,
    preset: str | None = None,
    components: str | Sequence[str] | None = None,
    hold: Form | None = None,
    text_bytes: int | None = None,
    **settings: Any,
) -> Attached:
    """Do as `wrap` and return the handle: `with diffcache.wrapped(pipe, method) as handle: ...`."""
    choice = None
    if method is None or preset is not None:
        denoisers = denoisers_of(target, components)
        choice = choice_for(target, denoisers, method, preset, settings)
        method, settings = choice.given(denoisers, settings)
    if is_settings_file(method):
        given = {**settings, **({} if hold is None else {"hold": hold})}
        return _wrapped_by_file(target, method, components, given, text_bytes)
    kind = kind_of(method)
    if kind in ("recipe", "video"):
        for name, value in (("components", components), ("hold", hold), ("text_bytes", text_bytes)):
            if value is not None:
                raise ValueError(f"{name}={value!r}: is for feature methods; leave it out")
        with ATTACHING:
            put = cached if kind == "recipe" else filming
            return put(target, method, **settings)
    target = target.network if isinstance(target, Loop) else target
    denoisers = denoisers_of(target, components)
    held = {} if hold is None else {"hold": hold}
    chosen = method_for(target, denoisers, method, **settings, **held)  # type: ignore[arg-type]
    reuse = reuse_of(chosen)
    with ATTACHING:  # of two threads, the second is refused
        check_free(target, denoisers, Site.MODEL if reuse is None else reuse.site)
        handle = Handle(target, denoisers, chosen, text_bytes=text_bytes)
    if choice is not None:
        handle.choice = choice
        _LOG.info("preset: %s", choice.why)
    return handle


def choice_for(
    target: Any, denoisers: dict[str, nn.Module], method: object, preset: str | None, settings: Mapping[str, Any]
) -> ChosenMethod:
    """Return the method of a pipeline by its preset, with the reason.

    The model is recognized by the first of its denoisers.

    Raises:
        AttachError: If the model has no such preset.
        ValueError: If a method was named too, or the preset's method lacks a setting.
    """
    if method is not None:
        raise ValueError(f"preset={preset!r} and method={method!r}: give one of them")
    first = next(iter(denoisers.values()))
    choice = choose(facts_of(first, getattr(target, "scheduler", None), target), preset)
    try:
        check_settings(method_class(choice.method), settings.keys() - {"hold"})
    except ValueError as error:
        name = choice.method if choice.preset is None else f"preset {choice.preset.name}"
        raise ValueError(f"{error}; no method was named, so {name} was taken: name the one that is meant") from None
    return choice


def _wrapped_by_file(
    target: Any,
    path: str | os.PathLike[str],
    components: str | Sequence[str] | None,
    settings: dict[str, Any],
    text_bytes: int | None,
) -> Attached:
    """Wrap a target with the settings of a file; bytes of texts may be others than it says.

    Raises:
        ValueError: If settings or components are given besides, or those of the file do not fit.
    """
    saved = read_settings(path)
    if components is not None and saved.components is not None:
        settings["components"] = components
    if settings:
        raise ValueError(
            f"method={str(path)!r}: has settings of its own, and {sorted(settings)} are given "
            "besides; change them in the file, or by diffcache.update when it is wrapped"
        )
    asked = {
        "components": saved.components or components,
        "hold": saved.hold,
        "text_bytes": saved.text_bytes if text_bytes is None else text_bytes,
    }
    try:
        given = {name: value for name, value in asked.items() if value is not None}
        handle: Attached = wrapped(target, saved.method, **given, **saved.settings)
        return handle
    except ValueError as error:
        raise ValueError(f"method={str(path)!r}: {error}") from error


def save(target: Any, path: str | os.PathLike[str]) -> None:
    """Write the settings of a wrapped object, so that `diffcache.wrap(pipe, path)` wraps it again.

    Args:
        target: A wrapped pipeline, denoiser, language model or video.
        path: File to write, `.yaml` or `.yml`. Measured tables go beside it, into a file of the
            same name that ends in `.safetensors`.

    Raises:
        AttachError: If the target is not wrapped.
        ValueError: If the file cannot be written, or there is something in the method that cannot
            be made again: a class of yours, or a recipe that was given as an object.

    Examples:
        >>> diffcache.save(pipe, "cache.yaml")  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, "cache.yaml")  # doctest: +SKIP
    """
    owner = attached_to(target)
    if isinstance(owner, Handle):
        names, holder = [denoiser.name for denoiser in owner.denoisers], owner.target()
        own = names == list(denoisers_of(holder))
        limit = None if owner.texts is None else owner.texts.limit_bytes
        save_settings(path, owner.method, None, None if own else names, limit)
        return
    recipe = getattr(owner, "recipe", None)  # as it was given, of a language model
    if recipe is not None and not isinstance(recipe, str):
        raise ValueError(
            f"{described(owner)} was given as an object, which YAML cannot hold; wrap with its "
            "name and settings, such as wrap(model, 'snapkv', budget=256)"
        )
    save_settings(path, recipe or owner.method, getattr(owner, "settings", None))


def kind_of(method: object) -> Kind:
    """Return the kind of a method, recipe or policy.

    Raises:
        UnknownMethodError: If nothing has that name.
    """
    if isinstance(method, str):
        name = re.split("[:|=]", method)[0].strip()
        row = find(name, *WORDS)
        if row is None and name:
            raise unknown(name, *WORDS)
        return "method" if row is None else row.kind
    by_denoiser = isinstance(method, Mapping) and method and all(isinstance(key, str) for key in method)
    if isinstance(method, Method) or by_denoiser:  # keys of recipes are numbers of layers
        return "method"
    from diffcache.kv.recipe import Recipe  # here, so that `import diffcache` stays light
    from diffcache.video.policy import VideoPolicy

    if isinstance(method, VideoPolicy):
        return "video"
    place = getattr(method, "__module__", None) or ""  # of a function that nobody called
    if isinstance(method, (Recipe, Mapping, Sequence)) or place.startswith("diffcache.kv.recipes"):
        return "recipe"
    return "method"  # making it raises an error that tells what is wrong


def cached(target: Any, recipe: Any, **settings: Any) -> Attached:
    """Give the calls of a language model caches of a recipe.

    Raises:
        AttachError: If it is no such model, or is cached already.
    """
    from diffcache.kv.hf.implicit import Caching
    from diffcache.kv.hf.model import config_of

    try:
        config_of(target)
    except AttachError:
        raise _refusal(target, recipe, "recipe") from None
    return Caching(target, recipe, **settings)


def filming(target: Any, policy: Any, **settings: Any) -> Attached:
    """Let a policy decide the frames that new streams of a causal video hold.

    Raises:
        AttachError: If it is no such video, or has been given a policy already.
    """
    from diffcache.video.policy import Films, PolicyOf, make_policy

    if not isinstance(target, Films):
        raise _refusal(target, policy, "video")
    if owner_of(target) is not None:
        raise AttachError(f"{type(target).__name__} already runs under {target.policy!r}; unwrap it first")
    return PolicyOf(target, make_policy(policy, **settings))


def _refusal(target: Any, method: Any, kind: Kind) -> AttachError:
    """Return the error for a target that takes no such method."""
    words = WORDS[kind]
    return AttachError(
        f"cannot wrap a {type(target).__name__} with {method!r}: a {words.noun} goes into {words.takes}"
    )


def unwrap(target: T) -> T:
    """Take the cache out again; the target is bit for bit as before.

    Raises:
        AttachError: If the target is not wrapped, shares a denoiser with the pipeline that is, or is in use in another
            thread: in a pipeline's call, `diffcache.run`, `diffcache.stream` or `generate`.
    """
    with ATTACHING:
        handles = [attached_to(target)]
        network = target.network if isinstance(target, Loop) else None
        if network is not None and owner_of(network) and attached_to(network) not in handles:
            handles.append(attached_to(network))
        for handle in handles:
            holder = handle.target() if isinstance(handle, Handle) else None
            alone = isinstance(target, (nn.Module, Loop))
            if holder is not None and holder is not target and not alone:
                raise AttachError(
                    f"this {type(target).__name__} is not wrapped itself: it shares a denoiser "
                    f"with another {type(holder).__name__} that is; unwrap that one, or the "
                    "denoiser"
                )
            handle.check_idle()
        for handle in handles:
            handle.detach()
    return target


def report(target: Any) -> Report:
    """Return the computed and skipped steps of a wrapped object's last run.

    Raises:
        AttachError: If the target is not wrapped.
    """
    return Report(handle_of(target))


def expected_bytes(
    target: Any,
    method: str | Method | Configuration | None = None,
    *,
    preset: str | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    text_tokens: int | None = None,
    batch: int = 1,
    branches: int = 1,
    skip_guidance_layers: Sequence[int] = (),
    **settings: Any,
) -> dict[str, int]:
    """Compute the bytes that a method will hold.

    A copy of each denoiser without weights, on torch's `meta` device, is called once with inputs of the right shapes,
    so that the count is that of a real run. Guidance in one batch doubles `batch`; guidance in two calls has two
    `branches`.

    Args:
        target: A diffusers pipeline, or a denoiser of a class in `diffcache.attach.inputs.INPUTS`.
        method: A method, or its catalogue name; None for that of its preset, as in `wrap`.
        preset: Preset to take in place of a method, as in `wrap`.
        height: Pixels; None for the pipeline's default.
        width: Pixels; None for the pipeline's default.
        frames: Frames of a video, 1 for an image; None for the pipeline's default.
        text_tokens: Length of the prompt as the denoiser sees it, padding and the tokens of all text encoders included
            (of Lumina 2, which leaves padding out, the prompt's own); None for the pipeline's default.
        batch: Samples in a call.
        branches: Calls of a step: 2 for guidance in two calls. Features are held for each of them; what a gate looks
            at is held once, where the first branch decides for all.
        skip_guidance_layers: Blocks that skip-layer guidance of Stable Diffusion 3 leaves out, in a call beside the
            one with guidance in one batch.
        **settings: Settings of a method given by name, such as `every=4`.

    Returns:
        Denoiser -> bytes.

    Raises:
        AttachError: If the target has no denoiser, or cannot be cached with this method.
        ValueError: If the inputs of the denoiser's class are not known, the size does not fit it, or a setting is out
            of its range.

    Examples:
        >>> diffcache.expected_bytes(pipe, "taylorseer", height=1024, width=1024)  # doctest: +SKIP
    """
    check_int("branches", branches, 1)
    for layer in skip_guidance_layers:
        check_int("skip_guidance_layers", layer, 0)
    denoisers = denoisers_of(target)
    if method is None or preset is not None:
        choice = choice_for(target, denoisers, method, preset, settings)
        method, settings = choice.given(denoisers, settings)
    chosen = method_for(target, denoisers, method, **settings)
    asked = {"height": height, "width": width, "frames": frames, "text_tokens": text_tokens}
    sizes = {n: size_of(target, m, {**asked, "batch": batch}) for n, m in denoisers.items()}
    compression = compression_of(target)
    found = {}
    for name, model in denoisers.items():
        size = replace(sizes[name], skip_layers=tuple(skip_guidance_layers))
        expected = bytes_of(model, chosen.for_denoiser(name), size, compression)
        found[name] = expected.of(branches)
    return found


def reset(target: Any) -> None:
    """Forget every feature held for a wrapped pipeline or denoiser; the next call starts a run.

    Outputs of text encoders are forgotten too. Of a language model with a recipe it lets go of the
    cache that was made last.

    Pipelines' calls and `diffcache.run` of other threads go on: they forget at their end.

    Raises:
        AttachError: If the target is not wrapped.
    """
    attached_to(target).reset()


def run(
    target: Any, *, steps: int | None = None, sigmas: Sequence[float] | Tensor | None = None
) -> AbstractContextManager[None]:
    """Let the denoiser calls inside be one sampling run.

    The run starts with nothing held and frees its features at its end. It belongs to this thread and task, and to
    tasks and `asyncio.to_thread` calls that are started inside; runs in other threads and tasks are apart. Calls of a
    pipeline are runs already.

    Without it, a bare denoiser's runs are told by timesteps, conditions and samples, which cannot tell a trajectory
    that is first seen at a lower timestep with a sample like the one before, such as another edit of one picture at
    low noise, right after a first step or where the sampler draws noise at every step.

    Args:
        target: A wrapped denoiser, or a pipeline with one.
        steps: Number of timesteps of the run, so that methods know its last step; None if nobody knows, a wrapped
            pipeline's scheduler tells it, or `sigmas` do.
        sigmas: Noise level at every step of flow matching, 0 to 1, for methods that ask for it where no scheduler
            tells it, such as SeaCache on a bare model; the one that the last step ends at is left out.

    Raises:
        AttachError: If the target is not wrapped, a run of it is open already in this thread, or more steps are taken.
        ValueError: If `steps` is no whole number of 1 or more, or `sigmas` are no noise levels or not as many.

    Examples:
        >>> with diffcache.run(model, steps=len(timesteps)):  # doctest: +SKIP
        ...     for t in timesteps:
        ...         x = step(model(x, t, cond), t, x)
    """
    if steps is not None:
        check_int("steps", steps, 1)
    levels = [] if sigmas is None else [float(value) for value in sigmas]
    if not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"sigmas={levels}: must be noise levels of flow matching, 0 to 1")
    if levels and (len(levels) - 1 == steps or (steps is None and levels[-1] == 0)):
        levels.pop()
    if sigmas is not None and len(levels) != (steps or len(levels) or 1):
        raise ValueError(f"sigmas={levels}: must be one a step, steps={steps}")
    return handle_of(target).told(steps or len(levels) or None, levels)


def settings(target: Any = None, **settings: Any) -> AbstractContextManager[None]:
    """Let the sampling runs that start inside have other settings, such as those of one request.

    Nothing is wrapped anew, so it costs nothing, and other threads and tasks go on as they are. A run reads its
    settings at its start and keeps them to its end.

    Args:
        target: A wrapped pipeline or denoiser; None for all that are wrapped with a method that has these settings.
        **settings: Settings of its method that tell when a step is computed or what stands in for the others, such as
            `every=6` or `threshold=0.1`.

    Raises:
        AttachError: If the target is not wrapped, or nothing is.
        ValueError: If a setting is unknown, out of its range, or says where features are taken or how many steps a run
            has.

    Examples:
        >>> with diffcache.settings(pipe, every=6):  # doctest: +SKIP
        ...     image = pipe(prompt).images[0]
    """
    handles = _wrapped_with(settings) if target is None else [handle_of(target)]
    return _choosing([(each, _changed(each, each.chosen, settings)) for each in handles])


def _wrapped_with(settings: Mapping[str, Any]) -> list[Handle]:
    """Return all that is wrapped with a method that has some settings."""
    with ATTACHING:
        handles = [handle for handle in WRAPPED if handle.target() is not None]
    if not handles:
        raise AttachError("nothing is wrapped; call diffcache.wrap first")
    found = [handle for handle in handles if has_settings(handle.chosen, settings)]
    if not found:
        wrapped = " and ".join(sorted({repr(handle.chosen) for handle in handles}))
        raise ValueError(f"settings {sorted(settings)}: not of what is wrapped, {wrapped}")
    return found


@contextmanager
def _choosing(chosen: Sequence[tuple[Handle, Method]]) -> Iterator[None]:
    """Let the runs that start inside have other methods."""
    with ExitStack() as stack:
        for handle, method in chosen:
            stack.enter_context(handle.choosing(method))
        yield


def update(target: T, **settings: Any) -> T:
    """Change settings of the method that a pipeline or denoiser is wrapped with, in place.

    What was learned of the model stays. Runs that are open keep their settings, as do those inside
    `diffcache.settings`; the next ones have the new.

    Args:
        target: A wrapped pipeline or denoiser.
        **settings: Settings of its method that tell when a step is computed or what stands in for
            the others, such as `every=6` or `threshold=0.1`.

    Returns:
        `target` itself.

    Raises:
        AttachError: If the target is not wrapped with a method.
        TablesError: If tables were measured on another model or scheduler.
        ValueError: If there is no setting, one is unknown, out of its range, or says where features
            are taken or how many steps a run has.

    Examples:
        >>> pipe = diffcache.update(pipe, every=6)  # doctest: +SKIP
    """
    handle = handle_of(target)
    if not settings:
        cls = type(handle.method)
        raise ValueError(f"settings: none is given; {cls.__name__} has {settings_of(cls)}")
    handle.use(_changed(handle, handle.method, settings))
    return target


def _changed(handle: Handle, method: Method, settings: Mapping[str, Any]) -> Method:
    """Return a method with other settings that fits the object it is attached to."""
    new = changed(method, settings)
    if {"tables", "model"} & settings.keys():
        handle.check_fits(new, handle.scheduler)
    return new


def stream(target: Any) -> AbstractContextManager[RunStream]:
    """Let the sampling runs inside be parts of one stream, such as the chunks of a long video.

    A run ends where the next one starts (`set_timesteps` of a wrapped pipeline's scheduler, a call of the pipeline,
    `diffcache.run`, or a timestep that turns back), and what was kept of it is freed. Features kept for the stream
    stay until its end, such as keys and values of the chunks before; `Step.chunk` tells which run of the stream it is,
    from 0. A stream belongs to this thread and task, and to tasks and `asyncio.to_thread` calls that are started
    inside. Without it, every call of a pipeline and every run is a stream of its own.

    A call that writes to the stream, such as the clean pass that commits a chunk to a KV cache, belongs into
    `diffcache.writing`. An exception frees what was kept of the run it is raised in, and what was kept of the stream
    if it is raised in such a call.

    Args:
        target: A wrapped denoiser, or a pipeline with one.

    Raises:
        AttachError: If the target is not wrapped, or a stream or run of it is open already in this thread.

    Examples:
        >>> with diffcache.stream(pipe):  # doctest: +SKIP
        ...     for chunk in chunks:
        ...         pipe.scheduler.set_timesteps(4)
        ...         for t in pipe.scheduler.timesteps:
        ...             noise = pipe.transformer(chunk, t, text, cache)[0]
        ...             chunk = pipe.scheduler.step(noise, t, chunk)[0]
        ...         with diffcache.writing():
        ...             pipe.transformer(chunk, zero, text, cache)
    """
    return handle_of(target).streaming()


@overload
def inspect(target: nn.Module) -> Anatomy: ...
@overload
def inspect(target: Any) -> Any: ...
def inspect(target: Any) -> Anatomy | dict[str, Anatomy]:
    """Return the anatomy of a denoiser, or of every denoiser of a pipeline by its name.

    Raises:
        AttachError: If there is no denoiser, or it has no list of blocks.
    """
    if isinstance(target, nn.Module):
        return anatomy_of(target)
    return {name: anatomy_of(model) for name, model in denoisers_of(target).items()}


def method_for(
    target: Any,
    denoisers: dict[str, nn.Module],
    method: str | Method | Configuration | Mapping[str, str | Method],
    **settings: Any,
) -> Method:
    """Return a method for a pipeline, as `wrap` takes it.

    Published settings are looked up by the first of its denoisers.
    """
    scheduler = getattr(target, "scheduler", None)
    if isinstance(method, Mapping):
        if set(method) != set(denoisers):
            raise AttachError(
                f"methods for {', '.join(method)}: the denoisers are {', '.join(denoisers)}; give "
                "each a method, or name those that are wrapped in components=[...]"
            )
        hold = settings.pop("hold", None)
        made = {name: method_for(target, {name: denoisers[name]}, one, **settings) for name, one in method.items()}
        both = Each(tuple(made.items()))
        return both if hold is None else Held(both, hold)
    first = next(iter(denoisers.values()))
    return make_method(method, lambda: facts_of(first, scheduler, target), **settings)
