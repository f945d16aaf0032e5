"""Films on disk: byte-exact round trips, foreign readers, and errors that name the file."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.eval.samples.clips import read_clip, read_fps, write_clip, write_preview


def noise(frames: int = 7, height: int = 48, width: int = 64, seed: int = 0) -> torch.Tensor:
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
@pytest.mark.parametrize(("height", "width"), [(48, 64), (65, 97), (2, 2)])
@pytest.mark.parametrize("count", [1, 7])
def test_a_film_comes_back_byte_for_byte(tmp_path: Path, ending: str, height: int, width: int, count: int) -> None:
    frames = noise(count, height, width)
    path = write_clip(tmp_path / f"a film: 100%d-0{ending}", frames, fps=8)
    assert torch.equal(read_clip(path), frames)
    assert torch.equal(by_opencv(path), frames)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
@pytest.mark.parametrize("fps", [8, 7.5, 24000 / 1001, 120.0, 0.5])
def test_the_frame_rate_is_kept(tmp_path: Path, ending: str, fps: float) -> None:
    path = write_clip(tmp_path / f"a{ending}", noise(5), fps)
    assert read_fps(path) == pytest.approx(fps, rel=1e-3)
    assert read_clip(path).shape[0] == 5
    assert cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FPS) == pytest.approx(fps, rel=1e-3)


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_equal_films_give_equal_files(tmp_path: Path, ending: str) -> None:
    files = [write_clip(tmp_path / f"{name}{ending}", noise(), 8) for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_film_is_replaced_and_a_film_on_another_device_layout_is_kept(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", noise(seed=1), 8)
    frames = noise(seed=2).permute(0, 1, 3, 2)
    write_clip(path, frames, 8)
    assert torch.equal(read_clip(path), frames)


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


def test_pictures_in_a_folder_are_read_in_natural_order(tmp_path: Path) -> None:
    frames = noise(11)
    for index, frame in enumerate(frames):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(tmp_path / f"frame_{index}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    assert torch.equal(read_clip(tmp_path), frames)
    assert read_fps(tmp_path) is None


def test_frames_are_read_as_pictures_are(tmp_path: Path) -> None:
    grey = noise(1)[0, 0].numpy()
    Image.fromarray(grey).convert("RGB").save(tmp_path / "0.tif")
    Image.fromarray((grey.astype(np.uint16) << 8) + 255).save(tmp_path / "1.png")
    (tmp_path / ".hidden.png").write_text("not a frame")
    film = read_clip(tmp_path)
    assert film.shape == (2, 3, *grey.shape) and (film.numpy() == grey).all()


def test_a_gif_is_read(tmp_path: Path) -> None:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    pictures = [Image.new("RGB", (9, 5), color) for color in colors]
    path = tmp_path / "a.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
    film = read_clip(path)
    assert film.shape == (3, 3, 5, 9)
    assert [tuple(frame[:, 2, 4].tolist()) for frame in film] == colors
    assert read_fps(path) == 10


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.97])
def test_a_film_cut_off_anywhere_is_an_error(tmp_path: Path, ending: str, share: float) -> None:
    path = write_clip(tmp_path / f"a{ending}", noise(12), 8)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"a\.(mp4|mkv) "):
        read_clip(path)


def test_one_flipped_byte_is_an_error_in_a_film_with_checksums(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", noise(12), 8)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.mkv"):
        read_clip(path)


def test_frames_of_different_sizes_are_an_error(tmp_path: Path) -> None:
    for side in (4, 5):
        Image.fromarray(np.zeros((side, 4, 3), dtype=np.uint8)).save(tmp_path / f"{side}.png")
    with pytest.raises(ValueError, match=r"differ.*\(4, 4\), \(5, 4\)"):
        read_clip(tmp_path)


@pytest.mark.parametrize(
    ("name", "frames", "fps", "message"),
    [
        ("a.avi", noise(2), 8, "a.avi: a film is written as .mp4 or .mkv"),
        ("a.mp4", noise(2).float(), 8, "uint8"),
        ("a.mp4", noise(2)[:, :1], 8, r"not torch.uint8 \[2, 1, 48, 64\]"),
        ("a.mp4", noise(2)[0], 8, r"\[3, 48, 64\]"),
        ("a.mp4", noise(2)[:0], 8, "no frame to write"),
        ("a.mp4", noise(2), 0, "fps must be .* not 0"),
        ("a.mp4", noise(2), float("nan"), "not nan"),
        ("a.mp4", noise(1, 1, 20000), 8, "cannot write 1 x 20000"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, name: str, frames: torch.Tensor, fps: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_clip(tmp_path / name, frames, fps)
    assert not list(tmp_path.iterdir())
