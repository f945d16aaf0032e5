"""The folder of the node, imported as ComfyUI imports it: by its path, under a name of its own."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "pipelines" / "comfyui"


def load() -> Any:
    """Return the package that ComfyUI would see."""
    name = "custom_nodes_diffcache"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
