"""Spans of skipped blocks: the roles of their blocks, keeping and estimating their features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add, itemgetter, sub
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.setup import can_set
from diffcache.attach.reuse.trace import Key
from diffcache.attach.tree import Template, hollow, leaves, outputs_of
from diffcache.errors import AttachError
from diffcache.step import Site

Kind = tuple[str, int]  # what an output is on a skipped step, and which base or input it needs
Picker = Callable[[dict[Any, Any]], Any]  # takes arguments by name or place
OWN: Kind = ("own", 0)  # an estimate of the output itself


@dataclass(eq=False)
class TapSpec:
    """Task of one block call for the cache."""

    key: tuple[str, int]  # key of this call's features in a branch
    carry: dict[int, Key]  # output index -> argument, for the streams that this block passes on
    span: int | None = None  # number of the span, None outside
    opens: bool = False  # whether the span's base is this block's input
    closes: bool = False  # whether the span's features are this block's outputs
    residual: bool = False  # whether those features are taken against the base
    sides: tuple[int, ...] = ()  # indices of outputs that travel no further along the list; kept for themselves
    is_hollow: bool = False  # whether nothing reads the outputs on a skipped step but skipped blocks
    bare: bool = False  # whether an output is no tensor
    # whether what the loop adds between the blocks of the span stays out of its features, so that a skipped step adds
    # its own
    live: bool = False

    @property
    def records(self) -> bool:
        """Return whether features of this call are kept."""
        return self.closes or bool(self.sides) or self.is_hollow

    def kind(self, number: int) -> Kind:
        """Return the kind of output `number` on a skipped step.

        A `residual` on a stream of the span's base, `own` or, where the stream just passes, the
        block's input.
        """
        if number not in self.carry or number in self.sides or (self.closes and not self.residual):
            return OWN
        return ("residual" if self.closes else "pass"), list(self.carry).index(number)


@dataclass(eq=False)
class BlockFeatures:
    """The features of one block call: a state for every kept tensor, and how they go together."""

    states: list[Any]  # states of the kept tensors
    kinds: list[Kind]  # kinds of the call's outputs on a skipped step
    template: Template  # form that the outputs are in
    hollow: Any = None  # zeros in the shapes of the outputs, where nobody reads them
    shapes: list[Any] = field(default_factory=list)  # shapes, dtypes and devices of the kept tensors


def by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Return the arguments of a call by name or place, as pickers take them."""
    return {**kwargs, **dict(enumerate(args))}


def picker(keys: list[Key], container: type) -> Picker:
    """Return a function that takes arguments of a call, by names or places, in a container; `Tensor` for one."""
    take = itemgetter(*keys)
    if container is Tensor or (container is tuple and len(keys) > 1):
        return take  # the fastest way through
    if len(keys) == 1:
        return lambda given: container((take(given),))
    return lambda given: container(take(given))


def copied(pick: Picker) -> Picker:
    """Return a function that copies the tensors that `pick` takes."""

    def copies(given: dict[Any, Any]) -> Any:
        taken = pick(given)
        if isinstance(taken, Tensor):
            return taken.clone()
        return type(taken)([tensor.clone() for tensor in taken])

    return copies


def record(frame: Frame, spec: TapSpec, out: Any) -> None:
    """Keep the features of a block that just ran."""
    features = frame.features
    if spec.is_hollow:
        features[spec.key] = BlockFeatures([], [], Template(None), hollow(out))
        return
    base = frame.bases.get(spec.span, ())
    tensors: list[Tensor] = []
    kinds: list[Kind] = []
    for number, output in enumerate(outputs_of(out)):
        kind = spec.kind(number)
        if kind == OWN or not isinstance(output, Tensor):
            own = [leaf.detach().clone() for leaf in leaves(output)]
            tensors += own
            kinds += [OWN] * len(own)
            continue
        kinds.append(kind)
        if kind[0] == "residual":
            tensors.append(torch.sub(output.detach(), base[kind[1]].detach()))
    observer = frame.setup.observer
    if observer is not None:
        site = f"{spec.key[0]}.{spec.key[1]}"
        for number, tensor in enumerate(tensors):
            observer.feature(frame.step, site, number, tensor)
    store_features(frame, spec.key, tensors, kinds, Template(out))


def store_features(frame: Frame, key: Any, tensors: list[Tensor], kinds: list[Kind], template: Template) -> None:
    """Hand fresh features to the method's states, new ones where their shapes changed."""
    instead, features = frame.instead, frame.features
    shapes = [(t.shape, t.dtype, t.device) for t in tensors]
    held: BlockFeatures | None = features.get(key)
    if held is None or held.shapes != shapes:
        site = f"{key[0]}.{key[1]}"
        before: BlockFeatures | None = next(reversed(features.values()), None) if held is None else None
        states = [instead.init_at(site, index) for index in range(len(tensors))]
        instead.link([*(before.states[-1:] if before is not None else ()), *states])
        held = features[key] = BlockFeatures(states, kinds, template, shapes=shapes)
    held.kinds, held.template = kinds, template
    for state, tensor in zip(held.states, tensors, strict=True):
        instead.record(state, frame.step, tensor)


def estimate(frame: Frame, spec: TapSpec, given: tuple[Any, ...]) -> Any:
    """Return the outputs of a skipped block from its features, its span's base and its input."""
    held: BlockFeatures = frame.features[spec.key]
    base = given if spec.live else frame.bases.get(spec.span, ())
    guesses = iter(estimates(frame, held, base))
    outputs = [given[place] if what == "pass" else next(guesses) for what, place in held.kinds]
    frame.closed += spec.closes
    return held.template.build(outputs)


def foresee(frame: Frame) -> list[list[Any]]:
    """Make the estimates of all single blocks of this call in one go.

    Where a kernel adds an estimate to its stream as it makes it, states are returned instead.
    """
    assert frame.layout is not None
    features = frame.features
    states, ends = [], [0]
    for key in frame.layout.foreseen:
        states += features[key].states
        ends.append(len(states))
    frame.adds_at_once = frame.instead.adds_at_once(states[0])
    found = states if frame.adds_at_once else frame.instead.estimate_all(states, frame.step)
    frame.foreseen = [found[start:end] for start, end in pairwise(ends)]
    return frame.foreseen


def estimates(frame: Frame, held: BlockFeatures, base: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the estimates of a call's tensors, residuals added to streams; those a model may write to are fresh."""
    instead, states = frame.instead, held.states
    if len(states) == 1 and held.kinds == [OWN]:  # as of a module: the shortest way
        guess = instead.estimate(states[0], frame.step)
        return [guess.clone() if instead.is_held(states[0]) else guess]
    kinds = [kind for kind in held.kinds if kind[0] != "pass"]
    if kinds and all(what == "residual" for what, _ in kinds):
        return instead.estimate_all(states, frame.step, [base[place] for _, place in kinds])
    if len(states) == 1:
        guesses = [instead.estimate(states[0], frame.step)]
    else:
        guesses = instead.estimate_all(states, frame.step) if states else []
    if states and instead.is_held(states[0]):  # all of a call have the same age
        guesses = [g.clone() if k is OWN else g for g, k in zip(guesses, kinds, strict=True)]
    return [
        base[place] + guess if what == "residual" else guess
        for guess, (what, place) in zip(guesses, kinds, strict=True)
    ]


# the site MODEL -----------------------------------------------------------------------------------


OUTPUT = ("output", 0)  # where the feature is held


def keep_output(frame: Frame, out: Any) -> Any:
    """Show the output to the observer and keep it; return its replacement, None if it stays."""
    setup, replaced = frame.setup, None
    observer, sample = setup.observer, frame.call.sample
    if observer is not None and isinstance(sample, Tensor):
        first, *others = leaves(out)
        seen = observer.output(frame.step, sample, first)
        if seen is not None:
            out = replaced = Template(out).build([seen, *others])
    if setup.site is not Site.MODEL:
        return replaced
    own = [leaf.detach().clone() for leaf in leaves(out)]
    if setup.parts.feature == "change":
        own[0].sub_(fitted(frame, own[0]))
    elif setup.parts.feature == "guidance":
        if frame.state is frame.first:
            frame.state.output = frame.step.index, own
        else:
            own = list(map(sub, own, guided(frame, own)))
    store_features(frame, OUTPUT, own, [OWN] * len(own), Template(out))
    return replaced


def stand_in(frame: Frame) -> Any:
    """Return the estimate of the output of a skipped step."""
    held: BlockFeatures = frame.features[OUTPUT]
    guesses = estimates(frame, held)
    if frame.setup.parts.feature == "change":
        value = guesses[0] + fitted(frame, guesses[0])
        guesses[0] = frame.instead.correct(held.states[0], frame.step, value)
    elif frame.setup.parts.feature == "guidance":
        if frame.state is frame.first:
            frame.state.output = frame.step.index, [guess.clone() for guess in guesses]
        else:
            guesses = list(map(add, guesses, guided(frame, guesses)))
    return held.template.build(guesses)


def guided(frame: Frame, like: list[Tensor]) -> Sequence[Tensor]:
    """Return the outputs of the first guidance branch in this step.

    Raises AttachError if it was not called before in this step, or returned other shapes.
    """
    model, first = frame.setup.anatomy.model, frame.first
    if first is None or first.output[0] != frame.step.index:
        raise AttachError(
            f"{model}: a guidance branch was called before the first one in step "
            f"{frame.step.index}, from whose output its own is made; call the guided branch first "
            "in every step"
        )
    theirs = [list(each.shape) for each in first.output[1]]
    own = [list(each.shape) for each in like]
    if theirs != own:
        raise AttachError(
            f"{model}: guidance branches return outputs of shapes {theirs} and {own}, of which "
            "none is made from the other; use another method, such as TaylorSeer"
        )
    return first.output[1]


def fitted(frame: Frame, like: Tensor) -> Tensor:
    """Return the sample in the shape of the output: more channels or tokens are left out.

    Zeros are added where the output has more, as with a learned variance. Raises AttachError if the
    sample has another number of axes.
    """
    sample = frame.call.sample
    if not isinstance(sample, Tensor) or sample.dim() != like.dim():
        settable = can_set(frame.setup.method, "feature")
        way_out = "feature='output'" if settable else "another method"
        raise AttachError(
            f"{frame.setup.anatomy.model}: its output of shape {list(like.shape)} cannot be taken "
            f"against its sample; use {way_out}"
        )
    if sample.shape == like.shape:
        return sample
    shared = tuple(slice(min(a, b)) for a, b in zip(sample.shape, like.shape, strict=True))
    out = like.new_zeros(like.shape)
    out[shared] = sample[shared].to(like.dtype)
    return out
