"""One launch of the tests of machine code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDE = ("LDG.E.128", "LDGSTS", "UTMALDG")  # loads of 16 bytes, asynchronous ones, whole tiles


@dataclass
class Launch:
    """One configuration of a kernel that is launched.

    Attributes:
        name: For the id of a test.
        kernel: The kernel.
        args: Its arguments.
        options: Constants and settings of the launch.
        products: Which instruction multiplies matrices, by architecture; none by default.
        wide: Whether loads have to be of 16 bytes or asynchronous.
        text: Pattern of what has to stand in the PTX.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    products: dict[int, str] = field(default_factory=dict)
    wide: bool = True
    text: str = ""
