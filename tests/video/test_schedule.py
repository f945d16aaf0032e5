"""Schedules of live streams against closed forms, brute force and a stream played through."""

from itertools import product

import pytest

from diffcache.video.schedule import CallTime, Goal, choose, scheduled, simulate

TIME = CallTime(weights_seconds=0.06, frame_seconds=0.004)


def test_the_time_of_a_call_is_fitted_and_has_a_knee() -> None:
    sizes = [(1, 1), (3, 1), (3, 4), (5, 2)]
    fitted = CallTime.fit([(t, b, TIME.seconds(t, b)) for t, b in sizes])
    assert fitted.weights_seconds == pytest.approx(0.06)
    assert fitted.frame_seconds == pytest.approx(0.004)
    for frames in (1, 3, 5):
        rows = TIME.knee(frames)
        assert TIME.seconds(frames, rows) >= 2 * TIME.weights_seconds
        assert rows == 1 or TIME.seconds(frames, rows - 1) < 2 * TIME.weights_seconds
    rates = [rows / TIME.seconds(1, rows) for rows in range(1, 400)]
    assert rates == sorted(rates)  # towards 1 / frame_seconds, half of it at the knee
    assert rates[TIME.knee(1) - 1] == pytest.approx(0.5 / 0.004)
    assert max(rates) < 1 / 0.004


@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (4, 1), (4, 2), (4, 4), (5, 2), (5, 4)])
@pytest.mark.parametrize("frames", [1, 3])
def test_a_stream_that_keeps_up_shows_its_first_frame_when_it_says(steps: int, rows: int, frames: int) -> None:
    rows = min(rows, steps)
    slow, fast = Goal(2.0, 9.0), Goal(500.0, 9.0)
    known = scheduled(TIME, steps, frames, rows, slow)
    played = simulate(TIME.seconds, steps, known, slow)
    assert played.first_seconds == pytest.approx(known.first_seconds)
    assert played.late == 0
    rushed = simulate(TIME.seconds, steps, known, fast, chunks=4000)
    assert rushed.frames_per_second == pytest.approx(known.frames_per_second, rel=0.01)
    assert rushed.late > 0.9


def test_the_shortest_chunk_that_holds_is_chosen() -> None:
    chosen = set()
    for rate, first in product((8.0, 14.0, 20.0, 30.0), (0.6, 1.0, 2.0)):
        goal = Goal(rate, first)
        every = [scheduled(TIME, 4, t, b, goal) for t, b in product(range(1, 9), range(1, 5))]
        held = [s for s in every if s.frames_per_second >= rate and s.first_seconds <= first]
        if not held:
            with pytest.raises(ValueError, match="chunks of up to 8 frames make"):
                choose(TIME, 4, goal, longest=8)
            continue
        found = choose(TIME, 4, goal, longest=8)
        assert found in held
        assert found.frames == min(each.frames for each in held)
        nearest = min(abs(s.rows - TIME.knee(s.frames)) for s in held if s.frames == found.frames)
        assert abs(found.rows - TIME.knee(found.frames)) == nearest
        played = simulate(TIME.seconds, 4, found, goal)
        assert played.late == 0
        assert played.first_seconds <= first
        chosen.add((found.frames, found.rows))
    assert len(chosen) > 2
