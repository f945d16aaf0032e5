"""The machine code of every kernel: nothing spills, shared memory fits, loads are wide."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from diffcache.kernels.gpu.machine import ARCHS, SHARED, machine
from tests.kernels.compiled.machine import WIDE, Launch

FILES = sorted(Path(__file__).parent.glob("*_launches.py"))
LAUNCHES = [
    launch
    for file in FILES
    for launch in importlib.import_module(f"tests.kernels.compiled.{file.stem}").launches()
]


FIRST = {launch.kernel: launch for launch in reversed(LAUNCHES)}  # of each kernel
BUILT = [(a, launch) for launch in LAUNCHES for a in ARCHS if a == 90 or launch in FIRST.values()]


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
    if launch.loop is not None:
        assert found.loops[0] <= launch.loop
