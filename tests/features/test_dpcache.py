"""DPCache: its programme against all schedules, its calibration against lines."""

from itertools import combinations, pairwise

import pytest
import torch

import diffcache
from diffcache.features.collect import RunInfo
from diffcache.features.dpcache import DPCache, key_steps
from diffcache.features.tables import Tables
from diffcache.offline.dpcache_collect import Lines
from diffcache.step import Site, Step

TOTAL = 10


def table(seed=0):
    torch.manual_seed(seed)
    return torch.rand(TOTAL, TOTAL, TOTAL, dtype=torch.float64)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("longest", [None, 3])
@pytest.mark.parametrize(("count", "first"), [(3, 2), (5, 2), (6, 3), (9, 3), (10, 10)])
def test_peer_dpcache_is_the_best_of_all_schedules(count, first, longest, last, agrees):
    """Every set of steps, with the cost that SGLang gives it."""
    errors, found = table(), {}
    for chosen in combinations(range(first, TOTAL), count - first):
        keys = [*range(first), *chosen, TOTAL]
        gaps = [b - a for a, b in pairwise(keys)]
        if (longest is None or max(gaps) <= longest) and (not last or TOTAL - 1 in keys):
            found[tuple(keys[:-1])] = sum(
                errors[keys[n - 2], keys[n - 1], keys[n - 1] + 1 : keys[n]].sum().item()
                for n in range(first, len(keys))
            )
    if not found:
        with pytest.raises(ValueError, match=f"computed={count}: no schedule of 10 steps"):
            key_steps(errors, count, first, longest, last)
        return
    best = min(found, key=found.__getitem__)
    steps, error = key_steps(errors, count, first, longest, last)
    costs = [torch.tensor([error])], [torch.tensor([found[best]])]
    agrees("dpcache", "all schedules, with SGLang's costs", *costs, 1e-6, (steps, best))


def test_the_calibration_measures_lines():
    torch.manual_seed(1)
    lines = Lines(Site.STACK)
    features = torch.randn(2, TOTAL, 1, 3, 2)
    for run in features:
        lines.begin(RunInfo(0, 0, torch.arange(TOTAL), None, TOTAL))
        for index, feature in enumerate(run):
            lines.feature(Step(index), "blocks.3", 0, feature)
        lines.end()
    errors = lines.tables()["errors"]
    for i, j, t in ((0, 1, 2), (2, 5, 9), (3, 4, 8)):
        guess = features[:, j] + (features[:, j] - features[:, i]) / (j - i) * (t - j)
        expected = sum((guess[n] - features[n, t]).abs().mean() for n in range(2))
        assert errors[i, j, t] == pytest.approx(float(expected), rel=1e-5)
    assert errors[5, 3, 8] == errors[2, 5, 4] == 0


def test_steps_come_from_the_tables():
    tables = Tables({"method": "dpcache", "steps": TOTAL, "site": "stack"}, {"errors": table()})
    parts = DPCache(5, warmup=2, tables=tables).parts()
    assert parts.when.steps == key_steps(table(), 5, 2)[0]
    with pytest.raises(diffcache.TablesError, match="measured at site 'stack', not 'model'"):
        DPCache(5, site="model", tables=tables)
