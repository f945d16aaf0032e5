"""The choice of implementations, its settings, and wrong kernels that turn themselves off."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from diffcache.kernels import configs, dispatch, forecast
from diffcache.kernels.dispatch import Operator


def test_a_cpu_takes_the_twin_whatever_is_measured(monkeypatch) -> None:
    tensor = torch.zeros(3)
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
        assert not forecast.SUM.takes(tensor)


def test_a_setting_that_is_none_says_what_there_is(monkeypatch) -> None:
    monkeypatch.setenv("DIFFCACHE_KERNELS", "cuda")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    with pytest.raises(ValueError, match="DIFFCACHE_KERNELS='cuda': must be one of auto, triton"):
        forecast.weighted_sum([torch.zeros(3)], [1.0])
    env = os.environ | {"DIFFCACHE_KERNELS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import diffcache.kernels.dispatch"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "DIFFCACHE_KERNELS='cuda': must be" in done.stderr.splitlines()[-1]


def test_a_kernel_that_is_asked_for_needs_triton(monkeypatch) -> None:
    monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(RuntimeError, match=r"pip install 'diffcache\[gpu\]'"):
        forecast.SUM.takes(torch.zeros(3))


@pytest.fixture
def asked_for(monkeypatch) -> None:
    """Ask for kernels, as if Triton were there."""
    monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)


def test_what_a_kernel_does_not_take(monkeypatch, asked_for) -> None:
    plain = torch.zeros(3)
    subclass = torch.nn.Parameter(plain, requires_grad=False)
    assert forecast.SUM.takes(plain)
    for tensor in (torch.zeros(3, requires_grad=True), plain.double(), subclass, torch.zeros(0)):
        assert not forecast.SUM.takes(tensor)
    monkeypatch.setenv("DIFFCACHE_KERNELS_OFF", "another, weighted_sum")
    assert not forecast.SUM.takes(plain)


@pytest.mark.parametrize("transform", ["dual", "jvp", "vmap"])
def test_a_kernel_is_not_asked_for_where_it_would_lose_a_tangent(asked_for, transform) -> None:
    asked, tensor = [], torch.ones(3)

    def run(x):
        asked.append(forecast.SUM.takes(torch.ones(3), x))
        return x

    with torch.no_grad():
        run(tensor)
        if transform == "dual":
            with forward_ad.dual_level():
                run(forward_ad.make_dual(tensor, tensor))
        elif transform == "jvp":
            torch.func.jvp(run, (tensor,), (tensor,))
        else:
            torch.func.vmap(run)(tensor)
        run(tensor)
    assert asked == [True, False, True]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_check_turns_a_wrong_kernel_off(monkeypatch, logged, wrong: bool) -> None:
    """The kernel adds to its first argument in place and returns the double of its second."""

    def twin(place, other):
        place += 1
        return 2 * other

    launched = []

    def kernel(place, other):
        launched.append(None)
        place += 1
        return 2.1 * other if wrong else 2 * other

    monkeypatch.setattr(dispatch, "kernel_module", lambda name: SimpleNamespace(run=kernel))
    monkeypatch.setenv("DIFFCACHE_CHECK", "1")
    operator = Operator("own", twin, "nowhere:run", dispatch.no_products)
    place, other = torch.zeros(3), torch.ones(3)
    assert torch.equal(operator.launch(place, other), 2 * torch.ones(3))
    assert torch.equal(place, torch.ones(3))  # once, whoever did it
    assert operator.off is wrong
    assert any("turned off" in line for line in logged) is wrong
    assert launched == [None]


def test_a_check_knows_results_that_are_arguments_too(monkeypatch) -> None:
    """Differences are written over the old ones, which the kernel is given as well."""

    def kernel(feature, old, room, distances):
        forecast.write_twin(feature, old, room, distances)

    monkeypatch.setattr(dispatch, "kernel_module", lambda name: SimpleNamespace(run=kernel))
    monkeypatch.setenv("DIFFCACHE_CHECK", "1")
    operator = Operator("own", forecast.write_twin, "nowhere:run", dispatch.no_products)
    old = [torch.ones(3), torch.full((3,), 2.0)]
    operator.launch(torch.full((3,), 4.0), old, [old[1], torch.empty(3)], [1.0, 1.0])
    assert not operator.off
    assert torch.equal(old[1], torch.full((3,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_check_allows_for_the_dtype_of_the_products(monkeypatch, dtype) -> None:
    def kernel(x):
        return x.float() * 1.001

    monkeypatch.setattr(dispatch, "kernel_module", lambda name: SimpleNamespace(run=kernel))
    monkeypatch.setenv("DIFFCACHE_CHECK", "1")
    operator = Operator("own", lambda x: x.float(), "nowhere:run", dispatch.no_products)
    operator.launch(torch.ones(3, dtype=dtype))
    assert operator.off is (dtype == torch.float32)


def test_a_difference_of_infinities_and_nan_is_none() -> None:
    inf = torch.tensor([-torch.inf, 1.0])
    assert dispatch.difference([inf], [inf.clone()]) is None
    assert dispatch.difference([inf], [torch.tensor([0.0, 1.0])]) is not None
    assert dispatch.difference([torch.tensor([torch.nan])], [torch.tensor([1.0])]) is not None
    codes = torch.zeros(8, dtype=torch.int8)
    assert "12.50%" in dispatch.difference([codes], [codes.clone().index_fill(0, torch.tensor([3]), 1)])


def test_options_of_a_launch_come_from_the_files(monkeypatch, tmp_path) -> None:
    shipped, own = tmp_path / "shipped.json", tmp_path / "own.json"
    key, default = (torch.bfloat16, "rows", 96, 5000), {"BLOCK": 16, "num_warps": 4}
    wide = {"bfloat16-rows-128-8192": {"BLOCK": 32, "ratio": 1.2}, "float32": {"BLOCK": 8}}
    shipped.write_text(json.dumps({"a GPU": {"own": wide}, "another": {"own": {}}}))
    monkeypatch.setattr(configs, "CONFIGS", shipped)
    monkeypatch.setattr(configs, "device_name", lambda index: "a GPU")
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    configs._entries.cache_clear()
    try:
        assert configs.tuned("own", key, default, cuda) == {"BLOCK": 32, "num_warps": 4}
        for name, sizes, place in (("own", (*key[:3], 3), cuda), ("else", key, cuda), ("own", key, cpu)):
            assert configs.tuned(name, sizes, default, place) == default
        own.write_text(json.dumps({"a GPU": {"own": {"bfloat16-rows-128-8192": {"num_warps": 8}}}}))
        monkeypatch.setenv("DIFFCACHE_KERNELS_CONFIGS", str(own))
        configs._entries.cache_clear()
        assert configs.tuned("own", key, default, cuda) == {"BLOCK": 16, "num_warps": 8}
        assert configs.tuned("own", ("float32",), default, cuda)["BLOCK"] == 8
        for entry in ({"TILE": 4}, {"BLOCK": "4"}, {"BLOCK": True}, {"num_warps": 0}):
            own.write_text(json.dumps({"a GPU": {"own": {"float32": entry}}}))
            configs._entries.cache_clear()
            with pytest.raises(ValueError, match=f"own.json: own, float32: {next(iter(entry))}="):
                configs.tuned("own", key, default, cuda)
    finally:
        configs._entries.cache_clear()
