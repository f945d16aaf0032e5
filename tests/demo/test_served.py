"""Models that `diffcache serve` takes, and requests it refuses in one line."""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli
from diffcache.pipelines import shipped_models
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo import replicas, serve, session_film
from diffcache.pipelines.demo.program import Asked, Program
from diffcache.pipelines.demo.session_film import program_of
from diffcache.pipelines.pretrained_video import Streaming, streaming
from diffcache.video import FewSteps

CPU = torch.device("cpu")


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["serve", "--keep-mb", "0", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_shipped_pipeline_is_filmed_through_its_text_encoder_and_autoencoder() -> None:
    with CausalVideo.from_pretrained("sticker-causal") as video:
        program = program_of(video, "sticker-causal", 1, 10**9)
        assert (program.sizes, program.beside) == ({"64 x 64": (64, 64)}, "window")
        assert (program.fps, program.prompts[0]) == (12, "a frog on grass")
        assert (program.policies[0], program.policies.count("full")) == ("full", 1)
        film = program.make(Asked("a frog on grass", "window", 0, 2, (32, 48)))
        first, second = film.next(), film.next()
        assert first.shape[1:] == second.shape[1:] == (32, 48, 3) and len(second) > len(first)
        assert film.readings()["decoder_bytes"] > 0


def test_a_folder_says_how_it_is_streamed(tmp_path: Path) -> None:
    assert streaming(tmp_path) == Streaming()  # as Self-Forcing's weights
    said = {"chunk": 2, "fps": 12, "prompts": ["a fox"], "sampler": {"predicts": "clean"}}
    file = tmp_path / "diffcache.json"
    file.write_text(json.dumps({"call": {"height": 64, "max_sequence_length": 8}, "stream": said}))
    wanted = Streaming((64, 832), 8, 2, 12, ["a fox"], FewSteps(predicts="clean"))
    assert streaming(tmp_path) == wanted
    (told,) = re.findall("```json\n(.*?)```", Path("docs/serve.md").read_text(), re.S)
    file.write_text(told)
    sampler = FewSteps(shift=2.0, predicts="clean")
    assert streaming(tmp_path) == Streaming((64, 64), 8, 3, 12, ["a frog on grass"], sampler, "full")


def test_what_cannot_be_served_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "run", lambda *given: pytest.fail("it was served"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, told = call("--port", port)
        assert code == 2 and f"--port {port}: cannot be served at" in told and "--port 0" in told
    code, told = call("--host", "no.such.address.invalid")
    assert code == 2 and told.startswith("error: --host no.such.address.invalid")
    code, told = call(tmp_path / "none", "--port", 0)
    assert code == 2 and "no pipeline at" in told and "Traceback" not in told
    monkeypatch.setattr(shipped_models, "MODELS", tmp_path)
    code, told = call("--port", 0)
    assert code == 3 and "sticker-causal: this installation does not hold it" in told
    assert call("--port", 0, "--dtype", "int8")[0] == call("--viewers", 0)[0] == 2
    monkeypatch.delitem(sys.modules, "diffcache.pipelines.demo.page", raising=False)
    monkeypatch.delattr("diffcache.pipelines.demo.page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, told = call("--port", 0)
    assert code == 3 and told == "error: the page needs gradio: pip install 'diffcache[demo]'\n"


def test_replicas_open_the_model_and_make_the_films_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    given: dict[str, Any] = {}

    def opened(*asked: Any) -> Any:
        return asked

    def program(video: Any, name: str, viewers: int, most_bytes: int) -> Program:
        return Program(lambda asked: (*video, most_bytes), [], [], [], {}, title=name, viewers=viewers)  # type: ignore[arg-type, return-value]

    @contextmanager
    def stand_in(opened: Callable[[], Any], **settings: Any) -> Iterator[Any]:
        given.update(settings)
        yield lambda asked: ("replica", opened()(asked))

    monkeypatch.setattr(serve, "_opened", opened)
    monkeypatch.setattr(session_film, "program_of", program)
    monkeypatch.setattr(serve, "run", lambda program, *where: given.update(program=program))
    monkeypatch.setitem(sys.modules, "ray", None)
    model = ("here", "--dtype", "bfloat16", "--device", "cpu", "--port", 0, "--cache-mb", 3)
    code, told = call(*model, "--ray", 2)
    assert code == 3 and told == "error: replicas need Ray Serve: pip install 'diffcache[ray]'\n"
    assert call(*model) == (0, "")  # needs no Ray
    asked: Any = None
    film = ("here", None, None, "bfloat16", "cpu", 1, 3 * 2**20)
    assert given.pop("program").make(asked) == film

    monkeypatch.setattr(replicas, "ray_serve", lambda: (None, None))
    monkeypatch.setattr(replicas, "replicas", stand_in)
    assert call(*model, "--ray", 3, "--threads", 1, "--viewers", 5) == (0, "")
    program = given.pop("program")
    assert Path(given.pop("folder")).name == "films"
    assert given == {"count": 3, "least": None, "cpus": 1, "gpus": 0.0}
    code, told = call(*model, "--ray", 2, "--ray-least", 3)
    assert code == 2 and told == "error: --ray-least 3: must be at most --ray, 2\n"
    file = tmp_path / "file"
    file.touch()
    code, told = call(*model, "--keep-mb", 5, "--keep", file)
    assert code == 2 and f"--keep {file}: no films can be saved there" in told
    assert program.make(asked) == ("replica", film)
    assert (program.title, program.viewers) == ("here", 5)
    for number in (0, -1, 1.5, "two"):
        code, told = call("--ray", number)
        assert code == 2 and "'--ray'" in told, told


def test_replicas_have_a_gpu_each_or_share_them_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shares = [serve.gpus_of(torch.device("cuda"), count) for count in (1, 2, 3, 5, 12)]
    assert shares == [1.0, 1.0, 0.5, 0.3333, 0.1666]
    assert serve.gpus_of(CPU, 4) == 0.0
