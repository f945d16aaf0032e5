"""Show the progress of a decoding: settled tokens as they come, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from diffcache.dllm.decode import Decoding

OnSettled = Callable[[int, "list[int] | str"], None]


class Streamer:
    """Calls a function with the tokens that settle: those before the first mask of an answer.

    Args:
        on_settled: Called with the number of a prompt and its newly settled tokens, or their text;
            None for nobody.
        text: Makes text of tokens; None for tokens.
    """

    def __init__(self, on_settled: OnSettled | None, text: Callable[[list[int]], str] | None) -> None:
        self.on_settled, self.text = on_settled, text
        self.told: dict[int, Any] = {}

    def show(self, decoding: Decoding, numbers: Iterable[tuple[int, int]] | None = None) -> None:
        """Tell the tokens that settled at the last step; the host waits.

        Told are all sequences, or those in `numbers`, each with the number of its prompt.
        """
        if self.on_settled is None:
            return
        answers = decoding.settled()
        for row, number in enumerate(range(len(answers))) if numbers is None else numbers:
            settled: Any = self.text(answers[row]) if self.text else answers[row]
            told = self.told.get(number, settled[:0])
            if self.text and settled.endswith("\ufffd") and decoding.rows[row].is_active:  # half a character
                continue
            if len(settled) > len(told) and settled[: len(told)] == told:
                self.on_settled(number, settled[len(told) :])
                self.told[number] = settled


@contextmanager
def progress_bar(shown: bool) -> Iterator[Callable[[Decoding], None]]:
    """Yield a function that shows how many tokens of a decoding are decided, if it is to; the host waits."""
    if not shown:
        yield lambda decoding: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("decoding", total=None)

        def show(decoding: Decoding) -> None:
            answer = decoding.answer
            done = int((answer != decoding.mask_id).sum())
            progress.update(task, completed=done, total=answer.numel())

        yield show
