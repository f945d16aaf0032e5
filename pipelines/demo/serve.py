"""The commands `diffcache stream` and `diffcache serve`: films as a file, and on a page."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffcache.command import METHOD, Device, Dtype, Seed, Threads, check_target, device_of, guarded
from diffcache.run_report import human

if TYPE_CHECKING:
    import gradio as gr
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from diffcache.pipelines.causal_video import CausalVideo
    from diffcache.pipelines.demo.kept import Kept
    from diffcache.pipelines.demo.program import Program
    from diffcache.pipelines.demo.showing import Viewers
    from diffcache.pipelines.video_stream import VideoStream


Model = Annotated[str, typer.Option(help="Folder of a causal WanPipeline, a shipped model or a Hugging Face ID.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="File of causal weights for its transformer, as Self-Forcing's.")
]
Lora = Annotated[Path | None, typer.Option(help="File of low-rank updates of the checkpoint, as LongLive's lora.pt.")]
SHIPPED, IMAGES = "sticker-causal", "sticker-flux"
FILMS = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "diffcache" / "films"


@guarded
def stream(
    prompt: Annotated[str, typer.Argument(help="What to film.")],
    model: Model = SHIPPED,
    checkpoint: Checkpoint = None,
    lora: Lora = None,
    out: Annotated[Path, typer.Option(help="The film, an .mp4 or a .gif.")] = Path("out/film.mp4"),
    policy: Annotated[
        str,
        typer.Option(
            metavar=METHOD,
            help="Frames that are held; `diffcache methods` has the policies. Empty for the model's own.",
        ),
    ] = "",
    start: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Image or video that the film begins with; its latest 60 latent frames."),
    ] = None,
    restyle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Video that is made anew under the prompt.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Chunks of three latent frames [default: 7; all with --restyle].")
    ] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    seed: Seed = 0,
    read_once: Annotated[
        bool, typer.Option(help="Keep rotated keys from step to step: half as much memory again.")
    ] = False,
    most_mb: Annotated[
        int | None, typer.Option(min=1, help="MB of keys and values to hold at most (default: what is free).")
    ] = None,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Film a prompt chunk by chunk, over a cache of the frames before, into a file.

    [bold]Try[/bold]

        diffcache stream "a frog on grass" --out frog.mp4

        diffcache stream "a crab on gravel" --restyle frog.mp4 --out crab.mp4

        diffcache stream "A red fox trots ..." --model ./Wan2.1-T2V-1.3B-Diffusers
            --checkpoint self_forcing_dmd.pt --policy infinity-rope
    """
    check_target("--out", out, (".mp4", ".gif"))
    if (height is None) != (width is None):
        raise ValueError(f"--height {height} --width {width}: go together; pass both or neither")
    if restyle is not None and (start is not None or read_once):
        other = f"--start {start}" if start is not None else "--read-once"
        raise ValueError(f"--restyle {restyle}: the film is made from all of it; leave out {other}")
    from diffcache.pipelines.demo.console import progress, quiet
    from diffcache.pipelines.demo.recording import to_file
    from diffcache.pipelines.video_to_video import VideoToVideo

    quiet()
    video = _opened(model, checkpoint, lora, dtype, str(device_of(device)), threads)
    size = None if height is None or width is None else (height, width)
    settings: dict[str, Any] = {
        "policy": policy or None,
        "size": size,
        "seed": seed,
        "most_bytes": None if most_mb is None else most_mb * 2**20,
    }
    film: VideoStream | VideoToVideo
    made: Iterator[NDArray[np.uint8]]
    if restyle is None:
        chunks = chunks or 7
        film = video.stream(prompt, start=start, chunks=chunks, read_once=read_once, **settings)
        made = film
    else:
        film = VideoToVideo(video, prompt, **settings)
        made = film.of(restyle)
    tall, wide = size or video.way.size
    length = "all of the video" if chunks is None else f"{chunks} chunks"
    typer.echo(f"{tall} x {wide}, {length}: at most {human(film.expected_bytes, 'B')} of keys and values")
    started = time.perf_counter()
    pictures: list[NDArray[np.uint8]] = []
    with progress("film") as show:
        for number, frames in enumerate(islice(made, chunks)):
            pictures.extend(frames)
            show(number + 1, chunks or 0)
    if not pictures:
        raise ValueError(f"--restyle {restyle}: is too short for a chunk")
    seconds = time.perf_counter() - started
    to_file(out, pictures, video.way.fps)
    typer.echo(
        f"{len(pictures)} pictures in {seconds:.1f} s, {len(pictures) / seconds:.1f} a second; "
        f"{human(film.nbytes, 'B')} held; wrote {out}"
    )


def _opened(
    model: str, checkpoint: Path | None, lora: Path | None, dtype: str, device: str, threads: int
) -> CausalVideo:
    """Return the model that a command line names."""
    import torch

    from diffcache.pipelines.causal_video import CausalVideo
    from diffcache.pipelines.demo.saved import DTYPES, check_dtype

    check_dtype(dtype)
    torch.set_num_threads(threads)
    return CausalVideo.from_pretrained(model, checkpoint=checkpoint, lora=lora, dtype=DTYPES.get(dtype), device=device)


@guarded
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder of a causal WanPipeline, a shipped model or a Hugging Face ID.")
    ] = SHIPPED,
    checkpoint: Checkpoint = None,
    lora: Lora = None,
    images: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Pipeline of the tab of images, empty for none "
            "[default: the shipped sticker-flux beside the shipped MODEL].",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0 lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    known_as: Annotated[
        list[str] | None, typer.Option(help="Further host name that browsers ask for, as of a proxy; repeatable.")
    ] = None,
    viewers: Annotated[int, typer.Option(min=1, help="Viewers that are served at a time.")] = 8,
    cache_mb: Annotated[int, typer.Option(min=1, help="MB of a film's cache at which the film ends.")] = 256,
    ray: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Film in N processes of Ray Serve, each with a model.")
    ] = None,
    ray_least: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes that stay; others start as films wait, up to --ray."),
    ] = None,
    keep: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Films are saved here every few chunks, so that viewers go on with them after a restart, for a day.",
        ),
    ] = FILMS,
    keep_mb: Annotated[
        int, typer.Option(min=0, help="MB of saved films, of which the oldest go; 0 saves none.")
    ] = 1000,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Serve a page that shows films of a causal video model while it makes them.

    It needs no network. Each viewer has films of their own; Ctrl-C ends them all.

    [bold]Try[/bold]

        diffcache serve

        diffcache serve ./my-causal-wan --port 8000 --viewers 2

        diffcache serve ./Wan2.1-T2V-1.3B-Diffusers --checkpoint self_forcing_dmd.pt --cache-mb 8000

        diffcache serve --ray 2
    """
    if ray_least is not None and ray_least > (ray or 0):
        raise ValueError(f"--ray-least {ray_least}: must be at most --ray, {ray or 'not given'}")
    place, chosen = device_of(device), free_port(host, port)
    gpus = gpus_of(place, ray) if ray else 0.0
    with tempfile.TemporaryDirectory(prefix="diffcache-serve-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # gradio makes it when it is imported
        from diffcache.pipelines.demo import page  # noqa: F401 - before a model is read
        from diffcache.pipelines.demo.console import quiet

        quiet()
        from diffcache.pipelines.demo.images import Drawer
        from diffcache.pipelines.demo.replicas import ray_serve, replicas
        from diffcache.pipelines.demo.session_film import program_of

        def opened(where: str) -> Program:
            video = _opened(model, checkpoint, lora, dtype, where, threads)
            name = Path(model).name if checkpoint is None else checkpoint.stem
            return program_of(video, name, viewers, cache_mb * 2**20)

        if ray is not None:
            ray_serve()
        program = opened(str(place) if ray is None else "cpu")  # refuses a wrong model
        if images is None:
            images = IMAGES if model == SHIPPED else ""
        if images:
            both = program.title.replace(" - ", f", {Path(images).name} - ")
            program = replace(program, drawer=Drawer(images, dtype, str(place)), title=both)
        names = (host, *(known_as or ()))
        kept = _kept(keep, keep_mb)
        if ray is None:
            run(program, names, chosen, typer.echo, kept)
            return
        films = os.path.join(folder, "films")
        with replicas(
            lambda: opened(str(place)).make, folder=films, count=ray, least=ray_least, cpus=threads, gpus=gpus
        ) as make:
            program = replace(program, make=make)  # which drops the model of this process
            run(program, names, chosen, typer.echo, kept)


def _kept(folder: Path, most_mb: int) -> Kept | None:
    """Return the saved films of a folder; None if `most_mb` is 0 and none are to be saved.

    Raises:
        ValueError: If nothing can be saved there.
    """
    from diffcache.pipelines.demo.kept import Kept

    try:
        return Kept(folder.expanduser(), most_mb * 2**20) if most_mb else None
    except OSError as error:
        raise ValueError(
            f"--keep {folder}: no films can be saved there ({error.strerror}); name another folder,"
            " or pass --keep-mb 0"
        ) from error


def run(
    program: Program, hosts: Sequence[str], port: int, tell: Callable[[str], None], kept: Kept | None = None
) -> None:
    """Serve a page until the process is interrupted; only saved films are left then.

    `hosts` are the address and further names by which browsers ask for it; the port is free; `tell` prints a line;
    viewers go on from the films in `kept`, None to save none.
    """

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)  # by default it would leave the temporary folder behind
    try:
        with served(program, hosts, port, kept) as (url, _, _):
            tell(f"{program.title} at {url} - Ctrl-C ends it")
            threading.Event().wait()
    except KeyboardInterrupt:
        tell("\nended")


@contextmanager
def served(
    program: Program, hosts: Sequence[str], port: int, kept: Kept | None = None
) -> Iterator[tuple[str, gr.Blocks, Viewers]]:
    """Serve a page; yield its address, the page, and the films of all viewers, which end with it.

    Arguments are those of `run`.
    """
    from diffcache.pipelines.demo.door import Listeners, guarded_by
    from diffcache.pipelines.demo.page import STYLE, build
    from diffcache.pipelines.demo.showing import Viewers

    listeners = Listeners()
    viewers = Viewers(program.viewers, listeners, kept)
    page = build(program, viewers)
    try:
        _, url, _ = page.launch(
            server_name=hosts[0],
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            footer_links=[],
            enable_monitoring=False,
            css=STYLE,
            app_kwargs=guarded_by(listeners, hosts[0], hosts[1:], most_bytes(program)),
            max_threads=max(40, 8 + 2 * program.viewers),
        )
        yield url, page, viewers
    finally:
        viewers.close()
        if getattr(page, "server", None) is not None:  # it would wait for pages that are open
            logging.getLogger("uvicorn.error").disabled = True  # it would log that they were cut off
            page.server.force_exit = True
        page.close(verbose=False)


def most_bytes(program: Program) -> int:
    """Return the most bytes of a request of the page: a prompt, or three pictures."""
    pixels = max((height * width for height, width in program.sizes.values()), default=0)
    from diffcache.pipelines.demo.door import MOST_BYTES

    return MOST_BYTES + (3 * pixels if program.seen else 0)


def gpus_of(device: torch.device, count: int) -> float:
    """Return the GPUs of each replica: one, or a fraction of one if there are more replicas than GPUs.

    Raises:
        ValueError: If the device is one of several GPUs: Ray chooses among them.
    """
    if device.type != "cuda":
        return 0.0
    if str(device) != "cuda":
        raise ValueError(
            f"--device {device}: with --ray {count} Ray chooses the GPU of each replica; pass "
            "--device cuda, and CUDA_VISIBLE_DEVICES for the GPUs it may take"
        )
    import torch

    together = -(-count // torch.cuda.device_count())  # replicas on a GPU
    return 10_000 // together / 10_000  # Ray counts in ten thousandths


def free_port(host: str, port: int) -> int:
    """Return the port that is asked for, or a free one for 0.

    Raises:
        ValueError: If the port is taken, or this machine has no such address.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot be served at ({error}); name another port, or "
            "--port 0 for any that is free"
        ) from error
