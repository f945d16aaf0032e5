"""A stream that was saved and restored goes on as it would have, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.kv.life.save import SavedCacheError, read, write
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.saved_stream import CACHE, STREAM
from diffcache.video import FewSteps, Flush, FullHistory, Recache, Switch, Window
from tests.video.cases import POLICIES
from tests.video.toys import SIZE, rollout, text, wan


@dataclass(frozen=True)
class Other(Switch):
    """A switch that a user wrote."""


@pytest.mark.parametrize("policy", [FullHistory(), Window(3, 1, "absolute"), *POLICIES.values()])
def test_a_restored_stream_goes_on_as_it_would_have(policy: Any, tmp_path: Path) -> None:
    with CausalVideo(wan(layers=2), sampler=FewSteps((1000, 500))) as video:
        settings: dict[str, Any] = {"size": SIZE, "policy": policy, "seed": 7}
        guided = video.session(text(2), negative=text(1, 9), guidance=2.0, **settings)
        plain = video.session(text(), **settings)
        for name, session in (("guided", guided), ("plain", plain)):
            for _ in range(4):
                session.next()
            session.save(tmp_path / name)
            wanted = torch.cat([session.next() for _ in range(2)], 2)
            restored = video.restore(tmp_path / name, policy)
            assert restored.frames == 12
            assert torch.equal(torch.cat([restored.next() for _ in range(2)], 2), wanted)
            restored.save(tmp_path / name)  # over what is there
            again = video.restore(tmp_path / name, policy)
            for each in (again, session):
                each.switch(text(session.batch, 4), Recache(6))  # latents are kept as well
            again.save(tmp_path / name)  # with a switch that has not taken effect
            again = video.restore(tmp_path / name, policy)
            assert torch.equal(again.next(), session.next())
            again.switch(text(session.batch, 4), Other())
            with pytest.raises(ValueError, match=r"mode=Other\(\): is written for Keep, Flush"):
                again.save(tmp_path / name)


def test_a_saved_stream_of_something_else_is_refused(tmp_path: Path) -> None:
    model = wan(layers=1)
    with CausalVideo(model, sampler=FewSteps((1000,))) as video:
        session = video.session(text(), size=SIZE, policy=Window(3, 3))
        session.next()
        session.save(tmp_path / "one")
        session.next()
        session.save(tmp_path / "two")
        with pytest.raises(FileNotFoundError, match="no such file"):
            video.restore(tmp_path / "none")
        with pytest.raises(SavedCacheError, match=r"saved with policy=Window\(window=3, sinks=3"):
            video.restore(tmp_path / "one", Window(3, 1))
        session.sampler = FewSteps((1000, 250))
        session.save(tmp_path / "two")
        with pytest.raises(SavedCacheError, match=r"sampler=FewSteps\(timesteps=\(1000, 250\)"):
            video.restore(tmp_path / "two", Window(3, 3))
        with torch.no_grad():
            model.blocks[0].ffn.net[2].bias.add_(1)
        with pytest.raises(SavedCacheError, match="saved with weights="):
            video.restore(tmp_path / "one", Window(3, 3))
    for layers, chunk, said in ((2, 3, "saved with transformer="), (1, 2, "saved with chunk=3, here is chunk=2")):
        with (
            CausalVideo(wan(layers=layers), sampler=FewSteps((1000,)), chunk=chunk) as other,
            pytest.raises(SavedCacheError, match=said),
        ):
            other.restore(tmp_path / "one", Window(3, 3))
    with CausalVideo(wan(layers=1), sampler=FewSteps((1000,))) as video:
        assert video.restore(tmp_path / "one", Window(3, 3)).frames == 3
        (tmp_path / "two" / CACHE).replace(tmp_path / "one" / CACHE)  # a save that was cut off
        with pytest.raises(SavedCacheError, match="are of two streams"):
            video.restore(tmp_path / "one", Window(3, 3))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("about.facts", 7), ("about.facts", {}), ("noise", 7), ("noise", lambda x: x[:-1]), ("frames", -1),
        ("frames", 2), ("size", (16, 8)), ("size", "8"), ("recall", "x"), ("prompts", [[0, torch.ones(2)]]), ("prompts", [[0.5, 3]]),
        ("latents", lambda x: x[0]), ("latents", lambda x: x * torch.nan), ("latents", 2**31),
        ("prompt", lambda x: x[..., :5]), ("switch", 3), ("switch.mode", "Other"),
        ("switch.settings", {"last": -1}), ("switch.prompt", lambda x: x[..., :5]),
    ],
)  # fmt: skip
def test_a_stream_that_was_altered_with_care_is_refused(
    video: CausalVideo, where: str, change: Any, tmp_path: Path
) -> None:
    session, _, _ = rollout(video, 1, policy=Window(3, 3))
    session.switch(text(1, 4), Flush())
    session.save(tmp_path)
    state, about = read(tmp_path / STREAM)
    write(tmp_path / STREAM, state, about)
    video.restore(tmp_path, Window(3, 3)).next()
    *outer, key = where.split(".")
    holder = {**state, "about": about}[outer[0]] if outer else state
    holder[key] = change(holder[key]) if callable(change) else change
    write(tmp_path / STREAM, state, about)  # with a digest of its own
    said = "holds what no stream holds|saved with (transformer=None|Recipe)"
    with pytest.raises(SavedCacheError, match=said):
        video.restore(tmp_path, Window(3, 3))


def test_a_saved_stream_of_numbers_that_are_not_finite_is_refused(video: CausalVideo, tmp_path: Path) -> None:
    session, _, _ = rollout(video, 1)
    session.store.layers[0].read().k[0, 0, 0] = torch.nan
    session.save(tmp_path)
    with pytest.raises(SavedCacheError, match="holds what no stream .* not finite"):
        video.restore(tmp_path)
