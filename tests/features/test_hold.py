"""Features held smaller or elsewhere: what it costs, and that nothing else changes."""

import pytest
import torch

import diffcache
from diffcache import Newton, Reuse, Step, Taylor, TaylorSeer
from diffcache.features.parts.hold import Hold, Packed, mapped, pack
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

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


def test_features_of_whole_numbers_are_summed_as_they_are():
    hold = Hold(Taylor(1), "int8")
    state = hold.init()
    for index in range(2):
        hold.record(state, Step(index), torch.tensor([200, 300]) * (index + 1))
    assert hold.estimate(state, Step(3)).tolist() == pytest.approx([800, 1200], rel=0.01)


@pytest.mark.parametrize(
    ("name", "site"),
    [("FluxTransformer2DModel", site) for site in ("module", "stack", "block", "model")]
    + [("UNet2DConditionModel", site) for site in ("module", "block")],  # of pictures and tokens
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


def test_states_are_copied_not_changed():
    state = Taylor(1).init()
    state.factors = [torch.ones(2)]
    doubled = mapped(state, torch.Tensor, lambda t: t * 2)
    assert doubled.factors[0].eq(2).all() and state.factors[0].eq(1).all()


def test_a_wrong_form_is_refused():
    model = cases()["DiTTransformer2DModel"].build()
    with pytest.raises(ValueError, match="hold='int4': must be one of 'bf16', 'int8', 'host'"):
        diffcache.wrap(model, "interval", hold="int4")
    assert not diffcache.anchor.owner_of(model)
