"""The machine code of every kernel: nothing spills, shared memory fits, loads are wide."""

from __future__ import annotations

import re

import pytest

from diffcache.kernels.gpu.machine import ARCHS, SHARED, machine
from tests.kernels.compiled.launches import LAUNCHES, Launch

WIDE = ("LDG.E.128", "LDGSTS", "UTMALDG")  # loads of 16 bytes, asynchronous ones, whole tiles
# Instructions of the longest loop on sm_90, with Triton 3.9, of every launch that has one.
LOOPS = {
    "attn_decode_kivi-4-128-128-torch.bfloat16": 1069, "attn_decode_kivi-8-32-128-torch.bfloat16": 927,
    "attn_decode_kivi-4-64-256-torch.float16": 905, "attn_decode_kivi-2-32-128-torch.float32": 1096,
    "attn_decode-torch.bfloat16-128-1-False": 364, "attn_decode-torch.bfloat16-128-16-True": 762,
    "attn_decode-torch.float32-128-1-True": 948, "attn_decode-torch.bfloat16-256-1-False": 361,
    "attn_lse-torch.bfloat16-128-1-False": 430, "attn_mass-torch.bfloat16-128-1-False": 349,
    "attn_lse-torch.bfloat16-128-4-True": 498, "attn_mass-torch.bfloat16-128-4-True": 602,
    "attn_lse-torch.bfloat16-256-2-True": 392, "attn_mass-torch.bfloat16-256-2-True": 495,
    "attn_lse-torch.float32-128-4-True": 776, "attn_mass-torch.float32-128-4-True": 834,
    "l1_sums-bfloat16": 131, "l1_sums-float32": 116,
    "linear_of_codes-4608": 110, "linear_of_codes-64": 152, "linear_of_codes-16": 127,
    "rotate-half": 91, "rotate-interleaved": 88, "rotate-some channels": 115,
}  # fmt: skip
LONGER = 1.15  # by which another version of the compiler may differ
FIRST = {launch.kernel: launch for launch in reversed(LAUNCHES)}  # of each kernel
# All of them for one architecture; for the others a kernel once, where it multiplies matrices or
# the architecture has the least room.
BUILT = [
    (arch, launch)
    for launch in LAUNCHES
    for arch in ARCHS
    if arch == 90 or (launch in FIRST.values() and (arch == min(ARCHS) or launch.products))
]


@pytest.mark.parametrize(("arch", "launch"), BUILT, ids=lambda each: getattr(each, "name", each))
def test_machine_code(arch: int, launch: Launch) -> None:
    found = machine(launch.kernel, arch, *launch.args, **launch.options)
    assert (found.stack, found.local) == (0, 0)
    assert found.shared <= SHARED[arch]
    if launch.wide:
        assert any(found.count(name) for name in WIDE), sorted(set(found.instructions))
    if arch in launch.products:
        assert found.count(launch.products[arch])
    assert re.search(launch.text, found.text)
    if arch == 90:
        longest = max(found.loops, default=0)
        assert longest <= LONGER * LOOPS.get(launch.name, 0)
