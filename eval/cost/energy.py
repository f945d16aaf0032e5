"""Energy that an NVIDIA accelerator takes, from NVML."""

from __future__ import annotations

import importlib
from typing import Any

import torch

INSTALL = "pip install 'diffcache[energy]'"


class Joules:
    """Measure the energy between `start` and `stop`, by the counter of the accelerator.

    It is the whole board's energy, with that of other processes on it. Volta and later have a
    counter.

    Args:
        device: The accelerator that is measured.

    Attributes:
        joules: Energy in joules after `stop`; None where it cannot be measured.
        reason: Reason why it cannot be measured; empty where it can.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.joules: float | None = None
        self.reason = ""
        self._nvml: Any = None
        self._handle: Any = None
        self._before = 0.0

    def start(self) -> None:
        """Start to measure; where that is not possible `reason` says why."""
        self.joules, self.reason = None, ""
        if self.device.type != "cuda":
            self.reason = f"NVML knows CUDA devices only, not {self.device.type}"
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            self.reason = f"pynvml is missing: {INSTALL}"
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.reason = f"NVML does not start: {error}"
            return
        self._nvml = nvml
        try:
            self._handle = _handle(nvml, self.device)
            self._before = self._counter()
        except nvml.NVMLError as error:
            self.reason = f"NVML does not tell the energy of this device: {error}"
            self._close()

    def stop(self) -> None:
        """Stop and set `joules`; a second time does nothing."""
        if self._nvml is None:
            return
        try:
            self.joules = self._counter() - self._before
        except self._nvml.NVMLError as error:
            self.reason = f"NVML stopped telling: {error}"
        finally:
            self._close()

    def _counter(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def _close(self) -> None:
        nvml, self._nvml = self._nvml, None
        nvml.nvmlShutdown()


def _handle(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle; it counts all devices, torch only those that it may see."""
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            name = str(uuid)
            return nvml.nvmlDeviceGetHandleByUUID(name if name[:3] == "GPU" else f"GPU-{name}")
    return nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
