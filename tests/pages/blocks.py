"""The fenced blocks of the project's pages."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Page, relative to the project.
        line: Line of the page that the block's text begins on.
        language: Word behind the fence.
        text: Text without the indentation of the fence.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Commands of a block of shell, without comments and prompts."""
        joined = self.text.replace("\\\n", " ")
        lines = [shlex.split(line.removeprefix("$ "), comments=True) for line in joined.split("\n")]
        return [shlex.join(words) for words in lines if words]


@cache
def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start(3)].count("\n") + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]
