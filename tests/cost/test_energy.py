"""Energy of a run, against a board that takes a known power."""

import sys
import time
from types import SimpleNamespace

import pytest

from diffcache.eval.cost import energy


class FakeNvml(SimpleNamespace):
    """An NVML whose board takes 50 W, with a counter of energy or without."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_energy=True, has_power=True, starts=True):
        super().__init__(energy=1000.0, open=0, has_energy=has_energy, has_power=has_power)
        self.starts = starts

    def nvmlInit(self):  # noqa: N802
        if not self.starts:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex  # noqa: N815

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        if not self.has_energy:
            raise self.NVMLError("not supported")
        return self.energy

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        if not self.has_power:
            raise self.NVMLError("not supported")
        return 50_000


def test_energy_of_the_counter(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with energy.Joules("cuda") as used:
        nvml.energy += 2500.0  # millijoules
    assert used.joules == 2.5 and used.reason == "" and nvml.open == 0
    with used:
        nvml.energy += 500.0
    assert used.joules == 0.5


def test_energy_of_sampled_power(monkeypatch):
    nvml = FakeNvml(has_energy=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    start = time.perf_counter()
    with energy.Joules("cuda:0", interval=0.001) as used:
        time.sleep(0.02)
    elapsed = time.perf_counter() - start
    assert 50 * 0.02 <= used.joules <= 50 * elapsed and nvml.open == 0
    assert energy.integral([(0.0, 10.0), (2.0, 30.0), (3.0, 30.0)]) == 40 + 30
    assert energy.integral([(0.0, 10.0)]) == 0


@pytest.mark.parametrize(
    ("device", "nvml", "reason"),
    [
        ("cpu", FakeNvml(), "CUDA devices only, not cpu"),
        ("cuda", None, "pynvml is missing: pip install"),
        ("cuda", FakeNvml(starts=False), "driver not loaded"),
        ("cuda", FakeNvml(has_energy=False, has_power=False), "neither energy nor power"),
    ],
)
def test_no_energy_and_why(monkeypatch, device, nvml, reason):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with energy.Joules(device) as used:
        pass
    assert used.joules is None and reason in used.reason
    assert nvml is None or nvml.open == 0
    with pytest.raises(ValueError, match="interval=0"):
        energy.Joules("cuda", interval=0)
