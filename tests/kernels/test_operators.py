"""Every operator on a CPU: exact, known to torch's checks, to compilers, to meta and to FLOPs."""

import pytest
import torch
from torch import library
from torch.utils.flop_counter import FlopCounterMode

from diffcache.features.parts.instead import Differences, Taylor
from diffcache.kernels import dispatch, forecast, move, quantize, rotary
from diffcache.step import Step
from tests.kernels.cases import DTYPES, Case, cases, check, copied

ALL = [case for dtype in DTYPES for case in cases(dtype)]
# Of every operator the last call, as some of the first have one number: all lengths are one another's there.
LAST = {case.operator.name: case for case in cases(torch.float32) if "fp8" not in case.name}
# ... and calls whose shapes follow from codes and lists.
MORE = ("attention-4-mask-listed-2", "mass-int8-causal-listed-2", "attention-rows")
LAST |= {case.name: case for case in ALL if case.name in MORE and case.args[0].dtype == torch.float32}
EACH = pytest.mark.parametrize("case", LAST.values(), ids=list(LAST))


def test_every_operator_has_cases() -> None:
    assert {case.operator.name for case in LAST.values()} == set(dispatch.OPERATORS)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_twin_is_no_worse_than_rounding_at_every_term(case: Case) -> None:
    args, before = copied(case.args), copied(case.args)
    case.tolerance *= 6
    check(case, case.operator(*args), args, before)


@EACH
def test_torch_accepts_the_registration(case: Case) -> None:
    library.opcheck(case.operator.op, copied(case.args))


@EACH
def test_shapes_are_known_without_numbers(case: Case) -> None:
    args, meta = copied(case.args), copied(case.args, lambda tensor: tensor.to("meta"))
    expected, found = (case.results(a, case.operator(*a)) for a in (args, meta))
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in expected]


def test_results_lie_as_compilers_are_told_where_arguments_lie_otherwise() -> None:
    """Where a kernel is turned off, compiled code meets the results of its twin."""
    turned, plain = torch.ones(6, 4).t(), torch.ones(4, 6)
    terms = [turned, plain], [1.0, 2.0], plain, torch.ones(4, 1)
    library.opcheck(forecast.SUM.op, terms)
    held = torch.ones(2, 8, 3, 4).transpose(1, 2)[..., 1:]
    slots = torch.zeros(2, 1, 2, dtype=torch.long)
    library.opcheck(move.GATHER.op, (held, held[..., ::2], slots))
    library.opcheck(quantize.QUANT.op, (held[..., :2], 2, 1, 2, 3.0, False, torch.float16))
    pictures = torch.ones(2, 3, 4, 8).to(memory_format=torch.channels_last)
    library.opcheck(rotary.ROTATE.op, (pictures, torch.ones(4, 4), 1.0, False, 0, False))


def test_float16_near_its_end_overflows_only_where_the_result_does() -> None:
    """A forecast of order 4 whose partial sums, or differences before their share, are too large."""
    signs = torch.tensor([1.0, -1.0]).half()
    terms = [each * signs for each in (6e4, -3e4, 2e4, -1e4, 100.0)]
    weights = [1.0, 4.0, 8.0, 32 / 3, 32 / 3]
    exact = sum(w * t.double() for w, t in zip(weights, terms, strict=True))
    assert exact.abs().max() < 65504 < max(w * float(t[0]) for w, t in zip(weights, terms, strict=True))
    assert torch.equal(forecast.weighted_sum(terms, weights), exact.half())
    wide = forecast.weighted_sum(terms, weights, torch.zeros(2))  # a float32 stream
    torch.testing.assert_close(wide, exact.float())
    taylor = Taylor(order=4)
    held = [Differences(list(terms), 0) for _ in range(9)]
    for found in taylor.estimate_all(held, Step(4), None):
        assert torch.equal(found, exact.half())
    (_, found) = forecast.finite_differences([-6e4 * signs], 6e4 * signs, [4])
    assert torch.equal(found, 3e4 * signs)


@EACH
def test_operations_are_counted_as_those_of_the_twin(case: Case) -> None:
    dispatch.register_flops()
    counts = []
    for run in (case.operator, case.operator.twin):
        with FlopCounterMode(display=False) as counter:
            run(*copied(case.args))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
