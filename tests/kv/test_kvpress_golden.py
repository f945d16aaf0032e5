"""The numbers of kvpress that our scores are held to: where they are from, and that they still hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.eval.kv.peer import installed
from tests.kv.kvpress_oracle import ALL as PRESSES
from tests.kv.kvpress_presses import GOLDEN, golden


def stored(name: str) -> Tensor:
    tensors, _ = golden()
    return tensors[name]


def test_the_file_is_small_and_says_where_its_numbers_come_from() -> None:
    about = golden()[1]
    assert GOLDEN.stat().st_size <= 300_000
    assert "NVIDIA" in about["attribution"] and "Apache-2.0" in about["attribution"]
    assert about["licence"] == "Apache-2.0" and about["kvpress"] == "0.5.5"
    assert about["presses"].keys() == PRESSES.keys()
    for name, spec in PRESSES.items():
        found = about["presses"][name]
        assert (found["class"], found["base"]) == (spec.cls, spec.base)
        assert name == "duo" or found["settings"] == spec.settings


@pytest.mark.skipif(installed() is None, reason="kvpress is not installed")
def test_kvpress_still_says_the_same() -> None:
    from tests.kv.make_kvpress_golden import make

    tensors, _ = make()
    assert tensors.keys() == golden()[0].keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, stored(name), rtol=1e-4, atol=1e-6, msg=name)
