"""Private names of torch and Hugging Face's libraries, which their releases may change.

Nothing else in the library names them, but for the allow-list of `tests/test_layers.py`. Names
without a version are those of every release that `pyproject.toml` allows. Some functions are bare
attribute getters or aliases: skipped steps call them, so that they cost no frame.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

Function = TypeVar("Function", bound=Callable[..., Any])

# torch: tensors and operations -----------------------------------------------------------------

# How often a tensor was written to; inference tensors raise.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The operation of an overload, and what an overload takes and writes to.
packet_of: Callable[[Any], Any] = attrgetter("_overloadpacket")
schema_of: Callable[[Any], Any] = attrgetter("_schema")

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
INT_MM = torch.ops.aten._int_mm
int_mm: Callable[[Tensor, Tensor], Tensor] = torch._int_mm
add_all: Callable[..., Iterable[Tensor]] = torch._foreach_add  # one launch for many tensors
# Keeps a CUDA device busy for as many of its cycles; benchmarks let the host run ahead with it.
cuda_sleep: Callable[[int], None] = torch.cuda._sleep

# Whether this runs inside `torch.func.vmap`, `grad` or `jvp`.
is_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active

DispatchMode = _python_dispatch.TorchDispatchMode  # a public class of a private module
current_dispatch_mode: Callable[[], Any] = _python_dispatch._get_current_dispatch_mode


def constant(function: Function) -> Function:
    """Mark a function that compilers call once, and whose result they take for a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler and triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@cache
def is_made_of_others(func: Any) -> bool:
    """Return whether an overload has a body of other operations, in C++ or registered (torch)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def has_kernel(func: Any, device: str) -> bool:
    """Return whether an overload has a kernel of its own on a type of devices (torch)."""
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def call_body(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the body of an overload that is made of others (torch).

    `decompose` prefers bodies in Python that export uses, and these round otherwise.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def storage_of(tensor: Tensor) -> int:
    """Return a number for the memory of a tensor, the same for its views (torch)."""
    return int(tensor.untyped_storage()._cdata)


# torch: modules --------------------------------------------------------------------------------

# A module's children by name, the very dictionary; `set_children` gives it another.
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
CALL_CODE = nn.Module._call_impl.__code__  # what runs hooks and forward
CALLS = ("__call__", "_call_impl")  # names of functions that call pipelines, and modules
PREFILL = "_prefill"  # what reads the prompt in `generate` (transformers)
ASSISTED = "_assisted_decoding"  # what verifies drafted tokens there
# What `nn.Conv2d` pads by where its padding is no constant.
padding_of: Callable[[nn.Module], list[int]] = attrgetter("_reversed_padding_repeated_twice")
_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def set_children(module: nn.Module, children: dict[str, Any]) -> None:
    """Give a module another dictionary of children (torch)."""
    module.__dict__["_modules"] = children


def weights_of(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return the parameters and buffers of a module itself, unset ones included (torch)."""
    return [*module._parameters.items(), *module._buffers.items()]


def weights_at(places: Iterable[tuple[nn.Module, str]]) -> list[Tensor | None]:
    """Return the parameter or buffer at every place, None where there is none now (torch)."""
    return [m._parameters.get(n, m._buffers.get(n)) for m, n in places]


def share_parameters(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the parameters of another, later ones included (torch)."""
    module.__dict__["_parameters"] = other._parameters


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the forward hooks of another, later ones included (torch)."""
    for table in (*_HOOKS, *_PRE_HOOKS):
        setattr(module, table, getattr(other, table))


def own_hooks(module: nn.Module) -> None:
    """Give a module forward hooks of its own, which a shallow copy shares (torch)."""
    for table in (*_HOOKS, *_PRE_HOOKS):
        setattr(module, table, getattr(module, table).copy())


def take_hooks(module: nn.Module, are_ours: Callable[[Any], bool]) -> None:
    """Take the forward hooks off a module that a function says yes to (torch)."""
    for tables in (_HOOKS, _PRE_HOOKS):
        hooks = getattr(module, tables[0])
        for key in [key for key, hook in hooks.items() if are_ours(hook)]:
            for table in tables:
                getattr(module, table).pop(key, None)


def count_hooks(module: nn.Module) -> tuple[int, int]:
    """Return how many forward hooks and forward pre-hooks a module has (torch).

    Those by which transformers returns hidden states do not count: the first call installs them.
    """
    hooks = len(module._forward_hooks)
    if hooks:
        theirs = "transformers.utils.output_capturing"
        places = [getattr(h, "__module__", "") for h in list(module._forward_hooks.values())]
        hooks -= places.count(theirs)
    return hooks, len(module._forward_pre_hooks)


def convolve(layer: nn.Conv2d, given: Tensor) -> Tensor:
    """Return the output of a convolution layer without its bias (torch)."""
    out: Tensor = layer._conv_forward(given, layer.weight, None)
    return out


def save_weights(module: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Write a module's own part of a state dict (torch)."""
    module._save_to_state_dict(destination, prefix, keep_vars)


# torch.compile ---------------------------------------------------------------------------------

# `torch.compiler.disable` imports the compiler at once, which takes seconds.
without_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called (torch)."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, in place or by `torch.compile(module)` (torch)."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def uncompiled(module: nn.Module) -> Any:
    """Return the module that `torch.compile(module)` was called on, else itself (torch)."""
    return getattr(module, "_orig_mod", module)


# diffusers -------------------------------------------------------------------------------------

# What a processor attends with, and how it splits a sample (diffusers 0.35 and 0.36).
backend_of: Callable[[Any], Any] = attrgetter("_attention_backend")
split_of: Callable[[Any], Any] = attrgetter("_parallel_config")


def is_split(processor: Any) -> bool:
    """Return whether an attention processor works on its share of a sample (diffusers 0.36)."""
    return getattr(processor, "_parallel_config", None) is not None


def parallel_config_of(model: nn.Module) -> Any:
    """Return how a model is split over processes, None if it is not (diffusers 0.36)."""
    return getattr(model, "_parallel_config", None)


def process_group_of(model: nn.Module) -> Any:
    """Return the process group over which a sample is split, None if none (diffusers 0.36)."""
    config = parallel_config_of(model)
    for name in ("context_parallel_config", "tensor_parallel_config"):
        part = getattr(config, name, None)
        mesh = getattr(part, "_flattened_mesh", None) or getattr(part, "_mesh", None)
        if mesh is not None:
            return mesh.get_group()
    return None


def uses_flex_attention(module: nn.Module) -> bool:
    """Return whether a module attends with flex attention, which compiles itself (diffusers)."""
    source = vars(sys.modules.get(type(module).__module__, object))
    backend = str(getattr(getattr(module, "processor", None), "_attention_backend", None))
    return "flex" in backend or "BlockMask" in source or "_CAN_USE_FLEX_ATTN" in source


def registry_of(module: nn.Module) -> Any:
    """Return the registry of a module's hooks, None if it has none (diffusers 0.33)."""
    return getattr(module, "_diffusers_hook", None)


def splits_inputs(module: nn.Module) -> bool:
    """Return whether a module's inputs are split over processes in its call (diffusers 0.36)."""
    registry = registry_of(module)
    hooks = () if registry is None else registry.hooks.values()
    return any(
        not getattr(part, "split_output", False)
        for hook in hooks
        if type(hook).__name__ == "ContextParallelSplitHook"
        for part in hook.metadata.values()
    )


def drop_registry(module: nn.Module) -> None:
    """Take the registry of hooks off a module (diffusers 0.33)."""
    del module._diffusers_hook


def put_below(registry: Any, name: str, hook: Any, reference: Any) -> None:
    """Put a hook below all others of a registry, whose chain stays whole (diffusers 0.33)."""
    registry.hooks[name] = hook
    registry._hook_order.insert(0, name)
    registry._fn_refs.insert(0, reference)


def take_out(registry: Any, name: str) -> Any:
    """Remove a hook from a registry and return it; others are not told (diffusers 0.33)."""
    place = registry._hook_order.index(name)
    registry._hook_order.pop(place)
    registry._fn_refs.pop(place)
    return registry.hooks.pop(name)


def is_pipeline(found: Any) -> bool:
    """Return whether something is a pipeline (diffusers), without importing it."""
    pipeline = getattr(sys.modules.get("diffusers"), "DiffusionPipeline", ())
    return isinstance(found, pipeline)


def frames_of_threads() -> dict[int, FrameType | None]:
    """Return the frame that each thread is in, by the thread's number (CPython)."""
    return dict(sys._current_frames())


def was_interrupted(pipeline: Any) -> bool:
    """Return whether a callback stopped the run of a pipeline (diffusers)."""
    return bool(getattr(pipeline, "_interrupt", False))


def planned_steps(pipeline: Any) -> int | None:
    """Return the number of steps that a pipeline said for its call, None before it did (diffusers)."""
    return getattr(pipeline, "_num_timesteps", None)


def forget_planned_steps(pipeline: Any) -> None:
    """Forget the number of steps of the call before, which not every pipeline says anew in time (diffusers)."""
    if planned_steps(pipeline) is not None:
        pipeline._num_timesteps = None


def in_float32(model: nn.Module) -> list[str]:
    """Return names of the parts of a model that half precision leaves in float32 (diffusers)."""
    return getattr(model, "_keep_in_fp32_modules", None) or []


def folder_of(config: Any) -> str:
    """Return where a model was loaded from, empty if not known (diffusers)."""
    return str(config.get("_name_or_path") or "")


# transformers, peft, cache-dit -----------------------------------------------------------------


class AttentionName(str):
    """The name of an attention function that is ours; a copy of it is the name used before."""

    __slots__ = ("before",)
    before: str

    def __new__(cls, name: str, before: str) -> AttentionName:
        """Return the name."""
        made = super().__new__(cls, name)
        made.before = before
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.before

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.before,)


def is_assisted(frame: FrameType | None) -> bool:
    """Return whether a frame is assisted decoding of `generate` (transformers)."""
    if frame is None or frame.f_code.co_name != ASSISTED:
        return False
    return frame.f_globals.get("__name__") == "transformers.generation.utils"


def reads_whole_prompt(frame: FrameType) -> bool:
    """Return whether a frame named `PREFILL` is of `generate`, and reads a prompt in one forward (transformers).

    No is always safe. A `_prefill` of one's own, which may hand a prompt to that of transformers in
    pieces, is told by what calls it; an assistant's guesses are taken back.
    """
    asked = frame.f_locals.get("generation_config")
    caller = frame.f_back
    ours = frame.f_globals.get("__name__") == "transformers.generation.utils"
    if not ours or caller is None or getattr(asked, "is_assistant", False):
        return False
    called = str(caller.f_globals.get("__name__")).startswith("transformers.")
    return called and getattr(asked, "prefill_chunk_size", 0) is None


# What models and their layers call a cache: the last since 5.24, and other things before.
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of the argument by which a forward takes a cache (transformers)."""
    return _cache_name(getattr(forward, "__func__", forward))


@lru_cache
def _cache_name(forward: Callable[..., Any]) -> str | None:
    known = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in known), None)


def brings_cache(given: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call have a cache under any name (transformers)."""
    return any(given.get(name) is not None for name in CACHES)


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the arguments by which a model, or its `generate`, uses a cache (transformers)."""
    return {cache_name(model.forward) or CACHES[0]: cache, "use_cache": True}


def attention_name_of(config: Any) -> Any:
    """Return the name of the attention function that a model uses (transformers)."""
    return config._attn_implementation


def attention_name_before(config: Any) -> str:
    """Return the attention function of a model before one of ours (transformers)."""
    used = config._attn_implementation
    return used.before if isinstance(used, AttentionName) else str(used)


def attention_names(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return every configuration in a model with its attention function's name (transformers)."""
    configs: list[Any] = []
    todo: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while todo:
        config = todo.pop(0)
        if not hasattr(config, "_attn_implementation") or any(config is one for one in configs):
            continue
        configs.append(config)
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [(config, config._attn_implementation) for config in configs]


def set_attention_names(names: Iterable[tuple[Any, Any]]) -> None:
    """Give configurations back the names that `attention_names` returned (transformers)."""
    for config, name in names:
        config._attn_implementation_internal = name  # its property would set those within as well


def use_attention(model: Any, name: str) -> bool:
    """Have a model use a registered attention function; say whether it does (transformers).

    Copies of its configurations name what they named before, and so does `restore_attention`.
    """
    before = attention_names(model)
    model.set_attn_implementation(name)
    if attention_name_of(model.config) != name:
        set_attention_names(before)
        return False
    ours = [pair for pair in before if attention_name_of(pair[0]) == name]
    set_attention_names((config, AttentionName(name, old)) for config, old in ours)
    return True


def names_attention_itself(model: Any) -> bool:
    """Return whether code of a model's own takes no other attention function (transformers)."""
    for cls in type(model).__mro__:  # transformers reads the file of the class at hand alone
        takes = getattr(cls, "_can_set_attn_implementation", None)
        is_own = cls.__module__ in sys.modules and not cls.__module__.startswith("transformers.")
        if takes is not None and is_own and not takes():
            return True
    return False


def restore_attention(model: nn.Module, name: str) -> None:
    """Restore the names of attention functions (transformers)."""
    for config, used in attention_names(model):
        if isinstance(used, AttentionName) and used == name:
            set_attention_names([(config, used.before)])


def adapters_of(module: nn.Module) -> dict[str, Any]:
    """Return which adapter of a layer is on and whether all are off (peft)."""
    names = ("_active_adapter", "_disable_adapters")
    return {name: module.__dict__.get(name) for name in names}


def is_cached(owner: Any) -> bool:
    """Return whether a model or a class has the mark of cache-dit, ParaAttention and the like."""
    return bool(getattr(owner, "_is_cached", False))


# accelerate ------------------------------------------------------------------------------------


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, wherever accelerate keeps its weights."""
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(model.parameters()).device
