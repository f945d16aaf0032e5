"""Telling guidance branches apart where no pipeline orders the calls: by name, or by content.

A call belongs to the branch that was given the same conditions, and to its run if its sample can be
the next step of that branch's. Where that does not tell, the timeline is in doubt: every call is
computed, and nothing of it is kept, until a run has passed by itself.

From step to step a sampler moves a sample little, and what it moves is scaled and mixed with new
noise; the samples of two trajectories start from independent noise. So the cosine of consecutive
samples is high in one trajectory, and near 0 where another one starts from noise.

Samples that are nearly done, of one prompt or picture, or that share channels or tokens of a
condition, are alike in two trajectories. A sampler that draws no noise still tells them apart: its
next sample is a sum of the samples and outputs of the last steps, each times a number. With one
that does draw noise, only `diffcache.run` tells them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.run import Branch, Timeline
from diffcache.attach.tree import leaves
from diffcache.foreign import version_of

_NAME = 'name its guidance branches: with diffcache.branch("uncond"): ...'
_RUN = "put each sampling run into a `with diffcache.run(model):` of its own"

MAX_BRANCHES = 16  # in one step, each of which holds features
FEWEST = 64  # values of a sample that can be told: fewer have a cosine of 0.5 and more by chance
_MOST = 4096  # values that are kept of a sample
# The lowest cosine of consecutive steps that was measured with 20 steps is 0.29 (SDE-DPM++ with
# Karras sigmas), with DDPM and ancestral Euler 0.59, with solvers that add no noise 0.92.
_LEAST = 0.2
# A sample outside the sums by this share of its length, and by ten times that of any step before,
# belongs to another trajectory. Rounding to bfloat16 alone makes 0.003.
_STRAY, _FURTHER = 0.01, 10.0
REACH = 3  # steps back that multistep solvers of the usual orders look
_CHANCE = 4.0  # standard deviations of the cosine of independent noise, which are 1 / sqrt(values)

# What a timeline doubts -> what to say of it.
DOUBTS = {
    "calls alike": "calls at one timestep are given the same conditions, so nothing tells which "
    f"guidance branch, or which sampling run, they belong to; {_NAME}, or {_RUN}",
    "name twice": "calls at one timestep are in the same diffcache.branch, so they may belong to "
    f"different sampling runs; {_RUN}, or give each a name of its own",
    "many calls": f"more than {MAX_BRANCHES} calls are at one timestep, so they may be runs of one "
    f"step, of which nothing can be skipped; {_RUN}, or call diffcache.reset(model) between them",
    "runs in turns": "the timestep turned back and then went past where it had been, so sampling "
    "runs may be taking turns, and outputs of this run so far may be made of another's features; "
    f"{_RUN}, or call diffcache.reset(model) where a run starts",
    "long step": "the timestep moved much further than at any step before, so another sampling run "
    f"may have started; {_RUN}, or call diffcache.reset(model) where it starts",
    "other sample": "again and again the sample is no next step of the one before, so sampling "
    f"runs may be taking turns, or the sampler draws new noise at every step; {_RUN}",
    "small sample": f"the call has no conditions, and its sample has fewer than {FEWEST} numbers "
    "(integers do not count), too few to tell whether a call is the next step of a sampling run or "
    f"another run's; {_RUN}",
}
_COMPUTED = "every call is computed until a run has passed by itself"
TURNED = (
    "the timestep turned back after a step that was skipped: if sampling began at that step, as "
    f"after an inversion, its output was made of the inversion's features; {_RUN}"
)
CHANGED = (
    "this call is computed: its conditions are not those of any branch so far, step after step;"
    f" {_NAME}, or {_RUN}, in which an argument that moves with the timestep is a sample"
)


class KeptArgument:
    """A tensor as a call was given it.

    It is held itself, and known to be unchanged by its version. An inference tensor has none, so a
    copy is held.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = None if tensor.is_inference() else version_of(tensor)
        self.tensor = tensor.clone() if self.version is None else tensor

    def equals(self, given: Tensor) -> bool:
        """Return whether a tensor holds the same.

        It is read, which waits for its device, only where it is not the very memory that was given
        before, unwritten since.
        """
        held = self.tensor
        if (held.shape, held.dtype, held.device) != (given.shape, given.dtype, given.device):
            return False
        if self.version is not None:
            if version_of(held) != self.version:  # what it held is lost
                return False
            same_memory = held.data_ptr() == given.data_ptr() and held.stride() == given.stride()
            if same_memory and not given.is_inference() and version_of(given) == self.version:
                return True
        return torch.equal(held, given)


def keep(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return conditions with their tensors as they are now."""
    return {p: KeptArgument(v) if isinstance(v, Tensor) else v for p, v in conditions.items()}


def alike(held: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Return whether a call's conditions are those that were kept."""
    if held.keys() != given.keys():
        return False
    read = []  # tensors whose contents have to be read, last
    for path, kept in held.items():
        value = given[path]
        if isinstance(kept, KeptArgument) != isinstance(value, Tensor):
            return False
        if not isinstance(kept, KeptArgument):
            if kept != value:
                return False
        elif kept.tensor is not value or kept.version != version_of(value):  # another, or written to
            read.append((kept, value))
    return all(kept.equals(value) for kept, value in read) if read else True


def tell(timeline: Timeline, name: str | None, signature: Any, conditions: dict[str, Any]) -> tuple[Branch, str]:
    """Return the branch that a call belongs to, a new one when it is none of those so far, and what to say of it.

    Where nothing tells the branch, the timeline's doubt is set. `name` was said for the branch,
    None for none; `conditions` are arguments by path that stay the same from step to step. Nothing
    is said where all is well.
    """
    index, is_named, found = timeline.index, name is not None, None
    if timeline.moving:
        conditions = {p: v for p, v in conditions.items() if p not in timeline.moving}
    for branch in [] if timeline.doubt else timeline.branches:
        fits = branch.name == name and (is_named or branch.signature == signature)
        if fits and (is_named or alike(branch.conditions, conditions)):
            found = branch
            break
    if found is None or found.seen_at == index:
        return _doubt_or_add(timeline, name, signature, conditions, found)
    found.steady = found.steady or frozenset(conditions)
    found.seen_at = index
    return found, ""


def _doubt_or_add(
    timeline: Timeline, name: str | None, signature: Any, conditions: dict[str, Any], found: Branch | None
) -> tuple[Branch, str]:
    """Return the answer of `tell` for a call without signs, or one that starts a branch.

    `found` is the branch that fits, of which this timestep had a call; None where none fits.
    """
    index, is_named = timeline.index, name is not None
    if found is not None:
        timeline.doubt = "name twice" if is_named else "calls alike"
    elif sum(b.seen_at == index for b in timeline.branches) >= MAX_BRANCHES:
        timeline.doubt = timeline.doubt or "many calls"
    if timeline.doubt:
        return doubted(timeline, name)
    named = [b for b in timeline.branches if b.name == name]
    known = named if is_named else [b for b in named if b.signature == signature]
    branch, said = None, ""
    if timeline.run.is_told:
        branch = _moved(timeline, known, conditions)
    if branch is None and not known and len(named) == 1 and named[0].seen_at < index:
        branch = named[0]  # of another look, so that this call is computed
        branch.conditions = keep(conditions)
    elif branch is None:
        said = CHANGED if sum(b.seen_at < index for b in known) > 1 else ""
        branch = timeline.add(name, {} if is_named else keep(conditions))
    branch.seen_at = index
    return branch, said


def _moved(timeline: Timeline, known: list[Branch], conditions: dict[str, Any]) -> Branch | None:
    """Return the branch of a call in a run that the user says, but for arguments that moved.

    Those that are others than at any branch's only call so far, and all that tells this one from
    one of them, are further noisy samples, and no conditions from now on. The call is computed: if
    it is a branch of its own after all, the other one follows at this timestep and is doubted.
    """
    earlier = [b for b in known if b.seen_at < timeline.index and b.steady is None]
    changes = [_changed(b.conditions, conditions) for b in earlier]
    moving = set.intersection(*changes) if changes else set()
    fitting = [b for b, paths in zip(earlier, changes, strict=True) if paths == moving]
    if len(fitting) != 1:
        return None
    timeline.moving |= moving
    for branch in timeline.branches:
        branch.conditions = {p: v for p, v in branch.conditions.items() if p not in moving}
    fitting[0].signature = None
    return fitting[0]


def _changed(held: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the paths of the conditions that are not those that were kept."""
    same = {p for p in held.keys() & given.keys() if alike({p: held[p]}, {p: given[p]})}
    return (held.keys() | given.keys()) - same


def doubted(timeline: Timeline, name: str | None) -> tuple[Branch, str]:
    """Return a branch that keeps nothing, and the warning about it."""
    timeline.branches.clear()
    return Branch(timeline.calls - 1, name, {}), f"{_COMPUTED}: {DOUBTS[timeline.doubt]}"


def watch(timeline: Timeline, sample: Tensor | None) -> None:
    """Count the steps in a row, in doubt, whose samples go on from the one before."""
    if timeline.calls == 1:
        before, timeline.glance = timeline.glance, glance(sample)
        timeline.steady = timeline.steady + 1 if goes_on(before, timeline.glance) else 0


def is_broken(
    timeline: Timeline, branch: Branch, signature: Any, conditions: dict[str, Any], sample: Tensor | None
) -> bool:
    """Return whether a call is given a sample that is no next step of its branch's.

    A sample that has moved so far and does not any more is none either: inversion ends, and
    sampling starts, at the same one. Nor is one that no sampler makes of the steps before without
    new noise, where all before could be made so. The first time since the timestep turned, another
    run may have started in place of the one before. After that the timeline is in doubt. So it is
    where the sample is too small to tell, and no condition does.
    """
    is_first = branch.signature != signature  # or of another look, which is computed
    before, now = branch.glance, glance(sample)
    branch.glance = timeline.glance = now
    is_one = sample is not None and sample.shape[:1] == (1,)  # a batch of one item
    strays = _strays(timeline, branch, now if is_one else glance(sample, 0))
    if is_first:
        return False
    if before is None or now is None:
        if any(isinstance(value, Tensor) for value in conditions.values()):
            return False
        timeline.doubt = "small sample"
    else:
        has_moved = not torch.equal(before, now)
        if goes_on(before, now) and has_moved >= branch.has_moved and not strays:
            branch.has_moved = has_moved
            timeline.steady += timeline.calls == 1
            return False
        if timeline.was_broken:
            timeline.doubt = "other sample"
    timeline.steady = 0
    return True


def _strays(timeline: Timeline, branch: Branch, now: Tensor | None) -> bool:
    """Note a glance at the first item of a branch's sample; return whether it is made of others than those before it.

    It is, if it is outside the sums as none of its trajectory was; not where the glance is None, as
    it tells too little.
    """
    earlier = branch.samples
    if now is None:
        branch.samples = earlier[1 - REACH :]
        return False
    branch.samples = [*earlier[1 - REACH :], now]
    before, outputs = list(earlier), 0
    for step, seen in timeline.outputs:
        if step < timeline.index:
            outputs += 1
            before.append(seen)
    if not outputs or not earlier:
        return False
    for seen in before:
        if seen.shape != now.shape:
            before = [each for each in before if each.shape == now.shape]
            break
    most, share = branch.stray, outside(now, before)
    branch.stray = share if most is None else max(most, share)
    return most is not None and share > max(_STRAY, _FURTHER * most)


def note_output(timeline: Timeline, out: Any) -> None:
    """Keep glances at the outputs of a call, of which a sampler makes the next sample.

    Guidance makes one of the items of a batch. All of four or fewer are looked at, else those where
    halves and thirds begin.
    """
    index, outputs = timeline.index, timeline.outputs
    while outputs and outputs[0][0] <= index - REACH:
        outputs.pop(0)
    batch = next(iter(leaves(out)), None)
    if batch is None or not batch.dim():
        return
    size = len(batch)
    chosen = range(size) if size <= 4 else (0, size // 3, size // 2, 2 * size // 3)
    for number in chosen:
        seen = glance(batch, number)
        if seen is not None:
            outputs.append((index, seen))


def turned(timeline: Timeline) -> str:
    """Return the warning for a run whose first sample goes on from a skipped step before it."""
    left, timeline.left = timeline.left, None
    return TURNED if goes_on(left, timeline.glance) else ""


def glance(sample: Tensor | None, item: int | None = None) -> Tensor | None:
    """Return some values of a batch, or of one `item`, as a copy of length 1, None where they tell too little."""
    if sample is not None and item is not None:
        sample = sample[item] if sample.dim() and item < len(sample) else None
    if sample is None or not sample.is_floating_point() or sample.numel() < FEWEST:
        return None
    values = sample.detach().reshape(-1)
    stride = values.numel() // _MOST | 1  # odd, so that it meets every column of an even width
    values = values[::stride].float()
    kept: Tensor = values / torch.linalg.vector_norm(values)
    return kept


def goes_on(before: Tensor | None, now: Tensor | None) -> bool:
    """Return whether one glance can be the step after another; waits for the device.

    False where nothing tells.
    """
    if before is None or now is None or before.shape != now.shape:
        return False
    least = max(_LEAST, _CHANCE / math.sqrt(len(now)))
    return float((before * now).sum()) >= least  # false where a sample is zero or not finite


def outside(now: Tensor, before: list[Tensor]) -> float:
    """Return the share of a glance's length, 1, that no sum of multiples of earlier glances holds; waits for it."""
    rows = torch.stack([*before, now]).cpu().double().nan_to_num(nan=0.0)  # an output may be broken
    products = rows @ rows.T
    inner, target = products[:-1, :-1], products[:-1, -1]
    held = target @ torch.linalg.lstsq(inner, target[:, None], driver="gelsd").solution[:, 0]
    return math.sqrt(max(1.0 - float(held), 0.0))
