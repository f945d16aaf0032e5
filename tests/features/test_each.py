"""Methods of their own for the denoisers of one pipeline."""

import pytest

import diffcache
from diffcache import Interval, TaylorSeer
from diffcache.features.each import Each
from tests.zoo.pipes import pipes

pytestmark = pytest.mark.usefixtures("quiet")
NAMES = ("transformer", "transformer_2")
BOTH = {"transformer": "taylorseer:every=3,warmup=4", "transformer_2": Interval(every=2)}


def computed(handle, pipe, steps=14):
    """The steps that each denoiser computed, of both guidance passes."""
    pipes()["WanPipeline-two"].run(pipe, steps=steps)
    return [[c.index for c in handle.last.calls if c.denoiser == name and c.computed] for name in NAMES]


def test_each_denoiser_follows_its_own_method():
    """The second takes over at half of the timesteps, after 8 of 14 steps, with a count of its own."""
    pipe = pipes()["WanPipeline-two"].build(0)
    expected = [[step for step in own for _ in range(2)] for own in ([0, 1, 2, 3, 6], [0, 2, 4])]
    for hold in (None, "int8"):
        with diffcache.wrapped(pipe, BOTH, hold=hold) as handle:
            assert computed(handle, pipe) == expected
            assert handle.method.total is None
            assert repr(handle.method) in str(diffcache.report(pipe))
    with diffcache.wrapped(pipe, BOTH, components=NAMES) as handle:
        assert handle.method == Each(
            (("transformer", TaylorSeer(every=3, warmup=4)), ("transformer_2", Interval(every=2)))
        )
        assert (
            eval(repr(handle.method), {name: getattr(diffcache, name) for name in ("Each", "Interval", "TaylorSeer")})
            == handle.method
        )
        assert diffcache.cite(pipe) == TaylorSeer.bibtex + "\n" + Interval.bibtex


def test_a_file_of_settings_keeps_the_method_of_each(tmp_path):
    pipe, path = pipes()["WanPipeline-two"].build(0), tmp_path / "cache.yaml"
    with diffcache.wrapped(pipe, BOTH) as handle:
        method, expected = handle.method, computed(handle, pipe)
        diffcache.save(pipe, path)
    with diffcache.wrapped(pipe, path) as handle:
        assert handle.method == method
        assert computed(handle, pipe) == expected


def test_a_run_of_equal_methods_is_that_of_the_one():
    case = pipes()["WanPipeline-two"]
    results = []
    for method in ("taylorseer:every=3", dict.fromkeys(NAMES, "taylorseer:every=3")):
        pipe = case.build(0)
        with diffcache.wrapped(pipe, method):
            results.append(case.run(pipe, steps=10))
    assert results[0].equal(results[1])


def test_settings_of_a_request_are_for_each():
    pipe = pipes()["WanPipeline-two"].build(0)
    with diffcache.wrapped(pipe, dict.fromkeys(NAMES, "interval:every=2")) as handle:
        with diffcache.settings(pipe, every=3):
            assert computed(handle, pipe)[1] == [0, 0, 3, 3]
        assert computed(handle, pipe)[1] == [0, 0, 2, 2, 4, 4]
    said = "Interval has no setting 'order'"
    with diffcache.wrapped(pipe, BOTH), pytest.raises(ValueError, match=said):
        diffcache.settings(pipe, order=2)


def test_bytes_are_those_of_each():
    pipe, size = pipes()["WanPipeline-two"].build(0), {"height": 64, "width": 64, "frames": 5}
    held = [diffcache.expected_bytes(pipe, f"taylorseer:order={order}", **size) for order in (1, 2)]
    both = dict(zip(NAMES, ("taylorseer", "taylorseer:order=2"), strict=True))
    expected = {name: held[number][name] for number, name in enumerate(NAMES)}
    assert diffcache.expected_bytes(pipe, both, **size) == expected != held[0]
