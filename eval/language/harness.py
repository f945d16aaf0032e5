"""Tasks of lm-evaluation-harness for causal models with a KV cache and for diffusion models.

`lm_eval` is imported when a class or a run is asked for; it takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from diffcache.errors import DiffcacheError
from diffcache.eval.language.exact_match import accuracy
from diffcache.eval.language.models import Language, encode_pair

NAME = "diffcache"  # what the class is registered as
MAX_NEW_TOKENS = 256
SHARES = ("acc", "acc_norm", "exact_match")  # means of right and wrong, one answer a question


@dataclass
class Pace:
    """Tokens generated and the seconds it took."""

    tokens: int = 0
    seconds: float = 0.0


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as failure:
        if (failure.name or "").partition(".")[0] != "lm_eval":
            raise
        raise DiffcacheError(
            "language tasks need lm-evaluation-harness: pip install 'diffcache[llm]'"
        ) from None


@cache
def lm_class() -> type[Any]:
    """Return the harness' model class over a `Language`, registered as `diffcache`.

    Raises:
        DiffcacheError: If `lm_eval` is not installed.
    """
    base = _import("lm_eval.api.model").LM

    class DiffcacheLM(base):  # type: ignore[misc,valid-type]
        """A `Language` as the harness calls it; one process, whatever started it."""

        def __init__(self, model: Language, batch_size: Any = None, **_: Any) -> None:
            super().__init__()
            self.model, self.pace = model, Pace()

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """Return continuations; requests of one setting go to the model together."""
            groups: dict[tuple[Any, ...], list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(_settings(request.args[1]), []).append(number)
            texts = [""] * len(requests)
            start = time.perf_counter()
            for (most, *stop), numbers in groups.items():
                prompts = [requests[number].args[0] for number in numbers]
                for number, text in zip(
                    numbers, self.model.generate(prompts, most, stop), strict=True
                ):
                    self.pace.tokens += len(self.model.tokenizer.encode(text))
                    texts[number] = cut(text, stop)
                    self.cache_hook.add_partial(
                        "generate_until", requests[number].args, texts[number]
                    )
            self.pace.seconds += time.perf_counter() - start
            return texts

        def loglikelihood(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            """Return log-likelihoods of continuations, and whether they are the greedy ones."""
            pairs = [encode_pair(self.model.tokenizer, *request.args) for request in requests]
            return [self.model.score(*pair) for pair in pairs]

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """Return log-likelihoods of whole texts."""
            encode = self.model.tokenizer.encode
            texts = [encode(request.args[0], add_special_tokens=False) for request in requests]
            return [self.model.rolling(list(ids)) if ids else 0.0 for ids in texts]

    _import("lm_eval.api.registry").register_model(NAME)(DiffcacheLM)
    return DiffcacheLM


def _settings(given: dict[str, Any]) -> tuple[Any, ...]:
    """Return the most new tokens and the stop strings of a request.

    Raises:
        ValueError: If it asks for sampling.
    """
    if given.get("do_sample") and given.get("temperature") != 0:
        raise ValueError("do_sample=True: only greedy generation is supported; set it to false")
    stop = given.get("until") or []
    most = next((given[k] for k in ("max_gen_toks", "max_new_tokens") if k in given), None)
    stop = [stop] if isinstance(stop, str) else stop
    return (int(most or MAX_NEW_TOKENS), *(s for s in stop if s))


def cut(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the stop strings."""
    ends = [text.find(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


def run_tasks(
    model: Language,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness in this process and return entries for a record.

    Args:
        model: `CausalLanguage`, `DiffusionLanguage`, or anything like them.
        tasks: Names of tasks.
        include_path: Folder of task files; then the harness' own tasks, which need a network, are
            left out.
        limit: Questions of each task; all by default.

    Returns:
        `quality`: task -> `metric,filter` -> `value`, `stderr` (None where there is none), `n`, and
        for shares of right answers the 95 % interval (Wilson) `low` and `high`;
        `timing`: generated `tokens`, `seconds` and `tokens_per_second` (None without any).

    Raises:
        DiffcacheError: If `lm_eval` is not installed.
        FileNotFoundError: If `include_path` does not exist.
        ValueError: If `tasks` is empty, unknown, or `limit` is below 1.
    """
    if not tasks or isinstance(tasks, str):
        raise ValueError(f"tasks={tasks!r}: must be a list of at least one task name")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: must be at least 1")
    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"include_path={str(include_path)!r}: no such folder of task files")
    lm = lm_class()(model)
    manager = _import("lm_eval.tasks").TaskManager(
        include_path=None if include_path is None else str(include_path),
        include_defaults=include_path is None,
    )
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}; there are {manager.all_tasks[:20]}")
    found = _import("lm_eval").simple_evaluate(
        model=lm, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False,
        bootstrap_iters=1000,
    )  # fmt: skip
    counts = found["n-samples"]
    quality = {
        task: _entries(results, counts.get(task, {}).get("effective"))
        for task, results in found["results"].items()
    }
    pace = lm.pace
    rate = pace.tokens / pace.seconds if pace.tokens else None
    timing = {"tokens": pace.tokens, "seconds": pace.seconds, "tokens_per_second": rate}
    return {"quality": quality, "timing": timing}


def _entries(results: dict[str, Any], n: int | None) -> dict[str, dict[str, Any]]:
    """Return the numbers of one task with their standard errors."""
    entries = {}
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = results.get(f"{metric}_stderr,{kind}")
        known = isinstance(error, (int, float)) and error == error
        entry = {"value": float(value), "stderr": error if known else None, "n": n}
        if metric in SHARES and n:
            share = accuracy(round(value * n), n)
            entry.update(low=share.low, high=share.high)
        entries[key] = entry
    return entries
