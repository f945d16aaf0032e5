"""The numbers of kvpress that our scores are held to: where they are from, and that they still hold."""

import pytest
import torch

from diffcache.eval.kv.peer import installed
from tests.kv.kvpress_golden import ABOUT, GOLDEN, golden, make


def test_the_file_is_small_and_says_where_its_numbers_come_from() -> None:
    about = golden()[1]
    assert GOLDEN.stat().st_size <= 300_000
    assert "NVIDIA" in about["attribution"] and "Apache-2.0" in about["attribution"]
    assert about["licence"] == "Apache-2.0" and about["kvpress"] == "0.5.5"
    assert about["presses"] == ABOUT


@pytest.mark.skipif(installed() is None, reason="kvpress is not installed")
def test_kvpress_still_says_the_same() -> None:
    tensors, stored = make()[0], golden()[0]
    assert tensors.keys() == stored.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, stored[name], rtol=1e-4, atol=1e-6, msg=name)
