"""Decoding through the front door: texts, batches, padding, host reads, refusals."""

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload
from rich.progress import Progress

import diffcache
from diffcache import dllm
from diffcache.dllm import D2Cache, DKVCache, DLLMCache, ElasticCache, FastDLLM, Policy, RowPlan, Schedule, Uncached
from diffcache.dllm.d2_cache import NotedPlan
from diffcache.dllm.dllm_cache import BranchPlan
from diffcache.errors import AttachError
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.registry import rows_of
from diffcache.timeline import lanes_of, timeline_text
from tests.dllm.toys import EOS, LAYERS, MASK, SIZES, bidirectional, padded, prompts, trace
from tests.internals import HostReads

SCHEDULE = Schedule(8, 4)
LENGTHS = (6, 3)


class Letters:
    """A tokenizer of letters."""

    mask_token_id, eos_token_id = MASK, EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 64 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(64 + number) for number in ids)


class HalfLetters(Letters):
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return super().decode(ids, skip_special_tokens) + "\ufffd"


class Unknowing(Letters):
    """A tokenizer that has one token for all that are no letters."""

    unk_token_id = 61

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 64 if letter.isalpha() else 61 for letter in text]}


def answer_of(model: Any, policy: Any, rows: Any, **settings: Any) -> torch.Tensor:
    with diffcache.wrapped(model, policy):
        return DiffusionLM(model).generate(rows, SCHEDULE, **settings).ids


def test_generate_is_the_loop_written_out() -> None:
    model, policy = bidirectional(), DKVCache(every=3)
    decoding, notes = trace(model, policy, prompts(*LENGTHS), SCHEDULE)
    diffcache.wrap(model, policy)
    answer = DiffusionLM(model).generate(prompts(*LENGTHS), SCHEDULE, check=True)
    assert torch.equal(answer.ids, decoding.ids[:, max(LENGTHS) :])
    rows = sum(now.rows.numel() for now in notes)
    assert (answer.forwards, answer.rows, answer.texts) == (8, rows, None)
    made = answer.report
    assert made is not None and made.finished and made.held_bytes == 0
    width = max(LENGTHS) + 8
    assert made.sites["model"]["token-layers"] == (rows * LAYERS, (8 * 2 * width - rows) * LAYERS)
    size = model.config.head_dim
    assert made.peak_bytes == 2 * LAYERS * 2 * 2 * width * size * 8  # K and V, 2 heads, float64
    saved = 100 * (1 - rows / (8 * 2 * width))
    said = f"steps    8: 6 computed, 2 in part, 0 skipped, {saved:.1f} % of all token-layers"
    assert f"{said} skipped" in str(made) and "not counted" not in str(made)
    rows = [float(now.rows.shape[1]) / width for now in notes]
    (lane,) = lanes_of(made.calls)
    assert lane.marks == rows and rows[:2] == [1, 1] and 0 < rows[2] < 1
    for ascii_only, parts, legend in ((False, "▁▂▃▄▅▆▇", "▂ to ▇"), (True, "0123456789", "1 to 9")):
        bars = timeline_text(made.calls, ascii_only=ascii_only).splitlines()
        full = "#" if ascii_only else "█"
        drawn = [full if share == 1 else parts[int(share * len(parts))] for share in rows]
        assert bars[1].endswith("  " + "".join(drawn)) and bars[2].endswith(f"{legend} in part")
    picture = made.timeline_image(800, 200)
    assert {(37, 99, 175)} < set(picture.crop((100, 80, 790, 81)).get_flattened_data())


@torch.no_grad()
def llada_by_hand(model: Any, prompt: list[int], scale: float, late: list[int]) -> list[int]:
    """Decode eight tokens in blocks of four and steps of two, guided, as LLaDA's code does."""
    ids = prompt + [MASK] * 8
    for step in range(4):
        both = torch.tensor([ids, [MASK] * len(prompt) + ids[len(prompt) :]])
        real, blank = model(input_ids=both, use_cache=False).logits
        logits = blank + (1 + scale) * (real - blank)
        best = logits[:, :MASK].argmax(-1).tolist()  # the mask is the last token
        logits[:, late] = float("-inf")
        sure = logits.softmax(-1)[torch.arange(len(ids)), best].tolist()
        start = len(prompt) + step // 2 * 4
        masks = [place for place in range(start, start + 4) if ids[place] == MASK]
        for place in sorted(masks, key=lambda p: -sure[p])[:2]:
            ids[place] = best[place]
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "policy", [None, Uncached(), DKVCache(every=1), FastDLLM(), DLLMCache(1, 1), D2Cache(), ElasticCache()], ids=repr
)
def test_guidance_and_late_tokens_are_those_of_llada(policy: Policy | None) -> None:
    """With a cache that computes every row; others compute as many rows of both branches."""
    model, schedule = bidirectional(), Schedule(8, 4, 4)
    free = [llada_by_hand(model, prompt, 0, []) for prompt in prompts(5, 5)]
    late = sorted({answer[0] for answer in free})
    wanted = [llada_by_hand(model, prompt, 0.5, late) for prompt in prompts(5, 5)]
    assert wanted != [llada_by_hand(model, prompt, 0.5, []) for prompt in prompts(5, 5)] != free
    sampler = dllm.Sampler(cfg_scale=0.5, late=tuple(late))
    if policy is not None:
        diffcache.wrap(model, policy)
    answer = DiffusionLM(model).generate(prompts(5, 5), schedule, sampler)
    count, width = answer.rows, 13 * 4 * 4  # of two sequences, each with and without its prompt
    if isinstance(policy, (FastDLLM, D2Cache, ElasticCache)):
        assert count < width and count % 2 == 0 and bool((answer.ids != MASK).all())
    else:
        assert answer.ids.tolist() == wanted and count == width
    alone = DiffusionLM(model).generate(prompts(5), schedule, sampler)
    assert torch.equal(alone.ids[0], answer.ids[0])  # no sequence sees another


def test_texts_go_in_and_come_out_as_they_settle() -> None:
    model = bidirectional()
    told: list[tuple[int, Any]] = []
    lm = DiffusionLM(model, Letters())
    assert lm.text([1, 2, EOS, 3]) == "AB" and lm.eos_id == EOS
    answer = lm.generate(["ABCD", "XY"], Schedule(8, 4), on_settled=lambda *what: told.append(what))
    assert answer.report is None and answer.texts is not None
    for row in range(2):
        assert "".join(text for number, text in told if number == row) == answer.texts[row]
    first = int(answer.ids[0, 1])  # a schedule's own end is left out as the tokenizer's is
    told.clear()
    ended = lm.generate("ABCD", Schedule(8, 4, eos_id=first), on_settled=lambda *what: told.append(what))
    assert ended.texts == ["".join(text for _, text in told)] == [lm.text(ended.ids[0].tolist(), first)]
    assert chr(64 + first) not in ended.texts[0]
    half = DiffusionLM(model, HalfLetters())  # what ends within a character is told to its end
    told.clear()
    wanted = half.generate("ABCD", Schedule(8, 4), on_settled=lambda *what: told.append(what)).texts
    assert ["".join(text for _, text in told)] == wanted
    ids: list[tuple[int, Any]] = []
    plain = DiffusionLM(model).generate([1, 2, 3, 4], Schedule(8, 4), on_settled=lambda *what: ids.append(what))
    assert list(itertools.chain(*[tokens for _, tokens in ids])) == plain.ids[0].tolist()


def test_the_progress_bar_shows_decided_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(Progress, "update", lambda bar, task, completed, total: done.append((completed, total)))
    DiffusionLM(bidirectional()).generate(prompts(*LENGTHS), SCHEDULE, progress=True)
    assert done == [(2 * step, 16) for step in range(1, 9)]  # one of each sequence a step


def test_a_model_whose_weights_accelerate_offloads_is_served() -> None:
    plain, model = bidirectional(), cpu_offload(bidirectional(), torch.device("cpu"))
    assert next(model.parameters()).is_meta
    rows = prompts(*LENGTHS)
    assert torch.equal(
        DiffusionLM(model).generate(rows, SCHEDULE).ids, DiffusionLM(plain).generate(rows, SCHEDULE).ids
    )
    wanted = answer_of(plain, DKVCache(every=3), rows)
    assert torch.equal(answer_of(model, DKVCache(every=3), rows), wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    ("policy", "whole", "some"),
    [(DKVCache(), RowPlan(), RowPlan(range(7, 9))), (DLLMCache(), BranchPlan(None, 6), BranchPlan(None, 6, False))],
)
def test_other_padding_than_that_of_what_is_held_is_refused(policy: Policy, whole: RowPlan, some: RowPlan) -> None:
    model = bidirectional()
    ids, valid = padded(prompts(9, 6))
    assert valid is not None
    other = valid.clone()
    other[1, 1] = True
    written = valid.clone()
    plain = model(ids, use_cache=False).logits
    with diffcache.wrapped(model, policy), diffcache.run(model):
        for mask in (valid, written):
            model(ids, attention_mask=mask, row_plan=whole, use_cache=False)
            wanted = model(ids, attention_mask=mask, row_plan=some, use_cache=False).logits
        copy = model(ids, attention_mask=valid.long(), row_plan=some, use_cache=False).logits
        assert torch.equal(copy, wanted)
        model(ids, attention_mask=written, row_plan=whole, use_cache=False)
        written[1, 1] = True
        for mask in (written, other, None):
            with pytest.raises(AttachError, match="attention_mask names other padding than at the"):
                model(ids, attention_mask=mask, row_plan=some, use_cache=False)
            model(ids, attention_mask=valid, row_plan=whole, use_cache=False)
        assert torch.equal(model(ids, row_plan=whole, use_cache=False).logits, plain)  # none is hidden
        model(ids, attention_mask=torch.ones_like(ids), row_plan=some, use_cache=False)


SOME = torch.tensor([[1, 3, 4], [1, 2, 5]])
PLANS: dict[Any, list[RowPlan]] = {
    Uncached(): [RowPlan(range(2, 5)), RowPlan(SOME), RowPlan()],
    DLLMCache(ratio=0.5): [BranchPlan(None, 2, *parts) for parts in itertools.product([False, True], repeat=2)],
    D2Cache(): [NotedPlan(SOME), NotedPlan()],
}


@pytest.mark.parametrize("lengths", [(6, 6), LENGTHS], ids=["whole", "padded"])
@pytest.mark.parametrize("policy", PLANS, ids=repr)
def test_no_layer_reads_the_device(policy: Policy, lengths: tuple[int, ...]) -> None:
    ids, valid = padded(prompts(*lengths))
    model = bidirectional()
    with torch.no_grad(), diffcache.wrapped(model, policy), diffcache.run(model):
        given: dict[str, Any] = dict(attention_mask=valid, use_cache=False)
        model(ids, row_plan=PLANS[policy][-1], **given)  # the first one checks the model
        for plan in PLANS[policy]:
            with HostReads() as reads:
                model(ids, row_plan=plan, **given)
            # transformers reads a padding mask once when it makes its own; on a CPU, where nobody
            # waits, both ends of rows that are no range are looked at once, for all layers
            looks = 2 * isinstance(plan.rows, torch.Tensor)
            assert reads.count <= looks + (plan.rows is None and valid is not None)


def test_settings_of_a_decoding_are_those_it_was_given() -> None:
    """Of one decoding, or from now on."""
    model = diffcache.wrap(bidirectional(), DKVCache(every=2))
    lm = DiffusionLM(model)

    def rows() -> int:
        return lm.generate(prompts(4), SCHEDULE).rows

    often = rows()
    with diffcache.settings(model, every=4):
        seldom = rows()
        assert lm.generate(prompts(4), SCHEDULE).report.method == DKVCache(every=4)
    assert seldom < often == rows()
    diffcache.update(model, every=4)
    assert rows() == seldom
    with pytest.raises(ValueError, match="DKVCache has no setting 'evry'; it has variant, every"):
        diffcache.update(model, evry=3)


@pytest.mark.parametrize("policy", sorted(rows_of("dllm").keys() - {"block-cache"}))
def test_an_autoregressive_model_is_refused_when_it_is_wrapped(policy: str) -> None:
    model = bidirectional(is_causal=True)
    del model.config.is_causal  # as a model has it that was never made for masks
    said = r"method=\w+\(.*LlamaForCausalLM is autoregressive.*wrap\(model, 'snapkv'"
    with pytest.raises(AttachError, match=said):
        diffcache.wrap(model, policy)
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.report(model)
    model.config.is_causal = False
    diffcache.unwrap(diffcache.wrap(model, policy))


def test_a_causal_model_of_other_code_is_never_served() -> None:
    """Masks that a class of its own makes are seen in a call alone."""
    model = bidirectional(is_causal=True)
    model.__class__ = type("Own", (type(model),), {"__module__": "own"})
    diffcache.wrap(model, DKVCache())
    with pytest.raises(AttachError, match=r"layers\.0\.self_attn hides tokens from each other"):
        DiffusionLM(model).generate(prompts(4), SCHEDULE)
    diffcache.unwrap(model)
    model.config.is_causal = False
    assert answer_of(model, DKVCache(), prompts(4)).shape == (1, 8)


def masked(kind: str, **more: Any) -> Any:
    """Return a masked language model of a kind of transformers."""
    config = getattr(hf, f"{kind}Config")(
        **SIZES, num_hidden_layers=2, max_position_embeddings=66, pad_token_id=1, **more
    )
    return bidirectional(config=config, network=getattr(hf, f"{kind}ForMaskedLM"))


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])  # whose positions are learned, and after that of padding
def test_positions_of_encoders_are_the_models_own(kind: str) -> None:
    model = masked(kind)
    ids = torch.tensor(prompts(9)).clamp_min(2)  # none of them padding
    lm = DiffusionLM(model, mask_id=MASK)
    plain = lm.generate(prompts(6, 4), SCHEDULE)
    with torch.no_grad():
        wanted = model(ids).logits
        with diffcache.wrapped(model, Uncached()), diffcache.run(model):
            assert torch.equal(model(ids, row_plan=RowPlan()).logits, wanted)
            some = model(ids, row_plan=RowPlan(range(3, 5))).logits
            torch.testing.assert_close(some, wanted[:, 3:5], rtol=0, atol=1e-10)
    with diffcache.wrapped(model, Uncached()):
        assert torch.equal(lm.generate(prompts(6, 4), SCHEDULE).ids, plain.ids)


SCALED = dict(mask_token_id=MASK, position_embedding_type="rotary", token_dropout=True)  # by the number of masks
NEIGHBORS = dict(embedding_size=32, intra_bottleneck_size=32)  # in embeddings


@pytest.mark.parametrize(("kind", "more"), [("Esm", SCALED), ("MobileBert", NEIGHBORS)])
def test_tokens_that_meet_outside_of_attention_are_refused(kind: str, more: dict[str, Any]) -> None:
    model = masked(kind, **more)
    for policy in (FastDLLM(), ElasticCache(), D2Cache()):
        with diffcache.wrapped(model, policy), pytest.raises(AttachError, match="tokens meet out"):
            DiffusionLM(model, mask_id=MASK).generate(prompts(6), SCHEDULE)


def test_as_many_positions_as_a_model_has_are_served() -> None:
    short = bidirectional(max_position_embeddings=16)  # and no longer ones, of which refused.txt tells
    assert DiffusionLM(short).generate(prompts(8), SCHEDULE).forwards == 8
