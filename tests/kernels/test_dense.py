"""Calls that ask cuDNN for dense attention, which is the same attention."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from diffcache.kernels import dense, dispatch


@pytest.fixture(name="measured")
def _measured(monkeypatch, tmp_path):
    """Return a function that says what was measured on the one CUDA device there is."""

    def say(ratio: float) -> None:
        file = tmp_path / "kernels.json"
        file.write_text(json.dumps({"a GPU": {dense.NAME: ratio}}))
        monkeypatch.setenv("DIFFCACHE_KERNELS_CHOICES", str(file))
        monkeypatch.setattr(dispatch, "device_name", lambda index: "a GPU")
        dispatch.measured.cache_clear()

    yield say
    dispatch.measured.cache_clear()


def test_many_queries_of_a_device_where_it_was_faster_ask_for_cudnn(measured, monkeypatch) -> None:
    def queries(count: int, is_cuda: bool = True) -> SimpleNamespace:
        device = torch.device("cuda" if is_cuda else "cpu")
        return SimpleNamespace(is_cuda=is_cuda, shape=(1, 24, count, 128), device=device)

    measured(1.8)
    assert dense.takes(queries(4608))
    assert not dense.takes(queries(1)) and not dense.takes(queries(4608, is_cuda=False))
    with monkeypatch.context() as within:
        within.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not dense.takes(queries(4608))
    monkeypatch.setenv("DIFFCACHE_KERNELS_OFF", dense.NAME)
    assert not dense.takes(queries(4608))
    monkeypatch.delenv("DIFFCACHE_KERNELS_OFF")
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    assert not dense.takes(queries(4608))
    monkeypatch.delenv("DIFFCACHE_KERNELS")
    measured(0.9)
    assert not dense.takes(queries(4608))


def test_results_are_those_of_torch_with_masks_and_groups_too(monkeypatch) -> None:
    asked, context = [], dense.sdpa_kernel

    def noted(order, set_priority):
        asked.append((order[0].name, set_priority))
        return context(order, set_priority=set_priority)

    monkeypatch.setattr(dense, "takes", lambda q: True)
    monkeypatch.setattr(dense, "sdpa_kernel", noted)
    q, k, v = torch.randn(2, 4, 9, 16), *torch.randn(2, 2, 2, 12, 16).unbind()
    mask = torch.rand(2, 1, 9, 12) > 0.3
    groups = {"enable_gqa": True}
    for given, settings in ((None, groups), (None, {"is_causal": True, **groups}), (mask, groups)):
        found = dense.scaled_dot_product_attention(q, k, v, given, **settings)
        expected = functional.scaled_dot_product_attention(q, k, v, given, **settings)
        assert torch.equal(found, expected)
    assert asked == [("CUDNN_ATTENTION", True)] * 2
