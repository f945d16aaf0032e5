"""`diffcache.tune`: search on some prompts, validate on others, return one method."""

from __future__ import annotations

import marshal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.digest import digest
from diffcache.errors import AttachError, CacheWarning
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.features.combine import FeatureMethod
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.features.tuned import Guarantee, Tuned
from diffcache.method import check_int
from diffcache.offline.calibrate import BATCH_SIZE, CollectPlan, calibrate, header_of, with_steps
from diffcache.offline.tracing import batches_of
from diffcache.offline.tune import space
from diffcache.offline.tune.guarantee import certify, most_strayed, samples_needed
from diffcache.offline.tune.search import BEST, Goal, Search, Tried, by_name, front_of
from diffcache.offline.tune.trial import Score, Trial, Trials
from diffcache.step import Site
from diffcache.targets import check_free, denoisers_of

Judge = Callable[[Tensor, Any], bool]
_DEARER = 5  # settings that are tried for a certificate beside what met the goal


def tune(
    pipe: Any,
    prompts: Sequence[Any],
    *,
    speedup: float | None = None,
    psnr: float | None = None,
    seconds: float | None = None,
    lpips: float | None = None,
    right: Judge | None = None,
    confidence: float | None = None,
    methods: Sequence[Method] | None = None,
    trials: int = 100,
    **settings: Any,
) -> Tuned:
    """Search methods, settings, sites and schedules for a pipeline, and return the best.

    A third of the prompts is searched on, and the best few are validated on the others. Tried are the families of
    `diffcache.offline.tune.space`, which are those of the whole catalog: every forecast for any number of computed
    steps at all sites that the model has, every gate for any threshold, next always the family whose neighbors did
    best. First looks are on one batch; the better half goes on with one batch more, and so on. Then steps of the best
    schedules are dropped, moved and added as long as that helps, each change compared on the same samples and stopped
    when it is behind. The best methods as they are are validated beside what was put together, so that the choice is
    behind none of them but by chance. What the model refuses is listed under `refused` in the tables' header, and what
    was not looked at under `skipped`, with the reasons. Costs are floating-point operations, so a search on one
    machine holds on another, except with `seconds`.

    Args:
        pipe: A diffusers pipeline, not wrapped, with one denoiser.
        prompts: Texts, class numbers or mappings of the call, one a sample; at least two batches.
        speedup: The closest method that needs at most `1 / speedup` of the operations.
        psnr: The cheapest method that stays this close, in dB.
        seconds: The closest method that takes at most as long for a batch.
        lpips: The cheapest method whose pictures stay this close by LPIPS, with the weights that `diffcache eval`
            finds.
        right: The cheapest method that spoils no picture: a function that takes a picture, uint8 [3, H, W] (a film [F,
            3, H, W]), and its prompt, and returns whether the picture is right. A picture counts against a method if
            it is wrong and its uncached one right. It needs `confidence`.
        confidence: Least probability with which each new prompt of the same kind stays as close as `psnr` or `lpips`,
            which are then no means, or is not spoilt: see `diffcache.offline.tune.guarantee`. Prompts have to differ
            and run one by one; 0.95 takes 19 to validate on, so 29 in all.
        methods: Methods to try, with changes of their steps, instead of the built-in space; those that need tables are
            calibrated.
        trials: Budget: as many methods as may be run on all prompts that are searched on. A first look, on one batch
            of them, counts as that part of one.
        **settings: `steps` or `num_inference_steps`, `batch_size`, `seed`, `out`, `resume` and `progress` as in
            `calibrate`; anything else goes to the pipeline's call.

    Returns:
        The method; its `front` holds what was seen, and its `validation` how close the chosen method is to the
        uncached output on prompts that were not searched on, as the best of the few that were tried on these; its
        `guarantee` is what `confidence` asked for. With `out` it is that file's, and `tuned` is its name on command
        lines.

    Warns:
        CacheWarning: If nothing that was validated meets the goal on those prompts.

    Raises:
        AttachError: If the pipeline is wrapped, nothing that was tried meets the goal, or nothing fits the pipeline.
        TablesError: If `<out>.trials` is of another search.
        ValueError: If there are too few prompts, or a setting is out of its range, or prompts are not apart as
            `confidence` needs them.

    Examples:
        >>> best = diffcache.tune(pipe, prompts, speedup=3.0)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, best)  # doctest: +SKIP
    """
    goal = Goal(speedup, psnr, seconds, lpips, right is not None, confidence)
    check_int("trials", trials, 1)
    if methods is not None:
        methods = [make_method(method) for method in methods]
        for method in methods:  # what could not be written in the end is not searched for
            if not isinstance(method, FeatureMethod):
                raise ValueError(f"methods: {method!r} is no method of reuse by itself, which a search chooses")
            to_plain(method, {})
    score = _score(lpips, right)
    plan = _plan(prompts, settings, 1 if goal.confidence is not None else BATCH_SIZE)
    batches = batches_of(plan.prompts, plan.batch_size)
    if goal.confidence is not None:
        _check_apart(plan, goal.confidence)
    if len(batches) < 2:
        raise ValueError(
            f"{len(plan.prompts)} prompts in batches of {plan.batch_size}: at least two batches "
            "are needed, to search and to validate on; give more prompts or batch_size=1"
        )
    denoisers = denoisers_of(pipe)
    check_free(pipe, denoisers, Site.MODEL)
    log = None if plan.out is None else plan.out.with_name(plan.out.name + ".trials")
    bench = Trials(pipe, batches, plan.seed, plan.arguments(), log, score)
    if log is not None and not plan.resume:
        log.unlink(missing_ok=True)
    model = next(iter(denoisers.values()))
    facts = facts_of(model, getattr(pipe, "scheduler", None))
    facts["guidance"] = plan.guidance(pipe)
    weights = sorted({f"{p.device.type} {p.dtype}" for p in model.parameters()})
    bench.open_log([asdict(goal), _name(right), plan.about(), facts, weights])
    third = -(-len(batches) // 3)
    bench.reference(0)
    glance = 1 if confidence is None else min(third, BATCH_SIZE)
    search = Search(bench, goal, list(range(third)), trials, plan.progress, glance)
    plan_of_search = replace(plan, prompts=[*chain(*batches[:third])])
    families = _families(pipe, model, methods, plan_of_search, search)
    search.run(families)
    others = list(range(third, len(batches)))
    if goal.confidence is None:
        tuned = _tuned(_choose(search, others), search, plan, facts)
    else:
        ladders = [family.ladder for family in families]
        method, validated, guarantee = _certified(search, ladders, others)
        tuned = _tuned((method, validated), search, plan, facts, guarantee)
    if log is not None:
        log.unlink(missing_ok=True)
    return tuned


def _score(lpips: float | None, right: Judge | None) -> Score | None:
    """Return the function that scores outputs, higher for the better; None for the PSNR.

    Raises:
        MissingWeightsError: If LPIPS has no weights.
        ValueError: If an output is no 8-bit picture.
    """
    if lpips is None and right is None:
        return None
    # By its name, as `diffcache.eval` is built on this.
    network = None if lpips is None else import_module("diffcache.eval.metrics.lpips").load()

    def score(drawn: Tensor, reference: Tensor, prompts: Sequence[Any]) -> list[float]:
        if drawn.dtype != torch.uint8:
            name = "right=" if network is None else f"lpips={lpips:g}"
            raise ValueError(f"{name}: needs pictures, and this pipeline returned {drawn.dtype}")
        if network is None:
            assert right is not None
            rows = zip(drawn, reference, prompts, strict=True)
            return [float(bool(right(mine, p)) or not right(plain, p)) for mine, plain, p in rows]
        pairs = (drawn, reference)
        if drawn.ndim == 5:  # of a film the mean over its frames
            pairs = (drawn.flatten(0, 1), reference.flatten(0, 1))
        found: Tensor = network.distances(*pairs).view(len(drawn), -1).mean(1)
        return [-value for value in found.tolist()]

    return score


def _name(function: Judge | None) -> str:
    """Return the name of a judge in the log of a search, and a digest of a function's code."""
    if function is None:
        return ""
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)  # tells two lambdas of one module apart
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    plain = [value for value in cells if isinstance(value, (int, float, str))]
    # of version 2, in which no reference counts show: an interrupted search is to be known again
    about = [] if code is None else [digest([marshal.dumps(code, 2).hex(), plain])]
    return ":".join([named.__module__, named.__qualname__, *about])


def _plan(prompts: Sequence[Any], settings: dict[str, Any], batch_size: int) -> CollectPlan:
    """Return how runs are made, as for a calibration; in batches of this size unless said."""
    settings = with_steps(settings)
    names = {"steps", "batch_size", "seed", "out", "resume", "progress"}
    own = {key: settings.pop(key) for key in names & set(settings)}
    if own.get("out") is not None:
        own["out"] = Path(own["out"])
    given: Any = prompts if isinstance(prompts, (str, Mapping)) else list(prompts)
    return CollectPlan(prompts=given, call=settings, **{"batch_size": batch_size, **own})


def _check_apart(plan: CollectPlan, confidence: float) -> None:
    """Raise ValueError unless prompts can be validated on one by one, and are enough."""
    if plan.batch_size != 1:
        raise ValueError(
            f"batch_size={plan.batch_size}: must be 1 with confidence=, since samples of one batch "
            "share the decisions of a method and are not apart"
        )
    seen: set[str] = set()
    for prompt in plan.prompts:
        key = digest(prompt)  # of what it holds: tensors tell no equality
        if key in seen:
            raise ValueError(
                f"prompts: {prompt!r} is there twice; with confidence= no prompt may be both searched and validated on"
            )
        seen.add(key)
    needed = samples_needed(confidence)
    searched = -(-len(seen) // 3)
    if len(seen) - searched < needed:
        raise ValueError(
            f"{len(seen)} prompts: confidence={confidence:g} takes {needed} to validate on beside "
            f"the third that is searched on; give at least {-(-3 * needed // 2)}"
        )


def _certified(
    search: Search, ladders: list[space.Ladder], batches: list[int]
) -> tuple[Method, dict[str, Trial], Guarantee]:
    """Return the cheapest method that is certified on prompts that were not searched on.

    Settings that are certified are of those that the search saw, of which nothing else is both cheaper and closer: the
    cheapest that met the goal, two that are cheaper and five that are dearer. A search for a PSNR has no reason to try
    dearer ones, so the next five rungs of the best method's ladder are tried on its prompts first.

    Raises:
        AttachError: If none is.
    """
    goal, tried = search.goal, search.first | search.seen
    best = search.best(search.seen or search.first)[:1]
    for method in search.dearer(ladders, best[0][0])[:_DEARER] if best else ():
        try:
            tried[repr(method)] = method, search.bench.measure(method, search.batches)
        except AttachError as error:
            search.refused[repr(method)] = str(error)
    front = front_of([trial for _, trial in tried.values()])
    start = next((i for i, trial in enumerate(front) if goal.met(trial)), len(front))
    ladder = [trial.method for trial in reversed(front[max(start - 2, 0) : start + 1 + _DEARER])]
    validated: dict[str, Trial] = {}

    def measure(key: str) -> Sequence[float]:
        if search.progress is not None:
            search.progress(search.trials, search.trials, f"validating {len(validated) + 1} settings")
        validated[key] = search.bench.measure(tried[key][0], batches)
        return validated[key].scored

    assert goal.bar is not None  # as a confidence goes with it
    assert goal.confidence is not None
    key, guarantee, counts = certify(ladder, measure, goal.bar, goal.confidence, goal.measure)
    if guarantee is None:
        most = most_strayed(len(batches), goal.confidence)
        saw = f"{counts[0]} of {len(batches)} prompts strayed from it" if counts else "nothing fits"
        wish = "right=" if goal.right else f"{goal.measure}={abs(goal.bar):g}"
        raise AttachError(
            f"{search.tried} methods were tried, and none is certified to stay within {wish} with "
            f"confidence={goal.confidence:g}: {saw} with the dearest, and {most} may; ask for "
            "less, or give more prompts or trials"
        )
    return tried[key][0], validated, guarantee


def _families(
    pipe: Any, model: nn.Module, methods: Sequence[Method] | None, plan: CollectPlan, search: Search
) -> list[space.Rungs]:
    """Return the families of a search, with tables where methods need them."""
    if methods is not None:
        needing = [m for m in methods if isinstance(m, Calibrated) and m.tables is None]
        measured = _calibrate(pipe, [[method] for method in needing], plan, search)
        filled = [measured.get(repr(method), method) for method in methods]
        fitting = [method for method in filled if repr(method) not in search.refused]
        return [space.Rungs(method.name, [method]) for method in fitting]
    search.skipped.update(space.LEFT_OUT)
    total = search.bench.total
    places = space.sites(hasattr(model, "down_blocks") and hasattr(model, "up_blocks"))
    measured = _calibrate(pipe, space.to_calibrate(places, total), plan, search)
    return space.families(total, places, [*measured.values()])


def _calibrate(
    pipe: Any, groups: Sequence[Sequence[Calibrated]], plan: CollectPlan, search: Search
) -> dict[str, Calibrated]:
    """Return methods with their tables, by their repr without; note those that do not fit."""
    own = {"steps": plan.steps, "batch_size": plan.batch_size, "seed": plan.seed}
    measured: dict[str, Calibrated] = {}
    for group in groups:
        try:
            filled = calibrate(pipe, group, plan.prompts, **own, **plan.call)
        except (AttachError, ValueError) as error:  # this model has nothing to measure it on
            search.refused.update({repr(method): str(error) for method in group})
        else:
            measured.update(zip(map(repr, group), filled, strict=True))
    return measured


def _choose(search: Search, batches: list[int]) -> tuple[Method, dict[str, Trial]]:
    """Return the method that does best on the prompts that were not searched on.

    Raises:
        AttachError: If none met the goal on those that were.
    """
    goal = search.goal
    others = {key: tried for key, tried in search.first.items() if key not in search.seen}
    ranked = [*search.best(search.seen), *search.best(others)]
    hopeful = [pair for pair in ranked if goal.met(pair[1])]
    if not hopeful:
        saw = "; ".join(f"{t.psnr_db:.1f} dB at {t.cost:.2f}" for _, t in ranked[:BEST])
        refused = next((f"; {m}: {why}" for m, why in search.refused.items()), "")
        raise AttachError(
            f"{search.tried} methods were tried, and none meets {goal}: the best were "
            f"{saw or 'nothing'}; ask for less, or give more trials{refused}"
        )
    # what was refined fits the prompts of the search better than others, so its starts go with it,
    # and the best methods as they are, so that the choice is behind none of them but by chance
    methods = [method for method, _ in hopeful]
    leaders = [method for method in methods if repr(method) in search.leaders]
    first = by_name([*methods[:BEST], *leaders[:BEST], *search.whole(methods)])
    more = by_name(methods[BEST : 2 * BEST])
    validated: Tried = {}
    for number, (key, method) in enumerate((first | more).items()):
        rival = next((t for _, t in search.best(validated)[:1] if goal.met(t)), None)
        if number >= len(first) and rival is not None:
            break
        trial = search.validate(method, batches, rival)
        if trial is not None:
            validated[key] = method, trial
    method, trial = search.best(validated)[0]
    if not goal.met(trial):
        warnings.warn(
            f"nothing that was validated meets {goal} on the prompts that were not searched on; "
            f"{method!r} has {trial.psnr_db:.1f} dB at {trial.cost:.2f}",
            CacheWarning,
            stacklevel=3,
        )
    return method, {key: trial for key, (_, trial) in validated.items()}


def _tuned(
    chosen: tuple[Method, dict[str, Trial]],
    search: Search,
    plan: CollectPlan,
    facts: dict[str, Any],
    guarantee: Guarantee | None = None,
) -> Tuned:
    """Return the method with the front of the search, saved if that is asked for."""
    method, validated = chosen
    tensors: dict[str, Any] = {}
    choice = to_plain(method, tensors)
    front = []
    for trial in front_of([trial for _, trial in search.seen.values()]):
        row = {name: getattr(trial, name) for name in ("method", "cost", "psnr_db")}
        for name in ("psnr_db", "low_db", "high_db"):
            row[f"validation_{name}"] = getattr(validated.get(trial.method), name, None)
        front.append(row)
    more = {"choice": choice, "front": front, "goal": asdict(search.goal)}
    more |= {name: getattr(search, name) for name in ("tried", "refused", "skipped", "stopped")}
    more |= {"steps": search.bench.total, "chosen": repr(method)}
    more |= {"validation": asdict(validated[repr(method)])}
    more |= {"seed": plan.seed, "batch_size": plan.batch_size}
    if guarantee is not None:
        more["guarantee"] = asdict(guarantee)
    tables = Tables(header_of(Tuned(), facts, plan, **more), tensors)  # type: ignore[arg-type]
    if plan.out is not None:
        tables = tables.save(plan.out)
    return Tuned(tables)
