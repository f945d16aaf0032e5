"""Every method on every kind of pipeline that `docs/methods.md` says it runs on."""

import warnings

import pytest
import torch

import diffcache
from diffcache.catalog import METHODS, method_class
from diffcache.features.collect import Calibrated
from diffcache.features.tables import Tables
from tests.zoo.families import FAMILIES, KINDS, STEPS
from tests.zoo.pipes import pipes

CASES = [(name, kind) for name, family in FAMILIES.items() for kind in family.pipelines]


@pytest.fixture(scope="module")
def built():
    made = {}

    def build(kind):
        if kind not in made:
            case = pipes()[kind]
            pipe = case.build(0)
            pipe.set_progress_bar_config(disable=True)
            made[kind] = case, pipe, case.run(pipe, 0, STEPS)
        return made[kind]

    return build


def inputs(case, pipe):
    """A prompt for a calibration, whose noise the calibration draws."""
    call = case.call(pipe, 1, STEPS)
    return [{key: value for key, value in call.items() if key != "generator"}]


def ready(family, name, kind, case, pipe, *, off=False):
    """The method, calibrated where it has to be."""
    method = family.method(name, kind, off=off)
    if isinstance(method, Calibrated) and method.tables is None:
        try:
            method.parts()
        except diffcache.UncalibratedError:
            return diffcache.calibrate(pipe, method, inputs(case, pipe))
    return method


def test_every_method_is_tried_on_three_kinds():
    # RegionE is for editing pipelines: tests/features/test_region_attention.py runs it on both.
    assert set(FAMILIES) == set(METHODS) - {"tuned", "regione"}
    for name, family in FAMILIES.items():
        assert len(family.pipelines) >= 3, name
        assert set(family.pipelines) <= set(KINDS)


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_runs_skips_repeats_and_leaves_no_trace(built, tmp_path, name, kind):
    case, pipe, plain = built(kind)
    family = FAMILIES[name]
    method = ready(family, name, kind, case, pipe)
    with diffcache.wrapped(pipe, method):
        first = case.run(pipe, 0, STEPS)
        report = diffcache.report(pipe)
        again = case.run(pipe, 0, STEPS)
        if name == "temporal-table":  # the first run fills the tables
            report = diffcache.report(pipe)
            assert report.peak_bytes > 0
    assert torch.isfinite(first).all() and first.shape == plain.shape
    assert torch.equal(first, again)
    assert report.skipped > 0
    assert torch.equal(case.run(pipe, 0, STEPS), plain)
    if isinstance(getattr(method, "tables", None), Tables):
        path = tmp_path / "tables.safetensors"
        method.tables.save(path)
        settings = {k: v for k, v in family.method(name, kind).__dict__.items() if k != "tables"}
        loaded = method_class(name)(**settings, tables=str(path))
        assert loaded == method
        with diffcache.wrapped(pipe, loaded):
            assert torch.equal(case.run(pipe, 0, STEPS), first)


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.off is not None])
def test_off_is_the_uncached_pipeline_bit_for_bit(built, name):
    family = FAMILIES[name]
    kind = family.pipelines[0]
    case, pipe, plain = built(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        method = ready(family, name, kind, case, pipe, off=True)
        with diffcache.wrapped(pipe, method):
            assert torch.equal(case.run(pipe, 0, STEPS), plain)
