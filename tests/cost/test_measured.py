"""Times in turn and memory of calls, against clocks and processes that are set."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from diffcache.eval.cost import interleave, peak_memory
from diffcache.eval.record import Setting
from tests import shipped as flux

CPU = Setting(torch.device("cpu"))


class Clock:
    """A clock that stands still unless it is set on."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu

    def takes(self, wall, cpu=0.0):
        self.wall += wall
        self.cpu += cpu


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleave, "time", clock)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5), raising=False)
    return clock


def test_contenders_take_turns_and_ratios_are_those_of_a_round(clock):
    order, slow = [], iter([9.0, 1.0, 2.0, 10.0, 4.0])  # the machine, round by round
    now = {"round": 0, "pace": 0.0}

    def contender(name, share):
        def run():
            if len(order) % 2 == 0:
                now["pace"] = next(slow)
            order.append(name)
            clock.takes(share * now["pace"], cpu=share)

        return run

    seen = []
    timings = interleave.measure(
        {"one": contender("one", 1.0), "half": contender("half", 0.5)},
        rounds=4,
        warmup=1,
        setting=replace(CPU, progress=lambda *given: seen.append(given)),
    )
    assert order == ["one", "half", "half", "one"] * 2 + ["one", "half"]
    assert timings.seconds == {"one": [1.0, 2.0, 10.0, 4.0], "half": [0.5, 1.0, 5.0, 2.0]}
    assert timings.ratios() == {"one": [1.0] * 4, "half": [2.0] * 4}
    rows = timings.rows(samples_per_call=6)
    assert rows["one"]["seconds"] == {"median": 3.0, "q1": 1.75, "q3": 5.5, "n": 4}
    assert rows["half"]["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 4}
    assert rows["half"]["cpu_seconds"]["median"] == 0.5
    assert rows["half"]["cpu_ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 4}
    assert rows["half"]["throughput"] == 6 / 1.5
    assert seen[0] == (0, 10, "one") and seen[-1] == (10, 10, "")
    assert timings.warning is None


def test_what_surrounds_a_turn_is_not_timed(clock):
    log = []

    class Within:
        def __enter__(self):
            log.append("in")
            clock.takes(100)

        def __exit__(self, *exception):
            log.append("out")
            clock.takes(100)

    def readings():
        log.append("read")
        return {"none": None, "denoiser_seconds": 3.0}

    turn = interleave.Turn(lambda: clock.takes(4), Within, lambda: clock.takes(50), readings)
    timings = interleave.measure({"a": turn, "b": lambda: clock.takes(8)}, 3, 0, CPU)
    assert timings.seconds == {"a": [4.0] * 3, "b": [8.0] * 3} and log == ["in", "read", "out"] * 3
    assert timings.readings == {"a": {"denoiser_seconds": [3.0] * 3}, "b": {}}
    row = timings.rows()["a"]
    assert row["denoiser_seconds"]["median"] == 3.0
    assert "cpu_ratio" not in row and "denoiser_ratio" not in row  # 0 s, and not in every row
    with pytest.raises(ValueError, match="reading='denoiser_seconds': not every contender"):
        timings.ratios("denoiser_seconds")


def test_short_calls_are_timed_in_a_row(clock):
    log = []
    turn = interleave.Turn(
        lambda: log.append("call") or clock.takes(2, 1),
        prepare=lambda: clock.takes(9, 9),
        after=lambda: log.append("after") or clock.takes(7, 7),
        calls=2,
    )
    timings = interleave.measure({"a": turn}, 2, 1, CPU)
    assert timings.seconds == {"a": [2.0] * 4} and timings.cpu_seconds == {"a": [1.0] * 4}
    assert log == ["call", "after"] * 6


def test_a_busy_machine_is_told(clock, monkeypatch):
    monkeypatch.setattr(interleave, "cores_here", lambda: 2)
    loads = iter([1.0, 3.5, 1.0])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0, 0), raising=False)
    timings = interleave.measure({"a": lambda: clock.takes(1)}, 2, 0, CPU)
    assert timings.load == 3.5 and "3.5 on 2 cores" in timings.warning


MIB = 1 << 20


WATCH = """
import time, torch
from diffcache.eval.cost import peak_memory
now, asked = peak_memory._now, []
def counted():
    asked.append(0)
    return now()
peak_memory._now = counted
for resettable in [True, False] if peak_memory._can_reset() else [False]:
    peak_memory._can_reset = lambda: resettable
    with peak_memory._resident() as most:
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
        "model": str(flux.DIRECTORY),
        "method": "taylorseer:every=2,order=1,warmup=1,site=module",
        "call": {"prompt": ["a small red ring"], "num_inference_steps": 3, "seed": 0},
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
    }
    found = peak_memory.measure(order)
    assert found > MIB


@pytest.mark.slow
def test_a_fresh_process_does_not_inherit_our_memory():
    big = torch.ones(900 * MIB, dtype=torch.uint8)
    call = {"prompt": ["a small red ring"], "num_inference_steps": 2, "seed": 0}
    found = peak_memory.peak_bytes("sticker-flux", None, call)
    assert MIB < found < big.numel()


def test_no_speed_above_what_operations_allow_goes_without_a_word():
    def row(q3, cpu=1.0):
        return {"ratio": {"median": 1.0, "q3": q3}, "cpu_ratio": {"median": 1.0, "q3": cpu}}

    rows = {"uncached": row(1.0), "fitted": row(4.94, 4.5), "unknown": row(9.0), "slow": row(0.9)}
    allowed = {"uncached": 0.999, "fitted": 4.63, "unknown": None, "slow": 2.0}
    (warning,) = interleave.too_fast(rows, allowed)
    assert warning == (
        "upper quartiles above what operations allow, timing noise, or work that FLOPs do not count, "
        "of fitted (speed 4.94; allowed 4.63)"
    )
    (warning,) = interleave.too_fast({"slow": row(2.2, 2.5), "fitted": row(4.94)}, allowed)
    assert warning.endswith("of slow (speed 2.20, CPU ratio 2.50; allowed 2.00); fitted (speed 4.94; allowed 4.63)")
