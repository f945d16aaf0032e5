"""Memory of a call, in this process and in a fresh one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from diffcache.eval.cost import memory
from diffcache.pipelines.small import flux

MIB = 1 << 20


WATCH = """
import time, torch
from diffcache.eval.cost import memory
now, asked = memory._now, []
def counted():
    asked.append(0)
    return now()
memory._now = counted
for resettable in [True, False] if memory._can_reset() else [False]:
    memory._can_reset = lambda: resettable
    with memory._resident() as most:
        before = most()
        block = torch.ones(64 << 20, dtype=torch.uint8)
        begun = len(asked)
        while not resettable and len(asked) < begun + 2:  # until the sampler has looked
            time.sleep(0.001)
        there = most() - before
        del block
        print(resettable, there, most() - before)
"""


def test_resident_memory_sees_what_is_gone_again():
    # In a process of its own: in this one, garbage of other tests may be freed meanwhile.
    command = [sys.executable, "-c", WATCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ways = [line.split() for line in done.stdout.splitlines()]
    # Where the kernel's mark cannot be reset there is one way alone.
    assert [way for way, _, _ in ways] == ["True", "False"][-len(ways) :] and ways
    for _, *most in ways:
        assert all(60 * MIB < int(count) < 96 * MIB for count in most)  # give or take some pages


def test_memory_of_a_call_in_this_process():
    order = {
        "model": str(flux.DIRECTORY), "method": "taylorseer:every=2,order=1,warmup=1,site=module",
        "call": {"prompt": ["a small red ring"], "num_inference_steps": 3, "seed": 0},
        "device": "cpu", "dtype": "float32", "threads": 1,
    }  # fmt: skip
    found = memory.measure(order)
    assert found > MIB


@pytest.mark.slow
def test_a_fresh_process_does_not_inherit_our_memory():
    big = torch.ones(900 * MIB, dtype=torch.uint8)
    call = {"prompt": ["a small red ring"], "num_inference_steps": 2, "seed": 0}
    found = memory.peak_bytes("shapes-flux", None, call)
    assert MIB < found < big.numel()


def test_a_process_that_failed_is_named(monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="some\nTypeError: no such argument\n", stdout="")
    monkeypatch.setattr(memory.subprocess, "run", lambda *given, **named: failed)
    with pytest.raises(memory.MeasureError, match="shapes-flux failed: TypeError: no such"):
        memory.peak_bytes("shapes-flux", None, {})
