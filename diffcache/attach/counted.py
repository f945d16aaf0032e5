"""The clock of networks without a timestep, such as language models: every call is a step."""

from __future__ import annotations

from diffcache.attach.run import Branch, Timeline


def count(timeline: Timeline) -> None:
    """Note a call that is a step of its own, and a run of its own where nobody told one."""
    run = timeline.run
    if not (run.is_told or run.in_pipeline):
        timeline.clear()
    timeline.index += 1
    timeline.calls = 1
    timeline.mark = (run.epoch, "call", timeline.index)


def only_branch(timeline: Timeline) -> Branch:
    """Return the one guidance branch of a network whose every call is a step."""
    if not timeline.branches:
        timeline.branches = [Branch(0, None, {})]
    timeline.branches[0].seen_at = timeline.index
    return timeline.branches[0]
