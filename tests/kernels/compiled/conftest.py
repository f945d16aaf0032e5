"""Compile kernels for GPUs, in a process of its own: see processes.py."""

import os

collect_ignore_glob = [] if os.environ.get("DIFFCACHE_COMPILED") == "1" else ["test_*.py"]
