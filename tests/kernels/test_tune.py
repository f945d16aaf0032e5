"""Options of launches: compared, timed and chosen."""

import torch

from diffcache.eval.kernels import options, timing
from diffcache.eval.kernels.case import KernelCase
from diffcache.kernels import configs


def test_candidates_that_are_right_are_timed_beside_the_defaults() -> None:
    def kernel(values):
        return values + (configs.tuned("own", (), {"TILE": 1}, values.device)["TILE"] == 3)

    ways = {"kernel": kernel, "plain": torch.clone, "rival": torch.clone}
    case = KernelCase("own", "a model", "", lambda device, tiny: (torch.ones(9),), ways, 1)
    kept = [options.Built({"TILE": n} if n > 1 else {}, "all", {"TILE": n}, (), "") for n in (1, 2, 3)]
    limits = {"bytes": 1.0, "operations": 1.0}
    ways = timing.row(options.trial(case, kept), torch.device("cpu"), 2, limits)["ways"]
    (found,) = options.ratios(case, kept, ways)
    ratio = ways["default"]["us"][1] / ways["TILE=2"]["us"][1]
    assert found == ("own", "all", {"TILE": 2}, ratio)
    assert ways["TILE=3"]["error"] > case.tolerance and not configs.TRIED


def test_the_best_of_the_worst_rows_is_an_entry_if_it_is_faster() -> None:
    one, two, three = {"BLOCK": 1}, {"BLOCK": 2}, {"BLOCK": 3}
    timed = [
        ("a", "x", one, 1.5),
        ("a", "x", two, 1.2),
        ("a", "x", one, 1.04),
        ("a", "x", two, 1.1),
        ("a", "x", three, 2.0),  # in one of the two rows of its bucket
        ("a", "y", one, 1.029),
        ("b", "x", two, 0.9),
        ("b", "z", three, 1.0301),
    ]
    expected = {"a": {"x": {"BLOCK": 2, "ratio": 1.1}}, "b": {"z": {"BLOCK": 3, "ratio": 1.03}}}
    assert options.faster(timed) == expected
    assert options.faster([]) == {}
