"""Read folders of pictures and films that other tools made; pair two of them by file name.

Few pictures are in memory at a time. `diffcache.eval.samples.clips` describes how each is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diffcache.eval.samples import clips, npz

Size = tuple[int, int]
_NAMED = 3  # files that a message names


@dataclass(frozen=True)
class Folder:
    """Samples on disk, each under a name; their contents are read when they are asked for."""

    path: Path  # folder, file, or `.npz`
    # Path inside the folder without the ending, in natural order (2 before 10); in an `.npz` file the index
    names: tuple[str, ...]
    files: tuple[Path, ...] = ()  # file of each, empty for an `.npz` file
    notes: tuple[str, ...] = ()  # notes on what was left out
    stored: npz.StoredPictures | None = None  # the pictures of an `.npz` file

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.names)

    def place(self, index: int) -> str:
        """Name a sample in messages."""
        return str(self.files[index]) if self.files else f"{self.path} picture {index}"

    def sizes(self) -> Iterator[Size]:
        """Yield height and width of every picture, from headers (errors: `read_size`)."""
        if self.stored is not None:
            yield from (self.stored.size for _ in range(self.stored.count))
        yield from map(clips.read_size, self.files)

    def picture(self, index: int, side: int | None = None) -> Tensor:
        """Return a picture, uint8 [3, H, W], `resized` to `side` pixels if that is given (errors: `read_picture`)."""
        stored = self.stored
        found = clips.read_picture(self.files[index]) if stored is None else stored[index]
        return found if side is None else clips.resized(found, side)

    def pictures(self, indices: Sequence[int] | None = None) -> Iterator[Tensor]:
        """Yield pictures, uint8 [3, H, W] (errors: `read_picture`)."""
        yield from map(self.picture, range(len(self)) if indices is None else indices)


def open_pictures(path: str | Path, recursive: bool = False) -> Folder:
    """Find the pictures of a folder, an `.npz` file (`arr_0`), or one picture.

    Raises FileNotFoundError if nothing is there, and ValueError if there are no pictures, or two have one name.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".npz" and not path.is_dir():
        stored = npz.open_pictures(path)
        return Folder(path, tuple(map(str, range(stored.count))), stored=stored)
    if not path.exists():
        raise FileNotFoundError(f"no folder or file {path}")
    if path.is_file():
        if not clips.is_picture(path):
            raise ValueError(f"{path} is no picture ({', '.join(clips.PICTURE_ENDINGS)}) and no .npz")
        return Folder(path, (path.stem,), (path,))
    files = [f for f in (path.rglob("*") if recursive else path.iterdir()) if not f.is_dir()]
    found = [file for file in files if clips.is_picture(file)]
    inside = [] if recursive else _folders_of_pictures(path)
    if not found:
        hint = "; the folders inside do: use --recursive" if inside else ""
        hint = hint or ("; it holds films" if any(map(is_film, files)) else "")
        raise ValueError(f"folder {path} holds no picture ({', '.join(clips.PICTURE_ENDINGS)}){hint}")
    notes = _left_out(path, set(files) - set(found), "files that are no pictures")
    notes += _left_out(path, inside, "folders of pictures (--recursive reads them)")
    return _named(path, found, notes)


def open_films(path: str | Path) -> Folder:
    """Find the films of a folder: film files, and folders inside with one picture a frame.

    Raises FileNotFoundError if nothing is there, and ValueError if there are no films, frames lie beside films, or
    two have one name.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no folder or file {path}")
    if path.is_file():
        if not is_film(path):
            raise ValueError(f"{path} is no film ({', '.join(clips.FILM_ENDINGS)})")
        return Folder(path, (path.stem,), (path,))
    files = [file for file in path.iterdir() if file.is_file()]
    found = [file for file in files if is_film(file)] + _folders_of_pictures(path)
    frames = [file for file in files if clips.is_picture(file)]
    if frames and not found:
        return Folder(path, (path.resolve().name,), (path,))
    if frames:
        raise ValueError(f"{path} holds films and pictures, such as {frames[0].name}: part them")
    if not found:
        raise ValueError(f"folder {path} holds no film ({', '.join(clips.FILM_ENDINGS)}, or folders of frames)")
    return _named(path, found, _left_out(path, set(files) - set(found), "files that are no films"))


def holds_films(path: str | Path) -> bool:
    """Say whether a path is a film or a folder with films; both kinds are a ValueError."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return is_film(path)
    files = [file for file in path.iterdir() if file.is_file()]
    films, pictures = (list(filter(kind, files)) for kind in (is_film, clips.is_picture))
    if films and pictures:
        raise ValueError(f"{path} holds films ({films[0].name}) and pictures ({pictures[0].name}): part them")
    return bool(films)


def is_film(file: Path) -> bool:
    """Say whether a file is a film by its name; hidden files and previews are none."""
    is_preview = file.name.endswith(".preview.mp4")  # runs once kept them beside the films
    is_hidden = file.name.startswith(".")
    return file.suffix.lower() in clips.FILM_ENDINGS and not (is_hidden or is_preview)


def pair(a: Folder, b: Folder) -> list[tuple[int, int]]:
    """Return pairs of indices: a sample of `a`, and the sample of `b` with the same name.

    Single files, and folders that are a film each, are a pair whatever their names. Raises ValueError, with their
    names, if samples have no counterpart.
    """
    if a.files == (a.path,) and b.files == (b.path,):
        return [(0, 0)]
    if (a.stored is None) != (b.stored is None):
        raise ValueError(f"{a.path} and {b.path}: an .npz has no file names; pair it with an .npz")
    places = {name: place for place, name in enumerate(b.names)}
    lacking = [_missing(b.path, [name for name in a.names if name not in places], a.path)]
    lacking += [_missing(a.path, sorted(places.keys() - set(a.names), key=clips.natural), b.path)]
    if any(lacking):
        raise ValueError("; ".join(filter(None, lacking)) + " (files are paired by name)")
    return [(place, places[name]) for place, name in enumerate(a.names)]


def common_size(folder: Folder, progress: Callable[[Iterable[Size]], Iterable[Size]] = iter) -> Size:
    """Return the height and width that all pictures have; raise ValueError, with its name, if one has another."""
    first: Size | None = None
    for index, size in enumerate(progress(folder.sizes())):
        first = first or size
        if size != first:
            raise ValueError(
                f"{folder.place(index)} is {size[0]} x {size[1]} and {folder.place(0)} "
                f"{first[0]} x {first[1]}: --resize SIDE makes them equal"
            )
    if first is None:
        raise ValueError(f"{folder.path} holds no picture")
    return first


def _named(path: Path, found: Collection[Path], notes: tuple[str, ...]) -> Folder:
    """Return files in natural order of their names, which must differ."""
    names: dict[str, Path] = {}
    for file in found:
        inside = file.relative_to(path)
        name = (inside if file.is_dir() else inside.with_suffix("")).as_posix()
        if name in names:
            both = sorted((file.name, names[name].name))
            raise ValueError(f"{path} holds {' and '.join(both)}: two files of one name; part them")
        names[name] = file
    order = sorted(names, key=clips.natural)
    return Folder(path, tuple(order), tuple(names[name] for name in order), notes)


def _left_out(path: Path, files: Collection[Path], what: str) -> tuple[str, ...]:
    if not files:
        return ()
    return (f"{path}: left out {len(files)} {what}, such as {min(files).name}",)


def _folders_of_pictures(path: Path) -> list[Path]:
    return [p for p in path.iterdir() if p.is_dir() and any(map(clips.is_picture, p.iterdir()))]


def _missing(path: Path, names: Sequence[str], other: Path) -> str:
    if not names:
        return ""
    dots = ", ..." if len(names) > _NAMED else ""
    return f"{path} lacks {len(names)} of {other}: {', '.join(names[:_NAMED])}{dots}"
