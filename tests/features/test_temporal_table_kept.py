"""Entries of a temporal table: rows once, so many entries, rounded in closed form."""

import pytest
import torch

import diffcache
from diffcache.attach.extensions.lookup_entries import alike, rounded_copy
from diffcache.errors import TablesError
from diffcache.features.profilingdit import ProfilingDiT
from diffcache.features.tables import Tables
from diffcache.features.taylorseer import TaylorSeer
from diffcache.features.temporal_table import (
    TemporalTable,
    TimeTables,
    disturbance,
    keeps_table,
    rounded,
    step_of,
)
from tests.features.temporal_toys import ALL, counts, table_of, toy, toy_run


def test_rows_that_are_alike_are_kept_once():
    one, two = torch.randn(4), torch.randn(4)
    two[0], other = 0.0, two.clone()
    other[0] = -0.0
    rows, places = alike(torch.stack([one, two, one, other, two]))
    assert torch.equal(rows.view(torch.int32), torch.stack([one, two, other]).view(torch.int32))
    assert places.tolist() == [0, 1, 0, 2, 1]
    assert alike(torch.randn(3, 4))[1] is None and alike(torch.randn(3))[1] is None
    model = toy()
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sizes = []
        for batch in (1, 8):
            toy_run(model, batch=batch)
            sizes.append(table_of(handle).table.nbytes)
            table_of(handle).clear()
    assert sizes[0] == 3 * 5 * 6 * 4 and sizes[1] < 4 * sizes[0]  # up to rounding by place


def test_more_conditions_than_entries():
    model = toy()
    plain, label = toy_run(model, steps=5), torch.randn(6)
    with diffcache.wrapped(model, TemporalTable(entries=4)) as handle:
        table = table_of(handle).table
        for _ in range(3):  # a run that is too long keeps its first four steps
            assert torch.equal(toy_run(model, steps=5), plain)
            assert len(table.conditions) == 4
        hits = [call[1] if call else 0 for call in counts(handle)]
        assert hits == [5, 5, 5, 5, 0]
        for _ in range(2):  # another prompt: two steps, of the timestep alone and with the label
            toy_run(model, steps=2, label=label)
        assert counts(handle)[-1] == (0, 5) and len(table.conditions) == 4


@pytest.mark.parametrize("bits", [8, 16])
def test_rounding_is_at_most_half_a_step_off(bits):
    values = [torch.randn(3, 50), 9 * torch.randn(3, 50), torch.zeros(2, 2)]
    for value in values:
        step = step_of([value], bits)
        kept = rounded(value, bits, step)
        assert (kept.value() - value).abs().max() <= 0.5001 * step
        assert int(kept.codes.abs().max()) <= 2 ** (bits - 1) - 1
        assert kept.nbytes == value.numel() * bits // 8 + 4
    assert float(step_of(values, bits)) == max(float(step_of([v], bits)) for v in values[:2])
    rows = step_of([values[1]], bits, dim=1)
    assert rows.shape == (3, 1)
    assert rows[1] == step_of([values[1][1]], bits)


def test_selection_takes_the_smaller_disturbance_element_by_element():
    layer, table = torch.rand(9), torch.rand(9)
    table[3] = layer[3]
    chosen = keeps_table(layer, table, "step")
    assert torch.equal(torch.where(chosen, table, layer), torch.minimum(layer, table))
    assert chosen[3]
    assert keeps_table(layer, layer + 1, "site").tolist() == [False] * 9
    assert keeps_table(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), "site").all()
    one = torch.randn(5)
    assert disturbance([one], [one.clone()]) == 0.0
    assert disturbance([one], [-one]) == pytest.approx(2.0)
    assert disturbance([one[:2], one[2:]], [2 * one[:2], 2 * one[2:]]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("scale", ["entry", "site"])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_rounded_table_is_half_a_step_off(bits, scale):
    model = toy()
    plain = toy_run(model)
    method = TemporalTable(bits=bits, scale=scale)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        toy_run(model)
        exact = [dict(page) for page in table_of(handle).table.conditions.values()]
    with diffcache.wrapped(model, method) as handle:
        assert torch.equal(toy_run(model), plain)  # what it computes it uses
        second = toy_run(model)
        third = toy_run(model)
        assert counts(handle) == [(0, 5)] * 3
        found = list(table_of(handle).table.conditions.values())
    assert torch.equal(second, third) and not torch.equal(second, plain)
    steps = {}
    for pages in zip(exact, found, strict=True):
        for name in pages[0]:
            one, two = pages[0][name], pages[1][name]
            step = two.rows[0].step
            steps.setdefault(name, set()).add(float(step))
            assert (one.value() - two.value()).abs().max() <= 0.5001 * step
    assert {len(found) for found in steps.values()} == ({1} if scale == "site" else {3})


def expected_harm(model, bits):
    """Return {site: [(by layer, by table)]} from the modules themselves."""
    harms = {}
    for s in range(3):
        temb = torch.cos(model.first(torch.full((2, 1), 1.0 - s / 8)))
        given = {"first": torch.full((2, 1), 1.0 - s / 8)}
        given.update({p: temb for p in ALL if p != "first"})
        for path in ALL:
            module = model.get_submodule(path)
            exact = module(given[path])
            by_layer = disturbance([exact], [rounded_copy(module, bits)(given[path])])
            table = rounded(exact, bits, step_of([exact], bits)).value()
            harms.setdefault(path, []).append((by_layer, disturbance([exact], [table])))
    return harms


@pytest.mark.parametrize("by", ["step", "site"])
def test_the_closer_maintenance_is_kept(by):
    model = toy()
    # a large weight for a condition that is always 0 spoils the rounding of the others in its row
    model.first.weight[0], model.first.bias[0] = 0.0, torch.pi / 2
    model.blocks[0].mod.weight[:, 0] = 1000.0
    expected = expected_harm(model, 8)
    with diffcache.wrapped(model, TemporalTable(bits=8, keep="closer", by=by)) as handle:
        toy_run(model)
        second = toy_run(model)
        pages = list(table_of(handle).table.conditions.values())
        ran = [count[0] for count in counts(handle)]
        assert torch.equal(toy_run(model), second)
    layers = 0
    for path, harms in expected.items():
        by_layer, by_table = torch.tensor(harms, dtype=torch.float64).T
        tables = keeps_table(by_layer, by_table, by)
        for page, harm, stays in zip(pages, harms, tables.tolist(), strict=True):
            assert page[path].harm == pytest.approx(harm, abs=1e-12)
            assert page[path].layer is not stays
            layers += not stays
    assert sum(ran) == layers and 0 < layers < 15


def test_the_layer_alone_is_the_rounded_layer():
    model = toy()
    with diffcache.wrapped(model, TemporalTable(bits=8, keep="layer")) as handle:
        toy_run(model)
        second = toy_run(model)
        assert counts(handle) == [(5, 0)] * 3
        assert table_of(handle).table.nbytes > 0
    twin = toy()
    for path in ALL:
        parent, _, child = path.rpartition(".")
        setattr(twin.get_submodule(parent), child, rounded_copy(twin.get_submodule(path), 8))
    assert torch.equal(second, toy_run(twin))
    rows = rounded_copy(model.first, 8)
    assert (rows.codes * rows.step - model.first.weight).abs().max() <= 0.5001 * rows.step.max()


def test_it_passes_on_what_the_inner_method_is_made_of():
    inner = TaylorSeer(every=3)
    method = TemporalTable(inner, entries=7)
    tables = TimeTables(7, None, "entry", "table", "step")
    assert method.abilities() == (inner.parts(), tables)
    assert TemporalTable(entries=7).abilities() == (tables,)
    tables = Tables({"method": "profilingdit", "steps": 9}, {"overlap.b": torch.zeros(2)})
    foreign = ProfilingDiT(background="blocks.0", tables=tables)
    with pytest.raises(TablesError, match="measured on an unknown model, this is "):
        diffcache.wrap(toy(), TemporalTable(foreign))
    assert eval(repr(method)) == method and hash(method) == hash(TemporalTable(inner, entries=7))


def test_the_length_of_runs_is_that_of_the_method_inside() -> None:
    tables = Tables({"method": "bac", "steps": 9, "metric": "cosine", "sites": ["a.ff"]},
                    {"pairs.a.ff": torch.ones(9, 9), "shift.a.ff": torch.zeros(9, 9)})  # fmt: skip
    assert TemporalTable(diffcache.BAC(count=2, union=1, tables=tables)).total == 9
    assert TemporalTable().total is TemporalTable(TaylorSeer()).total is None
