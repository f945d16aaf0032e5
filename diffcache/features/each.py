"""Methods of their own for the denoisers of one pipeline, such as the two experts of Wan 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from diffcache.errors import AttachError
from diffcache.features.base import Ability, Method


@dataclass(frozen=True)
class Each(Method):
    """Run a method of its own on each denoiser of a pipeline.

    What is asked of it as a whole, such as whether it reuses features, the first answers.

    Args:
        methods: Names of denoisers and their methods, in pairs.

    Raises:
        ValueError: If there is none.

    Examples:
        >>> both = {"transformer": "dbcache:warmup=4", "transformer_2": "dbcache:warmup=2"}
        >>> pipe = diffcache.wrap(pipe, both)  # doctest: +SKIP
    """

    name: ClassVar[str] = "each"

    methods: tuple[tuple[str, Method], ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods=(): name a denoiser and its method")
        entries = dict.fromkeys(method.bibtex for _, method in self.methods if method.bibtex)
        object.__setattr__(self, "bibtex", "\n".join(entries))

    def for_denoiser(self, denoiser: str) -> Method:
        """Return the method of a denoiser; raise AttachError if it has none."""
        for name, method in self.methods:
            if name == denoiser:
                return method
        names = ", ".join(name for name, _ in self.methods)
        raise AttachError(f"no method for {denoiser}: there are some for {names}")

    @property
    def total(self) -> int | None:
        """Length in steps of the runs that the methods are made for; each checks its own."""
        return next((m.total for _, m in self.methods if m.total is not None), None)

    def abilities(self) -> tuple[Ability, ...]:
        """Return those of the first."""
        return self.methods[0][1].abilities()

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: each method checks its own denoiser."""
