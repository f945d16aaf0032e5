"""Runs of the zoo's denoisers and pipelines, as a user's loop or a pipeline makes them."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import diffcache
from diffcache import Combine, Every, Interval, Taylor
from diffcache.attach.handle import Handle
from tests.zoo.case import Case
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

CASES, PIPES = cases(), pipes()
EVERY = Interval(every=3)
SEER = Combine(Every(3), Taylor(2), site="block")
STEPS = 6


def run(pipe: Any, name: str = "FluxPipeline", seed: int = 0, steps: int = STEPS, **more: Any) -> Tensor:
    """Return what a pipeline gives in so many steps."""
    return pipe(**{**PIPES[name].call(pipe, seed, steps), **more})[0]


def flux(seed: int = 0) -> Any:
    """Build the zoo's FluxPipeline."""
    return PIPES["FluxPipeline"].build(seed)


def wrapped_pipe(name: str, method: Any = EVERY, seed: int = 0) -> Any:
    """Build a pipeline of the zoo and wrap it."""
    return diffcache.wrap(PIPES[name].build(seed), method)


def sample(case: Case, model: nn.Module, steps: int, seed: int = 0, order: Iterable[int] | None = None) -> Tensor:
    """Return the outputs of all steps of a run, or of some of them in an order of their own."""
    outs = []
    with torch.no_grad():
        for step in range(steps) if order is None else order:
            out = model(**case.kwargs(model, seed, step, steps), return_dict=False)[0]
            outs.append(out.clone())
    return torch.stack(outs)


def inputs(case: Case, model: nn.Module, extra: str = "", step: int = 4, seed: int = 0) -> dict[str, Any]:
    """Make the arguments of one step, with those of a variant of the case if one is named."""
    made = case.kwargs(model, seed, step)
    return {**made, **case.extras[extra](model, seed)} if extra else made


def steps(handle: Handle, count: int) -> Iterator[int]:
    """Walk through the steps of a run that a scheduler would announce."""
    handle.restart(range(count))
    for index in range(count):
        yield index
        handle.run().ticks += 1


def in_threads(*jobs: Any) -> list[Any]:
    """Run every job in a thread of its own, all at once."""
    results: list[Any] = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def work(place: int) -> None:
        gate.wait()
        with torch.no_grad():
            try:
                results[place] = jobs[place]()
            except BaseException as error:
                results[place] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
