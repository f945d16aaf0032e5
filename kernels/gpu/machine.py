"""Compile kernels for GPUs that are not there, and read the machine code.

Triton brings its own assemblers, for NVIDIA's and AMD's, and NVIDIA's disassembler. The runtime's
own path is taken, a launch or `warmup`, so that arguments are specialized as they are at a launch.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

VERSION: str = triton.__version__
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# KiB that a block may have, from NVIDIA's table of compute capabilities, and AMD's of its chips.
SHARED: dict[int | str, int] = {
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    "gfx942": 64,
    "gfx1100": 64,
}
THREADS = 1024  # most of a block


class Nowhere:
    """A driver of a device that runs nothing and reads the machine code that it is given.

    Attributes:
        launched: Registers, spills and shared memory of the launches so far.
    """

    def __init__(self, arch: int | str) -> None:
        own = isinstance(arch, int)
        wide = 64 if str(arch).startswith("gfx9") else 32
        self.target = GPUTarget("cuda" if own else "hip", arch, wide)
        self.utils = self
        self.launched: list[Machine] = []
        # Of a launch: three sizes of the grid, the stream, what `load_binary` returned, and more.
        self.launcher_cls = lambda source, metadata: lambda *launch: self.launched.append(launch[4])

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compiler."""
        return self.target

    def get_current_device(self) -> int:
        """Return a number of its own for each architecture: Triton keeps kernels by device."""
        return int(str(self.target.arch).removeprefix("gfx"))

    def set_current_device(self, device: int) -> None:
        """Do nothing."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default stream."""
        return 0

    def is_active(self) -> bool:
        """Return True."""
        return True

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the limits of a launch."""
        return {
            "max_shared_mem": SHARED[self.target.arch] * 1024,
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return a module, a function, registers, spills and most threads; the function is read."""
        if self.target.backend == "hip":  # its facts are in its text
            return None, None, 0, 0, THREADS
        found = needs(code, shared)
        return None, found, found.registers, 0, THREADS


@dataclass
class Machine:
    """Facts of the machine code of a kernel.

    Attributes:
        registers: Of a thread.
        stack: Bytes of a thread that did not fit registers; 0 unless they spill.
        local: Bytes of local memory of a thread.
        shared: KiB of shared memory of a block.
        instructions: Names, one for each instruction.
        spans: First and last instruction of each loop.
        text: PTX, the assembler's source; empty where only the machine code was given.
    """

    registers: int
    stack: int
    local: int
    shared: float
    instructions: list[str] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""

    @property
    def loops(self) -> list[int]:
        """Instructions of each loop, longest first."""
        return sorted((last - first + 1 for first, last in self.spans), reverse=True)

    def count(self, name: str) -> int:
        """Return how many instructions begin with a name."""
        return sum(instruction.startswith(name) for instruction in self.instructions)


def compiled(kernel: Any, arch: int, *args: Any, **options: Any) -> Any:
    """Compile a kernel and return what Triton made of it, for `read`.

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
    return made


def launched(run: Callable[[], Any], arch: int | str) -> list[Machine]:
    """Compile the kernels that a function launches, without running them, and read their needs.

    Args:
        run: Launches kernels; its tensors may be without memory, on the device `meta`.
        arch: One of `SHARED`.

    Raises:
        triton.runtime.errors.OutOfResources: If a kernel needs more shared memory than a block has.
        Exception: Whatever the compiler raises.
    """
    device = _nowhere(arch)
    device.launched.clear()
    driver.set_active(device)
    try:
        run()
    finally:
        if torch.cuda.is_available():
            driver.reset_active()
    return list(device.launched)


@contextmanager
def noted() -> Iterator[list[Any]]:
    """Yield a list to which every launch is added: name, compiled kernel, grid, whole numbers."""
    found: list[Any] = []
    usual = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = usual(kernel, *args, grid=grid, warmup=warmup, **options)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        numbers = {name: n for name, n in given.items() if type(n) is int}
        found.append((kernel.__name__, made, tuple(grid), numbers))
        return made

    with mock.patch.object(JITFunction, "run", run):
        yield found


@cache
def _nowhere(arch: int | str) -> Nowhere:
    """Return the one driver of an architecture: kernels keep the driver of their first launch."""
    return Nowhere(arch)


def read(made: Sequence[Any], arch: int) -> list[Machine]:
    """Read the machine code of compiled kernels, all of one architecture of NVIDIA's.

    The disassembler takes most of a second to begin: kernels that are read together begin it once.
    """
    codes = [sections(one.asm["cubin"]) for one in made]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        target = f"SM{arch}" + "a" * (arch >= 90)  # with the instructions that later ones do not have
        tool = TOOLS / "nvdisasm", "--binary", target, file.name
        code = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)]
    places = [at for at, _ in lines]
    found, begin = [], 0
    for one, own in zip(made, codes, strict=True):
        names, spans = parsed(lines[bisect_left(places, begin) : bisect_left(places, begin + len(own))])
        whole = needs(one.asm["cubin"], one.metadata.shared)
        found.append(replace(whole, instructions=names, spans=spans, text=one.asm["ptx"]))
        begin += len(own)
    return found


def sections(cubin: bytes) -> bytes:
    """Return the code of a file of machine code, which is an ELF file of 64 bits: its sections `.text`."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    strings = headers[names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text", strings + name)
    )


def parsed(lines: list[tuple[int, str]]) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the names of instructions, and first and last instruction of each loop; `lines`: places and texts."""
    numbers = {at: number for number, (at, _) in enumerate(lines)}
    spans = []
    for number, (at, text) in enumerate(lines):
        jump = re.search(r"\bBRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            spans.append((numbers[int(jump[1], 16)], number))
    return [re.sub(r"^@!?\S+\s+", "", text).split()[0] for _, text in lines], spans


def needs(cubin: bytes, shared: int) -> Machine:
    """Read what machine code needs of registers and memory, without its instructions.

    Args:
        cubin: What the assembler wrote.
        shared: Bytes of shared memory of a block.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = TOOLS / "cuobjdump", "--dump-resource-usage", file.name
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", used)
    assert found is not None, used
    registers, stack, local = map(int, found.groups())
    return Machine(registers, stack, local, shared / 1024)


def read_amd(text: str, shared: int) -> Machine:
    """Read the assembler's source of a kernel for an AMD GPU, with `shared` bytes of local data share."""

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

    body = text[: text.index(".amdhsa_kernel")]
    names: list[str] = []
    labels: dict[str, int] = {}
    spans = []
    for line in re.findall(r"^(?:\t[a-z].*|\.\w+:)", body, re.MULTILINE):
        words = line.replace(":", " ").split()
        if line.startswith("."):
            labels[words[0]] = len(names)
            continue
        if words[0].startswith(("s_cbranch", "s_branch")) and words[1] in labels:
            spans.append((labels[words[1]], len(names)))
        names.append(words[0])
    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    local = number("private_segment_fixed_size")
    return Machine(number("vgpr_count"), spilled, local, shared / 1024, names, spans)
