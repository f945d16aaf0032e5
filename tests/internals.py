"""Looks inside methods and wrapped denoisers: schedules, calls, and what a cache would leave behind."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffcache.attach.handle import Handle
from diffcache.attach.reuse.reusing import FeatureReuse
from diffcache.features.base import When
from diffcache.features.combine import FeatureMethod
from diffcache.step import Step
from diffcache.targets import handle_of


def reuse_in(handle: Handle, number: int = 0) -> FeatureReuse:
    """Return the feature reuse of one of a handle's denoisers."""
    extensions = handle.denoisers[number].extensions
    (found,) = [extension for extension in extensions if isinstance(extension, FeatureReuse)]
    return found


def marks(target: Any, branch: int | str | None = None) -> str:
    """Return a letter for every call of the last run, or of a branch: C computed, s skipped."""
    calls = handle_of(target).last.calls
    return "".join("sC"[c.computed] for c in calls if branch is None or c.branch == branch)


@contextmanager
def noting(module: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that gets the keyword arguments of every call of a module meanwhile."""
    seen: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def cut_off(modules: Iterable[nn.Module], at: int = 1, error: BaseException | None = None) -> Iterator[None]:
    """Interrupt the call of modules that comes at a place, counted from 1; it has to come."""
    calls: list[int] = []
    error = error or KeyboardInterrupt()

    def stop(*_: Any) -> None:
        calls.append(0)
        if len(calls) == at:
            raise error

    hooks = [module.register_forward_pre_hook(stop) for module in modules]
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.found.total()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that a cache could leave behind in the modules of a model."""
    return {
        path: (
            type(module),
            {name: id(held) * (name[0] != "_") for name, held in module.__dict__.items()},
            type(module._modules),
            id(getattr(module, "processor", None)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
        for path, module in model.named_modules()
    }


def traces(pipe: Any) -> dict[str, Any]:
    """All that attaching may leave behind, in every module, the scheduler and the pipeline."""
    found: dict[str, Any] = {"": (type(pipe), sorted(pipe.__dict__))}
    for name, part in pipe.components.items():
        found[name] = type(part), sorted(getattr(part, "__dict__", {}))
        for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
            registry = getattr(module, "_diffusers_hook", None)
            found[f"{name}.{path}"] = (
                type(module),
                sorted(module.__dict__),
                type(module.__dict__["_modules"]),
                {k: list(v) for k, v in module.__dict__.items() if k.endswith("_hooks")},
                list(registry.hooks) if registry is not None else None,
            )
    return found


def computed_steps(
    asked: FeatureMethod | When, total: int, probes: Sequence[Tensor] | None = None, branch: int = 0
) -> list[int]:
    """Return the steps that a schedule computes in a run, by what it sees; asking changes nothing."""
    when = asked.parts().when if isinstance(asked, FeatureMethod) else asked
    state, computed = when.init(), []
    for index in range(total):
        step = Step(index, total=total, branch=branch)
        probe = None if probes is None else probes[index]
        answer = when.should_compute(state, step, probe)
        assert when.should_compute(state, step, probe) == answer
        if answer:
            when.computed(state, step, probe)
            computed.append(index)
    return computed
