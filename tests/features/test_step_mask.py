"""Step masks: those that cache-dit publishes, and the gate inside."""

import math

import pytest
import torch

from diffcache.features.step_mask import LEVELS, StepMask, mask_of
from tests.internals import computed_steps

SHOWN = {  # as cache-dit 1.5 prints them
    ("slow", 28): "1111111101110011100110010001",
    ("medium", 28): "1111110110001100011000110001",
    ("fast", 28): "1111110100010000100000100001",
    ("ultra", 28): "1111001000001000000100000001",
    ("medium", 8): "11110101",
    ("ultra", 9): "111001001",
    ("fast", 4): "1101",
    ("slow", 6): "111001",
}


def shown(mask):
    return "".join(map(str, map(int, mask)))


@pytest.mark.parametrize(("level", "total"), SHOWN)
def test_masks_are_those_published(level, total):
    assert shown(mask_of(level, total)) == SHOWN[level, total]


def test_peer_masks_of_every_length(agrees):
    steps_mask = pytest.importorskip("cache_dit").steps_mask
    lengths = [(total, level) for total in (4, 6, *range(8, 121)) for level in LEVELS]
    ours = [shown(mask_of(level, total)) for total, level in lengths]
    theirs = [shown(steps_mask(total_steps=total, mask_policy=level)) for total, level in lengths]
    agrees("step-mask", "cache-dit, run", steps=(ours, theirs))


def test_the_gate_has_a_say_in_what_the_mask_leaves_out_only():
    total = 28
    probes = [torch.tensor([2 + math.sin(s / 2), 1 + s / 10]) for s in range(total)]
    masked = [s for s, c in enumerate(mask_of("ultra", total)) if c]
    expected, kept = [], None
    for index, probe in enumerate(probes):
        changed = kept is None or (probe - kept).abs().sum() / kept.abs().sum() >= 0.3
        if index in masked or changed:
            expected.append(index)
            kept = probe
    assert computed_steps(StepMask("ultra", threshold=0.3), total, probes) == expected
    assert len(masked) < len(expected) < total
    assert computed_steps(StepMask("ultra", dynamic=False), total) == masked
