"""Write a stream of video into a folder, and read it where it can go on as it would have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diffcache.attach.fingerprint import facts_of
from diffcache.digest import digest, weights_digest
from diffcache.kv.life.save import SavedCacheError, load, read, save, write
from diffcache.kv.store import KVStore
from diffcache.pipelines.context_parallel import ranks_of
from diffcache.video import Cut, FewSteps, Flush, Keep, Recache, VideoPolicy

STREAM, CACHE = "stream.safetensors", "cache.safetensors"
SWITCHES: dict[str, Any] = {mode.__name__: mode for mode in (Keep, Flush, Recache, Cut)}


def facts(video: Any, policy: VideoPolicy, sampler: FewSteps) -> dict[str, str]:
    """Return what a stream has to find again where it goes on, by the words an error names it with.

    Args:
        video: `CausalVideo` that it runs on.
        policy: Frames that are held.
        sampler: Noise levels of a chunk.
    """
    ranks = ranks_of(video.transformer)
    return {
        "transformer": str(facts_of(video.transformer, None)["config"]),
        "weights": weights_digest(video.transformer.parameters()),
        "policy": repr(policy), "chunk": str(video.chunk), "sampler": repr(sampler),
        "rank": "0 of 1" if ranks is None else f"{ranks.rank} of {ranks.count}",
    }  # fmt: skip


def state_of(session: Any) -> dict[str, Any]:
    """Return what a stream goes on with beside its cache: tensors and plain values.

    Raises:
        ValueError: If the mode of a switch that has not taken effect cannot be written.
    """
    rows, switch = list(session.prompt.split(session.batch)), None
    if session._switch is not None:
        prompt, mode = session._switch
        name = type(mode).__name__
        if SWITCHES.get(name) is not type(mode):
            raise ValueError(f"mode={mode!r}: is written for {', '.join(SWITCHES)} alone")
        switch = {"prompt": prompt, "mode": name, "settings": asdict(mode)}
    return {
        "prompt": rows[0], "negative": rows[1] if session.guided else None, "size": session.size,
        "guidance": session.guidance, "read_once": session.store.read_once,
        "frames": session.frames, "noise": session.generator.get_state(), "recall": session.recall,
        "latents": session.latents, "switch": switch,
    }  # fmt: skip


def write_stream(
    folder: str | os.PathLike[str],
    store: KVStore,
    state: Mapping[str, Any],
    known: Mapping[str, str],
) -> None:
    """Write a stream into two files, one of which is its cache.

    Args:
        folder: Folder of the files, made if need be; those of another stream are replaced.
        store: Cache of the stream.
        state: Result of `state_of`.
        known: Result of `facts`.

    Raises:
        ValueError: If something in the cache has no place in a file.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    # A save that was cut off, or of another rank, leaves files that do not match.
    pair = {"stream": digest([state, known])}
    save(place / CACHE, store, pair)
    write(place / STREAM, dict(state), {"facts": dict(known), **pair})


def read_stream(
    folder: str | os.PathLike[str], known: Mapping[str, str], device: torch.device
) -> dict[str, Any]:
    """Return the state that `write_stream` wrote.

    Args:
        folder: Folder of the files.
        known: Result of `facts` here.
        device: Device of the tensors.

    Raises:
        FileNotFoundError: If there is no such stream.
        SavedCacheError: If it is altered, or something about it is not the same here.
    """
    state, about = read(Path(folder) / STREAM, device)
    for name, here in known.items():
        if about["facts"].get(name) != here:
            raise SavedCacheError(
                f"{os.fspath(folder)} was saved with {name}={about['facts'].get(name)}, here is "
                f"{name}={here}: a stream goes on with what it began with"
            )
    return {**state, "pair": about["stream"]}


def resume(session: Any, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Let a new session go on with what was saved of another.

    Args:
        session: `Session` of the same model and policy, with nothing held.
        folder: Folder of the files.
        state: Result of `read_stream`.

    Raises:
        FileNotFoundError: If there is no cache.
        SavedCacheError: If it is altered, or of another stream.
    """
    about = load(Path(folder) / CACHE, session.store, session.prompt.device)
    if about.get("stream") != state["pair"]:
        raise SavedCacheError(
            f"{os.fspath(folder)}: {CACHE} and {STREAM} are of two streams, since a save was cut "
            "off; save it again"
        )
    session.frames, session.latents = state["frames"], state["latents"]
    session.generator.set_state(state["noise"].cpu())
    switch = state["switch"]
    if switch is not None:
        session._switch = switch["prompt"], SWITCHES[switch["mode"]](**switch["settings"])
