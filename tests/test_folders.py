"""Folders of pictures and films, and lists of prompts."""

import hashlib
import json
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.eval.samples import clips, folders, npz
from diffcache.eval.samples.clips import read_clip, read_fps, write_clip, write_preview
from diffcache.eval.samples.prompts import SHIPPED, Prompts, calibration_prompts, load_prompts
from diffcache.eval.workshop.small.sticker_films import sample_film
from diffcache.eval.workshop.small.stickers import held_out_captions, parse
from tests.picture_files import filled, noise, save, save_npz


def test_pictures_come_in_natural_order(tmp_path: Path) -> None:
    names = ["10.png", "9.png", "x2.png", "x10.png", "1.png"]
    found = folders.open_pictures(filled(tmp_path, names))
    assert found.names == ("1", "9", "10", "x2", "x10") and found.notes == ()
    order = [4, 1, 0, 2, 3]
    expected = torch.stack([noise(seed=s) for s in order])
    assert torch.stack(list(found.pictures())).equal(expected)
    assert torch.stack(list(found.pictures([0, 3, 4]))).equal(expected[[0, 3, 4]])
    assert folders.common_size(found) == (12, 16)


def test_other_files_are_left_out_with_one_note(tmp_path: Path) -> None:
    filled(tmp_path, ["a.png"])
    for name in ("notes.txt", ".DS_Store", "._a.png"):
        (tmp_path / name).write_text("")
    filled(tmp_path / "inside", ["b.png"])
    found = folders.open_pictures(tmp_path)
    assert found.names == ("a",) and len(found.notes) == 2
    assert "left out 3 files that are no pictures, such as .DS_Store" in found.notes[0]
    assert "left out 1 folders of pictures (--recursive reads them), such as inside" in found.notes[1]
    assert folders.open_pictures(tmp_path, recursive=True).names == ("a", "inside/b")


def test_another_size_in_a_folder_names_the_file(tmp_path: Path) -> None:
    filled(tmp_path, ["1.png", "2.png"])
    save(tmp_path / "3.png", noise(12, 17))
    found = folders.open_pictures(tmp_path)
    with pytest.raises(ValueError, match=r"3\.png is 12 x 17 and .*1\.png 12 x 16: --resize"):
        folders.common_size(found)
    assert found.picture(2, side=8).shape == (3, 8, 8)


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    a = folders.open_pictures(filled(tmp_path / "a", ["1.png", "2.png", "10.png"]))
    b = folders.open_pictures(filled(tmp_path / "b", ["10.bmp", "2.png", "1.tif"]))
    assert folders.pair(a, b) == [(0, 0), (1, 1), (2, 2)]
    filled(tmp_path / "b", ["11.png", "12.png", "13.png", "14.png"])
    (tmp_path / "b" / "2.png").unlink()
    b = folders.open_pictures(tmp_path / "b")
    with pytest.raises(ValueError, match=r"b lacks 1 of .*a: 2; .*a lacks 4 of .*b: 11, 12, 13, \.\.\."):
        folders.pair(a, b)
    one, other = (folders.open_pictures(tmp_path / "a" / f"{n}.png") for n in (1, 2))
    assert folders.pair(one, other) == [(0, 0)]


def test_films_are_files_and_folders_of_frames(tmp_path: Path) -> None:
    film = torch.stack([noise(seed=s) for s in range(3)])
    write_clip(tmp_path / "b.mkv", film, 8)
    (tmp_path / "z.preview.mp4").touch()  # no film of its own
    filled(tmp_path / "a", ["2.png", "10.png", "1.png"])
    (tmp_path / "notes.txt").touch()
    found = folders.open_films(tmp_path)
    assert found.names == ("a", "b") and "2 files" in found.notes[0]
    frames, read = map(read_clip, found.files)
    assert read.equal(film) and frames.equal(film[[2, 0, 1]])
    assert folders.open_films(tmp_path / "a").names == ("a",)
    assert folders.open_films(tmp_path / "b.mkv").files == (tmp_path / "b.mkv",)
    assert folders.holds_films(tmp_path) and folders.holds_films(tmp_path / "b.mkv")
    assert not folders.holds_films(tmp_path / "a")


def test_npz_of_numpy_is_read(tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(5)])
    np.savez_compressed(tmp_path / "a.npz", made.permute(0, 2, 3, 1).contiguous().numpy())
    found = folders.open_pictures(tmp_path / "a.npz")
    assert found.names == ("0", "1", "2", "3", "4") and folders.common_size(found) == (12, 16)
    assert torch.stack(list(found.pictures())).equal(made)
    assert torch.stack(list(found.pictures([1, 4]))).equal(made[[1, 4]])


def test_npz_pairs_with_npz_only(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 3), ("c", 2)):
        save_npz(tmp_path / f"{name}.npz", torch.stack([noise(seed=s) for s in range(count)]))
    a, b, c = (folders.open_pictures(tmp_path / f"{name}.npz") for name in "abc")
    assert folders.pair(a, b) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match=r"c\.npz lacks 1 of .*a\.npz: 2"):
        folders.pair(a, c)
    other = folders.open_pictures(filled(tmp_path / "d", ["0.png", "1.png", "2.png"]))
    with pytest.raises(ValueError, match=r"an \.npz has no file names"):
        folders.pair(a, other)


def test_statistics(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(50, 4))
    mu, sigma = features.mean(0), np.cov(features.T)
    np.savez(tmp_path / "a.npz", mu=mu, sigma=sigma)
    found = npz.read_statistics(tmp_path / "a.npz")
    assert found is not None and found.count is None
    assert np.allclose(found.mean, mu) and np.allclose(found.cov, sigma)
    np.savez(tmp_path / "b.npz", arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    assert npz.read_statistics(tmp_path / "b.npz") is None


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.bmp", "a.tiff", "a.tif"])
def test_lossless_pictures_are_read_byte_for_byte(name: str, tmp_path: Path) -> None:
    assert torch.equal(clips.read_picture(save(tmp_path / name, noise())), noise())
    assert clips.read_size(tmp_path / name) == (12, 16)


def test_webp_and_jpeg_are_read(tmp_path: Path) -> None:
    flat = torch.full((3, 16, 16), 200, dtype=torch.uint8)
    assert torch.equal(clips.read_picture(save(tmp_path / "a.webp", noise(), lossless=True)), noise())
    assert (clips.read_picture(save(tmp_path / "a.jpg", flat)).int() - 200).abs().max() <= 2


def test_grey_palette_and_opaque_alpha_become_rgb(tmp_path: Path) -> None:
    grey = np.arange(192, dtype=np.uint8).reshape(12, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    three = clips.read_picture(tmp_path / "grey.png")
    assert all(torch.equal(channel, torch.from_numpy(grey)) for channel in three)
    few = Image.fromarray(noise().permute(1, 2, 0).numpy()).quantize(8)
    few.save(tmp_path / "palette.png")
    expected = torch.from_numpy(np.array(few.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(clips.read_picture(tmp_path / "palette.png"), expected)
    opaque = torch.cat([noise(), torch.full((1, 12, 16), 255, dtype=torch.uint8)])
    assert torch.equal(clips.read_picture(save(tmp_path / "opaque.png", opaque)), noise())


def sixteen_bit_png(file: Path, values: np.ndarray) -> Path:
    """Write a PNG of 16 bits by hand: Pillow cannot write colored ones."""
    height, width = values.shape[:2]
    kind = 2 if values.ndim == 3 else 0
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return file


@pytest.mark.parametrize("shape", [(12, 16), (12, 16, 3)])
def test_of_sixteen_bits_the_upper_eight_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, shape)
    found = clips.read_picture(sixteen_bit_png(tmp_path / "a.png", values))
    upper = torch.from_numpy(values >> 8).to(torch.uint8)
    expected = upper.expand(3, 12, 16) if upper.ndim == 2 else upper.permute(2, 0, 1)
    assert torch.equal(found, expected)


def test_resizing_scales_the_shorter_side_and_cuts_the_middle() -> None:
    assert clips.resized(noise(8, 8), 8).equal(noise(8, 8))
    flat = torch.full((3, 40, 20), 77, dtype=torch.uint8)
    assert clips.resized(flat, 10).equal(torch.full((3, 10, 10), 77, dtype=torch.uint8))
    stripes = torch.zeros(3, 10, 30, dtype=torch.uint8)
    stripes[..., 10:20] = 255  # exactly the middle third
    assert clips.resized(stripes, 10).min() == 255
    assert clips.resized(noise(9, 31), 5).shape == (3, 5, 5)


TEXTS = ("a red kite", 'a sign that says "stop", twice', "zwei Hüte")
SHA256 = hashlib.sha256("\n".join(TEXTS).encode()).hexdigest()


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8", newline="")
    return file


FILES = {
    "plain.txt": '# a comment\na red kite\r\n\n  a sign  that says "stop", twice \n# more\nzwei Hüte',
    "marked.txt": '\ufeffa red kite\na sign that says "stop", twice\nzwei Hüte\n',
    "DrawBench.csv": 'Prompts,Category\na red kite,A\n"a sign that says ""stop"", twice",B\n,C\nzwei Hüte,D\n',
    "PartiPrompts.tsv": 'Prompt\tCategory\na red kite\tA\na sign that says "stop", twice\tB\nzwei Hüte\tC\n',
    "sheet.tsv": 'Prompt\tx\na red kite\t1\n"a sign that says ""stop"", twice"\t2\nzwei Hüte\t3\n',
    "captions.json": json.dumps({"images": [], "annotations": [{"caption": t} for t in TEXTS]}),
    "VBench_full_info.json": json.dumps([{"prompt_en": t, "dimension": []} for t in TEXTS]),
    "texts.json": json.dumps(TEXTS),
    "objects.json": json.dumps([{"prompt": t} for t in TEXTS]),
    "lines.jsonl": "\n".join(json.dumps(t) for t in (TEXTS[0], {"prompt": TEXTS[1]}, {"caption": TEXTS[2]})),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_give_the_same_prompts(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, name, FILES[name])
    assert load_prompts(file) == Prompts(str(file), TEXTS, SHA256)
    few = load_prompts(str(file), limit=2)
    assert few.texts == TEXTS[:2] and few.sha256 == SHA256  # a limit makes no other list of it


def test_a_column_is_named_behind_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "own.csv", "id,Text,Other\n1,one,two\n2,three,four\n")
    assert load_prompts(f"{file}:text").texts == ("one", "three")
    assert load_prompts(f"{file}:Other").texts == ("two", "four")
    entries = written(tmp_path, "own.json", '[{"words": "five", "prompt": "six"}]')
    assert load_prompts(f"{entries}:words").texts == ("five",)


def test_coco_captions_are_one_a_picture_drawn_at_random(tmp_path: Path) -> None:
    texts = {i: [f"picture {i} said {n}" for n in range(5)] for i in range(40)}
    entries = [
        {"image_id": i, "id": 5 * i + n, "caption": text}
        for i, several in texts.items()
        for n, text in enumerate(several)
    ]
    file = written(tmp_path, "captions_val2014.json", json.dumps({"annotations": entries}))
    found = load_prompts(file)
    pictures = [int(text.split()[1]) for text in found.texts]
    chosen = {text.split()[-1] for text in found.texts}
    assert sorted(pictures) == list(range(40)) and pictures != list(range(40))
    assert chosen == set("01234") and "one caption a picture" in found.rule
    few = load_prompts(file, limit=10)  # a sample of the pictures, that a larger one begins with
    assert few.texts == found.texts[:10] and few.sha256 == found.sha256
    turned = written(tmp_path, "turned.json", json.dumps({"annotations": entries[::-1]}))
    assert load_prompts(turned).texts == found.texts


@pytest.mark.parametrize(
    ("name", "count"), [("stickers", 256), ("sticker-films", 7), ("pictures", 100), ("films", 50)]
)
def test_shipped_lists(name: str, count: int) -> None:
    found = load_prompts(name)
    assert name in SHIPPED and found.source == name
    assert len(found.texts) == len(set(found.texts)) == count
    assert all(text == text.strip() and not text.startswith("#") for text in found.texts)
    assert load_prompts(name, limit=7).texts == found.texts[:7]
    assert load_prompts(name, limit=7).sha256 == found.sha256


def test_sentences_of_stickers_are_those_of_held_out_scenes() -> None:
    assert list(load_prompts("stickers").texts) == held_out_captions(256)
    films = set(load_prompts("sticker-films").texts)
    rng = np.random.default_rng(0)
    drawn = {sample_film(rng, held=True).caption_at(0) for _ in range(400)}
    assert drawn <= films and all(len(parse(text)[0]) == 1 for text in films)


def test_quotation_marks_at_the_start_of_a_tsv_cell_stay(tmp_path: Path) -> None:
    rows = ['"HI" painted on a wall', '"one" beside "two"', "plain"]
    file = written(tmp_path, "quotes.tsv", "Prompt\tn\n" + "".join(f"{row}\t1\n" for row in rows))
    assert load_prompts(file).texts == tuple(rows)


def test_what_is_calibrated_on_is_not_evaluated_on(tmp_path: Path) -> None:
    for name in SHIPPED:
        own = calibration_prompts(name)
        assert len(own.texts) >= 32 and len(set(own.texts)) == len(own.texts)
        assert not {text.lower() for text in own.texts} & {text.lower() for text in load_prompts(name).texts}
    texts = [f"prompt {number}" for number in range(60)]
    file = written(tmp_path, "own.txt", "\n".join(texts))
    one, other = calibration_prompts(str(file)), load_prompts(f"held-out:{file}")
    assert sorted([*one.texts, *other.texts]) == sorted(texts)
    assert 20 <= len(one.texts) <= 40 and one.sha256 != other.sha256
    assert other.source == f"held-out:{file}"
    turned = written(tmp_path, "turned.txt", "\n".join(reversed(texts)))
    assert set(calibration_prompts(str(turned)).texts) == set(one.texts)  # by content, not place
    few = written(tmp_path, "few.csv", f"x,words\n1,{other.texts[0]}\n")
    with pytest.raises(ValueError, match="none of its 1 prompts may be calibrated on.*longer list"):
        calibration_prompts(f"{few}:words")
    only = written(tmp_path, "only.txt", one.texts[0])
    with pytest.raises(ValueError, match=r"only.txt holds no prompt to hold out"):
        load_prompts(f"held-out:{only}")


def clips_noise(frames: int = 7, height: int = 48, width: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, height, width), generator=generator, dtype=torch.uint8)


def by_opencv(path: Path) -> torch.Tensor:
    video = cv2.VideoCapture(str(path))
    pictures = []
    while True:
        there, picture = video.read()
        if not there:
            break
        pictures.append(torch.from_numpy(picture[..., ::-1].copy()))
    return torch.stack(pictures).permute(0, 3, 1, 2)


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
@pytest.mark.parametrize(("height", "width", "count"), [(48, 64, 7), (65, 97, 7), (2, 2, 1)])
def test_a_film_comes_back_byte_for_byte(tmp_path: Path, ending: str, height: int, width: int, count: int) -> None:
    frames = clips_noise(count, height, width)
    path = write_clip(tmp_path / f"a film: 100%d-0{ending}", frames, fps=8)
    assert torch.equal(read_clip(path), frames)
    assert torch.equal(by_opencv(path), frames)
    assert path.read_bytes() == write_clip(tmp_path / f"b{ending}", frames, fps=8).read_bytes()
    with pytest.raises(ValueError, match="cannot write 1 x 20000"):
        write_clip(tmp_path / "c.mp4", clips_noise(1, 1, 20000), 8)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"b{ending}"}


@pytest.mark.parametrize(("ending", "fps"), [(".mp4", 24000 / 1001), (".mkv", 7.5), (".mp4", 0.5), (".mkv", 120.0)])
def test_the_frame_rate_is_kept(tmp_path: Path, ending: str, fps: float) -> None:
    path = write_clip(tmp_path / f"a{ending}", clips_noise(5), fps)
    assert read_fps(path) == pytest.approx(fps, rel=1e-3)
    assert read_clip(path).shape[0] == 5
    assert cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FPS) == pytest.approx(fps, rel=1e-3)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 65)])
def test_a_preview_is_what_browsers_play(tmp_path: Path, height: int, width: int) -> None:
    import av

    smooth = torch.zeros(6, 3, height, width, dtype=torch.uint8)
    smooth[:, 0], smooth[:, 1], smooth[:, 2] = 200, 100, 50
    path = write_preview(tmp_path / "a.mp4", smooth, 8)
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.height, stream.width) == (height + height % 2, width + width % 2)
        frame = next(film.decode(stream))
        assert (frame.colorspace, frame.color_range) == (1, 1)
    # The index stands before the frames, so a browser can start before it has the whole file.
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    back = read_clip(path)[:, :, :height, :width]
    assert (back.double() - smooth.double()).abs().mean() < 3


def test_a_gif_is_read(tmp_path: Path) -> None:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    pictures = [Image.new("RGB", (9, 5), color) for color in colors]
    path = tmp_path / "a.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
    film = read_clip(path)
    assert film.shape == (3, 3, 5, 9)
    assert [tuple(frame[:, 2, 4].tolist()) for frame in film] == colors
    assert read_fps(path) == 10
