"""CacheQuant refuses settings out of range, and tables that were made for something else."""

from __future__ import annotations

import dataclasses

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
