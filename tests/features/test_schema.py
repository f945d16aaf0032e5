"""Tables are data from strangers: a method takes its own, refuses all others, and says where a run differs."""

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import diffcache
from diffcache import CacheWarning, Combine, FittedForecast, MagCache, TemporalTable, Tuned
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method, method_class
from diffcache.errors import TablesError, UncalibratedError
from diffcache.features.collect import Calibrated
from diffcache.features.each import Each
from diffcache.features.fitted import Weighted
from diffcache.features.parts.when import Listed
from diffcache.features.serialize import to_plain
from diffcache.features.tables import FORMAT, Tables
from diffcache.registry import rows_of
from tests.internals import noting
from tests.zoo.pipes import pipes

MEASURED = Path(__file__).parents[1] / "tables"  # on small models that are not kept
WITH_TABLES = [n for n in rows_of("method") if issubclass(method_class(n), (Calibrated, Tuned))]
# Lists that may be of any length, so that one number less is another list.
ANY_LENGTH = {"reuse", "starts", "points", "overlap.blocks", "curve"}


def tuned_tables():
    tensors = {}
    fitted = FittedForecast(7, tables=Tables.load(MEASURED / "fitted-forecast-7.safetensors"))
    header = {"method": "tuned", "steps": 20, "front": [], "choice": to_plain(fitted, tensors)}
    return Tables(header, tensors)


# Every method that takes tables: good ones, and the settings that go with them.
GOOD = {
    "teacache": ("teacache", {}),
    "magcache": ("magcache", {}),
    "ertacache": ("ertacache", {}),
    "fitted-forecast": ("fitted-forecast-7", {}),
    "dpcache": (
        lambda: Tables({"method": "dpcache", "steps": 12, "site": "stack"}, {"errors": torch.ones(12, 12, 12)}),
        {},
    ),
    "bac": ("bac", {}),
    "cachequant": (
        "cachequant-w4a8",
        {"every": 4, "bits": "w4a8", "exempt": ("single_transformer_blocks.*", "transformer_blocks.1.*")},
    ),
    "harmonica": ("harmonica-20", {}),
    "profilingdit": ("profilingdit", {}),
    "regione": (lambda: Tables({"method": "regione", "steps": 28}, {"gamma": torch.ones(27)}), {}),
    "tuned": (tuned_tables, {}),
}


def good(name):
    """Return good tables of a method: header, tensors, and the settings that go with them."""
    source, settings = GOOD[name]
    tables = source() if callable(source) else Tables.load(MEASURED / f"{source}.safetensors")
    header = json.loads(json.dumps(dict(tables.header)))
    # Of the layers of a quantized model those of the first block, which others are like.
    return header, {n: tables[n] for n in tables.names() if not n.startswith("quant/") or "blocks.0" in n}, settings


def use(name, header, tensors, settings):
    """Make the method, and all that it is attached with."""
    method = make_method(name, tables=Tables(header, tensors), **settings)
    return method.parts(), method.abilities(), method.total


def some(tensors):
    """Return one tensor's name of every kind of name: layers and sites have many alike."""
    kinds = {}
    for name in sorted(tensors):
        kinds.setdefault((name.split(".")[0].split("/")[0], "/" in name and name.rpartition("/")[2]), name)
    return sorted(set(kinds.values()))


def spoiled(value):
    """Yield what a tensor must not be, with a word on it."""
    real = value.is_floating_point()
    for text in ("nan", "inf", "-inf"):
        yield text, torch.full_like(value.double(), float(text))
    yield ("one inf", torch.cat([value.reshape(-1).double()[:-1], torch.tensor([math.inf])]).view(value.shape))
    yield ("absurd", torch.full_like(value, 1e300 if real else 10**9, dtype=torch.float64 if real else torch.int64))
    yield "complex", value.to(torch.complex64)
    yield "bool", value.bool()
    yield "of other numbers", value.long() if real else value.double()
    yield "one axis more", value[None]
    yield "one number", value.reshape(-1)[0]
    yield "empty", value[:0]


@pytest.mark.parametrize("file", sorted(MEASURED.iterdir()), ids=lambda file: file.stem)
def test_files_of_tables_are_taken(file):
    tables = Tables.load(file)
    name = tables.header["method"]
    own = {f.name for f in dataclasses.fields(method_class(name))} - {"tables"}
    settings = {key: value for key, value in tables.header["fields"].items() if key in own}
    use(name, tables.header, {n: tables[n] for n in tables.names()}, settings)


@pytest.mark.parametrize("name", WITH_TABLES)
def test_good_tables_are_taken(name):
    use(name, *good(name))


@pytest.mark.parametrize("name", WITH_TABLES)
def test_tables_of_another_method_and_none_are_refused(name):
    header, tensors, settings = good(name)
    other = "bac" if name != "bac" else "harmonica"
    with pytest.raises(TablesError, match=f"made for method '{other}', not '{name}'"):
        make_method(name, tables=Tables({**header, "method": other}, tensors), **settings)
    if name not in ("tuned", "regione"):  # never without them, or with those of its model
        with pytest.raises(UncalibratedError, match=r"diffcache\.calibrate\(pipe, "):
            make_method(name, **settings).parts()


@pytest.mark.parametrize("name", WITH_TABLES)
def test_tensors_that_are_not_what_they_must_be_are_refused(name):
    header, tensors, settings = good(name)
    taken = []
    for key in some(tensors):
        for word, value in spoiled(tensors[key]):
            try:
                use(name, header, tensors | {key: value}, settings)
                taken.append((key, word))
            except TablesError:
                pass
        rest = {n: t for n, t in tensors.items() if n != key}
        for changed in (rest, tensors | {key: tensors[key][:-1]}):
            try:
                use(name, header, changed, settings)
                taken.append((key, "missing" if changed is rest else "one less"))
            except TablesError:
                pass
    with pytest.raises(TablesError, match="'evil', which is no table"):
        use(name, header, tensors | {"evil": torch.zeros(2)}, settings)
    # an empty list of reused steps computes all
    allowed = {(key, "one less") for key in ANY_LENGTH} | {(k, "empty") for k in ("reuse", "points", "curve")}
    assert set(taken) <= allowed | {("curve", "missing")}  # official routers have none


def bad_headers(header):
    """Yield headers that are wrong, as JSON."""
    yield from ("[1, 2, 3]", "7", "null", '"x"', "{}", "{", "[" * 100_000 + "]" * 100_000)
    for steps in (None, 0, -3, 10**9, "many", 2.5, True, [28], 10**400):
        yield json.dumps({**header, "steps": steps})
    for key in ("steps", "method"):
        yield json.dumps({k: v for k, v in header.items() if k != key})
    wrong = {"method": (3, ["x"], "x" * 100_000), "guidance": ([1], "x"), "shape": ("x", [-1], 3)}
    for key, values in wrong.items():
        yield from (json.dumps({**header, key: value}) for value in values)
    needed = getattr(method_class(header["method"]), "schema", None)
    for key in ("choice", "front") if needed is None else needed.header:
        yield json.dumps({k: v for k, v in header.items() if k != key})
        for value in (None, -1, math.nan, [], {}, [1], ["x", "x"], True, "x", "x" * 1000):
            yield json.dumps({**header, key: value})


@pytest.mark.parametrize("name", WITH_TABLES)
def test_malformed_headers_are_refused(name, tmp_path):
    header, tensors, settings = good(name)
    path = tmp_path / "tables.safetensors"
    for text in bad_headers(header):
        if name == "tuned" and json.dumps({**header, "front": []}) == text:
            continue  # a front without trials is one
        save_file(tensors, path, {"format": FORMAT, "header": text})
        with pytest.raises(TablesError) as caught:
            make_method(name, tables=str(path), **settings)
        assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", sorted(set(WITH_TABLES) - {"tuned"}))
def test_finite_numbers_that_no_measurement_gives_are_refused(name):
    header, tensors, settings = good(name)
    for key in some(tensors):
        tensor = tensors[key]
        if tensor.is_floating_point() and key != "curve":
            with pytest.raises(TablesError, match=r"(with 1e\+38 in it|without a number .*); must be"):
                use(name, header, tensors | {key: torch.full_like(tensor, 1e38)}, settings)


LINE = {"class": "combine:Combine", "fields": {"when": {"class": "when:Every", "fields": {"every": 2}}}}


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_of_a_forecast_are_finite_and_one_for_each_feature(weight):
    good_weights = Weighted(((1, (0,), (1.0,)), (3, (2, 0), (1.5, -0.5))), 2)
    tensors = {}
    choice = to_plain(Combine(Listed([0, 2], 4), good_weights), tensors)
    choice["fields"]["instead"]["fields"]["weights"][0][2] = [weight]
    header = {"method": "tuned", "steps": 4, "front": [], "choice": choice}
    with pytest.raises(TablesError, match="Weighted"):
        Tuned(Tables(header, tensors))


STEPS = 6
CASE = pipes()["FluxPipeline"]


def fitted(pipe: Any, **header: Any) -> MagCache:
    """Return a method whose tables are of this pipeline."""
    about = facts_of(pipe.transformer, pipe.scheduler)
    tables = Tables(
        {"method": "magcache", "steps": STEPS, **about, **header}, {"ratios": torch.linspace(1, 0.9, STEPS)}
    )
    return MagCache(threshold=1.0, longest=2, retention=0.0, tables=tables)


def remarks(pipe: Any, method: Any, **call: Any) -> list[str]:
    with diffcache.wrapped(pipe, method), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(**{**CASE.call(pipe, 0, STEPS), **call})
    return [str(w.message) for w in caught if w.category is CacheWarning]


@pytest.fixture
def pipe() -> Any:
    return CASE.build(0)


def shape_of(pipe: Any) -> list[int]:
    with noting(pipe.transformer) as seen:
        CASE.run(pipe, 0, 1)
    return list(seen[0]["hidden_states"].shape[1:])


def test_a_run_like_the_calibration_says_nothing(pipe: Any) -> None:
    given = CASE.call(pipe, 0, STEPS)
    guidance = {"guidance_scale": given.get("guidance_scale", 3.5), "true_cfg_scale": 1}
    assert remarks(pipe, fitted(pipe)) == []
    assert remarks(pipe, fitted(pipe, guidance=guidance, shape=shape_of(pipe))) == []


@pytest.mark.parametrize(
    "wrap", [lambda m: m, TemporalTable, lambda m: Each((("transformer", m),))], ids=["itself", "inside", "of each"]
)
def test_other_guidance_is_told_once_a_run(pipe: Any, wrap: Any) -> None:
    method = wrap(fitted(pipe, guidance={"guidance_scale": 2.0, "true_cfg_scale": 1.0}))
    (text,) = remarks(pipe, method, guidance_scale=9.0)
    assert "guidance_scale=2.0, this run has guidance_scale=9.0" in text
    assert "calibrate again: diffcache.calibrate(" in text
    assert remarks(pipe, method, guidance_scale=2) == []


def test_guidance_that_is_a_default_counts(pipe: Any) -> None:
    (text,) = remarks(pipe, fitted(pipe, guidance={"true_cfg_scale": 4.0}))
    assert "true_cfg_scale=4.0, this run has true_cfg_scale=1.0" in text


def test_another_size_is_told_once_a_run(pipe: Any) -> None:
    tokens, channels = shape_of(pipe)
    method = fitted(pipe, shape=[tokens, channels])
    (text,) = remarks(pipe, method, height=96, width=32)
    assert f"of shape [{tokens}, {channels}], this run has [" in text
    bare = pipe.transformer
    method, match = fitted(pipe, shape=[1, channels]), rf"\[1, {channels}\], this run has"
    with diffcache.wrapped(bare, method), pytest.warns(CacheWarning, match=match):
        CASE.run(pipe, 0, 2)  # no pipeline is needed


def test_a_scheduler_replaced_after_wrapping_is_checked(pipe: Any) -> None:
    method, own = fitted(pipe), pipe.scheduler
    ran: list[int] = []
    with torch.no_grad(), diffcache.wrapped(pipe, method):
        expected = CASE.run(pipe, 0, STEPS)
        pipe.scheduler = type(own).from_config(own.config, shift=7.0)
        hook = pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(0))
        for _ in range(2):  # asking again does not help
            with pytest.raises(TablesError, match="with scheduler_config={'shift': .*'shift': 7.0"):
                CASE.run(pipe, 0, STEPS)
        assert not ran
        hook.remove()
        pipe.scheduler = own
        assert torch.equal(CASE.run(pipe, 0, STEPS), expected)
        pipe.scheduler = type(own).from_config(own.config)
        assert torch.equal(CASE.run(pipe, 0, STEPS), expected)
