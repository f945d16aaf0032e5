"""The machine code of every kernel."""

from pathlib import Path

from tests.kernels.processes import MARKS, run

pytestmark = MARKS


def test_machine_code_of_kernels(tmp_path: Path) -> None:
    run("compiled", tmp_path, DIFFCACHE_COMPILED="1", TRITON_DEFAULT_FP_FUSION="1")
