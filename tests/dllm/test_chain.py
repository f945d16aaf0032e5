"""The traces of automata, and the small diffusion language models that were trained on them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import diffcache
from diffcache.dllm import BlockCache, DKVCache, ElasticCache, FastDLLM, FreeCache, Policy, Schedule
from diffcache.eval.workshop.small import chain
from diffcache.eval.workshop.small.chain import (
    BLOCKS,
    HELD_OUT,
    WORLDS,
    ChainBatch,
    World,
    build_tokenizer,
    draw,
    load,
    solve,
)
from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.trainer import train
from diffcache.pipelines.diffusion_lm import DiffusionLM

WALK = World("walk", 16, 7, 64)


def batch_of(world: World, count: int = 20) -> ChainBatch:
    return draw(count, world, torch.Generator().manual_seed(HELD_OUT))


@pytest.mark.parametrize("world", [World(length=40), WALK], ids=repr)
def test_an_answer_is_the_trace_of_its_prompt(world: World) -> None:
    batch = batch_of(world)
    assert batch.ids.shape == (20, 2 * world.length + 2)
    for ids in batch.ids.tolist():
        letters, states = ids[1 : world.length + 1], ids[world.length + 2 :]
        assert ids[0] == chain.BOS and ids[world.length + 1] == chain.EQ
        state = 8 if world.kind == "walk" else 0
        for letter, wanted in zip(letters, states, strict=True):
            assert 0 <= letter - 16 < world.letters
            state = world.table[state, letter - 16].item()
            assert state == wanted
    again, other = batch_of(world), draw(20, world, torch.Generator().manual_seed(1))
    assert torch.equal(again.ids, batch.ids) and not torch.equal(other.ids, batch.ids)
    assert chain.is_exact(batch.answers, batch).all()
    wrong = batch.answers.clone()
    wrong[3, -1] += 1
    assert (~chain.is_exact(wrong, batch)).nonzero().tolist() == [[3]]


def test_hand_worked_traces() -> None:
    """a b a of the automaton; +3 four times, then -1, of the walk."""
    assert solve(World(), torch.tensor([[0, 1, 0]])).tolist() == [[3, 0, 3]]
    assert solve(WALK, torch.tensor([[6, 6, 6, 6, 2]])).tolist() == [[11, 14, 15, 15, 14]]


@pytest.mark.parametrize("world", [World(), WALK], ids=["automaton", "walk"])
def test_texts_are_prompts_and_answers_are_texts(world: World) -> None:
    batch, tokenizer = batch_of(world), build_tokenizer(world)
    assert tokenizer(batch.texts)["input_ids"] == batch.prompts.tolist()
    texts = tokenizer.batch_decode(batch.answers)
    assert [[int(word) for word in text.split()] for text in texts] == batch.answers.tolist()
    assert len(tokenizer) == chain.VOCABULARY and tokenizer.mask_token_id == chain.MASK
    assert tokenizer.decode([chain.EQ, 3, chain.EOS], skip_special_tokens=True) == "3"


def test_masks_are_those_of_a_diffusion_and_of_a_block_decoder() -> None:
    masked = chain.masks(400, World(), torch.Generator().manual_seed(0))
    assert masked[::2].float().mean().item() == pytest.approx(0.5, abs=0.06)  # 2.9 errors
    for row in masked[1::2].tolist():
        first = row.index(True) if True in row else len(row)
        clean = len(row) - row[::-1].index(False) if False in row else 0
        assert clean - first <= chain.WINDOW  # clean, a partly masked block, all masked
    masked, asked = chain.block_masks(200, 16, 49, WORLDS["chain-block"], torch.Generator().manual_seed(0))
    of = torch.arange(49, 96) // 16
    assert {3, 4, 5} == {int(block) for row in asked for block in of[row]} and not (asked & ~masked).any()
    for row, hidden in zip(asked, masked, strict=True):
        (block,) = set(of[row].tolist()) or {int(of[hidden][0]) - 1 if hidden.any() else 5}
        assert not hidden[of < block].any() and hidden[of > block].all()


@pytest.mark.parametrize("name", ["chain-block", "chain-guide"])
def test_a_training_is_exported_as_transformers_loads_it(name: str, tmp_path: Path) -> None:
    settings = Settings(steps=2, batch=2, examples=2, rate=1e-3, model=name)
    job = chain.Chain(settings, tmp_path)
    run = train(job, "chain", precision="float32")
    assert 0 <= run.rows[-1]["masked"] <= 1 and 0 <= run.rows[-1]["frontier"] <= 1
    job.export(run.average.eval(), tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    masked = name in BLOCKS
    assert ("diffcache.json" in files) == masked != ("generation_config.json" in files)
    model = load(str(tmp_path / "out"))
    assert model.dtype == torch.float32
    for one, other in zip(run.average["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)


def right(name: str, policy: Policy, count: int = 20, **changes: Any) -> int:
    """Return how many held-out prompts a shipped model answers exactly."""
    model, batch = load(name), batch_of(WORLDS[name], count)
    schedule = Schedule(WORLDS[name].length, **{"block": BLOCKS[name], **changes})
    with diffcache.wrapped(model, policy):
        answers = DiffusionLM(model).generate(batch.prompts, schedule).ids
    return int(chain.is_exact(answers, batch).sum())


def test_shipped_models_answer_held_out_prompts_exactly() -> None:
    assert right("chain-llada-probe", DKVCache()) >= 19
    assert right("chain-llada", FastDLLM(dual=True), count=5) == 5
    assert right("chain-block", BlockCache(), block=None) >= 19
    elastic = ElasticCache(0.9, "key")
    assert right("chain-llada-probe", elastic, count=4, block=None, window=16) == 4


def test_the_probe_finds_caches_that_freeze_masks() -> None:
    """Negative controls: a task that they pass could not certify any cache."""
    assert right("chain-llada-probe", DKVCache(delay=False), count=5) == 0
    assert right("chain-llada-probe", FreeCache(), block=8) <= 14
    assert right("chain-llada-probe", FreeCache(commit=True), block=8) >= 19


def test_a_guide_decodes_by_runs_of_tokens() -> None:
    """The guide knows the task as well, so that it agrees with all that is right."""
    batch = batch_of(WORLDS["chain-llada"], 3)
    lm = DiffusionLM(load("chain-llada"), guide=load("chain-guide"))
    answer = lm.generate(batch.prompts, Schedule(128, 32))
    assert chain.is_exact(answer.ids, batch).all()
    assert answer.forwards < 128 / 4
