"""Films that a page can show, and checks of a viewer's requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffcache.command import MAX_SEED
from diffcache.pipelines.demo.stream import Film

if TYPE_CHECKING:
    from diffcache.pipelines.demo.images import Drawer

LONGEST = 2000  # letters of a prompt
MOST_STEPS = 50


@dataclass(frozen=True)
class Asked:
    """Settings of one film, checked.

    Attributes:
        size: Height and width in pixels.
        start: Pictures that it begins with, uint8 `[F, H, W, 3]`; None for none.
        anew: Whether it is made from pictures that come in with every chunk.
    """

    prompt: str
    policy: str
    seed: int
    steps: int
    size: tuple[int, int]
    start: NDArray[np.uint8] | None = None
    anew: bool = False


@dataclass(frozen=True)
class Program:
    """Films that a page can show.

    Attributes:
        make: Returns a film; called in the thread that films.
        policies: Names of the policies, the first choice first.
        switches: Names of the treatments of the cache at a new prompt.
        prompts: Examples.
        sizes: Label on the page -> height and width in pixels that the model knows; the usual one first.
        steps: Usual number of steps of a chunk.
        fps: Frames shown a second.
        title: Title of the page.
        viewers: Viewers whose films may run at the same time.
        beside: Policy that runs beside the first to compare with, "" for none, until one is chosen.
        seen: Pictures of the first chunk and of each later one, where films can be made from pictures; else None.
        latent: Pictures of a latent frame, after the first.
        drawer: Pipeline of the tab of images; None for a page without one.
    """

    make: Callable[[Asked], Film]
    policies: Sequence[str]
    switches: Sequence[str]
    prompts: Sequence[str]
    sizes: Mapping[str, tuple[int, int]]
    steps: int = 4
    fps: int = 12
    title: str = "diffcache"
    viewers: int = 8
    beside: str = ""
    seen: tuple[int, int] | None = None
    latent: int = 1
    drawer: Drawer | None = None

    def asked(self, prompt: Any, policy: Any, seed: Any, steps: Any, size: Any) -> Asked:
        """Return the settings of a film from the values of a page.

        Raises:
            ValueError: If a value is out of its range; the message is for the viewer.
        """
        text, name = checked_prompt(prompt), one_of("policy", policy, self.policies)
        known = (whole("seed", seed, 0, MAX_SEED), whole("steps", steps, 1, MOST_STEPS))
        return Asked(text, name, *known, self.sizes[one_of("size", size, list(self.sizes))])


def checked_prompt(prompt: object) -> str:
    """Return a prompt without spaces around it; raise ValueError if it is empty or too long."""
    # JSON may hold halves of letters, which no tokenizer takes.
    text = str(prompt or "").encode(errors="ignore").decode().strip()
    if not text:
        raise ValueError("the prompt is empty: say what to film")
    if len(text) > LONGEST:
        raise ValueError(f"the prompt has {len(text):,} letters; at most {LONGEST:,} are read")
    return text


def one_of(kind: str, name: Any, names: Sequence[str]) -> str:
    """Return a name after a check that it is one of several names.

    Raises:
        ValueError: If it is not; `kind` is the word for it in the message.
    """
    if name not in names:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(names)}")
    return str(name)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return a value from a page as a whole number from `least` to `most`.

    Raises ValueError if it is none; `name` is its name on the page.
    """
    try:
        number = int(value)
        if number != float(value) or not least <= number <= most:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        said = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        raise ValueError(f"{name}={said}: must be a whole number from {least} to {most}") from None
    return number
