"""CacheQuant refuses settings out of range, and tables that were made for something else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from diffcache.errors import TablesError, UncalibratedError
from diffcache.features.cachequant import CacheQuant
from diffcache.features.collect import RunInfo
from diffcache.features.tables import Tables
from diffcache.step import Step


def test_tables_are_needed() -> None:
    for method in (CacheQuant(), CacheQuant(every=1, bits="w8a8")):
        with pytest.raises(UncalibratedError, match=r"diffcache\.calibrate\(pipe, CacheQuant"):
            method.parts()
    off = CacheQuant(every=1)
    assert off.abilities() == (off.parts(),)


def test_foreign_tables_are_refused(tmp_path) -> None:
    collector = CacheQuant(every=3).collector()
    collector.begin(RunInfo(0, 0, torch.arange(6), None, 6))
    for step in range(6):
        collector.feature(Step(step), "up_blocks.0", 0, torch.randn(1, 3, 4))
    collector.end()
    header = {"method": "cachequant", "steps": 6, **collector.settings(), "model": "Other"}
    tables = Tables(header, collector.tables())
    with pytest.raises(TablesError, match="made for every=3, not every=2"):
        CacheQuant(every=2, tables=tables)
    with pytest.raises(TablesError, match="made for bits=None, not bits='w8a8'"):
        CacheQuant(every=3, bits="w8a8", tables=tables)
    with pytest.raises(TablesError, match="it lacks 'starts'"):
        CacheQuant(every=3, tables=Tables(tables.header, {}))
    method = CacheQuant(every=3, tables=tables)
    with pytest.raises(TablesError, match="measured on Other, this is UNet2DModel"):
        method.check_model({"model": "UNet2DModel", "scheduler": None})
    path = str(tmp_path / "t.safetensors")
    saved = dataclasses.replace(method, tables=tables.save(path))
    assert eval(repr(saved)) == saved == method and hash(saved) == hash(method)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": "w2a8"}, "bits='w2a8': must be one of 'w8a8', 'w4a8'"),
        ({"site": "model"}, "site='model': must be 'deep', 'stack', 'run' or 'block'"),
        ({"corrected": 3}, "corrected=3: must be a name such as .* or a tuple of names"),
        ({"exempt": None}, "exempt=None: must be a name"),
        ({"site": "run", "blocks": (3,)}, r"blocks=\(3,\): must be a name such as 'blocks.2-9'"),
        ({"site": "run"}, "name the blocks of site 'run'"),
        ({"tables": 3}, "tables=3: must be Tables, a file, or None"),
        ({"tables": "nowhere.safetensors"}, "no such file"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheQuant(**settings)
