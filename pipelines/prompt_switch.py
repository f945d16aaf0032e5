"""Prompt switches of a stream of video, which take effect at the start of a chunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffcache.kv.positions import PositionMap
from diffcache.kv.store import KVStore
from diffcache.pipelines.video_inputs import check_text, text_rows
from diffcache.video import Cut, Flush, Keep, Recache, Switch


def checked(session: Any, prompt: Tensor, mode: Switch | None, negative: Tensor | None) -> tuple[Tensor, Switch]:
    """Return the text of all rows after a switch, and its mode; arguments are those of `Session.switch`.

    Raises:
        ValueError: If texts are of another shape or not finite, or `mode` is no switch or asks for
            more latents than are kept.
    """
    mode = Keep() if mode is None else mode
    if not isinstance(mode, Switch):
        raise ValueError(f"mode={mode!r}: must be Keep(), Flush(), Recache() or Cut()")
    check_text("prompt", prompt, session.video.transformer.config.text_dim)
    if len(prompt) != session.batch:
        raise ValueError(f"prompt={list(prompt.shape)}: must have B={session.batch} rows")
    if isinstance(mode, Recache) and mode.frames > session.recall:
        raise ValueError(
            f"frames={mode.frames}: the session keeps its latest {session.recall} latents; open it "
            f"with recall={mode.frames}"
        )
    most = session.policy.most_recached
    if isinstance(mode, Recache) and most is not None and mode.frames > most:
        raise ValueError(
            f"frames={mode.frames}: {session.policy!r} can make at most {most} frames anew at "
            f"once; give Recache({most})"
        )
    if session.guided and negative is None:
        negative = session.prompt[session.batch :]
        if negative.shape != prompt.shape:
            raise ValueError(
                f"prompt={list(prompt.shape)}: with guidance it must have as many tokens as "
                f"negative, {negative.shape[1]}; give `negative` anew with it"
            )
    return text_rows(session.video.transformer, prompt, negative, session.guidance), mode


def apply(session: Any, prompt: Tensor, mode: Switch) -> None:
    """Let a new prompt, the text of all rows, take effect between two chunks."""
    session.prompt, store = prompt, session.store
    if isinstance(mode, Flush):
        mode.carry_out(store, session.policy.sinks, session.unit)
    elif isinstance(mode, Recache) and session.latents is not None:
        _recache(session, mode, session.latents[:, :, -mode.frames :])
    elif isinstance(mode, Cut) and store.seen:
        place(store, mode.around(store.recipe.positions, store.seen // session.unit))


def place(store: KVStore, positions: PositionMap | None) -> None:
    """Have keys and queries rotated under the numbers of a map; as they are for None."""
    for layer in store.layers:
        layer.positions = positions


def _recache(session: Any, mode: Recache, latents: Tensor) -> None:
    """Make keys and values of latents anew, in place of all that is held."""
    store, unit, sinks = session.store, session.unit, session.policy.sinks
    if mode.keep_sinks and sinks:
        seen = store.seen // unit
        start = max(seen - latents.shape[2], min(sinks, seen))
        latents = latents[:, :, latents.shape[2] - (seen - start) :]
        Flush(0).carry_out(store, sinks, unit)
        for layer in store.layers:  # the frames are written under their own numbers
            layer.seen = start * unit
    else:
        store.reset()
    if not latents.shape[2]:
        return
    whole = mode.mask == "bidirectional"
    for part in latents.split(latents.shape[2] if whole else session.video.chunk, 2):
        session.rewrite(part)
