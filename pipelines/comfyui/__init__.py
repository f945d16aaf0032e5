"""Nodes of ComfyUI that cache a model; ComfyUI imports this folder from its `custom_nodes`."""

from .nodes import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS  # noqa: TID252
from .nodes import NODE_DISPLAY_NAME_MAPPINGS as NODE_DISPLAY_NAME_MAPPINGS  # noqa: TID252
