"""Agreement of methods with other code: tests assert it, and docs/methods.md shows their findings."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods.md"


class Agrees:
    """Asserts that a method does what other code does, and notes it for the table of the page."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.node = request.node
        self.is_noting = request.config.pluginmanager.has_plugin("compared")

    def __call__(
        self,
        method: str,
        source: str,
        found: Iterable[Tensor] = (),
        expected: Iterable[Tensor] = (),
        limit: float = 0.0,
        steps: Sequence[object] | None = None,
    ) -> None:
        """Assert that numbers and computed steps agree, and that the page says so.

        Args:
            method: Name of the method.
            source: The other code, as the page names it.
            found: Numbers that the method made.
            expected: Numbers that the other code made, of the same shapes.
            limit: Largest difference, as a part of the largest expected number; one digit.
            steps: Steps computed by the method and by the other code; None where the test gives
                one those of the other.
        """
        difference = None
        pairs = list(zip(found, expected, strict=True))
        if pairs:
            worst = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
            scale = torch.stack([b.abs().max() for _, b in pairs]).max()
            difference = float(worst / (scale or 1))
            assert difference <= limit, f"{method}, {source}: {difference} is above {limit}"
        if steps is not None:
            ours, theirs = steps
            assert ours == theirs, f"{method}, {source}: steps {ours}, not {theirs}"
        file = self.node.path.relative_to(ROOT / "tests").as_posix()
        row = (method, source, difference, steps is not None, file)
        self.node.user_properties.append(("agrees", row))
        if not self.is_noting:
            self._check_page(row, limit)

    def _check_page(self, row: tuple[str, str, float | None, bool, str], limit: float) -> None:
        method, source, difference, has_steps, file = row
        begin = re.escape(f"| [`{method}`](#{method}) | {source} |")
        shown = re.search(rf"{begin} (.*?) \| (.*?) \| (.*) \|", PAGE.read_text(encoding="utf-8"))
        way_out = "python -m diffcache.eval.workshop.compared --write"
        assert shown, f"docs/methods.md does not compare {method} with {source}: {way_out}"
        assert difference is None or 0 <= float(shown[1]) <= limit, way_out
        assert (not has_steps or shown[2] == "equal") and file in shown[3], way_out


@pytest.fixture
def agrees(request: pytest.FixtureRequest) -> Agrees:
    return Agrees(request)
