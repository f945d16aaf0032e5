"""Settings of temporal tables: bad ones refused, those of the method inside passed on."""

import pytest
import torch

import diffcache
from diffcache.errors import TablesError
from diffcache.features.profilingdit import ProfilingDiT
from diffcache.features.tables import Tables
from diffcache.features.taylorseer import TaylorSeer
from diffcache.features.temporal_table import (
    TemporalTable,
    TimeTables,
)
from tests.features.temporal_toys import toy


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
