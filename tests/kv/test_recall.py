"""The recall task, and the small language model that was trained on it."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffcache.eval.workshop.small import train_recall
from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.trainer import train
from diffcache.pipelines.small import recall
from diffcache.pipelines.small.recall import HELD_OUT, Task, draw, filler_nats, score
from diffcache.pipelines.small.recall_llama import DIRECTORY, LENGTHS, LONGEST, words


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def one_hot_of_next(ids, scale=20.0):
    """Logits that predict every token of `ids` from the one before."""
    following = torch.roll(ids, -1, dims=1)
    return torch.nn.functional.one_hot(following, recall.VOCABULARY).float() * scale


TASKS = Task(), Task(5, 1, 1), Task(129, 32, 32), Task(129, 20, 40, repeat=True), Task(513, 128)


class TestDraw:
    @pytest.mark.parametrize("task", TASKS)
    def test_every_token_is_what_the_task_says(self, task):
        batch = draw(6, task, generator(3))
        table = recall.successors().tolist()
        assert batch.ids.shape == (6, task.context + 4 * task.queries)
        for row in range(6):
            ids, starts = batch.ids[row].tolist(), batch.facts[row].tolist()
            assert ids[0] == recall.BOS and len(set(starts)) == task.facts
            facts = [ids[start : start + 4] for start in starts]
            assert all(start % 4 == 1 and start + 4 <= task.context for start in starts)
            assert [fact[0] == recall.MARK for fact in facts] == batch.marks[row].tolist()
            assert {fact[0] for fact in facts} <= {recall.MARK, recall.SEP}
            assert len({fact[1] for fact in facts}) == task.facts
            assert all(16 <= fact[1] < 144 for fact in facts)
            assert all(144 <= value < 272 for fact in facts for value in fact[2:])
            held = {start + offset for start in starts for offset in range(4)}
            for place in range(1, task.context):
                if place not in held:
                    assert 272 <= ids[place] < 512
                    if place > 1 and place - 1 not in held:
                        assert ids[place] - 272 in table[ids[place - 1] - 272]
            for number, asked in enumerate(batch.asked[row].tolist()):
                start = task.context + 4 * number
                assert ids[start : start + 4] == [recall.Q, *facts[asked][1:]]
                assert batch.answers[number].tolist() == [start + 2, start + 3]
            if not task.repeat:
                assert len(set(batch.asked[row].tolist())) == task.queries

    def test_parts_of_a_batch_are_parts_of_its_tokens(self):
        batch = draw(3, Task(33, 5, 4), generator())
        queries = batch.ids[:, 33:].reshape(3, 4, 4)
        assert torch.equal(batch.context, batch.ids[:, :33])
        assert torch.equal(batch.questions, queries[..., :2])
        assert torch.equal(batch.expected, queries[..., 2:])
        assert torch.equal(batch.aware(2), torch.cat([batch.ids[:, :33], queries[:, 2, :2]], 1))
        assert torch.equal(batch.asked_marks, batch.marks.gather(1, batch.asked))
        slots = batch.fact_slots()
        assert slots.sum(1).tolist() == [20] * 3
        assert not (batch.context[slots] >= recall.F0).any()
        assert (batch.context[~slots][batch.context[~slots] != recall.BOS] >= recall.F0).all()
        marked = batch.fact_slots(batch.marks)
        assert marked.sum() == 4 * batch.marks.sum() and (marked <= slots).all()

    @pytest.mark.parametrize("odds", [0.25, 1.0, 8.0])
    def test_odds_are_those_of_one_query(self, odds):
        batch = draw(6000, Task(65, 6, 1, odds=odds), generator(5))
        marked = batch.marks.sum(1).double()
        expected = odds * marked / (odds * marked + 6 - marked)
        error = math.sqrt((expected * (1 - expected)).sum()) / 6000
        assert batch.asked_marks.double().mean().item() == pytest.approx(expected.mean().item(), abs=4 * error)

    def test_filler_has_four_equally_likely_successors(self):
        table = recall.successors()
        assert all(len(set(row)) == 4 for row in table.tolist())
        chains = recall.filler(400, 60, generator(1)).flatten(1) - recall.F0
        before, after = chains[:, :-1].flatten(), chains[:, 1:].flatten()
        ways = (table[before] == after[:, None]).double()
        assert ways.sum(1).eq(1).all()
        assert ways.mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.006)  # over 4 errors


class TestScore:
    def test_exact_answers_count_and_logits_stand_one_before_what_they_predict(self):
        batch = draw(3, Task(33, 5, 4), generator())
        given = batch.expected.clone()
        given[1, 2, 0] += 1
        right = score(given, batch)
        assert right.shape == (3, 4, 2) and right.sum() == 23 and not right[1, 2, 0]
        logits = batch.answer_logits(one_hot_of_next(batch.ids))
        assert logits.shape == (3, 4, 2, 512) and score(logits, batch).all()
        late = batch.answer_logits(torch.roll(one_hot_of_next(batch.ids), 1, dims=1))
        assert not score(late, batch)[..., 0].any()

    def test_who_knows_the_chain_has_a_perplexity_of_four(self):
        batch = draw(4, Task(129, 16, 2), generator())
        table = torch.full((512, 512), -30.0)
        table[recall.F0 :].scatter_(1, recall.successors() + recall.F0, 0.0)
        nats = filler_nats(table[batch.ids], batch)
        assert nats.mean().exp().item() == pytest.approx(4.0, rel=1e-4)
        assert 0 < len(nats) < batch.context.numel()
        uniform = filler_nats(torch.zeros(*batch.ids.shape, 512), batch)
        assert uniform.mean().exp().item() == pytest.approx(512, rel=1e-4)


class TestTraining:
    def test_steps_draw_what_the_course_says(self):
        rng = np.random.default_rng(0)
        repeated = [train_recall.choose(index, 0.01, rng) for index in (0, 1500, 2499)]
        assert [task.context for task in repeated] == [33, 65, 129]
        assert all(task.repeat for task in repeated)
        for begin, lengths in train_recall.MIXED:
            tasks = [train_recall.choose(2500, begin + 0.01, rng) for _ in range(300)]
            assert {task.context for task in tasks} == set(lengths)
            assert not any(task.repeat for task in tasks)
            assert all(task.queries <= max(task.facts // 4, 2) for task in tasks)
        assert {context for _, lengths in train_recall.MIXED for context in lengths} == set(LENGTHS)

    def test_trains_and_exports_what_transformers_loads(self, tmp_path, monkeypatch):
        monkeypatch.setattr(train_recall, "draw", lambda count, *given: draw(min(count, 2), *given))
        settings = Settings(steps=2, batch=1, examples=1, rate=1e-3)
        job = train_recall.Recall(settings, tmp_path)
        run = train(job, "recall", precision="float32")
        assert {"first_129", "second_1025"} <= set(run.rows[-1])
        job.export(run.average.eval(), tmp_path / "model")
        assert not list(tmp_path.glob("**/*.part"))
        loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
        for (name, trained), kept in zip(run.average["model"].named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(trained.bfloat16().float(), kept), name


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(str(DIRECTORY)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(DIRECTORY))


class TestShipped:
    @torch.no_grad()
    def test_recalls_at_the_longest_trained_length(self, model):
        batch = draw(4, Task(LONGEST, 64, 16), generator(HELD_OUT + 1))
        logits = model(batch.ids).logits
        assert score(batch.answer_logits(logits), batch).double().mean() >= 0.95
        assert filler_nats(logits, batch).mean().exp() < 4.6

    @torch.no_grad()
    def test_questions_are_answered_from_a_cache_of_the_context(self, model):
        task = Task(257, 32, 4)
        batch = draw(4, task, generator(HELD_OUT + 2))
        right = []
        for number in range(task.queries):
            cache = model(batch.context, use_cache=True).past_key_values
            logits = model(batch.queries[:, number, :3], past_key_values=cache).logits
            right.append(logits[:, 1:].argmax(-1))
        assert score(torch.stack(right, 1), batch).double().mean() >= 0.9

    def test_prompts_are_text(self, model, tokenizer):
        assert [tokenizer.convert_ids_to_tokens(number) for number in range(512)] == words()
        batch = draw(1, Task(65, 8, 1), generator(HELD_OUT))
        text = tokenizer.decode(batch.aware()[0])
        assert text.startswith("[BOS] ") and text.split()[-2] == "[Q]"
        given = tokenizer(text, return_tensors="pt")
        assert torch.equal(given.input_ids, batch.aware())
        made = model.generate(**given)[:, -2:]
        assert torch.equal(made[:, None], batch.expected)
        assert tokenizer("k0 nonsense f239").input_ids == [16, recall.UNK, 511]

    def test_reports_are_of_this_model(self):
        bench = DIRECTORY.parents[1] / "bench"
        quality = json.loads((bench / "recall-llama-quality.json").read_text())
        training = json.loads((bench / "recall-llama-training.json").read_text())
        assert quality["shapes"]["model"] == training["model"] == "recall-llama"
        assert training["weights"] == 853_120 and training["seed"] == 0
        rows = {(row["tokens"], row["facts"]): row["quality"] for row in quality["rows"]}
        assert rows[LONGEST, 64]["whole_right"]["low"] >= 0.95
