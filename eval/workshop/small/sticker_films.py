"""Films of the sticker world: one object that drifts over a ground that stands still.

A sentence names the object, one of nine, and at times the ground. Size, place, direction, speed,
sway, light and colors of the ground stay unsaid, but the first frames tell them: what follows is
then certain. The object bounces off the edges, so that a film can go on for ever. Where the
sentence changes, another object takes the place of the one before in mid-flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diffcache.eval.workshop.small.stickers import (
    GROUNDS,
    SIDE,
    Scene,
    caption,
    ground,
    held_out,
    place,
    put,
    to_bytes,
)

FPS = 12
# Objects of which sticker-causal films half or more rightly to the end, of the 24 it was trained on: models of
# 4 million weights learn some objects long before others.
FILMED = ("frog", "crab", "strawberry", "pineapple", "burger", "cupcake", "gift", "sunflower", "pumpkin")
_SPEEDS = (0.5, 1.4)  # pixels a frame
_SWAYS = (0.0, 14.0)  # degrees to either side
_PERIODS = (20.0, 40.0)  # frames of one sway


@dataclass(frozen=True)
class Film:
    """A film: its first frame, how the object moves, and which object it is from when on.

    Attributes:
        scene: What the first frame shows: one object on a ground.
        velocity: Pixels a frame, to the right and down, as the film begins.
        sway: Most degrees that the object tilts to either side of its first tilt.
        period: Frames of one sway.
        names: The object from each of these frames on, in order; the first is frame 0.
    """

    scene: Scene
    velocity: tuple[float, float]
    sway: float
    period: float
    names: tuple[tuple[int, str], ...]

    def name_at(self, frame: int) -> str:
        """Return the object of a frame."""
        return next(name for start, name in reversed(self.names) if start <= frame)

    def caption_at(self, frame: int) -> str:
        """Return the sentence that a frame is told by."""
        (sticker,) = self.scene.stickers
        return caption(replace(self.scene, stickers=(replace(sticker, name=self.name_at(frame)),)))


def sample_film(
    rng: np.random.Generator, *, held: bool = False, switches: tuple[int, ...] = (), objects: tuple[str, ...] = FILMED
) -> Film:
    """Draw a film, with combinations of object and ground that training leaves out or with others.

    Args:
        rng: Source of randomness.
        held: Draw held-out combinations; else none of them.
        switches: Frames at which another object takes over.
        objects: Names of objects to choose from.

    Raises:
        ValueError: If no ground has enough combinations of the kind that is asked for.
    """
    most = max(sum(held_out((name,), kind) == held for name in objects) for kind in GROUNDS)
    if most <= len(switches):
        raise ValueError(
            f"held={held}: a ground has {most} of these objects at most, for {len(switches)} switches; give fewer, or "
            "other objects"
        )
    while True:
        kind = str(rng.choice(list(GROUNDS)))
        names = [str(name) for name in rng.choice(objects, 1 + len(switches), replace=False)]
        if all(held_out((name,), kind) == held for name in names):
            break
    (sticker,) = place((names[0],), rng)
    sticker = replace(sticker, size=int(rng.integers(26, 38, endpoint=True)))
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(*_SPEEDS)
    says = kind != "gradient" and bool(rng.random() < 0.5)
    return Film(
        Scene((sticker,), kind, int(rng.integers(1 << 31)), says_ground=says),
        velocity=(float(speed * np.cos(angle)), float(speed * np.sin(angle))),
        sway=float(rng.uniform(*_SWAYS)),
        period=float(rng.uniform(*_PERIODS)),
        names=tuple(zip((0, *switches), names, strict=True)),
    )


def render_film(film: Film, count: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Draw the first frames of a film.

    Args:
        film: What to draw.
        count: Number of frames.

    Returns:
        Pictures uint8 [F, 64, 64, 3], and where the object is, bool [F, 64, 64].
    """
    behind = ground(film.scene.ground, film.scene.seed)
    pictures = np.zeros((count, SIDE, SIDE, 3), np.uint8)
    masks = np.zeros((count, SIDE, SIDE), bool)
    (first,) = film.scene.stickers
    for frame in range(count):
        turned = film.sway * np.sin(2 * np.pi * frame / film.period)
        sticker = replace(
            first,
            name=film.name_at(frame),
            x=_bounced(first.x + frame * film.velocity[0], first.size / 2),
            y=_bounced(first.y + frame * film.velocity[1], first.size / 2),
            tilt=first.tilt + float(turned),
        )
        picture, cover = put(behind, sticker)
        pictures[frame] = to_bytes(picture)
        masks[frame] = cover > 0.5
    return pictures, masks


def _bounced(place: float, margin: float) -> float:
    """Return a place as walls at a margin from both edges throw it back."""
    room = SIDE - 2 * margin
    along = (place - margin) % (2 * room)
    return margin + min(along, 2 * room - along)
