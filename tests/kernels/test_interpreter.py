"""Every kernel in Triton's interpreter."""

from pathlib import Path

from tests.kernels.processes import MARKS, run

pytestmark = MARKS


def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    run("interpreted", tmp_path, TRITON_INTERPRET="1", DIFFCACHE_KERNELS="triton")
