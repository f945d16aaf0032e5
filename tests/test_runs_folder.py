"""The folder of a case: what is complete, what is damaged, and what hashes keep apart."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.eval.methods import parse_method
from diffcache.eval.runs import score
from diffcache.eval.runs.folder import CaseFolder, ManifestError, batches, remember
from diffcache.eval.runs.task import Case, directory_sha256


class TestBatches:
    def test_every_sample_is_in_one_batch_with_its_own_prompt_and_seed(self) -> None:
        made = batches(["a", "b", "c"], samples=10, size=4, seed=5)
        assert [b.ids for b in made] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
        assert [p for b in made for p in b.prompts] == [*"abcabcabca"]
        assert [s for b in made for s in b.seeds] == list(range(5, 15))

    def test_more_samples_leave_full_batches_as_they_are(self) -> None:
        few, many = (batches(["a", "b"], n, 4, 0) for n in (8, 50))
        assert [b.digest for b in few] == [b.digest for b in many[:2]]


class TestCaseFolder:
    def sample(self) -> torch.Tensor:
        return torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)

    def test_samples_come_back_as_they_were(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 3, 4, 0)
        drawn = [self.sample() for _ in range(3)]
        folder.write(batch, drawn, {"seconds": 1.0})
        assert all(map(torch.equal, folder.read([0, 1, 2]), drawn))

    def test_films_come_back_as_they_were(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path, fps=12), batches(["a"], 1, 4, 0)
        film = torch.randint(0, 256, (5, 3, 32, 48), dtype=torch.uint8)
        folder.write(batch, [film], {})
        assert torch.equal(folder.read([0])[0], film)

    def test_a_cut_off_line_is_no_line(self, tmp_path: Path) -> None:
        folder, made = CaseFolder(tmp_path), batches(["a"], 3, 1, 0)
        for batch in made[:2]:
            folder.write(batch, [self.sample()], {})
        text = folder.manifest.read_bytes()
        folder.manifest.write_bytes(text[:-20])
        assert set(folder.done(made)) == {0}
        folder.write(made[2], [self.sample()], {})
        assert set(folder.done(made)) == {0, 2}

    @pytest.mark.parametrize("damage", ["missing", "short"])
    def test_a_damaged_sample_is_drawn_again(self, tmp_path: Path, damage: str) -> None:
        folder, made = CaseFolder(tmp_path), batches(["a"], 2, 1, 0)
        for batch in made:
            folder.write(batch, [self.sample()], {})
        file = tmp_path / "samples" / "00001.png"
        file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:100])
        assert set(folder.done(made)) == {0}
        with pytest.raises(ManifestError, match=r"00001\.png"):
            folder.read([1])

    def test_a_changed_sample_is_seen_when_it_is_read(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 1, 1, 0)
        folder.write(batch, [self.sample()], {})
        sums = {0: folder.done([batch])[0]["files"][0]["sha256"]}
        file = tmp_path / "samples" / "00000.png"
        folder.read([0], sums)
        picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
        picture.save(file)  # still a picture, so that only its digest tells
        folder.read([0])
        with pytest.raises(ManifestError, match=r"00000\.png: it is not the file that was drawn"):
            folder.read([0], sums)

    def test_a_last_batch_drawn_shorter_or_longer_is_told_by_its_files(self, tmp_path: Path) -> None:
        folder = CaseFolder(tmp_path)
        (long,), (short,) = batches(["a"], 2, 2, 0), batches(["a"], 1, 2, 0)
        first, second = self.sample(), self.sample()
        folder.write(long, [first, second], {})
        assert not folder.done([short])
        folder.write(short, [self.sample()], {})
        assert len(folder.done([short])[0]["ids"]) == 1
        assert not folder.done([long])
        folder.write(long, [first, second], {})
        assert len(folder.done([long])[0]["ids"]) == 2
        assert not folder.done([short])

    def test_a_damaged_manifest_is_named(self, tmp_path: Path) -> None:
        folder, (batch,) = CaseFolder(tmp_path), batches(["a"], 1, 1, 0)
        folder.write(batch, [self.sample()], {})
        folder.manifest.write_text("{" + folder.manifest.read_text() + "\n")
        with pytest.raises(ManifestError, match=r"manifest\.0\.jsonl is damaged: delete"):
            folder.done([batch])

    @pytest.mark.parametrize("text", ["", "[]", '{"key": "k"}', '{"key": "other", "value": 1}'])
    def test_what_cannot_be_read_is_computed_again(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "kept.json"
        file.write_text(text)
        assert remember(file, "k", lambda: 2) == 2
        assert remember(file, "k", lambda: 3) == 2
        columns = tmp_path / "kept.safetensors"
        columns.write_text(text)
        for _ in range(2):
            found = score.kept(columns, "k", lambda: {"a": torch.ones(2)})
            assert torch.equal(found["a"], torch.ones(2))

    def test_other_prompts_are_refused(self, tmp_path: Path) -> None:
        folder = CaseFolder(tmp_path)
        folder.write(batches(["a"], 1, 1, 0)[0], [self.sample()], {})
        for other in (batches(["b"], 1, 1, 0), batches(["a"], 1, 1, 9)):
            with pytest.raises(ManifestError, match="other prompts or seeds"):
                folder.done(other)

    def test_lines_of_all_processes_count(self, tmp_path: Path) -> None:
        made = batches(["a"], 4, 2, 0)
        for rank, batch in enumerate(made):
            CaseFolder(tmp_path, rank).write(batch, [self.sample(), self.sample()], {})
        assert set(CaseFolder(tmp_path).done(made)) == {0, 1}


class TestHashes:
    ABOUT: ClassVar[dict] = {"model": "m", "seed": 0}

    def test_anything_that_changes_samples_changes_the_folder(self) -> None:
        method = parse_method("interval:every=3")
        cases = [
            Case("x", "uncached", 7),
            Case("x", "uncached", 8),
            Case("x", "method", 7, method),
            Case("x", "method", 7, parse_method("interval:every=4")),
        ]
        folders = {case.folder(self.ABOUT) for case in cases}
        folders |= {case.folder({**self.ABOUT, "seed": 1}) for case in cases}
        assert len(folders) == 8

    def test_fewer_steps_share_the_samples_of_an_uncached_run_of_that_length(self) -> None:
        one = Case("a", "fewer steps", 7, None, ("m",))
        assert one.digest(self.ABOUT) == Case("b", "uncached", 7).digest(self.ABOUT)

    def test_weights_change_the_hash_of_a_model(self, tmp_path: Path) -> None:
        file = tmp_path / "weights.bin"
        file.write_bytes(bytes(3 << 20))
        before = directory_sha256(tmp_path)
        file.write_bytes(bytes((3 << 20) - 1) + b"1")
        assert directory_sha256(tmp_path) != before
        (tmp_path / "README.md").write_text("words")
        assert directory_sha256(tmp_path) == directory_sha256(tmp_path)
