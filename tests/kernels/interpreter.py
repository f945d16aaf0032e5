"""Make Triton's CPU interpreter compute bfloat16 and 8-bit floats as a GPU does.

Triton 3.6 to 3.9 interpret bfloat16 by its raw 16 bits: sums, comparisons and products of matrices
are wrong, and rounding truncates. Values of these dtypes are numbers of `ml_dtypes` here. `install`
comes after `TRITON_INTERPRET=1` is set and before the first launch.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

SMALL = {tl.bfloat16: np.dtype(ml_dtypes.bfloat16), tl.float8e5: np.dtype(ml_dtypes.float8_e5m2)}
SMALL[tl.float8e4nv] = np.dtype(ml_dtypes.float8_e4m3fn)
BITS = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in SMALL.values()}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}  # beyond these a cast saturates
Handle = interpreter.TensorHandle
known_dtype = interpreter._get_np_dtype
known_names: dict[str, np.dtype] = {}


def numpy_dtype(kind: Any) -> np.dtype:
    """Return the numpy dtype of values of a Triton type."""
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if element.name not in known_names:
        small = not isinstance(element, tl.pointer_type) and element in SMALL
        known_names[element.name] = SMALL[element] if small else known_dtype(kind)
    return known_names[element.name]


def cast(self: Any, source: Handle, kind: Any, *_: Any) -> Handle:
    """Cast with rounding to the nearest."""
    target, values = kind.scalar, source.data
    if source.dtype.scalar in SMALL or target in SMALL:
        values = values.astype(np.float32)
    if target in LARGEST:
        clipped = np.clip(values, -LARGEST[target], LARGEST[target])
        values = np.where(np.isnan(values), values, clipped)
    return Handle(values.astype(numpy_dtype(target)), target)


def dot(self: Any, left: Handle, right: Handle, start: Handle, *_: Any) -> Handle:
    """Multiply matrices in float64, as every CPU does it alike, and round once."""
    wide = start.data.dtype
    found = np.matmul(left.data.astype(np.float64), right.data.astype(np.float64))
    return Handle(found.astype(wide) + start.data, start.dtype.scalar)


def bits(values: np.ndarray) -> np.ndarray:
    """Return values as the bits that are in memory."""
    return values.view(BITS[values.dtype]) if values.dtype in BITS else values


def load(self: Any, places: Handle, mask: Handle, other: Handle | None, *_: Any, **__: Any) -> Handle:
    """Read memory as bits, then see them as values."""
    element = places.get_element_ty()
    dtype = numpy_dtype(element)
    raw = BITS.get(dtype, dtype)
    rest = np.zeros(places.data.shape, raw)
    if other is not None:
        rest = bits(np.ascontiguousarray(other.data))
    found = interpreter._interpreter.load(places.data, mask.data, rest, raw)
    return Handle(found.view(dtype), element)


def store(self: Any, places: Handle, value: Handle, mask: Handle, *_: Any, **__: Any) -> Any:
    """Write values as bits."""
    given = bits(np.ascontiguousarray(value.data))
    return interpreter._interpreter.store(places.data, given, mask.data)


def patch_once() -> None:
    """Leave the language as the interpreter has it, which else patches it at every call of a function in a kernel."""
    patch, done = interpreter._patch_lang, set[int]()  # names of modules: dictionaries that stay where they are

    def patched(fn: Any) -> Any:
        if id(fn.__globals__) not in done:
            done.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched


def install() -> None:
    """Put these functions in the place of the interpreter's."""
    patch_once()
    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = builder.create_fp_to_fp = cast
    builder.create_dot = dot
    builder.create_masked_load, builder.create_masked_store = load, store
    if not hasattr(builder, "get_bf16"):  # 3.6 and 3.7
        builder.get_bf16 = lambda self, value: Handle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)
    patch = interpreter._patch_lang_tensor
    if "squeeze" in inspect.getsource(patch):
        return

    def patched(tensor: Any, *scope: Any) -> Any:  # numpy 2.4: int() of an array of one raises
        found = patch(tensor, *scope)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        return found

    interpreter._patch_lang_tensor = patched
