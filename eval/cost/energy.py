"""Energy that an NVIDIA accelerator takes, from NVML."""

from __future__ import annotations

import importlib
import threading
import time
from itertools import pairwise
from typing import Any

import torch

INSTALL = "pip install 'diffcache[energy]'"


class Joules:
    """Measure the energy of what runs inside: `with Joules(device) as energy: ...`.

    The counter of the accelerator is read where it has one (Volta and later). Elsewhere its power
    is read at intervals and integrated by the trapezoidal rule. It is the whole board's energy,
    with that of other processes on it.

    Args:
        device: The accelerator that is measured.
        interval: Seconds between two readings of the power.

    Attributes:
        joules: Energy in joules once the block has ended; None where it cannot be measured.
        reason: Reason why it cannot be measured; empty where it can.

    Raises:
        ValueError: If `interval` is not above 0.
    """

    def __init__(self, device: torch.device | str = "cuda", interval: float = 0.02) -> None:
        if not interval > 0:
            raise ValueError(f"interval={interval}: must be above 0 seconds")
        self.device, self.interval = torch.device(device), interval
        self.joules: float | None = None
        self.reason = ""
        self._nvml: Any = None
        self._handle: Any = None
        self._start: float | None = None
        self._readings: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Joules:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> Joules:
        """Start to measure; where that is not possible `reason` says why."""
        self.joules, self.reason, self._start, self._readings = None, "", None, []
        if self.device.type != "cuda":
            self.reason = f"NVML knows CUDA devices only, not {self.device.type}"
            return self
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.reason = f"pynvml is missing: {INSTALL}"
            return self
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.reason, self._nvml = f"NVML does not start: {error}", None
            return self
        try:
            self._begin()
        except self._nvml.NVMLError as error:
            self.reason = f"NVML tells neither energy nor power of this device: {error}"
            self._close()
        return self

    def stop(self) -> None:
        """Stop and set `joules`; a second time does nothing."""
        if self._nvml is None:
            return
        try:
            self.joules = self._finish()
        except self._nvml.NVMLError as error:
            self.reason = f"NVML stopped telling: {error}"
        finally:
            self._close()

    def _begin(self) -> None:
        self._handle = _handle(self._nvml, self.device)
        try:
            self._start = self._energy()
        except self._nvml.NVMLError:
            self._read()
            self._stop.clear()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def _finish(self) -> float | None:
        if self._start is not None:
            return self._energy() - self._start
        self._halt()
        self._read()
        return integral(self._readings)

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._read()
            except self._nvml.NVMLError:  # the last reading, in the caller's thread, says why
                return

    def _read(self) -> None:
        watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        self._readings.append((time.perf_counter(), watts))

    def _energy(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _close(self) -> None:
        self._halt()
        nvml, self._nvml = self._nvml, None
        nvml.nvmlShutdown()


def integral(readings: list[tuple[float, float]]) -> float:
    """Return the integral of (seconds, watts) by the trapezoidal rule, in joules."""
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in pairwise(readings))


def _handle(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle; it counts all devices, torch only those that it may see."""
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            name = str(uuid)
            return nvml.nvmlDeviceGetHandleByUUID(name if name[:3] == "GPU" else f"GPU-{name}")
    return nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
