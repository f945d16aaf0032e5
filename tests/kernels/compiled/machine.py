"""Compile kernels for GPUs that are not there, and read the machine code.

Triton brings its own assembler and disassembler. The runtime's own path is taken, `warmup`, so
that arguments are specialized as they are at a launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHS = (80, 90, 100)
SHARED = {80: 163, 90: 227, 100: 227}  # KiB that a block may have
WIDE = ("LDG.E.128", "LDGSTS", "UTMALDG")  # loads of 16 bytes, asynchronous ones, whole tiles


class Nowhere:
    """A driver of a device that launches nothing."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps what it compiled by device, not by architecture

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def is_active(self) -> bool:
        return True

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED[self.target.arch] * 1024, "multiprocessor_count": 132,
            "max_num_regs": 65536, "warpSize": 32,
        }  # fmt: skip

    def load_binary(self, *args: Any) -> None:
        raise RuntimeError("there is no GPU")


@dataclass
class Machine:
    """What the machine code of a kernel shows.

    Attributes:
        registers: Of a thread.
        stack: Bytes of a thread that did not fit registers; 0 unless they spill.
        local: Bytes of local memory of a thread.
        shared: KiB of shared memory of a block.
        instructions: Names, one for each instruction.
        loops: Instructions of each loop, longest first.
    """

    registers: int
    stack: int
    local: int
    shared: float
    instructions: list[str]
    loops: list[int]

    def count(self, name: str) -> int:
        """Return how many instructions begin with a name."""
        return sum(instruction.startswith(name) for instruction in self.instructions)


@dataclass
class Launch:
    """One configuration of a kernel that is launched.

    Attributes:
        name: For the id of a test.
        kernel: The kernel.
        args: Its arguments.
        options: Constants and settings of the launch.
        products: Which instruction multiplies matrices, by architecture; none by default.
        loop: Most instructions of the longest loop; None where there is none to guard.
        wide: Whether loads have to be of 16 bytes or asynchronous.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    products: dict[int, str] = field(default_factory=dict)
    loop: int | None = None
    wide: bool = True


def machine(kernel: Any, arch: int, *args: Any, **options: Any) -> Machine:
    """Compile a kernel and read its machine code.

    Args:
        kernel: Function that Triton compiles.
        arch: 80, 90 or 100.
        args: As at a launch, `MockTensor(dtype)` in the place of tensors.
        options: As at a launch.
    """
    driver.set_active(Nowhere(arch))
    kernel.device_caches.clear()  # they know the device by its number, which stays the same
    made = kernel.warmup(*args, grid=(1,), **options)
    assert made.metadata.target.arch == arch
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True,
                           check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", used)
    assert found is not None, used
    lines = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)
    ]
    loops = []
    for at, text in lines:
        jump = re.search(r"\bBRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            loops.append(sum(int(jump[1], 16) <= place <= at for place, _ in lines))
    names = [re.sub(r"^@!?\S+\s+", "", text).split()[0] for _, text in lines]
    registers, stack, local = map(int, found.groups())
    return Machine(registers, stack, local, made.metadata.shared / 1024, names,
                   sorted(loops, reverse=True))  # fmt: skip
