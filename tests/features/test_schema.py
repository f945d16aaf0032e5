"""Tables are data from strangers: every method takes its own and refuses all others, in one way."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffcache import CacheQuant, Combine, FittedForecast, Tuned
from diffcache.catalog import make_method, method_class
from diffcache.errors import TablesError, UncalibratedError
from diffcache.features.collect import Calibrated
from diffcache.features.fitted import Weighted
from diffcache.features.parts.when import Listed
from diffcache.features.serialize import to_plain
from diffcache.features.tables import FORMAT, Tables
from diffcache.registry import rows_of

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
    return header, {n: tables[n] for n in tables.names()}, settings


def use(name, header, tensors, settings):
    """Make the method, and all that it is attached with."""
    method = make_method(name, tables=Tables(header, tensors), **settings)
    return method.parts(), method.abilities(), method.total


def some(tensors):
    """Return one tensor's name of every kind of name: layers and sites have many alike."""
    kinds = {}
    for name in sorted(tensors):
        kinds.setdefault((name.split(".")[0].split("/")[0], name.rpartition("/")[2]), name)
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
    for key, value in (
        ("method", 3),
        ("method", ["x"]),
        ("method", "x" * 10_000_000),
        ("guidance", [1]),
        ("guidance", "x"),
        ("shape", "x"),
        ("shape", [-1]),
        ("shape", 3),
    ):
        yield json.dumps({**header, key: value})
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


def test_an_error_says_what_is_there_and_what_must_be():
    header, tensors, _ = good("magcache")
    tensors["ratios"][3] = float("nan")
    message = r"'ratios' is float64 \[28\] with nan in it; must be \[28\] real .* from 0.01 to 100;"
    with pytest.raises(TablesError, match=message):
        use("magcache", header, tensors, {})
    header, tensors, settings = good("cachequant")
    layer = next(n for n in tensors if n.endswith("/gain"))
    del tensors[layer]
    with pytest.raises(TablesError, match=f"it lacks '{layer}'"):
        use("cachequant", header, tensors, settings)
    header, tensors, settings = good("ertacache")
    tensors["scale"] = tensors["scale"][:, :-1]
    with pytest.raises(TablesError, match=r"'shift' is float64 \[28, 16\]; must be \[28, 15\]"):
        use("ertacache", header, tensors, settings)


@pytest.mark.parametrize("name", sorted(set(WITH_TABLES) - {"tuned"}))
def test_finite_numbers_that_no_measurement_gives_are_refused(name):
    header, tensors, settings = good(name)
    for key in some(tensors):
        tensor = tensors[key]
        if tensor.is_floating_point() and key != "curve":
            with pytest.raises(TablesError, match=r"(with 1e\+38 in it|without a number .*); must be"):
                use(name, header, tensors | {key: torch.full_like(tensor, 1e38)}, settings)


def test_a_step_that_no_correction_covers_is_refused():
    source = Tables.load(MEASURED / "cachequant-5.safetensors")
    tensors = {name: source[name] for name in source.names()}
    CacheQuant(tables=Tables(source.header, tensors))
    tensors["starts"] = tensors["starts"][:1]
    with pytest.raises(TablesError, match=r"starts=\[0\] leaves out step 3, which no correction"):
        CacheQuant(tables=Tables(source.header, tensors))


def test_a_header_nested_without_end_and_what_is_no_file_are_refused(tmp_path):
    choice = LINE
    for _ in range(3000):
        choice = [choice]
    with pytest.raises(TablesError, match="nested without end"):
        Tables({"method": "tuned", "steps": 4, "front": [], "choice": choice}, {})
    with pytest.raises(TablesError, match="is a folder; name a file in it"):
        Tables.load(tmp_path)


LINE = {"class": "combine:Combine", "fields": {"when": {"class": "when:Every", "fields": {"every": 2}}}}


class Nested(str):
    """JSON that is nested deeper than `json` writes."""


def deep(depth):
    return Nested("[" * depth + json.dumps(LINE) + "]" * depth)


@pytest.mark.parametrize(
    "choice",
    [
        {"class": "os:system", "fields": {}},
        {"class": "..os:system", "fields": {}},
        {"class": "../../evil:X", "fields": {}},
        {"class": "tables:json", "fields": {}},
        {"class": "tables:Path", "fields": {}},
        {"class": "interval:Interval", "fields": {"evil": 1}},
        {"class": "interval:Interval", "fields": {"every": "3"}},
        {"class": "interval:Interval", "fields": {"every": 0}},
        {"class": "interval:Interval", "fields": [3]},
        {"class": "interval:Interval"},
        {"class": "when:LastComputed", "fields": {}},
        {"class": "when:Listed", "fields": {"steps": [0]}},
        {"class": "combine:Combine", "fields": {}},
        {"class": "combine:Combine", "fields": {"when": 3}},
        {"class": "combine:Combine", "fields": {**LINE["fields"], "site": "run", "blocks": 5}},
        {"class": "combine:Combine", "fields": {**LINE["fields"], "site": "nowhere"}},
        {"class": "combine:Combine", "fields": {**LINE["fields"], "lead": {"float": "nan"}}},
        {"class": "instead:Taylor", "fields": {"order": 10**9}},
        {"class": "magcache:MagCache", "fields": {"tables": "/etc/passwd"}},
        {"class": "magcache:MagCache", "fields": {"tables": None}},
        {"class": "magcache:MagCache", "fields": {"tables": {"tables": "x/", "header": 7}}},
        {"class": "teacache:TeaCache", "fields": {"threshold": math.nan}},
        {"class": "fitted:Weighted", "fields": {"weights": [], "history": 1}},
        {"float": "nan"},
        {},
        7,
        "x",
        [1],
        None,
        deep(500),
        deep(5000),
    ],
    ids=lambda choice: str(choice)[:60],
)
def test_tuned_files_hold_a_method_and_nothing_else(choice, tmp_path):
    path = tmp_path / "tuned.safetensors"
    text = choice if isinstance(choice, Nested) else json.dumps(choice)
    text = f'{{"method": "tuned", "steps": 4, "front": [], "choice": {text}}}'
    save_file({}, path, {"format": FORMAT, "header": text})
    with pytest.raises(TablesError, match="tuned.safetensors") as caught:
        Tuned(str(path))
    assert len(str(caught.value)) < 1000


def test_a_tuned_file_that_names_itself_is_refused(tmp_path):
    path = tmp_path / "tuned.safetensors"
    choice = {"class": "tuned:Tuned", "fields": {"tables": str(path)}}
    header = {"method": "tuned", "steps": 4, "front": [], "choice": choice}
    Tables(header, {}).save(path)
    with pytest.raises(TablesError, match="Tuned with tables="):
        Tuned(str(path))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_of_a_forecast_are_finite_and_one_for_each_feature(weight):
    for weights in (((1, (0,), (weight,)),), ((1, (0,), (0.5, 0.5)),), ((1, (), ()),)):
        with pytest.raises(ValueError, match="must be a finite number for each of up to 2 computed"):
            Weighted(weights, 2)
    good_weights = Weighted(((1, (0,), (1.0,)), (3, (2, 0), (1.5, -0.5))), 2)
    tensors = {}
    choice = to_plain(Combine(Listed([0, 2], 4), good_weights), tensors)
    choice["fields"]["instead"]["fields"]["weights"][0][2] = [weight]
    header = {"method": "tuned", "steps": 4, "front": [], "choice": choice}
    with pytest.raises(TablesError, match="Weighted"):
        Tuned(Tables(header, tensors))
