"""Promises of the library with kernels on: off is exact, `unwrap` leaves no trace."""

import pytest
import torch

import diffcache
from diffcache.kernels import attention, dispatch, forecast
from tests.zoo.catalog import cases

STEPS = 7


@pytest.fixture(scope="module")
def flux():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


def sample(case, model, handle=None):
    outs = []
    with torch.no_grad():
        for step in range(STEPS):
            if handle is not None and step:
                handle.run().ticks += 1
            given = case.kwargs(model, 0, step=step, steps=STEPS)
            outs.append(model(**given, return_dict=False)[0].clone())
    return torch.stack(outs)


@pytest.fixture
def launched(monkeypatch):
    """Names of the operators whose kernels ran."""
    names = []
    plain = dispatch.Operator.launch
    monkeypatch.setattr(dispatch.Operator, "launch", lambda self, *args: names.append(self.name) or plain(self, *args))
    return names


def test_a_compiler_follows_what_chooses_kernels(launched) -> None:
    def call(x):
        held = x.view(1, 1, 4, 8)
        out, _ = attention.attn_forward(held[:, :, :1], held, held, 0.5)
        return out.sum() + forecast.weighted_sum([x, x.flip(0)], [1.0, 0.5])

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, names = call(x), launched.copy()
        found = torch.compile(call, fullgraph=True, backend="eager")(x)
    assert torch.equal(found, plain)
    assert launched == [*names, *names]


@pytest.mark.parametrize(
    "settings", [{"order": 2, "site": "module"}, {"order": 2, "form": "newton"}, {"order": 1, "site": "model"}]
)
def test_a_cached_run_is_that_of_plain_pytorch_and_repeats(flux, launched, monkeypatch, settings) -> None:
    case, model = flux
    found = []
    for backend in ("triton", "triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
        with diffcache.wrapped(model, "taylorseer", every=3, warmup=1, **settings) as handle:
            found.append(sample(case, model, handle))
            assert handle.last.skipped > 0
        if backend == "triton":
            assert set(launched) == {"weighted_sum", "finite_differences"}
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-5)


def test_frames_that_were_handed_out_do_not_change(flux) -> None:
    """Differences are written over the old ones: what the model returned before must stay."""
    case, model = flux
    outs, copies = [], []
    method = diffcache.TaylorSeer(every=2, warmup=1, order=1, site="model")
    with diffcache.wrapped(model, method) as handle, torch.no_grad():
        for step in range(STEPS):
            if step:
                handle.run().ticks += 1
            out = model(**case.kwargs(model, 0, step=step, steps=STEPS), return_dict=False)[0]
            outs.append(out)
            copies.append(out.clone())
    for out, copy in zip(outs, copies, strict=True):
        assert torch.equal(out, copy)


@pytest.mark.parametrize(
    ("base", "gate"),
    [
        (torch.ones(3, 4), None),  # another dtype
        (torch.ones(2, 3, 4).half(), None),  # another shape
        (None, torch.ones(2, 3, 4).half()),
        (None, torch.ones(4)),
    ],
)
def test_what_broadcasts_or_promotes_goes_to_plain_pytorch(launched, base, gate) -> None:
    terms = [torch.randn(3, 4).half(), torch.randn(3, 4).half()]
    found = forecast.weighted_sum(terms, [1.0, 2.0], base, gate)
    expected = forecast.sum_twin(terms, [1.0, 2.0], base, gate)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert not launched
    forecast.weighted_sum(terms, [1.0, 2.0], terms[0], torch.ones(1, 4).half())
    assert launched == ["weighted_sum"]
