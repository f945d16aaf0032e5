"""Compiled blocks: as many graphs as without a cache, no breaks, the same numbers."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Combine, Every, FirstBlock, Interval, Taylor, TeaCache
from diffcache.targets import handle_of
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

CASES = cases()
STEPS = 6
METHODS = [
    Interval(every=3),
    Combine(Every(3), Taylor(2), site="block"),
    FirstBlock(threshold=5.0),
    TeaCache(0.5, (1.0, 0.0)),  # which looks into the first block
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def counting() -> tuple[list[Any], Callable[..., Any]]:
    """Return a list of the graphs that were compiled, and a backend that runs them as they are."""
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    return graphs, backend


def trajectory(model: nn.Module, name: str, steps: int = STEPS) -> Tensor:
    return sample(CASES[name], model, steps)


@cache
def graphs_of(name: str) -> int:
    """Number of graphs of the uncached model with compiled blocks."""
    model = CASES[name].build(0)
    graphs, backend = counting()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    trajectory(model, name, 2)
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.parametrize(
    ("method", "order"),
    [(method, "compile first") for method in METHODS] + [(METHODS[0], "cache first")],
    ids=["interval", "taylor", "first-block", "teacache", "interval, cache first"],
)
def test_compiled_blocks_have_the_same_graphs_and_numbers(method: Any, order: str):
    name = "FluxTransformer2DModel"
    expected_graphs = graphs_of(name)
    assert expected_graphs >= 2
    eager = diffcache.wrap(CASES[name].build(0), method)
    expected = trajectory(eager, name)

    model = CASES[name].build(0)
    graphs, backend = counting()
    if order == "cache first":
        diffcache.wrap(model, method)
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    if order == "compile first":
        diffcache.wrap(model, method)
    torch._dynamo.utils.counters.clear()
    outs = trajectory(model, name)
    assert len(graphs) == expected_graphs
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(outs, expected)
    calls = handle_of(model).last.calls
    assert [c.computed for c in calls] == [c.computed for c in handle_of(eager).last.calls]
    assert not all(call.computed for call in calls)
    assert all(call.flops is None for call in calls)  # not counted inside compiled blocks
    trajectory(model, name)
    assert len(graphs) == expected_graphs


def test_a_model_compiled_as_a_whole_after_wrapping_is_refused_when_it_runs():
    name = "WanTransformer3DModel"
    model = CASES[name].build(0)
    plain = trajectory(model, name)
    diffcache.wrap(model, Interval(every=3))
    cached = trajectory(model, name)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(AttachError, match=r"compiled as a whole.*compile_repeated_blocks\(fullgraph=True\)"):
        compiled(**CASES[name].kwargs(model, 0))
    torch._dynamo.reset()
    diffcache.reset(model)
    assert torch.equal(trajectory(model, name), cached)
    diffcache.unwrap(model)
    out = compiled(**CASES[name].kwargs(model, 0, 0, STEPS)).sample
    assert torch.allclose(out, plain[0], atol=1e-5)
