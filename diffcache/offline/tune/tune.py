"""`diffcache.tune`: search on some prompts, validate on others, return one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from diffcache.api import check_free, denoisers_of
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Listed
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.features.tuned import Tuned
from diffcache.offline.calibrate import BATCH_SIZE, Plan, calibrate, header_of
from diffcache.offline.tracing import batches_of
from diffcache.offline.tune import space
from diffcache.offline.tune.search import Goal, Search, front_of
from diffcache.offline.tune.trial import Bench, Trial
from diffcache.step import Site


def tune(
    pipe: Any,
    prompts: Sequence[Any],
    *,
    speedup: float | None = None,
    psnr: float | None = None,
    seconds: float | None = None,
    methods: Sequence[Method] | None = None,
    trials: int = 60,
    **settings: Any,
) -> Tuned:
    """Search methods, settings, sites and schedules for a pipeline, and return the best.

    Half of the prompts are searched on, and the best few are validated on the other half. Tried
    are regular schedules with reuse, Taylor's and Newton's forecasts, schedules by dynamic
    programming with fitted forecasts, and gates; then single steps of the best schedules are
    moved as long as that helps. Costs are floating-point operations, so a search on one machine
    holds on another, except with `seconds`.

    Args:
        pipe: A diffusers pipeline, not wrapped, with one denoiser.
        prompts: Texts, class numbers or mappings of the call, one a sample; at least two batches.
        speedup: The closest method that needs at most `1 / speedup` of the operations.
        psnr: The cheapest method that stays this close, in dB.
        seconds: The closest method that takes at most so long a batch.
        methods: What to try instead of the built-in space; those that need tables are calibrated.
        trials: Most methods that are tried.
        **settings: `steps`, `batch_size`, `seed`, `out`, `resume` and `progress` as in
            `calibrate`; anything else goes to the pipeline's call.

    Returns:
        The method; its `front` holds what was seen. With `out` it is that file's, and `tuned` is
        its name on command lines.

    Raises:
        AttachError: If the pipeline is wrapped, nothing that was tried meets the goal, or nothing
            fits the pipeline.
        TablesError: If `<out>.trials` is of another search.
        ValueError: If there are too few prompts, or a setting is out of its range.

    Example:
        >>> best = diffcache.tune(pipe, prompts, speedup=3.0)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, best)  # doctest: +SKIP
    """
    goal = Goal(speedup, psnr, seconds)
    plan = _plan(prompts, settings)
    batches = batches_of(plan.prompts, plan.batch_size)
    if len(batches) < 2:
        raise ValueError(
            f"{len(plan.prompts)} prompts in batches of {plan.batch_size}: at least two batches "
            "are needed, to search and to validate on; give more prompts or batch_size=1"
        )
    denoisers = denoisers_of(pipe)
    check_free(pipe, denoisers, Site.MODEL)
    log = None if plan.out is None else plan.out.with_name(plan.out.name + ".trials")
    bench = Bench(pipe, batches, plan.seed, plan.arguments(), log)
    if log is not None and not plan.resume:
        log.unlink(missing_ok=True)
    model = next(iter(denoisers.values()))
    facts = facts_of(model, getattr(pipe, "scheduler", None))
    facts["guidance"] = plan.guidance(pipe)
    weights = sorted({f"{p.device.type} {p.dtype}" for p in model.parameters()})
    bench.open_log([asdict(goal), plan.about(), facts, weights])
    half = (len(batches) + 1) // 2
    bench.reference(0)
    chosen = _methods(pipe, methods, goal, bench, replace(plan, prompts=[*chain(*batches[:half])]))
    search = Search(bench, goal, list(range(half)), trials, plan.progress)
    best = search.run(chosen)
    tuned = _choose(search, best, list(range(half, len(batches))))
    return _tuned(tuned, search, plan, facts)


def _plan(prompts: Sequence[Any], settings: dict[str, Any]) -> Plan:
    """Return how runs are made, as for a calibration."""
    names = {"steps", "batch_size", "seed", "out", "resume", "progress"}
    own = {key: settings.pop(key) for key in names & set(settings)}
    if own.get("out") is not None:
        own["out"] = Path(own["out"])
    given = list(prompts) if not isinstance(prompts, str) else prompts
    return Plan(prompts=given, call=settings, **{"batch_size": BATCH_SIZE, **own})


def _methods(
    pipe: Any,
    methods: Sequence[Method] | None,
    goal: Goal,
    bench: Bench,
    plan: Plan,
) -> list[Method]:
    """Return what is tried, with tables where they are needed."""
    wanted: list[Method] = list(methods) if methods is not None else [*space.fitted()]
    missing = [m for m in wanted if isinstance(m, Calibrated) and m.tables is None]
    made: list[Calibrated] = []
    if missing:
        own = {"steps": plan.steps, "batch_size": plan.batch_size, "seed": plan.seed}
        made = calibrate(pipe, missing, plan.prompts, **own, **plan.call)
    filled = iter(made)
    ready = [next(filled) if any(m is lack for lack in missing) else m for m in wanted]
    if methods is not None:
        return ready
    total = bench.total
    if goal.speedup is not None:
        counts = [_count_for(bench, goal)]
    elif goal.seconds is not None:
        share = min(1.0, goal.seconds / bench.uncached_seconds)
        counts = space.counts_for(total, 0.6 * share, share)[-2:]
    else:
        counts = sorted({max(1, round(total * share)) for share in (0.15, 0.2, 0.25, 0.35, 0.5)})
    found = space.candidates(total, counts, ready)  # type: ignore[arg-type]
    return found + (space.gates() if goal.speedup is None else [])


def _count_for(bench: Bench, goal: Goal) -> int:
    """Return the most computed steps that are cheap enough; what always runs counts as well."""
    assert goal.speedup is not None
    for count in range(max(1, int(bench.total / goal.speedup)), 1, -1):
        probe = Combine(Listed(range(count), bench.total), Reuse(), Site.STACK)
        if goal.met(bench.measure(probe, [0])):
            return count
    return 1


def _choose(
    search: Search, best: list[tuple[Method, Trial]], batches: list[int]
) -> tuple[Method, dict[str, Trial]]:
    """Return the method that does best on the prompts that were not searched on.

    Raises:
        AttachError: If none meets the goal.
    """
    if not best or not search.goal.met(best[0][1]):
        saw = "; ".join(f"{t.psnr_db:.1f} dB at {t.cost:.2f}" for _, t in best[:3]) or "nothing"
        raise AttachError(
            f"{search.used} trials, and none meets {search.goal}: the best were {saw}; ask for "
            "less, or give more trials"
        )
    validated = {
        repr(m): (m, search.bench.measure(m, batches)) for m, t in best if search.goal.met(t)
    }
    method, _ = max(validated.values(), key=lambda pair: search.goal.rank(pair[1]))
    return method, {key: trial for key, (_, trial) in validated.items()}


def _tuned(
    chosen: tuple[Method, dict[str, Trial]],
    search: Search,
    plan: Plan,
    facts: dict[str, Any],
) -> Tuned:
    """Return the method with what the search saw, saved if that is asked for."""
    method, validated = chosen
    tensors: dict[str, Any] = {}
    choice = to_plain(method, tensors)
    trials = [trial for _, trial in search.seen.values()]
    front = [
        {
            "method": trial.method,
            "cost": trial.cost,
            "psnr_db": trial.psnr_db,
            "validation_psnr_db": getattr(validated.get(trial.method), "psnr_db", None),
        }
        for trial in front_of(trials)
    ]
    more = {"choice": choice, "front": front, "goal": asdict(search.goal), "tried": search.used,
            "steps": search.bench.total, "chosen": repr(method),
            "validation": asdict(validated[repr(method)]), "seed": plan.seed,
            "batch_size": plan.batch_size}  # fmt: skip
    tables = Tables(header_of(Tuned(), facts, plan, **more), tensors)  # type: ignore[arg-type]
    if plan.out is not None:
        tables = tables.save(plan.out)
        if search.bench.log is not None:
            search.bench.log.unlink(missing_ok=True)
    return Tuned(tables)
