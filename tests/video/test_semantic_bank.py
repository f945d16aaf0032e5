"""The semantic bank: salient tokens, and frames of a prompt that comes again."""

import pytest
import torch
from torch import Tensor

from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import Flush, Keep, Recache, SemanticBank, Switch
from diffcache.video.semantic_bank import salient
from tests.video.toys import CHANNELS, CHUNK, SIZE, UNIT, disturb, text


def test_as_few_tokens_are_salient_as_have_the_mass() -> None:
    attention = torch.tensor([[0.1, 0.4, 0.2, 0.3], [4.0, 0.0, 0.0, 0.0]])
    assert salient(attention, 0.7).tolist() == [[False, True, False, True], [True] + 3 * [False]]
    assert salient(attention, 0.71).tolist()[0] == [False, True, True, True]
    assert salient(attention, 1).all()
    noise = torch.rand(3, 500, generator=torch.Generator().manual_seed(0))
    kept = salient(noise, 0.9)
    for row, which in zip(noise, kept, strict=True):
        share = row[which] / row.sum()
        assert share.sum() >= 0.9 > share.sum() - share.min()


def read_after(video: CausalVideo, batch: int, mode: Switch | None) -> tuple[Session, list[int]]:
    """Return a session of three prompts, the third the first again, and the frames it reads."""
    session = video.session(text(batch), size=SIZE, policy=SemanticBank(3, 9, 1, 2))
    film = torch.randn(1, CHANNELS, 12, *SIZE, generator=torch.Generator().manual_seed(5))
    first, second, third = film.expand(batch, -1, -1, -1, -1).split([CHUNK, 2 * CHUNK, CHUNK], 2)
    session.take(first)
    for seed, part in ((9, second), (2, third)):
        session.switch(text(batch, seed), mode)
        session.take(part)
    layer = session.store.layers[0]
    pos, recalled = layer.meta()["pos"][:, 0], layer.stats["recalled"][:, 0] > 0
    pos = pos[:, : recalled.shape[1]].where(recalled, -1)
    return session, sorted((pos[pos >= 0] // UNIT).unique().tolist())


@pytest.mark.parametrize(("mode", "read"), [(Keep(), [1, 2]), (Flush(2), [0]), (Recache(6), [1, 2])])
def test_a_prompt_that_comes_again_reads_its_own_frames(video: CausalVideo, mode: Switch, read: list[int]) -> None:
    session, found = read_after(video, 1, mode)
    assert found == read  # of the six of the other prompt none, though they are later
    assert session.store.layers[0].held < (9 + 3 + CHUNK) * UNIT


def test_of_what_is_not_read_nothing_is_seen_and_rows_are_apart(video: CausalVideo) -> None:
    def ahead(*gone: int, batch: int = 1) -> Tensor:
        session = read_after(video, batch, Keep())[0]
        for layer in session.store.layers:
            start = 0
            for frame in sorted(set(frames_of_slots(layer.meta()["pos"][0, 0]))):
                count = int((layer.meta()["pos"][0, 0] // UNIT == frame).sum())
                if frame in gone:
                    disturb(layer, range(start, start + count))
                start += count
        return session.next()

    plain = ahead()
    assert torch.equal(ahead(3, 4, 5), plain)
    assert not torch.equal(ahead(2), plain)
    torch.testing.assert_close(ahead(batch=2)[:1], plain, atol=1e-5, rtol=0)


def frames_of_slots(pos: Tensor) -> list[int]:
    return [place // UNIT for place in pos.tolist() if place >= 0]
