"""Options of launches without a GPU: those that are compiled, dropped and kept."""

from diffcache.eval.kernels import linear
from diffcache.eval.kernels.options import ARCH, built, choices_of
from diffcache.kernels.dispatch import OPERATORS


def test_candidates_that_spill_or_do_not_fit_are_dropped():
    case = next(iter(linear.cases()))
    usual = built(case, {}, ARCH)
    assert usual.name == "default" and not usual.dropped and 0 < usual.used[0] < 256
    assert usual.used[1:] == (96, 0)
    spilling = built(case, {"COLUMNS": 256, "num_warps": 4}, ARCH)
    assert spilling.dropped == "spills" and spilling.used[2] > 0
    large = built(case, {"num_stages": 8}, ARCH)
    assert large.name == "num_stages=8" and "shared memory" in large.dropped and not large.options
    assert built(case, {"num_warps": 8}, ARCH).options == usual.options


def test_every_operator_has_options_to_try():
    assert [name for name in OPERATORS if not choices_of(name)] == []
