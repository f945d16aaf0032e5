"""Register operators with a Triton kernel and a twin in plain PyTorch, and choose between the two.

An operator is defined once, by `define`: its twin is the specification and its CPU implementation,
its kernel is imported at the first launch. `DIFFCACHE_KERNELS` chooses:

- `auto` (the default): the kernel on CUDA devices where it was measured to be faster than the
  twin, by `diffcache kernels measure` or in `choices.json`; else the twin. On a CPU that is always
  the twin, so that results are reproducible.
- `triton`: the kernel wherever it runs: on CUDA devices, and on a CPU under `TRITON_INTERPRET=1`.
- `torch`: the twin everywhere.

`diffcache kernels measure` keeps what it finds in `kept_file`, which counts as long as `versions`
stay the same; ratios of `choices.json` count with the torch and the Triton they were measured with.
`DIFFCACHE_KERNELS_CHOICES=FILE` adds ratios that were measured elsewhere:
`{device: {operator: ratio}}`, or a file of that command.
`DIFFCACHE_KERNELS_OFF=weighted_sum,lse_merge` takes single kernels out. `DIFFCACHE_CHECK=1`
compares the first launch of every operator, dtype and size with the twin and turns a kernel off
that differs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from diffcache.foreign import constant, is_transforming

NAMESPACE = "diffcache"
BACKENDS = ("auto", "triton", "torch")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHOICES = Path(__file__).with_name("choices.json")
SHIPPED_FOR = ("torch", "triton")  # versions that have to be those of `choices.json`
# Largest norm of the difference from the twin, over the norm of the twin's result, in a check.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
OPERATORS: dict[str, Operator] = {}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads it once, too
# Operator and beginning of an architecture of AMD's -> why plain PyTorch runs there.
REFUSED = {
    ("attn_decode_kivi", "gfx"): "has instructions of NVIDIA's in it",
    ("attn_forward", "gfx11"): "spills registers",
    ("attn_mass", "gfx11"): "spills registers",
    ("attn_int8", "gfx11"): "spills registers",
}
OLDEST = (3, 5)  # version of triton; before, matrices of few columns could not be multiplied

_LIBRARY = library.Library(NAMESPACE, "FRAGMENT")
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Operator:
    """One operator of torch with two implementations.

    Attributes:
        name: Name in `torch.ops.diffcache`.
        twin: Plain PyTorch; takes and returns what the operator does.
        kernel: Where the launch is: a module of `diffcache.kernels.gpu` and a function in it.
        flops: Formula of its operations, see `define`.
        op: The operator, `torch.ops.diffcache.<name>.default`.
        packet: The operator as torch's counter of operations knows it.
        off: Whether a check turned the kernel off.
        checked: Dtypes and sizes that were compared with the twin.
    """

    name: str
    twin: Callable[..., Any]
    kernel: str
    flops: Callable[..., int]
    op: Any = None
    packet: Any = None
    off: bool = False
    checked: set[Any] = field(default_factory=set)

    def takes(self, *tensors: Tensor | None) -> bool:
        """Return whether the kernel should run on these tensors, the first of which counts most.

        Raises:
            RuntimeError: If `DIFFCACHE_KERNELS=triton` asks for a kernel and there is no triton 3.5
                or newer.
        """
        first = tensors[0]
        assert first is not None
        if not (first.is_cuda or INTERPRETED):  # a CPU: the shortest way
            return False
        how = chosen()
        if how == "torch":
            return False
        given = [tensor for tensor in tensors if tensor is not None]
        if any(type(t) is not Tensor or t.device != first.device for t in given):
            return False  # what subclasses do is known to plain operations alone
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return False  # kernels have no gradient
        # ... nor a tangent, and they know nothing of `torch.func.vmap`
        if is_transforming() or any(map(_has_tangent, given)):
            return False
        if first.dtype not in DTYPES or not first.numel() or self.off or self.name in turned_off():
            return False
        if refused(self.name, first.device):
            return False
        if how == "triton":
            _need_triton()
            return True
        return first.is_cuda and ratio(self.name, first.device) > 1 and has_triton()

    def __call__(self, *args: Any) -> Any:
        """Call the operator."""
        return self.op(*args)

    def launch(self, *args: Any) -> Any:
        """Run the kernel; compare it with the twin first where `DIFFCACHE_CHECK=1` asks for it."""
        module, _, name = self.kernel.partition(":")
        run = getattr(kernel_module(module), name)
        if os.environ.get("DIFFCACHE_CHECK") != "1":
            return run(*args)
        key = [(t.dtype, t.numel().bit_length(), t.device) for t in tensors_of(args)]
        if (once := tuple(key)) in self.checked:
            return run(*args)
        self.checked.add(once)
        copies = _copied(args, {})
        expected = self.twin(*copies)
        before = _copied(args, {})
        found = run(*args)
        # A kernel computes in the dtype of its first tensor, whatever that of its results.
        least = TOLERANCE.get(tensors_of(args)[0].dtype, 0.0)
        wrong = difference((found, args), (expected, copies), least)
        if wrong is None:
            return found
        self.off = True
        _LOG.warning(
            "the kernel of %s differs from plain PyTorch (%s) and is turned off; "
            "DIFFCACHE_KERNELS=torch turns all of them off",
            self.name,
            wrong,
        )
        for tensor, old in zip(tensors_of(args), tensors_of(before), strict=True):
            tensor.copy_(old)
        return self.twin(*args)


def define(
    schema: str, twin: Callable[..., Any], fake: Callable[..., Any], kernel: str, flops: Callable[..., int]
) -> Operator:
    """Register an operator.

    Args:
        schema: Signature with a name, in the language of torch's operators.
        twin: Plain PyTorch; the CPU implementation.
        fake: Returns empty results of the right shapes, dtypes and strides.
        kernel: Module of `diffcache.kernels.gpu` and function that launches, `module:function`.
        flops: Operations by shapes, as torch's counter counts those of the twin: a formula takes
            the arguments with shapes in the place of tensors, and `out_shape`.
    """
    operator = Operator(schema.partition("(")[0], twin, kernel, flops)
    _LIBRARY.define(schema)
    _LIBRARY.impl(operator.name, lambda *a: _on_cpu(operator, a), "CPU")
    _LIBRARY.impl(operator.name, lambda *a: _on_cuda(operator, a), "CUDA")
    library.register_fake(f"{NAMESPACE}::{operator.name}", fake, lib=_LIBRARY)
    operator.packet = getattr(getattr(torch.ops, NAMESPACE), operator.name)
    operator.op = operator.packet.default
    OPERATORS[operator.name] = operator
    return operator


def register_flops() -> None:
    """Tell torch's counter the formulas of all operators; importing it imports triton."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for operator in OPERATORS.values():
        if operator.packet not in flop_registry:
            register_flop_formula(operator.packet)(operator.flops)


def no_products(*args: Any, **kwargs: Any) -> int:
    """Return 0: torch counts products of matrices, and there are none."""
    return 0


def nothing(*_: Any) -> None:
    """Return nothing, as operators do that write."""


def _on_cpu(operator: Operator, args: Sequence[Any]) -> Any:
    run = operator.launch if INTERPRETED and chosen() == "triton" else operator.twin
    return run(*args)


def _on_cuda(operator: Operator, args: Sequence[Any]) -> Any:
    first = tensors_of(args)[0]
    off = operator.off or refused(operator.name, first.device)
    if chosen() == "torch" or off or not has_triton():
        return operator.twin(*args)
    with torch.cuda.device_of(first):
        return operator.launch(*args)


def chosen() -> str:
    """Return the backend `DIFFCACHE_KERNELS` asks for, `auto`, `triton` or `torch`, or raise ValueError."""
    found = os.environ.get("DIFFCACHE_KERNELS") or "auto"
    if found not in BACKENDS:
        raise ValueError(f"DIFFCACHE_KERNELS={found!r}: must be one of {', '.join(BACKENDS)}")
    return found


@constant  # a compiler cannot trace what reads files
def ratio(name: str, device: torch.device) -> float:
    """Return how much faster a kernel was measured on this kind of device; 0 if it was not."""
    return float(measured(device_name(device.index or 0)).get(name, 0))


@constant
def refused(name: str, device: torch.device) -> str:
    """Return why the kernel of an operator is not for a device; empty where it is."""
    if device.type != "cuda" or not torch.version.hip:
        return ""
    arch = torch.cuda.get_device_properties(device).gcnArchName
    known = (why for (one, start), why in REFUSED.items() if one == name and arch.startswith(start))
    return next(known, "")


def is_faster(name: str, device: torch.device) -> bool:
    """Return whether something that is no kernel of ours was measured to be faster, and is on."""
    return chosen() != "torch" and name not in turned_off() and ratio(name, device) > 1


@constant
def has_triton() -> bool:
    """Return whether triton is installed, and new enough for every kernel."""
    return _found_triton()


@cache
def _found_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    version: str = importlib.import_module("triton").__version__
    return tuple(map(int, version.split(".")[:2])) >= OLDEST


def difference(found: Any, expected: Any, least: float = 0.0) -> str | None:
    """Return where results differ by more than rounding in their dtype, and than `least`, or None."""
    for number, (one, other) in enumerate(zip(tensors_of(found), tensors_of(expected), strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {number} is {one.dtype} {list(one.shape)}"
        if not one.is_floating_point():
            share = float((one != other).float().mean()) if one.numel() else 0.0
            if share > 1e-4:  # codes of numbers in the middle of two may be either
                return f"{share:.2%} of the numbers of result {number} are others"
            continue
        wide, exact = one.double(), other.double()
        same = (wide == exact) | (wide.isnan() & exact.isnan())  # infinities among them
        error = float((wide - exact).where(~same, 0.0).norm())
        size = float(exact.where(exact.isfinite(), 0.0).norm())
        if not error <= max(TOLERANCE.get(one.dtype, 1e-9), least) * size:
            return f"result {number} is off by {error / size if size else error:.2g}"
    return None


@cache
def measured(device: str) -> dict[str, float]:
    """Return operator -> ratio on a device: of the user's file, the kept one, or the shipped one.

    Where nothing is known a hint is logged, once.
    """
    own = os.environ.get("DIFFCACHE_KERNELS_CHOICES")
    more = json.loads(Path(own).read_text()) if own else {}
    for choices in (more.get("choices", more), kept(device).get("choices", {}), shipped(device)):
        if device in choices:
            found: dict[str, float] = choices[device]
            return found
    if chosen() == "auto" and has_triton():
        _LOG.warning(
            "no kernel was measured on %s with torch %s and triton %s, so plain PyTorch is used: "
            "`diffcache kernels measure` finds in three minutes what is faster; "
            "DIFFCACHE_KERNELS=torch ends this hint",
            device,
            *(versions()[name] for name in SHIPPED_FOR),
        )
    return {}


def shipped(device: str) -> dict[str, dict[str, float]]:
    """Return the ratios shipped for a device; none for another torch or triton.

    The driver of this machine may be another than where it was measured: it makes no kernel, and
    is assumed to change no choice.
    """
    found = json.loads(CHOICES.read_text()).get(device, {})
    here = versions()
    fits = bool(found) and all(found["versions"][name] == here[name] for name in SHIPPED_FOR)
    return {device: found["choices"]} if fits else {}


def kept_file(device: str) -> Path:
    """Return the file of a device's ratios in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "diffcache" / "kernels" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device)}.json"


@cache
def kept(device: str) -> dict[str, Any]:
    """Return the ratios that `kernels measure` kept for a device; none if versions changed."""
    try:
        found: dict[str, Any] = json.loads(kept_file(device).read_text())
    except (OSError, ValueError):
        return {}
    had = found.get("versions", {})
    return found if all(had.get(name) == one for name, one in versions().items()) else {}


@cache
def versions() -> dict[str, str]:
    """Return the versions that times depend on: driver, torch, triton and this library."""
    triton = importlib.import_module("triton").__version__ if has_triton() else ""
    return {
        "driver": _driver(),
        "torch": str(torch.__version__),
        "triton": triton,
        "diffcache": importlib.import_module("diffcache").__version__,
    }


def _driver() -> str:
    """Return the version of NVIDIA's driver, or of ROCm; empty if neither tells it."""
    if rocm := vars(torch.version).get("hip"):
        return str(rocm)
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"\b\d+(\.\d+)+\b", text)
        return found[0] if found else ""
    except OSError:  # Windows' Linux has no such file, but the library
        number = ctypes.c_int(0)
        try:
            ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            return ""
        return str(number.value)


@cache
def device_name(index: int) -> str:
    """Return the name of a CUDA device."""
    return torch.cuda.get_device_name(index)


def turned_off() -> set[str]:
    """Return the operators that `DIFFCACHE_KERNELS_OFF` names."""
    return set(os.environ.get("DIFFCACHE_KERNELS_OFF", "").replace(" ", "").split(","))


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _need_triton() -> None:
    if not has_triton():
        raise RuntimeError(
            "DIFFCACHE_KERNELS=triton: triton 3.5 or newer is not installed; pip install "
            "'diffcache[gpu]', or use DIFFCACHE_KERNELS=auto"
        )


@cache
def kernel_module(name: str) -> Any:
    """Return a module of Triton kernels, imported at the first launch."""
    return importlib.import_module(f"diffcache.kernels.gpu.{name}")


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists and tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_of(item)]
    return []


def _copied(tree: Any, made: dict[Any, Tensor]) -> Any:
    """Return arguments with copies of tensors, one for those that share their memory."""
    if isinstance(tree, Tensor):
        where = tree.data_ptr(), tree.dtype, tree.shape, tree.stride()
        if where not in made:
            made[where] = tree.clone()
        return made[where]
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(item, made) for item in tree)
    return tree


chosen()  # a wrong setting is told at once
