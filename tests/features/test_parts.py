"""Parts of methods: maps, schedules, and what is held in a smaller form."""

import itertools

import pytest
import torch

import diffcache
from diffcache import Newton, Reuse, Step, Taylor, TaylorSeer
from diffcache.features.parts.correction import AffineSums
from diffcache.features.parts.dynamic import best_starts
from diffcache.features.parts.hold import Hold, Packed, mapped, pack
from tests.zoo.catalog import cases
from tests.zoo_runs import sample


def pairs(n: int = 200, c: int = 3, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, c, dtype=torch.float64) * 2 + 5
    return x, x * torch.tensor([0.5, -1, 2.0]) + 1 + noise * torch.randn(n, c)


def sums(x: torch.Tensor, y: torch.Tensor) -> AffineSums:
    made = AffineSums()
    made.add(x, y)
    return made


def test_equals_least_squares() -> None:
    x, y = pairs()
    a, b = sums(x, y).solve()
    for c in range(3):
        design = torch.stack((x[:, c], torch.ones(200, dtype=torch.float64)), dim=1)
        expected = torch.linalg.lstsq(design, y[:, c]).solution
        torch.testing.assert_close(torch.stack((a[c], b[c])), expected)


@pytest.mark.parametrize("cuts", [(1, 199), (50, 50, 100), (200,)])
def test_parts_merge_in_any_order(cuts: tuple[int, ...]) -> None:
    x, y = pairs()
    parts = [sums(u, v) for u, v in zip(x.split(cuts), y.split(cuts), strict=True)]
    merged = AffineSums()
    for part in reversed(parts):
        merged.merge(part)
    merged.merge(AffineSums())
    assert merged.count == 200
    for found, expected in zip(merged.solve(), sums(x, y).solve(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_large_mean_does_not_cancel() -> None:
    x = torch.randn(1000, 1, dtype=torch.float64)
    made = AffineSums()
    for part in x.split(100):
        made.add(part + 1e6, 3 * part)
    a, b = made.solve()
    assert abs(float(a) - 3) < 1e-7 and abs(float(b) + 3e6) < 1


def test_a_channel_that_does_not_vary_is_shifted() -> None:
    x = torch.full((64, 2), 0.1)
    y = torch.randn(64, 2)
    a, b = sums(x, y).solve()
    assert torch.equal(a, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(b, (y.double() - x.double()).mean(0))
    assert torch.equal(sums(x, y).solve(official=True)[0], a)
    zeros = sums(torch.zeros(4, 1), torch.ones(4, 1)).solve()
    assert [float(v) for v in zeros] == [1, 1]


def test_official_moments_shrink_the_slope() -> None:
    x, y = pairs()
    a, _ = sums(x, y).solve()
    shrunk, b = sums(x, y).solve(official=True)
    torch.testing.assert_close(shrunk, a * 199 / 200)
    torch.testing.assert_close(
        shrunk,
        (  # covariance over n, variance over n - 1
            ((x - x.mean(0)) * (y - y.mean(0))).mean(0) / x.var(0)
        ),
    )
    torch.testing.assert_close(b, y.mean(0) - shrunk * x.mean(0))


def brute_force(cost, count, shortest=1, longest=None, *, maximise=False):
    """Try every split; of equal ones take the smallest last start, then the last but one."""
    total = len(cost)
    longest = longest or total
    found = []
    for inner in itertools.combinations(range(1, total), count - 1):
        starts = [0, *inner]
        ends = [start - 1 for start in inner] + [total - 1]
        if all(shortest <= b - a + 1 <= longest for a, b in zip(starts, ends, strict=True)):
            value = 0.0
            for a, b in zip(starts, ends, strict=True):  # in the programme's order
                value += float(cost[a, b])
            found.append((-value if maximise else value, starts[::-1], value))
    if not found:
        return None
    _, starts, value = min(found)
    return starts[::-1], value


@pytest.mark.parametrize("maximise", [False, True])
@pytest.mark.parametrize(
    ("total", "count", "shortest", "longest"),
    [(1, 1, 1, None), (7, 3, 1, None), (9, 9, 1, None), (10, 4, 2, 3), (11, 5, 1, 4), (8, 1, 8, 8)],
)
def test_equals_brute_force(total, count, shortest, longest, maximise):
    """Every split is tried, with costs that have no structure at all."""
    for seed in range(5):
        cost = torch.randn(total, total, generator=torch.Generator().manual_seed(seed)).double()
        made = best_starts(cost, count, shortest=shortest, longest=longest, maximise=maximise)
        expected = brute_force(cost, count, shortest, longest, maximise=maximise)
        assert made[0] == expected[0]
        assert made[1] == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize("maximise", [False, True])
def test_ties_take_the_smallest_starts(maximise):
    """Costs of few values tie often; whole numbers add exactly."""
    for seed in range(20):
        cost = torch.randint(0, 3, (9, 9), generator=torch.Generator().manual_seed(seed))
        for count in range(1, 10):
            assert best_starts(cost, count, maximise=maximise) == brute_force(cost, count, maximise=maximise)


STEPS = 7


@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 32, 4, 4), (1, 32, 2, 4, 4), (7,)])
def test_int8_is_right_to_half_a_step_of_each_token(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    packed = pack(tensor, "int8")
    axis = 1 if len(shape) >= 4 else -1
    largest = tensor.abs().amax(dim=axis, keepdim=True)
    assert packed.values.dtype == torch.int8
    # half a step, and what rounding the scale to bfloat16 adds
    assert ((packed.unpack() - tensor).abs() <= largest / 127 * 0.505).all()
    assert pack(torch.zeros(shape), "int8").unpack().eq(0).all()


def test_bytes_are_what_they_say():
    tensor = torch.randn(4, 64, 128)
    sizes = {f: sum(t.nbytes for t in pack(tensor, f).tensors()) for f in ("bf16", "int8", "host")}
    assert sizes == {"bf16": 4 * 64 * 256, "int8": 4 * 64 * (128 + 2), "host": 4 * 64 * 512}
    assert torch.equal(pack(tensor, "host").unpack(), tensor)
    assert torch.equal(pack(tensor, "bf16").unpack(), tensor.bfloat16().float())
    integers = torch.arange(4)
    assert torch.equal(pack(integers, "int8").unpack(), integers)


@pytest.mark.parametrize("inner", [Reuse(), Taylor(2), Newton(2)])
@pytest.mark.parametrize("shape", [(2, 6, 32), (2, 6, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_forecast_from_codes_is_bit_for_bit_that_of_the_unpacked_tensors(inner, shape, dtype):
    hold = Hold(inner, "int8")
    state, base = hold.init(), torch.randn(shape)  # float32: the sum may be of another dtype
    for index in range(4):
        hold.record(state, Step(index * 2), torch.randn(shape).to(dtype))
        expected = inner.estimate(mapped(state.state, Packed, Packed.unpack), Step(index * 2 + 1))
        found = hold.estimate(state, Step(index * 2 + 1))
        assert found.dtype == dtype and torch.equal(found, expected)
        [added] = hold.estimate_all([state], Step(index * 2 + 1), [base])
        assert torch.equal(added, base + expected)


@pytest.mark.parametrize(
    ("name", "site"),
    [("FluxTransformer2DModel", site) for site in ("module", "stack", "model")]
    + [("UNet2DConditionModel", "block")],  # of pictures and tokens
)
def test_every_site_can_be_held(name, site):
    case = cases()[name]
    model = case.build()
    method = TaylorSeer(every=3, order=1, warmup=2, site=site)
    results, sizes = {}, {}
    for form in (None, "bf16", "int8", "host"):
        with diffcache.wrapped(model, method, hold=form) as handle:
            results[form], sizes[form] = sample(case, model, STEPS), handle.held_bytes()
    assert torch.equal(results["host"], results[None])
    scale = results[None].abs().max()
    assert 0 < (results["bf16"] - results[None]).abs().max() < 0.1 * scale
    assert (results["int8"] - results[None]).abs().max() < 0.2 * scale
    assert sizes["bf16"] == sizes[None] // 2
    assert sizes["host"] == sizes[None]


def test_features_of_whole_numbers_are_summed_as_they_are():
    hold = Hold(Taylor(1), "int8")
    state = hold.init()
    for index in range(2):
        hold.record(state, Step(index), torch.tensor([200, 300]) * (index + 1))
    assert hold.estimate(state, Step(3)).tolist() == pytest.approx([800, 1200], rel=0.01)
