"""Finished blocks in a loop that is not ours: diffusers' pipeline of LLaDA2, and bare models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from torch import Tensor
from transformers import LlamaForCausalLM

import diffcache
from diffcache.dllm import BlockCache
from diffcache.errors import AttachError, CacheWarning
from diffcache.pipelines.demo.describe import find
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.targets import handle_of
from tests.dllm.remote_models import DreamModel
from tests.dllm.test_remote import made
from tests.dllm.toys import LAYERS, MASK, bidirectional, blocks_of, by_hand
from tests.internals import HostReads, cut_off

BLOCK = 8


class BlockCausal(LlamaForCausalLM):
    """A Llama whose tokens see their own block and those before, as remote code would have it."""

    length = BLOCK

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, **more: Any) -> Any:
        mask = blocks_of(input_ids.shape[1], self.length) & attention_mask.bool()[:, None, None]
        return super().forward(input_ids, mask, position_ids, **more)


class NoPositions(BlockCausal):
    """One that leaves out the positions that it is given."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, **more: Any) -> Any:
        at = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, attention_mask, at, **more)


class WiderBlocks(BlockCausal):
    length = 2 * BLOCK


class AttendsItself(DreamModel):
    """One that calls torch's attention itself, as LLaDA2's own code does."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        mask = blocks_of(input_ids.shape[1], BLOCK) & attention_mask.bool()[:, None, None]
        return super().forward(input_ids, mask, position_ids)


def block_causal(cls: type = BlockCausal) -> Any:
    model: Any = bidirectional(is_causal=True)
    model.__class__ = cls
    return model


def pipeline(model: Any) -> LLaDA2Pipeline:
    scheduler = BlockRefinementScheduler(block_length=BLOCK)
    pipe = LLaDA2Pipeline(model=model, scheduler=scheduler, tokenizer=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt(*shape: int) -> Tensor:
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(shape[1]))


def ask(pipe: Any, ids: Tensor, **settings: Any) -> Any:
    usual = dict(gen_length=35, num_inference_steps=4, threshold=0.5, editing_threshold=None)
    found = pipe(input_ids=ids, **{**usual, "mask_token_id": MASK, "output_type": "seq", **settings})
    return getattr(found, "sequences", found)


class Fed:
    """Counts the tokens of every call that a model embeds."""

    def __init__(self, model: Any) -> None:
        self.counts: list[int] = []
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: self.counts.append(args[0].numel()))

    def taken(self) -> list[int]:
        counts, self.counts = self.counts, []
        return counts


PADDED = torch.tensor([[0] * 10 + [1] * 3, [1] * 13])
EDITS = {"threshold": 0.9, "editing_threshold": 0.05}
CASES: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "tail in the first block": (prompt(2, 13), {}),
    "short prompt and one step": (prompt(1, 3), {"num_inference_steps": 1, "gen_length": 50}),
    "whole blocks, sampled": (prompt(2, 16), {"gen_length": 32, "temperature": 1.0, "top_k": 8}),
    "long prompt": (prompt(1, 40), {}),
    "left padding and editing": (prompt(2, 13), {"attention_mask": PADDED, **EDITS}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_same_and_takes_far_fewer_tokens(case: str) -> None:
    ids, settings = CASES[case]
    model = block_causal()
    fed, pipe = Fed(model), pipeline(model)

    def text(ids: Tensor) -> Tensor:
        return ask(pipe, ids, **settings, generator=torch.Generator().manual_seed(0))

    wanted = text(ids)
    uncached = sum(fed.taken())
    wanted_of_other = text(ids.flip(1))
    diffcache.wrap(pipe, BlockCache())
    fed.taken()
    assert torch.equal(text(ids), wanted)  # what is met for the first time is checked
    assert torch.equal(text(ids.flip(1)), wanted_of_other)
    fed.taken()
    assert torch.equal(text(ids), wanted)
    computed = sum(fed.taken())
    assert 2 * computed <= uncached
    report = diffcache.report(pipe)
    left_out = uncached - computed
    assert report.sites == {"model": {"token-layers": (computed * LAYERS, left_out * LAYERS)}}
    (remark,) = report.remarks
    assert "exact: attention is causal by blocks of 8 tokens" in remark and remark in str(report)
    assert json.loads(report.to_json())["remarks"] == [remark]
    assert report.held_bytes == 0 < report.peak_bytes
    diffcache.unwrap(pipe)
    assert torch.equal(text(ids), wanted) and sum(fed.taken()) == uncached


def test_tokens_that_a_callback_writes_are_computed() -> None:
    model = block_causal()
    fed, pipe = Fed(model), pipeline(model)

    def write(pipe: Any, step: int, timestep: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = given["block_x"]
        if step in (6, 9):  # in place, in a block that is finished
            ids[0, 2 * step - 9] = 7
        return {"block_x": ids.clone() if step == 9 else ids}

    settings = {"callback_on_step_end": write, "eos_token_id": 5, **EDITS}
    wanted = ask(pipe, prompt(2, 13), **settings)
    assert not torch.equal(wanted, ask(pipe, prompt(2, 13), **EDITS))
    uncached = sum(fed.taken())
    diffcache.wrap(pipe, BlockCache())
    assert torch.equal(ask(pipe, prompt(2, 13), **settings), wanted)
    assert 2 * sum(fed.taken()) < uncached


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model = block_causal()
    pipe = pipeline(model)
    wanted = ask(pipe, prompt(2, 13))
    diffcache.wrap(pipe, BlockCache())
    with cut_off([model.model.layers[1].mlp], 7):
        ask(pipe, prompt(2, 16))
    assert handle_of(pipe).held_bytes() == 0
    assert torch.equal(ask(pipe, prompt(2, 13)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_code_that_attends_itself_is_served(dtype: torch.dtype) -> None:
    model = made("dream", dtype)
    model.__class__ = AttendsItself
    pipe = pipeline(model)
    settings = {"editing_threshold": 0.05, "attention_mask": PADDED}
    wanted = ask(pipe, prompt(2, 13), **settings)
    diffcache.wrap(pipe, BlockCache())
    found = ask(pipe, prompt(2, 13), **settings)
    assert "exact" in diffcache.report(pipe).remarks[0]  # and the check is not too strict
    assert dtype != torch.float32 or torch.equal(found, wanted)


def test_finished_blocks_are_stale_as_put_in_by_hand_and_the_report_says_so() -> None:
    model = bidirectional()
    pipe = pipeline(model)
    given: list[Tensor] = []
    out: list[Tensor] = []
    diffcache.wrap(pipe, BlockCache())
    model.register_forward_pre_hook(lambda _, args: given.append(args[0].clone()) if args else None, prepend=True)
    model.register_forward_hook(lambda _, args, made: out.append(made.logits))
    with pytest.warns(CacheWarning, match="approximate: attention goes both ways"):
        ask(pipe, prompt(2, 13), gen_length=27)
    assert "LlamaForCausalLM: approximate" in str(diffcache.report(pipe))
    kept, before, width = None, given[0], 0
    for ids, logits in zip(given, out, strict=True):
        last, width = width, ids.shape[1]
        is_final = torch.equal(ids[:, :last], before)  # as when that was computed
        start = 0 if kept is None else last - BLOCK * (width == last or not is_final)
        before = ids
        if kept is not None:
            more = (0, 0, 0, width - last)
            kept = [tuple(torch.nn.functional.pad(x, more) for x in pair) for pair in kept]
        rows = torch.arange(start, width).expand(2, -1)
        wanted, kept = by_hand(model, ids, rows, kept)
        torch.testing.assert_close(logits[:, start:], wanted, rtol=0, atol=1e-10)
        assert logits[:, :start].isnan().all()
    assert width == 40 and len(given) > 10


def test_a_saved_pipeline_is_described_without_its_weights(tmp_path: Path) -> None:
    pipe = pipeline(bidirectional())
    pipe.save_pretrained(tmp_path)
    known = diffcache.inspect(pipe)["model"]
    assert known.lists[0].key == "model.layers" and known.lists[0].depth == LAYERS
    assert find(str(tmp_path)) == {"model": (known, {})}
    assert find(str(tmp_path / "model")) == {str(tmp_path / "model"): (known, {})}


def arguments(ids: Tensor) -> dict[str, Tensor]:
    at = torch.arange(ids.shape[1]).expand_as(ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": at}


def test_a_bare_model_is_served_in_a_run() -> None:
    model = block_causal()
    plain = block_causal()
    fed = Fed(model)
    long, short, batch = prompt(1, 32), prompt(1, 16), prompt(2, 24)
    edited = long.clone()
    edited[0, 13] = 9
    with torch.no_grad(), diffcache.wrapped(model, BlockCache(block=BLOCK)):
        with diffcache.run(model):
            for ids in (*2 * [long[:, :24]], long, edited, edited[:, :30], long, short, batch):
                logits = model(**arguments(ids)).logits
                read = slice(ids.shape[1] // BLOCK * BLOCK - BLOCK, None)
                wanted = plain(**arguments(ids)).logits[:, read]
                torch.testing.assert_close(logits[:, read], wanted, rtol=0, atol=1e-10)
        # three blocks, checked; a fourth one, checked; from the edit on; no whole blocks; from the
        # edit on; another text; more of them
        assert fed.taken() == [24, 24, 8, 32, 8, 24, 30, 24, 16, 48]
        assert torch.equal(model(**arguments(long)).logits, plain(**arguments(long)).logits)
        with diffcache.run(model):
            model(**arguments(long))
            with HostReads() as reads:
                model(**arguments(long))
        assert reads.count <= 3  # however many layers: three numbers of one tensor


def test_what_a_bare_model_does_not_take_is_refused() -> None:
    model, ids = block_causal(), arguments(prompt(1, 16))
    said = r"BlockCache\(block=None\): a bare model has no scheduler"
    refused = pytest.raises(AttachError, match=said)
    with torch.no_grad(), diffcache.wrapped(model, BlockCache()), diffcache.run(model), refused:
        model(**ids)
    with torch.no_grad(), diffcache.wrapped(model, BlockCache(block=BLOCK)), diffcache.run(model):
        with pytest.raises(ValueError, match="nobody says that the model's attention is causal"):
            DiffusionLM(model).generate([1, 2])
        with pytest.raises(AttachError, match="takes no output_hidden_states"):
            model(**ids, output_hidden_states=True)
        with pytest.raises(AttachError, match=r"takes position_ids \[B, T\]"):
            model(ids["input_ids"], ids["attention_mask"], None)
