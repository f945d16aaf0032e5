"""Draw the films of VBench's suite under the names that it looks for, resumable at any film.

The films lie in a folder of their own, since VBench takes all that is in it for films; manifests
and settings stand beside that folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffcache.eval.methods import parse_row
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.folder import FILMS, MARKER, Batch, CaseFolder, check_claim
from diffcache.eval.runs.ranks import Progress, join
from diffcache.eval.runs.task import Case, Task, code_sha256, digest
from diffcache.eval.vbench import film_names, suite
from diffcache.files import write_json


@dataclass(frozen=True)
class Suite:
    """Films to draw."""

    task: Task  # model, seed of the first film, call, frame rate; its `prompts` is VBench's list
    out: Path  # folder of the run; the films go into `films` inside
    method: str = ""  # a row of an evaluation (`diffcache.eval.methods.parse_row`); "" for uncached
    # Dimensions to draw for; None for all. The choice does not change a film's seed.
    dimensions: Sequence[str] | None = None
    samples: int = suite.SAMPLES  # films of a prompt, five times as many of flickering; VBench's own number is 5
    # File with one prompt a line in the order of VBench's list, handed to the pipeline in place of VBench's own;
    # names of films keep those
    rewritten: Path | None = None

    @property
    def films(self) -> Path:
        """The folder that VBench reads."""
        return self.out / FILMS


def draw_suite(job: Suite, progress: Progress) -> tuple[int, float] | None:
    """Draw every film that is not there yet; processes of a launcher share them out.

    Film `i` of the whole suite has seed `seed + i`, so no two share one.

    Returns:
        Number of films, and their frames per second; None in all processes but the first.

    Raises:
        FileNotFoundError: There is no such model or list of prompts.
        RunError: The folder holds films of other settings.
        ValueError: The list cannot be read, the pipeline draws pictures, or something else lies in the folder of
            films.
    """
    prompts = film_names.read_info(str(job.task.prompts))
    texts = _texts(prompts, job.rewritten)
    ranks = join(job.task.device)
    drawer = Drawer(job.task, ranks)
    if drawer.fps is None:
        raise ValueError(f"--model {job.task.model}: {drawer.pipeline} draws no films")
    names = film_names.expected(prompts)
    places = {name: place for place, name in enumerate(names)}
    wanted = [
        Batch(places[name], (places[name],), (texts[name],), (job.task.seed + places[name],))
        for name in film_names.expected(prompts, job.dimensions, job.samples)
    ]
    method = parse_row(job.method) if job.method else None
    case = Case(FILMS, "method" if method else "uncached", drawer.steps, method)
    # The names of the whole list, so that none changes its number.
    shared = {**drawer.about, "names": digest(names), "texts": digest(sorted(texts.items()))}
    mine = {"identity": case.digest(shared), **shared, "steps": case.steps, "method": job.method}
    mine |= {"code": code_sha256()} if method else {}
    is_new = check_claim(job.out, mine)
    if job.films.is_dir() and any(job.films.iterdir()):
        film_names.check_folder(job.films)
    ranks.wait()
    if is_new and ranks.is_first:
        write_json(job.out / MARKER, mine)
    folder = CaseFolder(job.out, ranks.index, drawer.fps, names)
    _draw(drawer, case, folder, wanted[ranks.index :: ranks.count], progress)
    ranks.wait()
    ranks.close()
    return (len(wanted), drawer.fps) if ranks.is_first else None


def _draw(drawer: Drawer, case: Case, folder: CaseFolder, share: Sequence[Batch], progress: Progress) -> None:
    """Draw the films of this process that are not drawn yet, one a call."""
    done = folder.done(share)
    progress.expect(len(share))
    progress.advance(len(done), case.name, drawn=False)
    todo = [batch for batch in share if batch.number not in done]
    if not todo:
        return
    with drawer.wrapped(case):
        for batch in todo:
            drawn = drawer.draw(case, batch)
            folder.write(batch, drawn.samples, drawn.about)
            progress.advance(1, case.name)


def _texts(prompts: Sequence[film_names.Prompt], rewritten: Path | None) -> Mapping[str, str]:
    """Return the calls of the pipeline, by name of the film.

    Raises:
        FileNotFoundError: There is no such file of rewritten prompts.
        ValueError: It does not hold one prompt for each of the list.
    """
    lines = [prompt.text for prompt in prompts]
    if rewritten is not None:
        text = rewritten.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
        if len(lines) != len(prompts) or not all(lines):
            raise ValueError(
                f"--rewritten {rewritten}: has {len(list(filter(None, lines)))} prompts in "
                f"{len(lines)} lines, but must have one for each of the {len(prompts)} of VBench's "
                "list, in its order"
            )
    texts: dict[str, str] = {}
    # A prompt that stands in the list twice is drawn once, from its last line, as in VBench's loop.
    for prompt, line in zip(prompts, lines, strict=True):
        texts |= dict.fromkeys(film_names.expected([prompt]), line)
    return texts
