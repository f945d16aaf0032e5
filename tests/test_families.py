"""Every method on every kind of pipeline that `docs/methods.md` says it runs on."""

import warnings

import pytest
import torch

import diffcache
from diffcache.catalog import method_class
from diffcache.features.collect import Calibrated
from diffcache.features.tables import Tables
from diffcache.registry import rows_of
from tests.internals import traces
from tests.methods import ON_PIPELINES, STEPS, method, pipelines_of
from tests.zoo.pipes import pipes

FEWER = 6  # steps, in which every method skips some; settings of `off` are for STEPS
CASES = [(name, kind) for name in ON_PIPELINES for kind in pipelines_of(name)]


@pytest.fixture(scope="module")
def built():
    """Build each pipeline once; what it draws is the same before and after all the tests."""
    made = {}

    def build(kind, steps=FEWER):
        if (kind, steps) not in made:
            case = pipes()[kind]
            pipe = case.build(0)
            made[kind, steps] = case, pipe, case.run(pipe, 0, steps)
        return made[kind, steps]

    yield build
    for (_, steps), (case, pipe, plain) in made.items():
        assert torch.equal(case.run(pipe, 0, steps), plain)


def ready(name, kind, case, pipe, *, off=False):
    """The method, calibrated where it has to be."""
    made = method(name, kind, off=off)
    if isinstance(made, Calibrated) and made.tables is None:
        try:
            made.parts()
        except diffcache.UncalibratedError:
            return diffcache.calibrate(pipe, made, [case.prompt(pipe, 1, STEPS if off else FEWER)])
    return made


@pytest.mark.parametrize(
    "name", sorted({n for n in ON_PIPELINES if issubclass(method_class(n), Calibrated)} - {"harmonica"})
)
def test_a_calibration_that_breaks_off_goes_on(built, tmp_path, name):
    """With what its first run left in a file; tests/router_training has it of harmonica."""
    kind = pipelines_of(name)[0]
    case, pipe, _ = built(kind)
    made, out = method(name, kind), tmp_path / "tables.safetensors"
    prompts = [case.prompt(pipe, seed, FEWER) for seed in (1, 2)]
    whole = diffcache.calibrate(pipe, made, prompts, batch_size=1)

    def stop(done, total, word):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diffcache.calibrate(pipe, made, prompts, batch_size=1, out=out, progress=stop)
    again = diffcache.calibrate(pipe, made, prompts, batch_size=1, out=out)
    assert set(again.tables.names()) == set(whole.tables.names())
    for table in whole.tables.names():
        assert torch.equal(again.tables[table], whole.tables[table]), table


def test_every_method_is_tried_on_three_kinds():
    # RegionE is for editing pipelines: tests/features/test_regione.py runs it on both.
    assert set(ON_PIPELINES) == set(rows_of("method")) - {"tuned", "regione"}
    assert all(len(pipelines_of(name)) >= 3 for name in ON_PIPELINES)


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_runs_skips_repeats_and_leaves_no_trace(built, tmp_path, name, kind):
    case, pipe, plain = built(kind)
    made = ready(name, kind, case, pipe)
    before = traces(pipe)
    with diffcache.wrapped(pipe, made):
        first = case.run(pipe, 0, FEWER)
        report = diffcache.report(pipe)
        if not isinstance(getattr(made, "tables", None), Tables):
            assert torch.equal(case.run(pipe, 0, FEWER), first)
        if name == "temporal-table":  # the first run fills the tables
            report = diffcache.report(pipe)
            assert report.peak_bytes > 0
    assert torch.isfinite(first).all() and first.shape == plain.shape
    assert report.skipped > 0
    assert traces(pipe) == before
    if isinstance(getattr(made, "tables", None), Tables):
        path = tmp_path / "tables.safetensors"
        made.tables.save(path)
        settings = {k: v for k, v in method(name, kind).__dict__.items() if k != "tables"}
        loaded = method_class(name)(**settings, tables=str(path))
        assert loaded == made
        assert eval(repr(loaded), {type(made).__name__: type(made)}) == made
        with diffcache.wrapped(pipe, loaded):
            assert torch.equal(case.run(pipe, 0, FEWER), first)


@pytest.mark.parametrize("name", ON_PIPELINES)
def test_off_is_the_uncached_pipeline_bit_for_bit(built, name):
    kind = pipelines_of(name)[0]
    case, pipe, plain = built(kind, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        with diffcache.wrapped(pipe, ready(name, kind, case, pipe, off=True)):
            assert torch.equal(case.run(pipe, 0, STEPS), plain)
