"""A feature cache on the transformer of a stream: reads are skipped, what is committed never is."""

from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.catalog import make_method, method_class
from diffcache.features.interval import Interval
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.registry import rows_of
from diffcache.video import FewSteps, FlowCache, FullHistory, VideoPolicy, Window
from tests.methods import ON, STEPS
from tests.video.toys import held, text, wan

SAMPLER = FewSteps(tuple(range(1000, 0, -1000 // STEPS)))
SMALL: dict[str, Any] = {"size": (4, 4), "seed": 1}
GUIDE: dict[str, Any] = {"negative": text(seed=9), "guidance": 2.0}


REFUSED = r"diffcache\.(calibrate|tune)\(pipe|scheduler"


def opened(video: CausalVideo, policy: VideoPolicy | None = None) -> Session:
    return video.session(text(), policy=policy or Window(3, 3), **SMALL)


@cache
def uncached(policy: VideoPolicy, guided: bool) -> Tensor:
    """Return a film without a feature cache."""
    with CausalVideo(wan(layers=2), sampler=SAMPLER) as video:
        session = video.session(text(), policy=policy, **SMALL, **GUIDE if guided else {})
        return torch.cat([session.next() for _ in range(3)], 2)


def marks(calls: Any) -> str:
    return "".join("w" if call.writes else "C" if call.computed else "s" for call in calls)


@pytest.mark.parametrize("name", [*[*ON][::2], "temporal-table", "guided", "flow-cache"])
def test_what_is_held_after_a_chunk_is_a_clean_pass_of_it(name: str) -> None:
    """An independent transformer that is given the finished frames holds the same, to the bit."""
    method = make_method(name, **ON.get(name, {})) if name in rows_of("method") else Interval(every=3)
    if name == "flow-cache":  # its other half
        method = make_method("teacache", threshold=9.0, coefficients=(1.0, 0.0), input="modulated")
    policy = FlowCache(4) if name == "flow-cache" else Window(3, 3)
    guide = GUIDE if name == "guided" else {}
    model, other = wan(layers=2), wan(layers=2)
    with CausalVideo(model, sampler=SAMPLER) as video, CausalVideo(other) as plain:
        one, two = (each.session(text(), policy=policy, **SMALL, **guide) for each in (video, plain))
        made = []
        with diffcache.wrapped(model, method) as handle:
            for _ in range(3):
                made.append(one.next())
                two.take(made[-1])
                for mine, theirs in zip(held(one), held(two), strict=True):
                    assert torch.equal(mine, theirs)
                steps = marks(handle.last.calls)
                assert len(steps) == STEPS + 1 and steps[0] == "C" and steps[1:].find("w") == STEPS - 1
                assert ("s" in steps) == (name != "temporal-table")  # which stands in for modules
    assert torch.equal(uncached(policy, bool(guide)), torch.cat(made, 2)) == ("s" not in steps)


# Methods that need neither a pipeline nor tables, though contract tests have no row for them alone.
BARE = {"temporal-table", "seacache", "lazycache", "dbprune", "pab", "step-mask", "fastercache", "speca"}


@pytest.mark.parametrize("name", sorted(set(rows_of("method")) - {*ON, *BARE}))
def test_a_method_that_needs_a_pipeline_is_refused_before_a_stream_begins(name: str) -> None:
    model = wan(layers=2)
    with CausalVideo(model), pytest.raises((diffcache.AttachError, diffcache.UncalibratedError), match=REFUSED):
        diffcache.wrap(model, method_class(name)())


def test_runs_of_two_streams_are_apart_whichever_way_they_take_turns() -> None:
    model = wan(layers=2)
    with CausalVideo(model, sampler=SAMPLER) as video, diffcache.wrapped(model, Interval(every=3)):
        alone = [
            torch.cat([session.next() for _ in range(3)], 2)
            for session in (opened(video), opened(video, FullHistory()))
        ]
        found: dict[int, Tensor] = {}

        def film(number: int, session: Session) -> Callable[[], None]:
            def roll() -> None:
                found[number] = torch.cat([session.next() for _ in range(3)], 2)

            return roll

        sessions = opened(video), opened(video, FullHistory())
        threads = [Thread(target=film(*each)) for each in enumerate(sessions)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert all(torch.equal(found[number], alone[number]) for number in range(2))
        with diffcache.stream(model) as stream:
            session = opened(video)
            assert torch.equal(torch.cat([session.next() for _ in range(3)], 2), alone[0])
            assert stream.chunk == 2
