"""Triton's interpreter and its compiler run in processes of their own: they exclude one another."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = [name for name in ("triton", "ml_dtypes") if importlib.util.find_spec(name) is None]
MISSING = pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}: pip install '.[gpu,dev]'")
MARKS = [MISSING, pytest.mark.timeout(900)]


def run(folder: str, cache: Path, **settings: str) -> None:
    """Run the tests of a folder; what they print is shown if one fails."""
    env = os.environ | settings | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(HERE.parents[1]), "TRITON_CACHE_DIR": str(cache)}
    env.pop("PYTEST_XDIST_WORKER", None)
    # The mark of the test that waits for it is its limit.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=0", HERE / folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
