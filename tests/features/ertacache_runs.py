"""Euler's method in a loop, and the collector of ERTACache driven as calibration does."""

import torch

from diffcache.features.collect import RunInfo
from diffcache.features.ertacache import ERTACache
from diffcache.features.tables import Tables
from diffcache.offline.ertacache_collect import Profile
from diffcache.step import Step

STEPS = 10


def made(collector, steps=STEPS, **settings):
    header = {"method": "ertacache", "steps": steps, **collector.settings()}
    return ERTACache(tables=Tables(header, collector.tables()), **settings)


def sigmas(steps=STEPS, dtype=torch.float64):
    return torch.linspace(1, 0, steps + 1, dtype=dtype) ** 1.3


def loop(field, start, times, stand_in=None):
    """Sample with Euler's method; `stand_in(index, x, v)` may replace the output."""
    x, seen = start.clone(), []
    for index in range(len(times) - 1):
        v = field(x, float(times[index]))
        out = v if stand_in is None else stand_in(index, x, v)
        seen.append(out)
        x = x + (times[index + 1] - times[index]) * out
    return x, seen


def profile(field, starts, threshold, times=None, branches=1, stop=None):
    """Drive the collector as calibration does; `stop` ends after so many runs."""
    times = sigmas() if times is None else times
    steps, collector, runs = len(times) - 1, Profile(threshold), 0
    for number in range(collector.passes):
        for prompt, start in enumerate(starts):
            if stop is not None and runs == stop:
                return collector
            run_once(collector, field, start, times, number, prompt, branches)
            runs += 1
    assert steps == collector.total
    return collector


def run_once(collector, field, start, times, number, prompt, branches=1):
    steps = len(times) - 1
    collector.begin(RunInfo(number, prompt, times[:-1] * 1000, times, steps))

    def stand_in(index, x, v):
        outs = []
        for branch in range(branches):
            step = Step(index, total=steps, branch=branch)
            value = v if branch == 0 else v * (1 + branch)
            out = collector.output(step, x, value)
            outs.append(value if out is None else out)
        return outs[0]

    loop(field, start, times, stand_in)
    collector.end()


def curved(x, t):
    return torch.sin(3 * x + t) + x * t
