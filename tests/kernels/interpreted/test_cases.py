"""Every kernel against exact results, and with other options of its launches, in the interpreter."""

import json

import pytest
import torch

from diffcache.eval.kernels.launch_options import choices_of
from diffcache.kernels import configs, forecast, quantize
from diffcache.kernels.coded import attn_decode_kivi
from diffcache.kernels.gpu import coded as coded_launch
from diffcache.kernels.gpu import forecast as forecast_launch
from tests.kernels.cases import DTYPES, Case, cases, check, copied, guarded


@pytest.mark.parametrize("case", [c for d in DTYPES for c in cases(d)], ids=lambda c: c.name)
def test_a_kernel_is_exact_but_for_rounding(case: Case) -> None:
    args, before = copied(case.args, lambda t: t), copied(case.args)
    found = case.operator(*args)
    check(case, found, args, before)
    for given, old in zip(inputs(args), inputs(before), strict=True):
        if not any(given is result for result in case.results(args, found)):
            assert torch.equal(given, old)  # what is not a result is not written to


def inputs(args):
    """Return the tensors of arguments."""
    found = []
    copied(args, lambda tensor: found.append(tensor) or tensor)
    return found


LAST = {case.operator.name: case for case in cases(torch.float32)}


@pytest.fixture(autouse=True)
def own_file(monkeypatch, tmp_path):
    """Read entries from a file of the user's."""
    entries = {
        "weighted_sum": {"float32-2-1024": {"BLOCK": 256}},
        # 128 slots would be of four groups of keys: the launch reads 32 at once
        "attn_decode_kivi": {"float32-64-2-2-32-2-32": {"BLOCK": 128, "num_warps": 2}},
    }
    (tmp_path / "own.json").write_text(json.dumps({"cpu": entries}))
    monkeypatch.setenv("DIFFCACHE_KERNELS_CONFIGS", str(tmp_path / "own.json"))
    configs._entries.cache_clear()
    yield
    configs._entries.cache_clear()


def test_options_change_the_launch_and_not_the_result(monkeypatch):
    blocks = []
    for module, name in ((forecast_launch, "programs"), (coded_launch, "split")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, run=run: (blocks.append(a[-1]), run(*a))[1])
    terms = [guarded((9, 100), torch.float32, seed) for seed in (1, 2)]
    q, k, v = (guarded((1, heads, 32, 64), torch.float32, heads) for heads in (2, 1, 1))
    keys = quantize.quant_twin(k, 2, 32, 1, 3.0, False, torch.float16)
    values = quantize.quant_twin(v, 2, 1, 32, 3.0, False, torch.float16)
    found = []
    for _ in range(2):
        found.append(forecast.weighted_sum(terms, [1.0, 0.5]))
        given = q[:, :, 0], *keys, *values, 0.1, 2, 2, 32, 32, 0.0, 0.0
        found += attn_decode_kivi(*given)
        monkeypatch.delenv("DIFFCACHE_KERNELS_CONFIGS", raising=False)
        configs._entries.cache_clear()
    assert blocks == [256, 32, 2048, 16]
    assert torch.equal(found[0], found[3])
    torch.testing.assert_close(found[1:3], found[4:])


@pytest.mark.parametrize("name", sorted(LAST))
def test_every_candidate_gives_the_same_numbers(name):
    case, tried = LAST[name], choices_of(name)
    for options in (tried[0], tried[-1]):
        with configs.trying(name, options) as asked:
            args, before = copied(case.args), copied(case.args)
            check(case, case.operator(*args), args, before)
        assert all(set(options) <= set(each) for each in asked.values())
