"""Tasks of lm-evaluation-harness under recipes, beside the same model with an exact cache.

`lm_eval` takes seconds to import; so does this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from tqdm import tqdm

from diffcache.eval.kv.asked import acts_on_tokens, score
from diffcache.eval.kv.recall_cost import write_rows
from diffcache.eval.kv.recipe_words import NONE
from diffcache.eval.kv.texts import TextModel
from diffcache.eval.metrics.intervals import Interval, mean_interval, share_change, share_interval
from diffcache.eval.record import Setting
from diffcache.foreign import CACHES, cache_name, with_cache
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.most_attention import Asked

BENCHMARK = "kv-tasks"
Request = tuple[Any, list[int], list[int]]  # words, tokens of the context and of what follows


@dataclass(frozen=True)
class Questions:
    """Questions to a language model."""

    # Directory or Hugging Face model ID of a causal model of transformers with its tokenizer, or `recall-llama`
    model: str
    tasks: tuple[str, ...]
    limit: int | None = None  # questions of each task; all where none is given
    include_path: str | None = None  # folder of task files, beside those of the harness
    device: str = "cpu"
    batch: int = 1  # prompts that are generated from at once, padded on the left
    seed: int = 0  # seed of the examples that prompts begin with

    def __post_init__(self) -> None:
        TextModel(self.model)  # raises where there is none
        if not all(self.tasks):
            raise ValueError(f"--tasks {','.join(self.tasks)!r}: a name is empty")
        if self.limit is not None and self.limit < 2:
            raise ValueError(f"--limit {self.limit}: an interval needs at least 2 questions")
        if self.seed >= 1 << 32:  # NumPy's most
            raise ValueError(f"--seed {self.seed}: must be below 2**32")
        if self.batch < 1:
            raise ValueError(f"--batch {self.batch}: must be at least 1")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"--include-path {self.include_path}: no such folder of task files")

    def load(self) -> RecipeLM:
        """Return the model."""
        made = RecipeLM(pretrained=TextModel(self.model).place, device=self.device, batch_size=self.batch)
        made.model.generation_config.max_new_tokens = None  # each task sets its own
        return made

    def manager(self) -> TaskManager:
        """Return the harness's manager of the tasks.

        Raises ValueError if there is no task of a name.
        """
        # The harness' own files are thousands: they are read only where they are needed.
        manager = TaskManager(include_path=self.include_path, include_defaults=False)
        if any(not manager.match_tasks([task]) for task in self.tasks):
            manager = TaskManager(include_path=self.include_path)
        for task in self.tasks:
            if not manager.match_tasks([task]):
                raise ValueError(
                    f"--tasks {task}: no such task; `lm_eval ls tasks` lists those of the harness, "
                    "--include-path adds a folder of others"
                )
        return manager


class RecipeLM(HFLM):  # type: ignore[misc] # lm_eval has no types
    """A causal model of transformers that answers every request with a cache of a recipe.

    Answers are generated as `model.generate` does with the cache. For a log-likelihood all of the
    context but its last token is read, the cache is compressed, and then the last token and what
    follows are fed, so that everything that is scored is scored after the compression: token by
    token where the recipe acts while tokens are generated, at once where it does not.

    Attributes:
        recipe: Recipe of each cache; that of the class does nothing.
    """

    recipe = Recipe()

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        cache = cache_for(self.model, self.recipe)
        made: Tensor = super()._model_generate(
            context, max_length, stop, **{cache_name(self.model.forward) or CACHES[0]: cache}, **settings
        )
        return made

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        check_prompts(self.recipe, all(len(context) > 1 for _, context, _ in requests))
        answers = []
        shown = tqdm(requests, "scoring", disable=disable_tqdm, leave=False)
        for context, alike in groupby(shown, self._context):
            cache = self._read(context[:-1])
            for _, _, following in alike:
                answers.append(self._score(cache.fork(), context[-1], following))
        return answers

    def _context(self, request: Request) -> list[int]:
        """Return the end of a context that fits into the model together with the tokens after it."""
        _, context, following = request
        if len(following) > self.max_length:
            raise ValueError(
                f"{len(following)} tokens are to be scored at once, and the model takes {self.max_length}"
            )
        return context[-(self.max_length + 1 - len(following)) :]

    @torch.no_grad()
    def _read(self, tokens: list[int]) -> KVCache:
        """Return the compressed cache of some tokens."""
        cache = cache_for(self.model, self.recipe)
        if tokens:
            ids = torch.tensor([tokens], device=self.device)
            self.model(input_ids=ids, **with_cache(self.model, cache))
            cache.settle()
        return cache

    def _score(self, cache: KVCache, last: int, following: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of tokens in nats, and whether greedy decoding gives them."""
        each, right = score(self.model, cache, [last], following, self.recipe)
        return float(each.double().sum()), bool(right.all())


def check_recipe(recipe: Recipe, kinds: Mapping[str, str]) -> None:
    """Check that tasks can measure a recipe.

    `kinds` maps the name of each task to the kind of requests that it makes. Raises ValueError if the recipe cannot
    act, or would act on nothing that is scored.
    """
    if recipe.score == Asked():
        raise ValueError(
            f"recipe {recipe.name!r} scores slots by a probe that its user chooses, and a task has "
            "none; --tasks recall measures it with the context as the probe"
        )
    for task, kind in kinds.items():
        check_prompts(recipe, kind != "loglikelihood_rolling", f"--tasks {task}: ")


def check_prompts(recipe: Recipe, prompted: bool, where: str = "") -> None:
    """Raise ValueError if a recipe compresses prompts alone, and no prompt comes before the tokens that are scored."""
    if not prompted and recipe.evicts and not acts_on_tokens(recipe):
        raise ValueError(
            f"{where}recipe {recipe.name!r} compresses once, after a prompt, and here whole texts "
            "are scored without one, so nothing would be compressed; take a recipe that also acts "
            "while tokens are generated (h2o, kivi, ...), or a task with contexts"
        )


def ask(
    questions: Questions,
    recipes: dict[str, Recipe],
    out: Path | None = None,
    each: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Ask all questions with an exact cache and with each recipe, and return rows of a record.

    Args:
        questions: Questions to ask.
        recipes: Recipes by name.
        out: JSON file of the record.
        each: Callback that is given the name of the next one.

    Returns:
        For each recipe, task and metric: `value` and its `change` from the exact cache of the same questions, with 95
        % intervals where the metric is a mean over questions. The exact cache is the recipe `none`.

    Raises:
        ValueError: If a task is unknown, or cannot measure a recipe.
    """
    manager = questions.manager()
    loaded = manager.load(list(questions.tasks))["tasks"]
    for recipe in recipes.values():
        check_recipe(recipe, {name: task.OUTPUT_TYPE for name, task in loaded.items()})
    lm, started = questions.load(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    exact: dict[tuple[str, str], tuple[float, Tensor]] = {}
    for name, recipe in {NONE: Recipe(), **recipes}.items():
        if each is not None:
            each(name)
        lm.recipe = recipe
        try:
            found = _evaluate(lm, questions, manager)
        finally:
            detach(lm.model)
        for row, values in _rows(found):
            now = row["value"]["value"], values
            before = exact.setdefault((row["task"], row["metric"]), now)
            change = None if name == NONE else _change(before, now)
            rows.append({"name": name, **row, "change": change})
    if out is not None:
        shapes = asdict(questions) | {"device": lm.device.type}
        body = {"shapes": shapes, "rounds": 1, "seconds": time.perf_counter() - started, "rows": rows}
        write_rows(BENCHMARK, Setting(lm.device, lm.model.dtype), body, out, "lm_eval")
    return rows


def _evaluate(lm: RecipeLM, questions: Questions, manager: TaskManager) -> dict[str, Any]:
    seed = questions.seed
    of = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    asked = {"tasks": list(questions.tasks), "task_manager": manager, "limit": questions.limit}
    found: dict[str, Any] = lm_eval.simple_evaluate(model=lm, bootstrap_iters=0, **asked, **dict.fromkeys(of, seed))
    return found


def _rows(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield each metric of each task; where it is a mean over questions, with the value of every question."""
    for task, results in found["results"].items():
        samples = found["samples"].get(task, [])
        for key, value in results.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            each = [sample[metric] for sample in samples if sample["filter"] == kind]
            values = torch.empty(0)
            if each and all(isinstance(one, (int, float)) for one in each):
                values = torch.tensor(each, dtype=torch.float64)
            if len(values) < 2 or not math.isclose(float(values.mean()), value, abs_tol=1e-9):
                values = torch.empty(0)  # no mean over questions: an exponential, a ratio of sums, a mean of groups
            about = {"task": task, "metric": key, "value": {"value": float(value)}}
            if len(values):
                about["value"] = _interval(values).to_dict()
            yield about, values


def _is_share(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _interval(values: Tensor) -> Interval:
    return share_interval(values) if _is_share(values) else mean_interval(values)


def _change(before: tuple[float, Tensor], after: tuple[float, Tensor]) -> dict[str, Any]:
    """Return the change of a metric, with its interval where the metric is a mean over questions."""
    values = before[1], after[1]
    if not all(map(len, values)):
        return {"value": after[0] - before[0]}
    if all(map(_is_share, values)):
        return share_change(*values).to_dict()
    return mean_interval(values[1] - values[0]).to_dict()
