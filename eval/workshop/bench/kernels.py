"""Time of every kernel beside plain PyTorch, torch.compile and rivals, and the limit of the device.

On a CPU sizes are tiny and times say nothing: there the benchmark only shows that every way runs
and is right.
"""

from __future__ import annotations

from typing import Any

import torch

from diffcache.eval.kernels.case import all_cases
from diffcache.eval.kernels.timing import CALLS, ceilings, choices, row
from diffcache.eval.record import Setting

ROUNDS = 30


@torch.no_grad()
def measure(setting: Setting, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure all kernels.

    Args:
        setting: Device; dtypes are those of the rows.
        rounds: Timed turns of each way.
    """
    tiny = setting.device.type == "cpu"
    limits = ceilings(setting.device, tiny)
    rows, cases = [], all_cases()
    for number, case in enumerate(cases):
        if setting.progress is not None:
            setting.progress(number, len(cases), f"{case.operator}, {case.model}")
        rows.append(row(case, setting.device, rounds, limits))
    return {
        "shapes": {"calls": CALLS},
        "rounds": rounds,
        "tiny": tiny,
        "limits": limits,
        "rows": rows,
        "choices": {} if tiny else {torch.cuda.get_device_name(setting.device): choices(rows)},
    }
