"""Answer a prompt with a saved diffusion language model, with and without a cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import diffcache
from diffcache.dllm import Policy, Quota, Sampler, Schedule, Threshold
from diffcache.dllm.guided import Guided
from diffcache.dllm.rules import Rule
from diffcache.method import Method
from diffcache.pipelines.demo.saved import DTYPES, call_defaults, check_dtype
from diffcache.pipelines.diffusion_lm import Answer, DiffusionLM
from diffcache.pipelines.shipped_models import MODELS, places, present
from diffcache.registry import rows_of
from diffcache.run_report import Report


@dataclass(frozen=True)
class Order:
    """Request to a model; None leaves a setting to the model's folder.

    Attributes:
        length: Tokens of the answer.
        block: Tokens of a block.
        steps: Forwards of the answer, where their number is fixed.
        threshold: Least confidence of a token to be decided at once; None to decide a fixed number a step.
        guide: Autoregressive model that judges drafts; None for none.
        sampler: Measure that ranks candidates, as `Sampler.by`; None for their confidence.
        seed: Seed of noise and drawn orders.
    """

    prompt: str
    length: int | None = None
    block: int | None = None
    steps: int | None = None
    threshold: float | None = None
    guide: str | None = None
    sampler: str | None = None
    seed: int = 0

    def schedule(self, defaults: dict[str, Any], eos_id: int | None, window: int | None = None) -> Schedule:
        """Return the schedule of the answer; `defaults` give the `length` and `block` that the order leaves open.

        A sliding window of the policy, in tokens, takes the place of blocks unless the order has a block.

        Raises:
            ValueError: If the numbers do not go together.
        """
        known = {"eos_id": eos_id, **defaults}
        if window is not None and self.block is None:
            known |= {"block": None, "window": window}
        asked = {"length": self.length, "block": self.block, "steps": self.steps}
        return Schedule(**known | {k: v for k, v in asked.items() if v is not None})

    def how(self) -> Sampler:
        """Return the sampler, which decides how tokens are chosen.

        Raises:
            ValueError: If the threshold or the measure is invalid, or does not go with the other settings.
        """
        by: Any = self.sampler or "confidence"
        rule: Rule = Quota() if self.threshold is None else Threshold(self.threshold)
        if self.guide is not None:
            if self.threshold is not None:
                raise ValueError(
                    f"--threshold {self.threshold} and --guide {self.guide}: a guide decides how "
                    "many tokens settle at once; leave one of the two out"
                )
            rule = Guided()
        return Sampler(by=by, rule=rule, seed=self.seed)


@dataclass
class Done:
    """Answer of a cached run, its seconds and place, and the same of an uncached run; None unless asked for."""

    answer: Answer
    seconds: float
    place: str
    plain: Answer | None = None
    plain_seconds: float | None = None

    @property
    def report(self) -> Report:
        """Report of the rows that the cache computed and left out."""
        assert self.answer.report is not None, "the model is wrapped"
        return self.answer.report

    @property
    def same(self) -> int | None:
        """Number of tokens that agree with the uncached run's; None without one."""
        return None if self.plain is None else int((self.answer.ids == self.plain.ids).sum())

    def lines(self) -> list[str]:
        """Return lines on the seconds, and on the agreement with the uncached run."""
        count = self.answer.ids.numel()
        ran, every = self.report.computed, self.report.computed + self.report.skipped
        work = f"{ran:,} of {every:,} token-layers in {self.answer.forwards} forwards"
        if self.plain is None or self.plain_seconds is None:
            return [f"{count} tokens in {self.seconds:.2f} s on {self.place}, {work}"]
        pair = f"uncached {self.plain_seconds:.2f}, cached {self.seconds:.2f}"
        ratio = self.plain_seconds / self.seconds
        return [
            f"computed: {work}; uncached all, in {self.plain.forwards}",
            f"seconds: {pair}: {ratio:.2f}x on {self.place}",
            f"tokens that the uncached answer has too: {self.same} of {count}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            "schema": 1,
            "place": self.place,
            "seconds": self.seconds,
            "uncached_seconds": self.plain_seconds,
            "text": self.answer.texts,
            "tokens": self.answer.ids.numel(),
            "same_tokens": self.same,
            "forwards": self.answer.forwards,
            "rows": self.answer.rows,
            "report": self.report.to_dict(),
        }


def find(model: str) -> str | None:
    """Return the folder or model ID of a diffusion language model, given by path, shipped name or ID; else None."""
    for path in places(model):
        if path.is_dir():
            is_pipeline = (path / "model_index.json").exists()
            return str(path) if not is_pipeline and _has_mask(path) else None
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(model, "model_index.json")
    except LocalEntryNotFoundError:  # no network: look at the files that were downloaded
        return model if isinstance(try_to_load_from_cache(model, "config.json"), str) else None
    except EntryNotFoundError:
        return model
    except OSError:  # no such model
        return None
    return None


def _has_mask(path: Path) -> bool:
    """Return whether a folder of transformers says which token the mask is, or brings its code."""
    said: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "config.json"):
        file = path / name
        said |= json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    keys = ("mask_token_id", "mask_token", "auto_map")
    return "model_type" in said and any(said.get(key) is not None for key in keys)


def load(
    source: str, dtype: str, device: torch.device, guide: str | None = None, *, trust_remote_code: bool = False
) -> tuple[DiffusionLM, dict[str, Any]]:
    """Load a model with its tokenizer, and the defaults of its decoding.

    Args:
        source: Source that `find` returned.
        dtype: One of `DTYPES`, or `auto` for the dtype of the weights, float32 on the CPU.
        device: Device of the model.
        guide: Autoregressive model with the same tokens: shipped, a folder or a name on the Hub; None for none.
        trust_remote_code: Whether Python code that comes with the weights may run.

    Raises:
        ValueError: If the dtype is unknown, a model or the tokenizer cannot be loaded, or the guide cannot judge
            drafts of the model.
    """
    check_dtype(dtype)
    chosen: Any = DTYPES.get(dtype) or (torch.float32 if device.type == "cpu" else "auto")
    lm = DiffusionLM.from_pretrained(source, dtype=chosen, trust_remote_code=trust_remote_code)
    lm.model.to(device)
    if guide is not None:
        from transformers import AutoModelForCausalLM

        shipped = present(MODELS / guide)
        place = str(shipped) if shipped.is_dir() else guide
        try:
            judge = AutoModelForCausalLM.from_pretrained(place, dtype=chosen)
        except (OSError, ValueError) as error:
            raise ValueError(f"--guide {guide}: cannot be loaded: {error}") from error
        lm = DiffusionLM(lm.model, lm.tokenizer, guide=judge.to(device).eval())
    return lm, call_defaults(Path(source)) if Path(source).is_dir() else {}


def run(
    lm: DiffusionLM,
    method: Method,
    order: Order,
    defaults: dict[str, Any],
    *,
    compare: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Done:
    """Answer with a policy of `diffcache.dllm`; with `compare`, answer uncached before.

    `defaults` are the settings that `order` leaves open; `tell` is called with the text that settled.

    Raises:
        AttachError: If the model cannot be served with the policy.
        ValueError: If the method is no policy, or the settings do not go together.
    """
    if not isinstance(method, Policy):
        raise ValueError(
            f"--method {method.name}: is for pictures; a diffusion language model takes one of "
            f"{', '.join(rows_of('dllm'))}"
        )
    if lm.block is not None:
        defaults = {"block": None, **defaults}  # the model's own
    schedule = order.schedule(defaults, lm.eos_id, method.schedule.window)
    sampler = order.how()
    with diffcache.wrapped(lm.model, method):
        pass  # so that a misfit is refused before anything is computed
    plain, plain_seconds = None, None
    if compare:
        _warm(lm, order.prompt, schedule, sampler)
        started = time.perf_counter()
        plain = lm.generate(order.prompt, schedule, sampler)
        plain_seconds = time.perf_counter() - started
    diffcache.wrap(lm.model, method)
    if compare:
        _warm(lm, order.prompt, schedule, sampler)
    told = None if tell is None else (lambda number, text: tell(str(text)))
    started = time.perf_counter()
    answer = lm.generate(order.prompt, schedule, sampler, on_settled=told)
    seconds = time.perf_counter() - started
    weight = next(lm.model.parameters())
    place = f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"
    return Done(answer, seconds, place, plain, plain_seconds)


def _warm(lm: DiffusionLM, prompt: str, schedule: Schedule, sampler: Sampler) -> None:
    """Take one step, so that one-time work is not timed."""
    steps = lm.steps(prompt, schedule, sampler)
    next(steps)
    steps.close()
