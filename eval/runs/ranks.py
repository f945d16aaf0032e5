"""The processes of a run under `accelerate launch`; without it, one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from diffcache.eval.cost.interleave import cores_here

_PATIENCE = timedelta(days=7)  # ranks wait for the slowest, whatever a batch takes


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    index: int = 0  # number of this process, from 0; the first one reports
    count: int = 1  # number of processes
    local: int = 0  # place on its machine
    beside: int = 1  # number of processes on its machine

    @property
    def workers(self) -> int:
        """Threads of this process among the cores of its machine."""
        return max(1, cores_here() // self.beside)

    @property
    def is_first(self) -> bool:
        """Say whether this process reports."""
        return self.index == 0

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def close(self) -> None:
        """Leave the group of processes."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().destroy_process_group()


def join(device: str) -> Ranks:
    """Join the processes that a launcher started, or be alone.

    Batches are dealt out by their number, so that every number of processes draws the same samples; the run's
    folder must be one that all hosts see. On the device `cpu` the processes meet over gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    import torch
    from accelerate import PartialState

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    return Ranks(state.process_index, state.num_processes, state.local_process_index, beside)
