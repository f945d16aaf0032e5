"""Every kernel against exact results, in Triton's interpreter."""

import pytest
import torch

from tests.kernels.cases import DTYPES, Case, cases, check, copied


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
