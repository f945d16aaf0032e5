"""Every kernel on a CUDA device: the cases of the interpreter, and repeats for races."""

import importlib
import sys

import pytest
import torch

from diffcache.eval.kernels import measure, watch
from diffcache.kernels import dispatch
from tests.kernels.cases import DTYPES, Case, cases, check, copied
from tests.kernels.families.coded import attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [c for d in DTYPES for c in cases(d)], ids=lambda case: case.name)
def test_a_kernel_is_exact_but_for_rounding_and_repeats(case: Case, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
    there = copied(case.args, lambda tensor: tensor.cuda())
    case.tolerance *= 2
    first = None
    for _ in range(20):
        args = copied(there)
        found = case.results(args, case.operator(*args))
        if first is None:
            first = found
            here = copied(args, lambda tensor: tensor.cpu())
            returned = copied(list(found), lambda tensor: tensor.cpu())
            exact = Case(case.name, case.operator, here, case.exact, lambda a, out: out, case.tolerance)
            check(exact, returned, here, case.args)
        for one, other in zip(found, first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("case", attention(torch.float16), ids=lambda case: case.name)
def test_codes_are_the_same_by_assembly_and_without(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched = importlib.import_module("diffcache.kernels.gpu.coded")
    args = copied(case.args, lambda tensor: tensor.cuda())
    found = launched.attn_decode_kivi(*args)
    monkeypatch.setattr(launched, "INTERPRETED", True)
    for one, other in zip(found, launched.attn_decode_kivi(*args), strict=True):
        assert torch.equal(one, other)


def test_operators_are_measured_here_and_the_file_is_used(tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "measured.json"
    found = watch.Found(lambda name: file)
    wanted = [("check", "weighted_sum"), ("options", "weighted_sum")]
    command = [sys.executable, "-m", measure.__name__, "cuda:0"]
    watch.measure(command, wanted, found, 120, lambda *shown: None)
    assert found.body["finished"] and not found.body["failed"]
    monkeypatch.setenv("DIFFCACHE_KERNELS_CHOICES", str(file))
    dispatch.measured.cache_clear()
    try:
        measured = dispatch.ratio("weighted_sum", torch.device("cuda", 0))
        assert measured == found.body["choices"][found.body["device"]]["weighted_sum"] > 0
    finally:
        dispatch.measured.cache_clear()
