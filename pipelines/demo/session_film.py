"""Films of a causal video model, one session each, for a page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffcache.kv.codec.base import tensors
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.demo.program import Asked, Program, checked_prompt
from diffcache.registry import rows_of
from diffcache.run_report import human
from diffcache.video import Cut, FewSteps, Flush, Keep, Recache, Switch

# Policies of a page, its first choice first: those of the registry, but for Ca2-VDM, which is for
# transformers of another build.
_NAMES = [name for name, row in rows_of("video").items() if row.family == "Frames"]
POLICIES = ("window", "window:sinks=0", *(n for n in _NAMES if n not in ("window", "full")), "full")
SWITCHES: dict[str, Switch] = {
    "keep": Keep(), "flush": Flush(), "re-cache": Recache(), "cut": Cut(),
}  # fmt: skip
RECALL = 12  # frames that a re-cache, or another policy, begins with


class Decoder(Protocol):
    """Makes pictures of the latents of one film, in their order."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held from one call to the next."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in -1..1, `[B, 3, F, H, W]`, of latents `[B, C, F, H, W]`."""


@dataclass(frozen=True)
class Served:
    """A causal video model, and what lies between it and words and pictures.

    Attributes:
        video: Rolls the transformer out.
        embed: Returns text embeddings of a prompt, `[1, S, E]`; raises ValueError where it cannot.
        decoder: Returns a decoder for one film.
        size: Height and width that it was trained at, in pixels.
        scale: Pixels of a latent, across and down.
        prompts: Examples.
        fps: Frames a second that it was trained at.
        name: Name of the model.
        beside: Policy that a page compares with at first.
        policy: Policy that a page begins with.
    """

    video: CausalVideo
    embed: Callable[[str], Tensor]
    decoder: Callable[[], Decoder]
    size: tuple[int, int]
    scale: int
    prompts: Sequence[str]
    fps: int
    name: str
    beside: str = "full"
    policy: str = POLICIES[0]

    def program(self, viewers: int, most_bytes: int) -> Program:
        """Return what a page can show of it.

        Args:
            viewers: Viewers at the same time.
            most_bytes: Bytes of a film's cache at which the film ends.
        """
        patch = self.video.transformer.config.patch_size[1]
        policies = [self.policy, *(name for name in POLICIES if name != self.policy)]
        return Program(
            lambda asked: SessionFilm(self, asked, most_bytes), policies, list(SWITCHES),
            self.prompts, self.size, self.scale * patch, len(self.video.sampler.timesteps),
            self.fps, f"{self.name} - diffcache", viewers, self.beside,
        )  # fmt: skip


class SessionFilm:
    """A film of one session.

    Another policy begins with the latest 12 frames, which are run through the model once more to
    fill its cache.

    Args:
        served: Model.
        asked: Settings.
        most_bytes: Bytes of the cache at which the film ends.

    Raises:
        ValueError: If the model cannot make such a film.
    """

    def __init__(self, served: Served, asked: Asked, most_bytes: int) -> None:
        self.served, self.asked, self.most_bytes = served, asked, most_bytes
        self.session = self._begun(asked.policy, served.embed(asked.prompt))
        self.session.sampler = sampler_of(served.video.sampler, asked.steps)
        self.decoder = served.decoder()
        self._colors: NDArray[np.float64] | None = None  # of the prompt's first chunk
        self._drift = 0.0

    def next(self) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, `[F, H, W, 3]`.

        Raises:
            ValueError: If the cache has grown to its bound.
        """
        held = self.session.store.nbytes
        if held > self.most_bytes:
            raise ValueError(
                f"the film is over: its cache grew to {human(held, 'B')} in {self.session.frames} "
                f"frames, and this page has {human(self.most_bytes, 'B')} for one; take a smaller "
                "window, or serve with more --cache-mb"
            )
        pictures = self.decoder.decode(self.session.next())[0].movedim(0, -1).float()
        frames: NDArray[np.uint8] = (127.5 * pictures + 127.5).clamp(0, 255).byte().cpu().numpy()
        colors = np.concatenate([frames.mean((0, 1, 2)), frames.std((0, 1, 2))])
        self._colors = colors if self._colors is None else self._colors
        self._drift = float(np.sqrt(np.square(colors - self._colors).mean()))
        return frames

    def apply(self, order: Mapping[str, Any]) -> None:
        """Change the policy or the prompt.

        Raises:
            ValueError: If one of them cannot be; nothing is changed then.
        """
        prompt = order.get("prompt")
        text = None if prompt is None else self.served.embed(checked_prompt(prompt))
        name = order.get("policy", self.asked.policy)
        if name != self.asked.policy:
            self._use(name)
        if text is not None:
            mode, most = SWITCHES[order.get("switch", "keep")], self.session.policy.most_recached
            if isinstance(mode, Recache) and most is not None:
                mode = replace(mode, frames=min(mode.frames, most))
            self.session.switch(text, mode)
            self._colors = None

    def readings(self) -> dict[str, float]:
        """Return bytes by role, and how far colors are from those of the prompt's first chunk."""
        held = self.decoder.nbytes
        more = {"decoder_bytes": float(held)} if held else {}
        return bytes_by_role(self.session) | more | {"drift": self._drift}

    def _begun(self, policy: str, text: Tensor) -> Session:
        height, width = (pixels // self.served.scale for pixels in self.asked.size)
        return self.served.video.session(
            text, size=(height, width), policy=policy, seed=self.asked.seed, recall=RECALL
        )

    def _use(self, policy: str) -> None:
        """Go on with another policy."""
        before = self.session
        session = self._begun(policy, before.prompt)
        session.sampler = before.sampler
        if before.latents is not None:
            session.take(before.latents)
        session.generator.set_state(before.generator.get_state())
        self.session, self.asked = session, replace(self.asked, policy=policy)


def sampler_of(sampler: FewSteps, steps: int) -> FewSteps:
    """Return a sampler of so many steps: itself, or with times that are evenly apart.

    Args:
        sampler: Sampler that a model was trained with.
        steps: Number of steps.
    """
    if steps == len(sampler.timesteps):
        return sampler
    first = sampler.timesteps[0]
    return replace(sampler, timesteps=tuple(first * (steps - n) / steps for n in range(steps)))


def bytes_by_role(session: Session) -> dict[str, float]:
    """Return the bytes of a session's cache: all, those of first and of later frames, and the rest.

    The rest are rotated copies that steps of a chunk share, room for the next frames, and numbers
    of positions.
    """
    total, first = session.store.nbytes, session.policy.sinks * session.unit
    sinks = history = 0.0
    for layer in session.store.layers:
        if layer.form is None:
            continue
        form, coded = layer.form, sum(segment.width for segment in layer.segments)
        exact = form.batch * form.heads * (form.size + form.value_size) * form.dtype.itemsize
        codes = sum(part.nbytes for part in tensors(layer.segments)) / max(coded, 1)
        old = min(first, coded)
        new = min(first - old, layer.tail.length)
        sinks += old * codes + new * exact
        history += (coded - old) * codes + (layer.tail.length - new) * exact
    return {
        "bytes": total, "sinks_bytes": sinks, "history_bytes": history,
        "working_bytes": max(0.0, total - sinks - history),
    }  # fmt: skip
