"""Keep the run of one thread or task in its context."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

from diffcache.attach.run import Run


class Place:
    """Stands for a run in the context of a thread or task; the handle, not the context, owns it.

    So a run ends with whichever goes first, and no context keeps a model alive.
    """

    __slots__ = ("__weakref__", "run", "task", "thread")

    def __init__(self, run: Run) -> None:
        self.run = weakref.ref(run)
        self.thread, self.task = threading.get_ident(), _task()

    @property
    def is_here(self) -> bool:
        """Return whether this very thread and task started the run."""
        return self.thread == threading.get_ident() and self.task == _task()


def _task() -> Any:
    """Return a weak reference to the task that is running, None outside of tasks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
    return None if task is None else weakref.ref(task)
