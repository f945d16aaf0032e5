"""The command `diffcache serve`: a page that shows a causal video model while it films."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffcache.command import Device, Dtype, Threads, device_of, guarded

if TYPE_CHECKING:
    import torch

    from diffcache.pipelines.demo.program import Program


@guarded
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a causal WanPipeline, or file of weights as Self-Forcing releases "
            "them (default: the shipped sticker-causal).",
        ),
    ] = None,
    wan: Annotated[
        Path | None,
        typer.Option(help="With a file: folder of a WanPipeline with its other models."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0 lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    known_as: Annotated[
        list[str] | None,
        typer.Option(help="Further host name that browsers ask for, as of a proxy; repeatable."),
    ] = None,
    viewers: Annotated[int, typer.Option(min=1, help="Viewers that are served at a time.")] = 8,
    cache_mb: Annotated[
        int, typer.Option(min=1, help="MB of a film's cache at which the film ends.")
    ] = 256,
    ray: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Film in N processes of Ray Serve, each with a model."
        ),
    ] = None,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Serve a page that shows films of a causal video model while it makes them.

    It needs no network. Each viewer has films of their own; Ctrl-C ends them all.

    [bold]Try[/bold]

        diffcache serve

        diffcache serve ./my-causal-wan --port 8000 --viewers 2

        diffcache serve self_forcing_dmd.pt --wan ./Wan2.1-T2V-1.3B-Diffusers --cache-mb 8000

        diffcache serve --ray 2
    """
    place, chosen = device_of(device), free_port(host, port)
    gpus = gpus_of(place, ray) if ray else 0.0
    with tempfile.TemporaryDirectory(prefix="diffcache-serve-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # gradio makes it when it is imported
        from diffcache.pipelines.demo import page  # noqa: F401 - before a model is read
        from diffcache.pipelines.demo.console import quiet

        quiet()
        import torch

        from diffcache.pipelines.demo.replicas import ray_serve, replicas
        from diffcache.pipelines.demo.served import open_model

        def opened(where: torch.device) -> Program:
            torch.set_num_threads(threads)
            return open_model(model, wan, dtype, where).program(viewers, cache_mb * 2**20)

        if ray is None:
            run(opened(place), (host, *(known_as or ())), chosen, typer.echo)
            return
        ray_serve()
        program = opened(torch.device("cpu"))  # refuses a wrong model, and tells what can be shown
        with replicas(lambda: opened(place).make, count=ray, cpus=threads, gpus=gpus) as make:
            program = replace(program, make=make)  # which drops the model of this process
            run(program, (host, *(known_as or ())), chosen, typer.echo)


def run(program: Program, hosts: Sequence[str], port: int, tell: Callable[[str], None]) -> None:
    """Serve a page until the process is interrupted; nothing of it is left then.

    Args:
        program: Films that the page shows.
        hosts: Address, and further names by which browsers ask for it.
        port: Port, a free one.
        tell: Prints a line.
    """
    from diffcache.pipelines.demo.door import Listeners, guarded_by
    from diffcache.pipelines.demo.page import NARROW, build
    from diffcache.pipelines.demo.showing import Viewers

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)  # which would leave the temporary folder
    listeners = Listeners()
    viewers = Viewers(program.viewers, listeners)
    page = build(program, viewers)
    try:
        _, url, _ = page.launch(
            server_name=hosts[0], server_port=port, prevent_thread_lock=True, quiet=True,
            share=False, ssr_mode=False, footer_links=[], enable_monitoring=False, css=NARROW,
            app_kwargs=guarded_by(listeners, hosts[0], hosts[1:]),
            max_threads=max(40, 8 + 2 * program.viewers),
        )  # fmt: skip
        tell(f"{program.title} at {url} - Ctrl-C ends it")
        threading.Event().wait()
    except KeyboardInterrupt:
        tell("\nended")
    finally:
        viewers.close()
        if page.server is not None:  # pages that are open would be waited for
            logging.getLogger("uvicorn.error").disabled = True  # which it tells of
            page.server.force_exit = True
        page.close(verbose=False)


def gpus_of(device: torch.device, count: int) -> float:
    """Return the GPUs of each replica: one, or a part of one where replicas are more than GPUs.

    Args:
        device: Device of the replicas.
        count: Number of replicas.

    Raises:
        ValueError: If one of several GPUs is named, which Ray chooses.
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
        ValueError: If it is taken, or there is no such address here.
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
