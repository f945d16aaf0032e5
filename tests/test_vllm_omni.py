"""The backend under the classes of vLLM-Omni's own wheel, driven by its own runner and selector.

`VLLM_OMNI` names the wheel (`pip download vllm-omni --no-deps`); without one, small stand-ins take its
place. vLLM itself is not there: what imports it is replaced, or cut out of its file.
"""

import ast
import importlib
import os
import re
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

import diffcache
from diffcache.errors import AttachError, UnknownMethodError
from tests.zoo.catalog import cases

WHEEL = os.environ.get("VLLM_OMNI", "")
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
pytestmark = pytest.mark.usefixtures("quiet")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="VLLM_OMNI names no wheel of vllm-omni")


def source(path: str) -> str:
    """Return the text of a file of the wheel."""
    with zipfile.ZipFile(WHEEL) as wheel:
        return wheel.read(f"vllm_omni/{path}").decode()


def cut(path: str, name: str, **around: Any) -> Any:
    """Return a class or method of a file of the wheel, without what the file imports."""
    nodes = ast.walk(ast.parse(source(path)))
    (node,) = [n for n in nodes if getattr(n, "name", None) == name]
    names: dict[str, Any] = {"Any": Any, "dataclass": dataclass, "field": field, "fields": fields}
    names |= around
    code = "from __future__ import annotations\n" + ast.unparse(node)
    exec(compile(code, path, "exec"), names)
    return names[name]


class StandIn:
    """Base class and configuration where no wheel is given."""

    def __init__(self, config: Any) -> None:
        self.config, self.enabled = config, False

    def is_enabled(self) -> bool:
        return self.enabled

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(num_inference_steps=None, _extra_params=data)

    def refresh_known(self, reqs: list[Any], *, od_config: Any) -> None:
        """As the runner: only where the number of steps is known."""
        steps = reqs[0].sampling_params.num_inference_steps
        if steps is not None:
            self.cache_backend.refresh(self.pipeline, steps)  # type: ignore[attr-defined]


@pytest.fixture
def omni(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The real base class, configuration and refresh of the runner, and our backend on them."""
    for name in ("vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.cache"):
        package = ModuleType(name)
        package.__path__ = [f"{WHEEL}/{name.replace('.', '/')}"]  # in the wheel, without __init__
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("vllm_omni.diffusion.cache.base", "diffcache.pipelines.vllm_omni"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    base: Any = ModuleType("vllm_omni.diffusion.cache.base")
    config: Any = StandIn
    refresh: Any = StandIn.refresh_known
    if WHEEL:
        data: Any = ModuleType("vllm_omni.diffusion.data")
        data.DiffusionCacheConfig = config = cut("diffusion/data.py", "DiffusionCacheConfig")
        monkeypatch.setitem(sys.modules, "vllm_omni.diffusion.data", data)
        base = importlib.import_module("vllm_omni.diffusion.cache.base")
        path = "diffusion/worker/diffusion_model_runner.py"
        refresh = cut(path, "_refresh_cache_for_requests", logger=SimpleNamespace(warning=print))
    else:
        base.CacheBackend = StandIn
        monkeypatch.setitem(sys.modules, base.__name__, base)
    ours = importlib.import_module("diffcache.pipelines.vllm_omni")
    yield SimpleNamespace(base=base, config=config, refresh=refresh, ours=ours)
    for name in ("vllm_omni.diffusion.cache.base", "diffcache.pipelines.vllm_omni"):
        sys.modules.pop(name, None)


class Pipeline(nn.Module):
    """A pipeline as vLLM-Omni has them: one module with a loop in `forward`, guidance in two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.case = cases()["FluxTransformer2DModel"]
        self.transformer = self.case.build(0)
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def forward(self, seed: int, steps: int = 8) -> torch.Tensor:
        inputs = self.case.kwargs(self.transformer, 0)
        other = {**inputs, "encoder_hidden_states": -inputs["encoder_hidden_states"]}
        sample = torch.randn(inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(seed))
        scheduler = getattr(self, "scheduler", None) or self.stepper
        scheduler.set_timesteps(steps)
        scheduler.set_begin_index(0)
        for t in scheduler.timesteps:
            time = t.expand(len(sample)) / 1000
            one, two = (
                self.transformer(**{**given, "hidden_states": sample, "timestep": time})[0]
                for given in (inputs, other)
            )
            sample = scheduler.step(two + 3 * (one - two), t, sample)[0]
        return sample


def backend_of(omni: Any, method: str) -> Any:
    return omni.ours.DiffcacheBackend(omni.config.from_dict({"method": method}))


def generate(omni: Any, backend: Any, pipeline: Pipeline, seed: int, **asked: Any) -> torch.Tensor:
    """Do as the runner does: refresh by its own rules, then call the pipeline."""
    given = {"num_inference_steps": None, "timesteps": None, "sigmas": None, **asked}
    request = SimpleNamespace(sampling_params=SimpleNamespace(**given))
    runner = SimpleNamespace(cache_backend=backend, pipeline=pipeline)
    omni.refresh(runner, [request], od_config=SimpleNamespace(cache_backend="diffcache"))
    made: torch.Tensor = pipeline.forward(seed)
    return made


def test_it_is_a_backend_of_theirs(omni: Any) -> None:
    backend = backend_of(omni, "interval:every=3")
    assert isinstance(backend, omni.base.CacheBackend)
    assert not backend.is_enabled()
    pipeline = Pipeline()
    backend.enable(pipeline)
    assert backend.is_enabled()
    backend.disable()
    assert not backend.is_enabled()
    assert repr(omni.ours.DiffcacheBackend(omni.config.from_dict({})).method).startswith("Taylor")


@pytest.mark.parametrize("steps", [8, None])
def test_generations_are_exact_or_skip_and_do_not_leak(omni: Any, steps: int | None) -> None:
    """With the number of steps, and without it, where the runner never refreshes."""
    pipeline = Pipeline()
    plain = [pipeline.forward(seed) for seed in (1, 2)]
    exact = backend_of(omni, "interval:every=1")
    exact.enable(pipeline)
    for seed in (1, 2):
        made = generate(omni, exact, pipeline, seed, num_inference_steps=steps)
        assert torch.equal(made, plain[seed - 1])
    exact.disable()
    backend = backend_of(omni, "interval:every=3")
    backend.enable(pipeline)
    first = generate(omni, backend, pipeline, 1, num_inference_steps=steps)
    assert "8: 3 computed, 5 skipped" in backend.report()
    assert not torch.equal(first, plain[0])
    generate(omni, backend, pipeline, 2, num_inference_steps=steps)
    assert torch.equal(generate(omni, backend, pipeline, 1, num_inference_steps=steps), first)
    backend.disable()
    assert torch.equal(pipeline.forward(1), plain[0])


def test_zero_steps_another_pipeline_and_other_weights_are_taken(omni: Any) -> None:
    one, two = Pipeline(), Pipeline()
    backend = backend_of(omni, "interval:every=3")
    backend.refresh(one, 0)  # enables what is not yet
    first = one.forward(1)
    backend.refresh(two, None, verbose=False)
    assert torch.equal(two.forward(1), first)
    two.transformer = two.case.build(0)
    backend.refresh(two, 8)
    assert torch.equal(two.forward(1), first)
    assert "5 skipped" in backend.report()


@pytest.mark.parametrize("has_scheduler", [True, False])
def test_a_generation_that_stops_between_steps_leaves_nothing(omni: Any, has_scheduler: bool) -> None:
    """Where the runner does not refresh, nothing but the call of `forward` tells that one ended."""
    pipeline = Pipeline()
    scheduler = pipeline.scheduler
    backend = backend_of(omni, "interval:every=3")
    if not has_scheduler:
        del pipeline.scheduler
        pipeline.stepper = scheduler
    backend.enable(pipeline)
    first = generate(omni, backend, pipeline, 1)
    step, left = scheduler.step, iter(range(2))

    def stops(*args: Any) -> Any:
        if next(left, None) is None:
            raise InterruptedError
        return step(*args)

    scheduler.step = stops  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        generate(omni, backend, pipeline, 2)
    del scheduler.step
    assert not diffcache.api.handle_of(backend.loop).held_bytes()
    assert torch.equal(generate(omni, backend, pipeline, 1), first)
    assert "8: 3 computed, 5 skipped" in backend.report()
    backend.disable()
    assert "forward" not in vars(pipeline)


def test_what_cannot_be_cached_is_refused(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownMethodError, match="unknown method .nonsense."):
        backend_of(omni, "nonsense")
    with pytest.raises(AttachError, match="none of transformer, transformer_2, unet"):
        backend_of(omni, "interval").enable(nn.Linear(1, 1))
    with pytest.raises(AttachError, match="call enable first"):
        backend_of(omni, "interval").report()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="may decide by what one rank sees"):
        backend_of(omni, "first-block").enable(Pipeline())


@needs_wheel
def test_the_patch_of_the_page_fits_their_selector(omni: Any) -> None:
    text = source("diffusion/cache/selector.py")
    (patch,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] != "+")
        assert text.count(old) == 1
        text = text.replace(old, "\n".join(line[1:] for line in lines if line[:1] != "-"))
    names = {"DiffusionCacheConfig": omni.config, "CacheBackend": omni.base.CacheBackend}
    tree = ast.parse(text)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    exec(textwrap.dedent("from typing import Any\n") + ast.unparse(function), names)
    made = names["get_cache_backend"]("diffcache", {"method": "taylorseer:every=5"})
    assert made.method == diffcache.TaylorSeer(every=5)
