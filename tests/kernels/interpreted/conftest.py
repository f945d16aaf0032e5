"""Run kernels in Triton's interpreter, in a process of its own: see processes.py."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
if not collect_ignore_glob:
    from tests.kernels import interpreter

    interpreter.install()
