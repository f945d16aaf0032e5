"""Decode with a diffusion language model: blocks of masks become words, with a cache or without.

>>> lm = diffcache.wrap(DiffusionLM(model, tokenizer), "dkv-cache", every=8)  # doctest: +SKIP
>>> answer = lm.generate("What is 2 + 2?", Schedule(length=128))
... # doctest: +SKIP
>>> print(answer.texts[0], answer.report)  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.anchor import Loop, owner_of
from diffcache.api import report, run
from diffcache.attach.attention_sdpa import calls_sdpa
from diffcache.dllm.block_cache import BlockCache, whole_blocks, within_blocks
from diffcache.dllm.decode import Decoding, Schedule
from diffcache.dllm.guided import Guided
from diffcache.dllm.policy import FedRows, Policy, Uncached
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.sampler import Sampler
from diffcache.dllm.state import State, check_coverage
from diffcache.foreign import device_of_model
from diffcache.method import check_bool, check_int
from diffcache.pipelines.guide import ModelGuide, check_guide
from diffcache.pipelines.masked_model import FAMILIES, Family, MaskedModel, parts_of
from diffcache.pipelines.prompt_tokens import Prompts, tokens_of
from diffcache.run_report import Report
from diffcache.targets import handle_of

OnSettled = Callable[[int, "list[int] | str"], None]


class Streamer:
    """Calls a function with the tokens that settle: the decided tokens before the first mask of an answer.

    Args:
        on_settled: Called with the number of a prompt and its newly settled tokens, or their text; None for nobody.
        text: Makes text of tokens; None for tokens.
    """

    def __init__(self, on_settled: OnSettled | None, text: Callable[[list[int]], str] | None) -> None:
        self.on_settled, self.text = on_settled, text
        self.told: dict[int, Any] = {}

    def show(self, decoding: Decoding, numbers: Iterable[tuple[int, int]] | None = None) -> None:
        """Tell the tokens that settled at the last step; the host waits.

        `numbers` are the sequences to tell about, each with the number of its prompt; None for all.
        """
        if self.on_settled is None:
            return
        answers = decoding.settled()
        for row, number in enumerate(range(len(answers))) if numbers is None else numbers:
            settled: Any = self.text(answers[row]) if self.text else answers[row]
            told = self.told.get(number, settled[:0])
            if self.text and settled.endswith("\ufffd") and decoding.rows[row].is_active:  # half a character
                continue
            if len(settled) > len(told) and settled[: len(told)] == told:
                self.on_settled(number, settled[len(told) :])
                self.told[number] = settled


@contextmanager
def progress_bar(shown: bool) -> Iterator[Callable[[Decoding], None]]:
    """Yield a function that shows the decided tokens of a decoding on a bar, if one is `shown`; the host waits."""
    if not shown:
        yield lambda decoding: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("decoding", total=None)

        def show(decoding: Decoding) -> None:
            answer = decoding.answer
            done = int((answer != decoding.mask_id).sum())
            progress.update(task, completed=done, total=answer.numel())

        yield show


@dataclass(frozen=True, eq=False)
class Answer:
    """Result of a decoding, and its cost.

    Attributes:
        ids: Tokens of the answers, int64 `[B, length]`.
        texts: The answers up to their end, None without a tokenizer.
        forwards: Calls of the model.
        rows: Rows that the plans named, of all sequences and forwards together. Where a policy has
            the model compute more than that, the report tells how many.
        report: Rows that the cache computed and left out, None where the model is not wrapped.
        guide_rows: Rows that the guide computed, of all sequences and forwards together.
    """

    ids: Tensor
    texts: list[str] | None
    forwards: int
    rows: int
    report: Report | None
    guide_rows: int = 0


class DiffusionLM(Loop):
    """A masked diffusion language model and how it is decoded.

    Models that attend both ways see prompt and answer whole. Models whose attention is causal over blocks (LLaDA2,
    SDAR, Fast-dLLM v2) are decoded block by block: a policy chooses rows of the active block, everything before it is
    kept exactly, and nothing after it is computed. Elastic-Cache, d2Cache and dLLM-Cache are refused for these models,
    since they need features of all tokens in each layer.

    Args:
        model: A model of transformers, or one with its own code such as LLaDA and Dream, that predicts masks; or
            diffusers' `LLaDA2Pipeline`, whose model, tokenizer and block length are taken. Wrapped with a policy of
            `diffcache.dllm`, it is decoded with that cache; else without any.
        tokenizer: Its tokenizer; None for prompts and answers of token ids.
        mask_id: Token of the mask; None for that of the configuration or the tokenizer.
        eos_id: Token that ends an answer; None for that of the tokenizer, or none.
        guide: Autoregressive model of transformers with the same tokenizer, for `Sampler(rule=Guided())`, which is
            then the sampler where none is given.
        shift: Whether the logits of a row predict the token after its own, as in Dream; None to go by the
            configuration's `model_type`. A cache then also computes the row before each token that may be committed.
        block: Tokens of a block, for a model whose attention is causal over blocks and goes both ways inside; None to
            go by its configuration. Before the first answer, three forwards of two blocks check the block, and find
            out whether the model makes the mask of blocks itself.
        compiled: Whether `torch.compile` runs forwards of some rows, for models whose attention goes through
            transformers' interface, and all policies but dLLM-Cache and Sparse-dLLM. Forwards of all rows, and those
            within `torch.inference_mode`, stay as they are. Logits agree up to rounding. A new number of rows may be
            compiled anew; `Schedule(multiple=16)` makes them few.

    Raises:
        ValueError: If nothing tells the token of the mask, the guide cannot score the model's tokens, `shift` is not
            what the model does, or the pipeline is another one.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        mask_id: int | None = None,
        eos_id: int | None = None,
        guide: nn.Module | None = None,
        shift: bool | None = None,
        block: int | None = None,
        compiled: bool = False,
    ) -> None:
        check_bool("compiled", compiled)
        self.compiled = compiled
        if not isinstance(model, nn.Module):
            model, tokenizer, block = parts_of(model, tokenizer, block)
        self.model: nn.Module = model
        self.tokenizer, self.guide = tokenizer, guide
        if guide is not None:
            check_guide(guide, model)
        config = getattr(model, "config", None)
        model_type = str(getattr(config, "model_type", None))
        family = FAMILIES.get(model_type, Family())
        known = [getattr(x, "mask_token_id", None) for x in (config, tokenizer)]
        found = next((x for x in (mask_id, *known, family.mask_id) if x is not None), None)
        if found is None:
            raise ValueError(
                "mask_id=None: neither the model's configuration nor the tokenizer says which "
                "token the mask is; give mask_id"
            )
        self.mask_id: int = found
        if shift is not None:
            check_bool("shift", shift)
        if None not in (shift, family.shift) and shift != family.shift:
            raise ValueError(
                f"shift={shift}: models of model_type={model_type!r} have shift={family.shift}; leave it out"
            )
        self.shift = bool(family.shift if shift is None else shift)
        if block is None:
            block = getattr(config, family.named, None) or family.block
        if block is not None:
            check_int("block", block, 1)
        self.block = block
        self.masked = MaskedModel(model, block)
        self.masked.check_token("mask_id", found)
        self.masked.check_token("eos_id", eos_id)
        self.eos_id = getattr(tokenizer, "eos_token_id", None) if eos_id is None else eos_id

    @classmethod
    def from_pretrained(
        cls, source: str, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
    ) -> DiffusionLM:
        """Load a model and its tokenizer as transformers saves them.

        Args:
            source: Directory or Hugging Face model ID.
            dtype: Data type of the weights; "auto" is the one that they were saved in.
            trust_remote_code: Whether Python code that comes with the weights may run, which LLaDA and Dream need.

        Raises:
            ValueError: If transformers cannot load it, or nothing tells the token of the mask.
        """
        from transformers import AutoTokenizer

        from diffcache.pipelines.language_model import load_language_model

        model = load_language_model(source, dtype, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        return cls(model, tokenizer)

    @property
    def network(self) -> nn.Module:
        """The model."""
        return self.model

    @property
    def policy(self) -> Policy | None:
        """The policy that the model is wrapped with, None where it is not wrapped.

        Raises:
            ValueError: If it is wrapped with another method.
        """
        if owner_of(self.model) is None:
            return None
        method = handle_of(self.model).chosen
        if not isinstance(method, Policy):
            raise ValueError(
                f"the model is wrapped with {method!r}: a diffusion language model takes a policy "
                "of diffcache.dllm, such as DKVCache(); unwrap it first"
            )
        return method

    def generate(
        self,
        prompts: Prompts,
        schedule: Schedule | None = None,
        sampler: Sampler | None = None,
        *,
        on_settled: OnSettled | None = None,
        progress: bool = False,
        check: bool = False,
    ) -> Answer:
        """Decode answers to one or several prompts.

        Args:
            prompts: A text, texts, or token ids of one sequence `[P]` or `[1, P]`, or of several in a list; those of
                different lengths are padded on the left.
            schedule: Length, blocks and steps; None for the policy's default, which ends at the tokenizer's end token.
            sampler: Sampler; None for low-confidence decoding, a fixed number of tokens a step.
            on_settled: Called with the number of a sequence and what settled in it: text, or tokens without a
                tokenizer. A token has settled when all before it are decided.
            progress: Whether a progress bar is shown.
            check: Whether every plan is checked to cover all rows that changed; each step waits for that.

        Raises:
            ValueError: If the prompts are empty or too long, contain the mask or ids that are no tokens of the model,
                the sampler does not fit the policy, or the model's logits are not finite.
        """
        rows = 0
        with progress_bar(progress) as show:
            decoding = self._begun(prompts, schedule, sampler)
            streamer = self._streamer(on_settled, decoding)
            for count in self._forwards(decoding, check):
                rows += count
                show(decoding)
                streamer.show(decoding)
        ids = decoding.answer
        texts = None if self.tokenizer is None else [self.text(row, decoding.schedule.eos_id) for row in ids.tolist()]
        made = None if self.policy is None else report(self.model)
        guided = 0 if decoding.guide is None else decoding.guide.rows
        batch = len(ids) * (2 if decoding.sampler.cfg_scale else 1)
        return Answer(ids, texts, decoding.step, rows * batch, made, guided)

    def steps(
        self, prompts: Prompts, schedule: Schedule | None = None, sampler: Sampler | None = None
    ) -> Generator[Decoding, None, None]:
        """Yield the decoding after each of its steps.

        Several may take turns on one model: each holds keys and values of its own, and frees them
        at its end or when its iterator is closed.

        Args:
            prompts: Prompts, as for `generate`.
            schedule: Schedule, as for `generate`.
            sampler: Sampler, as for `generate`.
        """
        decoding = self._begun(prompts, schedule, sampler)
        for _ in self._forwards(decoding):
            yield decoding

    def serve(
        self,
        prompts: Iterable[str | Sequence[int] | None],
        schedule: Schedule | None = None,
        sampler: Sampler | None = None,
        *,
        slots: int = 8,
        longest: int | None = None,
        fill: int = 256,
        on_settled: OnSettled | None = None,
        is_canceled: Callable[[int], bool] | None = None,
    ) -> Generator[tuple[int, list[int] | ValueError], None, None]:
        """Yield the number of a prompt and its answer's tokens, each as it ends.

        At most `slots` prompts are decoded at a time; where one ends, the next one takes its place (continuous
        batching). For models whose attention is causal over blocks. If the sampler draws nothing at random, each
        answer is the one that its prompt has alone, up to rounding.

        Args:
            prompts: Texts or token ids, taken one by one as places are free. An iterator that blocks until its next
                one makes all wait; it may yield None instead while there is none, and is asked again after the next
                forward. Serving ends once it is exhausted and all places are free.
            schedule: Schedule, as for `generate`.
            sampler: Sampler, as for `generate`.
            slots: Sequences that are decoded at a time.
            longest: Most tokens of a prompt; None to look at all prompts beforehand.
            fill: Tokens of a prompt that a forward computes once others are under way, in whole blocks of attention,
                at least one; longer prompts take several forwards.
            on_settled: Called with the number of a prompt and what settled in its answer, as for `generate`.
            is_canceled: Asked after every forward about each prompt that is decoded; if it returns True, the prompt
                leaves its place without an answer.

        Yields:
            Number of the prompt, from 0, and the tokens of its answer; or an error, for a prompt that is longer than
            `longest` or is not made of the model's tokens. It disturbs no other prompt.

        Raises:
            ValueError: If the model attends both ways, the policy does not let sequences come and go, or the prompts
                are one text, or the tokens of one prompt.
        """
        self._check_serves(prompts, slots, longest, fill)
        rows: Iterable[list[int] | ValueError | None] = map(self._tokens, prompts)
        if longest is None:
            rows = list(rows)
            longest = max([1, *(len(row) for row in rows if isinstance(row, list))])
        refused: list[tuple[int, ValueError]] = []
        waiting = self._admitted(rows, longest, refused)
        early = list(islice(waiting, slots))
        taken = [pair for pair in early if pair]
        yield from refused
        refused.clear()
        numbers = dict(enumerate(number for number, _ in taken))
        places = slots if taken and None in early else max(len(taken), 1)  # others may come
        blank = [0 if self.mask_id else 1]  # so that settings are checked even without a prompt
        first = [row for _, row in taken] + [blank] * (places - len(taken))
        decoding = self._begun(first, schedule, sampler, longest)
        for slot in range(len(taken), places):
            decoding.leave(slot)
        if not taken:
            return
        streamer = self._streamer(on_settled, decoding)
        size = max(fill, self.block or 1)
        with closing(self._forwards(decoding)) as forwards:
            for _ in forwards:
                streamer.show(decoding, numbers.items())
                canceled = [n for n in numbers.values() if is_canceled and is_canceled(n)]
                for slot, number in list(numbers.items()):
                    if number in canceled:
                        decoding.leave(slot)
                    elif decoding.rows[slot].is_active:
                        continue
                    else:
                        yield number, decoding.answer[slot].tolist()
                    del numbers[slot]
                    streamer.told.pop(number, None)  # there may be endlessly many prompts
                self._seat(decoding, numbers, waiting, size)
                yield from refused
                refused.clear()

    def _seat(
        self, decoding: Decoding, numbers: dict[int, int], waiting: Iterator[tuple[int, list[int]] | None], fill: int
    ) -> None:
        """Put prompts that wait in places that are free, as long as there are both."""
        for slot in range(len(decoding.rows)):
            if slot not in numbers:
                pair = next(waiting, None)
                if pair is None:  # no prompt at present
                    return
                numbers[slot] = pair[0]
                decoding.place(slot, pair[1], fill)

    def text(self, ids: Sequence[int], eos_id: int | None = None) -> str:
        """Return the text of an answer up to its end, the model's own or the schedule's `eos_id`."""
        kept = list(ids)
        kept = kept[: min((kept.index(end) for end in (self.eos_id, eos_id) if end in kept), default=len(kept))]
        found: str = self.tokenizer.decode(kept, skip_special_tokens=True)
        return found

    def _streamer(self, on_settled: OnSettled | None, decoding: Decoding) -> Streamer:
        """Return what tells the tokens of a decoding that settle, or their text."""
        end = decoding.schedule.eos_id
        return Streamer(on_settled, None if self.tokenizer is None else lambda ids: self.text(ids, end))

    # one decoding --------------------------------------------------------------------------

    def _forwards(self, decoding: Decoding, check: bool = False) -> Generator[int, None, None]:
        """Yield how many rows of each sequence a forward computed, after every forward."""
        policy = self.policy
        context, stack = copy_context(), ExitStack()  # so that decodings that take turns have a run each
        try:
            if policy is not None:
                context.run(stack.enter_context, run(self.model))
            while not decoding.is_finished:
                if self.policy is not policy:
                    raise ValueError(
                        "the model was unwrapped, or wrapped anew, while it decodes; end the "
                        "decoding or close its iterator first"
                    )
                plan, count = self._planned(policy, decoding, check), decoding.width
                logits = context.run(self.masked.logits, decoding, plan, policy is not None)
                decoding.commit(logits, plan)
                yield plan.count(count)
        except BaseException:
            context.run(stack.__exit__, *sys.exc_info())
            raise
        context.run(stack.close)

    def _planned(self, policy: Policy | None, decoding: Decoding, check: bool) -> RowPlan:
        """Return the plan of the next forward, checked to cover what changed if that is asked."""
        plan = ALL if policy is None else self._chosen(policy, decoding.state, check)
        if self.block is not None:
            plan = replace(plan, block=self.block, masks_itself=self.masked.masks_itself)
        return replace(plan, compiled=True) if self.compiled else plan

    def _chosen(self, policy: Policy, state: State, check: bool) -> RowPlan:
        """Return the rows that a policy chooses, where blocks of attention leave it a choice."""
        keeps = self.block is not None and not isinstance(policy, Uncached)
        forced = whole_blocks(state) if keeps else None
        if forced is not None:
            return forced
        plan = policy.plan(state)
        if check:
            check_coverage(state, plan)
        if self.shift:
            plan = state.with_predictors(plan)
        return within_blocks(state, plan) if keeps else plan

    def _begun(
        self, prompts: Prompts, schedule: Schedule | None, sampler: Sampler | None, longest: int = 0
    ) -> Decoding:
        """Return a decoding before its first forward, with room for prompts of `longest` tokens."""
        policy = self.policy
        guide = None if self.guide is None else ModelGuide(self.guide)
        if sampler is None:
            sampler = Sampler() if guide is None else Sampler(rule=Guided())
        if schedule is None:
            usual = Schedule() if policy is None else policy.schedule
            block = usual.block if self.block is None else None
            schedule = replace(usual, eos_id=self.eos_id, block=block)
        for setting, kind in ((schedule, Schedule), (sampler, Sampler)):
            if not isinstance(setting, kind):
                name = kind.__name__
                raise ValueError(f"{name.lower()}={setting!r}: must be a {name} of diffcache.dllm")
        if policy is not None and policy.needs_order and sampler.by != "random":
            raise ValueError(
                f"by={sampler.by!r}: {policy!r} computes what is committed next, which is only "
                "known of a random order; use Sampler(by='random'), or another policy"
            )
        if self.compiled and not can_be_compiled(policy):
            raise ValueError(
                f"compiled=True: serves a model that is wrapped with a policy whose layers compute "
                f"the rows it plans, such as FastDLLM(dual=True), and not {policy!r}; leave it out"
            )
        ids, valid = self._encoded(prompts, longest)
        self.masked.check_sizes(ids.shape[1], schedule)
        if self.block is not None:
            self._check_within(policy, sampler)
            is_alone = self.masked.masks_itself
        elif isinstance(policy, BlockCache):
            raise ValueError(
                f"{policy!r}: keeps finished blocks, and nobody says that the model's attention is "
                "causal over blocks; give DiffusionLM(..., block=...), or use another policy"
            )
        else:
            is_alone = calls_sdpa(self.model)
        if valid is not None and policy is None and is_alone:
            raise ValueError(
                f"prompts: are of different lengths, and each release of "
                f"{type(self.model).__name__}'s own code takes padding in another way, or not at "
                "all; wrap the model first, with diffcache.dllm.Uncached() for no cache, or decode "
                "prompts one by one"
            )
        return Decoding(ids, schedule, sampler, self.mask_id, valid, guide, self.shift, self.block)

    def _tokens(self, prompt: Any) -> list[int] | ValueError | None:
        """Return the tokens of a prompt, or the error of one that is none of the model."""
        if prompt is None:
            return None
        if isinstance(prompt, Integral) or (isinstance(prompt, Tensor) and not prompt.dim()):
            return ValueError(f"prompts: hold the token {prompt}; give each prompt as a list of them")
        try:
            return tokens_of([prompt], self.tokenizer, self.masked.size("vocab_size"))[0]
        except ValueError as error:
            return error

    def _admitted(
        self, rows: Iterable[list[int] | ValueError | None], longest: int, refused: list[tuple[int, ValueError]]
    ) -> Iterator[tuple[int, list[int]] | None]:
        """Yield numbers and tokens of prompts, and note those that are refused on the way."""
        number = -1
        for row in rows:
            if row is None:
                yield None
                continue
            number += 1
            if isinstance(row, list) and (len(row) > longest or self.mask_id in row):
                row = ValueError(
                    f"prompts: number {number} has {len(row)} tokens where longest={longest}, or "
                    f"holds the mask, token {self.mask_id}; shorten it, or take that out"
                )
            if isinstance(row, list):
                yield number, row
            else:
                refused.append((number, row))

    def _check_serves(self, prompts: Any, slots: int, longest: int | None, fill: int) -> None:
        """Raise ValueError unless sequences may come and go, and `prompts` is not a single one, to be split up."""
        check_int("slots", slots, 1)
        check_int("fill", fill, 1)
        if longest is not None:
            check_int("longest", longest, 1)
        policy = self.policy
        if self.block is None:
            raise ValueError(
                "block=None: every token of this model sees all others, so that sequences of one "
                "batch have to begin together; use generate, or a model causal over blocks"
            )
        if policy is None or not policy.is_local:
            raise ValueError(
                f"{policy!r}: sequences come and go beside others with a policy that goes by the "
                "place of each alone; wrap the model with BlockCache() or FastDLLM(dual=True)"
            )
        if isinstance(prompts, Tensor):
            prompts = prompts.tolist()
        listed = isinstance(prompts, (list, tuple)) and prompts
        if isinstance(prompts, str) or (listed and isinstance(prompts[0], Integral)):
            raise ValueError(
                f"prompts={str(prompts)[:40]!r}: is one prompt; give several, each a text or its "
                "tokens, such as [prompt]"
            )

    def _check_within(self, policy: Policy | None, sampler: Sampler) -> None:
        """Raise ValueError unless a policy and a rule go with attention that is causal over blocks."""
        abilities = () if policy is None else policy.abilities()
        if not all(isinstance(x, FedRows) and x.plans is RowPlan for x in abilities):
            raise ValueError(
                f"{policy!r}: chooses rows by what its layers note of all tokens, and here those "
                f"before the active block of {self.block} are exact and those after it unseen; use "
                "a policy that plans rows by itself, such as BlockCache() or FastDLLM(dual=True)"
            )
        every = policy is None or isinstance(policy, (BlockCache, Uncached))
        if sampler.rule.editing is not None and not every:
            raise ValueError(
                f"rule={sampler.rule!r}: edits decided tokens, whose rows {policy!r} leaves out; "
                "use BlockCache(), or a rule without editing"
            )

    def _encoded(self, prompts: Prompts, longest: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return prompts as tokens `[B, P]`, padded on the left, and a mask of the tokens that are no padding."""
        rows = tokens_of(prompts, self.tokenizer, self.masked.size("vocab_size"))
        longest = max([longest, *map(len, rows)])
        device = device_of_model(self.model)
        filler = 0 if self.mask_id else 1  # any token but the mask: nothing sees it
        padded = [[filler] * (longest - len(row)) + row for row in rows]
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        if all(len(row) == longest for row in rows):
            return ids, None
        counts = torch.tensor([[len(row)] for row in rows], device=device)
        return ids, torch.arange(longest, device=device) >= longest - counts


def can_be_compiled(policy: Policy | None) -> bool:
    """Return whether forwards under a policy can be compiled."""
    abilities = () if policy is None else policy.abilities()
    return bool(abilities) and all(isinstance(x, FedRows) and x.plans.compiles for x in abilities)
