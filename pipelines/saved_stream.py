"""Write a stream of video into a folder, and read it where it can go on as it would have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from diffcache.attach.fingerprint import facts_of
from diffcache.digest import digest, weights_digest
from diffcache.kv.life.save import SavedCacheError, load, read, refusing, save, write
from diffcache.kv.store import KVStore
from diffcache.method import check_int
from diffcache.pipelines.context_parallel import ranks_of
from diffcache.pipelines.video_inputs import check_latents
from diffcache.video import Cut, FewSteps, Flush, Keep, Recache, VideoPolicy

STREAM, CACHE = "stream.safetensors", "cache.safetensors"
SWITCHES: dict[str, Any] = {mode.__name__: mode for mode in (Keep, Flush, Recache, Cut)}


def facts(video: Any, policy: VideoPolicy, sampler: FewSteps) -> dict[str, str]:
    """Return the facts that a restored stream must share with the saved one, by their names in an error."""
    ranks = ranks_of(video.transformer)
    return {
        "transformer": str(facts_of(video.transformer, None)["config"]),
        "weights": weights_digest(video.transformer.parameters()),
        "policy": repr(policy),
        "chunk": str(video.chunk),
        "sampler": repr(sampler),
        "rank": "0 of 1" if ranks is None else f"{ranks.rank} of {ranks.count}",
    }


def state_of(session: Any) -> dict[str, Any]:
    """Return the state of a stream beside its cache: tensors and plain values.

    Raises:
        ValueError: If the mode of a switch that has not taken effect cannot be written.
    """
    rows = list(session.prompt.split(session.batch))
    return {
        "prompt": rows[0],
        "negative": rows[1] if session.guided else None,
        "size": session.size,
        "guidance": session.guidance,
        "read_once": session.store.read_once,
        "frames": session.frames,
        "noise": session.generator.get_state(),
        "recall": session.recall,
        "latents": session.latents,
        "switch": switch_state(session._switch),
        "prompts": [list(each) for each in session.prompts],
    }


def switch_state(switch: tuple[Tensor, Any] | None) -> dict[str, Any] | None:
    """Return a switch that has not taken effect as plain values, which `switch_of` reads.

    Raises:
        ValueError: If its mode cannot be written.
    """
    if switch is None:
        return None
    prompt, mode = switch
    name = type(mode).__name__
    if SWITCHES.get(name) is not type(mode):
        raise ValueError(f"mode={mode!r}: is written for {', '.join(SWITCHES)} alone")
    return {"prompt": prompt, "mode": name, "settings": asdict(mode)}


def switch_of(state: Mapping[str, Any] | None) -> Any:
    """Return text and mode of the switch that `switch_state` wrote; None for none."""
    if state is None:
        return None
    return state["prompt"], SWITCHES[state["mode"]](**state["settings"])


def write_stream(
    folder: str | os.PathLike[str], store: KVStore, state: Mapping[str, Any], known: Mapping[str, str]
) -> None:
    """Write a stream into a folder, as two files, one of which is its cache; another stream there is replaced.

    `state` is the result of `state_of`, `known` that of `facts`.

    Raises:
        ValueError: If something in the cache cannot be written to a file.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    # A save that was cut off, or of another rank, leaves files that do not match.
    pair = {"stream": digest([state, known])}
    save(place / CACHE, store, pair)
    write(place / STREAM, dict(state), {"facts": dict(known), **pair})


def restored(video: Any, folder: str | os.PathLike[str], policy: VideoPolicy, sampler: FewSteps) -> Any:
    """Return the session that `write_stream` wrote, to go on with a `CausalVideo`.

    The policy and the noise levels must be those that it was made with.

    Raises:
        FileNotFoundError: If there is no such stream.
        SavedCacheError: If it is altered, has content that no stream has, or its facts are not the same here.
    """
    state, about = read(Path(folder) / STREAM, video.transformer.device)
    known = facts(video, policy, sampler)
    with refusing(folder, "stream"):
        for name, here in known.items():
            if about["facts"].get(name) != here:
                raise SavedCacheError(
                    f"{os.fspath(folder)} was saved with {name}={about['facts'].get(name)}, here "
                    f"is {name}={here}: a stream goes on with what it began with"
                )
        names = ("size", "negative", "guidance", "read_once", "recall")
        session = video.session(state["prompt"], policy=policy, **{n: state[n] for n in names})
        session.sampler = sampler
        pair = load(Path(folder) / CACHE, session.store, session.prompt.device).get("stream")
        if pair != about["stream"]:
            raise SavedCacheError(
                f"{os.fspath(folder)}: {CACHE} and {STREAM} are of two streams, since a save was "
                "cut off; save it again"
            )
        _fill(session, state)
    return session


def _fill(session: Any, state: Mapping[str, Any]) -> None:
    """Let a session with a loaded cache go on with the rest of the saved state.

    Raises:
        Exception: If parts are not those of a stream, or do not go together.
    """
    store, unit = session.store, session.unit
    check_int("frames", state["frames"], 0)
    if store.seen % unit or store.seen > state["frames"] * unit:
        raise ValueError(f"{store.seen} tokens of {state['frames']} frames of {unit}")
    if not all(x.isfinite().all() for x in store.tensors()):
        raise ValueError("keys or values that are not finite")
    latents, switch = state["latents"], switch_of(state["switch"])
    if latents is not None:
        check_latents(latents, session.shape)
    session.frames, session.latents = state["frames"], latents
    session.prompts = [(start, mean) for start, mean in state["prompts"]]
    for start, mean in session.prompts:
        check_int("prompts", start, 0)
        wanted = (len(session.prompt), session.prompt.shape[2])
        if mean.shape != wanted or not mean.isfinite().all():
            raise ValueError(f"prompts: a mean of {list(mean.shape)}")
    session.generator.set_state(state["noise"].cpu())
    if switch is not None:
        prompt, *negative = switch[0].split(session.batch)
        session.switch(prompt, switch[1], negative=negative[0] if negative else None)
