"""The page of `diffcache serve`: films that are shown while they are made, cached and not.

It needs no network: nothing is fetched or reported. Leaving the page ends its films.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from diffcache.errors import DiffcacheError, MissingError
from diffcache.pipelines.demo.images import Drawer
from diffcache.pipelines.demo.program import Asked, Program, checked_prompt, one_of
from diffcache.pipelines.demo.recording import LATEST, has_mp4
from diffcache.pipelines.demo.showing import ALONE, Viewers, show
from diffcache.registry import find

for _name, _value in {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
}.items():
    os.environ.setdefault(_name, _value)  # gradio reads them when it is imported

try:
    import gradio as gr
except ImportError as _error:
    raise MissingError("the page needs gradio: pip install 'diffcache[demo]'") from _error

_HTML = """
<div class="films"><p class="idle">Say what to film, and press Start.</p></div>
<div class="timeline" aria-label="prompts so far"></div>
<div class="status" role="status"></div>
"""
_NUMBERS = """
<div class="plots"></div>
<details hidden><summary>All numbers</summary><div class="scroll"><table></table></div></details>
"""
_PICTURES = """
<div class="row">
  <button type="button" class="camera">Camera</button>
  <label class="file">Picture or film<input type="file" accept="image/*,video/*"></label>
  <span class="said" role="status"></span>
</div>
<div class="chosen" hidden>
  <canvas></canvas>
  <div>
    <label><input type="radio" name="use" value="begin" checked> the film goes on from it</label>
    <label><input type="radio" name="use" value="anew"> the film is made from it</label>
    <button type="button" class="off">Leave it out</button>
  </div>
</div>
"""
_FOLDER = Path(__file__).parent
_SCRIPT = (_FOLDER / "player.js").read_text(encoding="utf-8")
_CAMERA = (_FOLDER / "camera.js").read_text(encoding="utf-8")
STYLE = (_FOLDER / "page.css").read_text(encoding="utf-8")
_SAVE = "Save as MP4"
_MARGIN = 16  # pixels that a picture of the page may have beyond the largest size
_EVENTS = 8  # times the viewers at a time, whose films or pictures may wait for their turn
_PAUSE, _RESUME = "Pause", "Go on"
_QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
_NOT_RUNNING = "**nothing is running:** press Start first"
# Puts the number that this browser is known by in the place of the last input; a browser that
# stores nothing has none, and its films are not saved.
_VIEWER = """(...given) => {
  let mine = '';
  try {
    mine = localStorage.getItem('diffcache-viewer') || '';
    if (!/^[0-9a-f]{32}$/.test(mine)) {
      const bytes = Array.from(crypto.getRandomValues(new Uint8Array(16)));
      mine = bytes.map((byte) => byte.toString(16).padStart(2, '0')).join('');
      localStorage.setItem('diffcache-viewer', mine);
    }
  } catch (error) {
    mine = '';
  }
  return [...given.slice(0, -1), mine];
}"""
_DRAW, _DRAWS = "Draw", "Draws ..."
_IDLE = '<div class="idle">A picture without a cache, the same with it, and the difference.</div>'
_log = logging.getLogger("diffcache.serve")


class Handlers:
    """Actions of the page's buttons; every message is for the viewer."""

    def __init__(self, program: Program, viewers: Viewers) -> None:
        self.program, self.viewers = program, viewers

    def start(
        self, prompt: Any, policy: Any, other: Any, seed: Any, steps: Any, size: Any, viewer: Any, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        """Film, and yield the player's value, a note, and the button of a saved film."""
        yield from self._show(lambda: self.program.asked(prompt, policy, seed, steps, size), request, other, viewer)

    def arrive(self, viewer: Any) -> tuple[Any, Any]:
        """Tell a viewer of a film that was saved; return button and note."""
        saved = self.viewers.kept and self.viewers.kept.find(viewer)
        if not saved:
            return gr.skip(), gr.skip()
        told = f"your film of {saved[0].prompt!r} was saved at chunk {saved[1]}"
        return gr.Button(visible=True), told

    def go_on(self, viewer: Any, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """Film on from the viewer's saved film, and yield as `start` does."""

        def asked() -> Asked:
            saved = self.viewers.kept and self.viewers.kept.find(viewer)
            if not saved:
                raise ValueError("your film is not saved any more: start another one")
            return saved[0]

        yield from self._show(asked, request, ALONE, viewer, goes_on=True)

    def _show(
        self, settings: Callable[[], Asked], request: gr.Request, other: Any, viewer: Any, goes_on: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        kept: Any = ""  # removes the note and the button of the saved film
        back: Any = gr.Button(visible=False)
        try:
            who, asked = str(request.session_hash), settings()
            values = show(self.program, self.viewers, who, asked, other, viewer, goes_on)
            for value in values:
                yield value["player"], value["note"] or kept, back
                kept = back = gr.skip()
        except (ValueError, DiffcacheError) as error:
            yield gr.skip(), f"**{error}**", gr.skip()
        except Exception as error:  # this viewer is told; the others go on
            yield gr.skip(), _broken("film", error), gr.skip()

    def draw(
        self, prompt: Any, method: Any, steps: Any, seed: Any, request: gr.Request
    ) -> Iterator[tuple[Any, Any, str]]:
        """Draw a picture without and with a cache; yield both, a note and the button's label."""
        assert self.program.drawer is not None  # there is no button without it
        try:
            self.viewers.wait_for(str(request.session_hash))
            yield gr.skip(), "", _DRAWS
            yield self.program.drawer.draw(prompt, method, steps, seed).html(), "", _DRAW
        except (ValueError, DiffcacheError) as error:
            yield gr.skip(), f"**{error}**", _DRAW
        except Exception as error:
            yield gr.skip(), _broken("picture", error), _DRAW

    def apply(self, prompt: Any, switch: Any, request: gr.Request) -> str:
        """Change the prompt from the next chunk on."""
        try:
            orders = {"prompt": checked_prompt(prompt), "switch": one_of("switch", switch, self.program.switches)}
        except ValueError as error:
            return f"**{error}**"
        return self._order(request, **orders)

    def policy(self, policy: Any, request: gr.Request) -> str:
        """Change the policy from the next chunk on, if a film is running."""
        try:
            return self._order(request, policy=one_of("policy", policy, self.program.policies))
        except ValueError as error:
            return f"**{error}**"

    def _order(self, request: gr.Request, **orders: str) -> str:
        showing = self.viewers.find(request.session_hash)
        if showing is None or showing.over:
            return _NOT_RUNNING if "prompt" in orders else ""
        showing.order(**orders)
        return "from the next chunk on"

    def pause(self, label: str, request: gr.Request) -> str:
        """Stop filming for a while, or go on; return the next label of the button."""
        showing = self.viewers.find(request.session_hash)
        if showing is None or showing.over:
            return _PAUSE
        for stream in showing.streams:
            if label == _PAUSE:
                stream.pause()
            else:
                stream.resume()
        return _RESUME if label == _PAUSE else _PAUSE

    def see(self, value: Any, request: gr.Request) -> None:
        """Take pictures of the viewer's camera or file, which the page sends as they come in."""
        if self.program.seen is not None:
            with suppress(ValueError):  # not sent by the page: nobody is there to be told
                side = max(map(max, self.program.sizes.values())) + _MARGIN
                most = 2 * self.program.seen[1]
                self.viewers.see(str(request.session_hash), value, most, side)

    def stop(self, request: gr.Request) -> None:
        """End the viewer's films."""
        self.viewers.stop(request.session_hash)

    def leave(self, request: gr.Request) -> None:
        """End the viewer's films and forget them."""
        self.viewers.leave(request.session_hash)

    def save(self, request: gr.Request) -> str:
        """Return a link that holds the latest frames as a file; nothing is written here."""
        showing = self.viewers.find(request.session_hash)
        if showing is None:
            return "nothing was filmed yet: press Start first"
        try:
            file = showing.recording.mp4()
        except (ValueError, DiffcacheError) as error:
            return str(error)
        name, coded = "diffcache.mp4", base64.b64encode(file).decode()
        link = f'<a download="{name}" href="data:video/mp4;base64,{coded}">{name}</a>'
        return f"{link} ({len(file) / 1e6:.1f} MB)"


def build(program: Program, viewers: Viewers) -> gr.Blocks:
    """Return the page."""
    do = Handlers(program, viewers)
    with gr.Blocks(title=program.title, analytics_enabled=False) as page:
        gr.HTML(f"<h1>{escape(program.title)}</h1>", elem_id="head")
        if program.drawer is None:
            arrived = _film(program, do)
        else:
            with gr.Tab("Film"):
                arrived = _film(program, do)
            with gr.Tab("Image"):
                _image(program.drawer, do)
        if viewers.kept is not None:
            page.load(do.arrive, arrived[0], arrived[1:], js=_VIEWER, **_QUICK)
        page.unload(do.leave)
    page.queue(max_size=_EVENTS * program.viewers, api_open=False)
    return page


def _film(program: Program, do: Handlers) -> list[Any]:
    """Lay out the films and their controls; return what a page that was opened fills."""
    player = gr.HTML(value={"job": ""}, html_template=_HTML, js_on_load=_SCRIPT, elem_id="player")
    with gr.Row(elem_id="say"):
        prompt = gr.Textbox(program.prompts[0], label="Prompt", elem_id="prompt", scale=6, min_width=240)
        start = gr.Button("Start", variant="primary", elem_id="start", min_width=90)
        back = gr.Button("Go on with my film", visible=False, elem_id="back", min_width=185)
        use = gr.Button("New prompt", elem_id="apply", min_width=110)
    gr.Examples([[text] for text in program.prompts], prompt, label="Try")
    if program.seen is not None:
        height, width = next(iter(program.sizes.values()))
        pictures = gr.HTML(
            {},
            html_template=_PICTURES,
            js_on_load=_CAMERA,
            width=width,
            height=height,
            fps=program.fps,
            elem_id="pictures",
        )
        pictures.input(do.see, pictures, None, queue=False, show_progress="hidden", trigger_mode="multiple")
    with gr.Row(elem_id="controls"):
        policy, other, switch = _choices(program)
        pause = gr.Button(_PAUSE, elem_id="pause", min_width=80)
        stop = gr.Button("Stop", elem_id="stop", min_width=80)
    note = gr.Markdown(elem_id="note")
    gr.HTML(_NUMBERS, elem_id="numbers")
    with gr.Accordion("More", open=False, elem_id="more"):
        with gr.Row():
            seed = gr.Number(0, label="Seed", elem_id="seed", min_width=90)
            steps = gr.Number(program.steps, label="Steps", elem_id="steps", min_width=90)
            size = gr.Dropdown(
                list(program.sizes), value=next(iter(program.sizes)), label="Size", elem_id="size", min_width=130
            )
        save = gr.Button(
            _SAVE if has_mp4() else f"{_SAVE}: pip install 'diffcache[eval]'", interactive=has_mp4(), elem_id="save"
        )
        link = gr.HTML(f"the latest {LATEST / program.fps:.0f} seconds", elem_id="link")
    viewer = gr.Textbox(visible=False)  # whose value is that of `_VIEWER`
    asked = [prompt, policy, other, seed, steps, size, viewer]
    gr.on([start.click, back.click], lambda: _PAUSE, None, pause, **_QUICK)
    for button, film, given in ((start, do.start, asked), (back, do.go_on, [viewer])):
        button.click(
            film,
            given,
            [player, note, back],
            show_progress="hidden",
            concurrency_limit=None,
            trigger_mode="multiple",
            js=_VIEWER,
        )
    gr.on([use.click, prompt.submit], do.apply, [prompt, switch], note, **_QUICK)
    policy.input(do.policy, policy, note, **_QUICK)
    for chosen in asked[1:3]:
        chosen.change(lambda name: gr.Dropdown(info=_about(name)), chosen, chosen, **_QUICK)
    pause.click(do.pause, pause, pause, **_QUICK)
    stop.click(do.stop, None, None, **_QUICK)
    save.click(do.save, None, link, **_QUICK)
    return [viewer, back, note]


def _image(drawer: Drawer, do: Handlers) -> None:
    """Lay out the tab of a picture with and without a cache."""
    drawn = gr.HTML(_IDLE, elem_id="drawn")
    with gr.Row(elem_id="describe"):
        prompt = gr.Textbox(drawer.prompts[0], label="Prompt", elem_id="image-prompt", scale=6, min_width=240)
        draw = gr.Button(_DRAW, variant="primary", elem_id="draw", min_width=90)
    gr.Examples([[text] for text in drawer.prompts], prompt, label="Try")
    with gr.Row(elem_id="how"):
        method = gr.Dropdown(
            drawer.methods(),
            value="taylorseer",
            label="Cache",
            allow_custom_value=True,
            info="with settings behind it, if you like: taylorseer:every=3",
            elem_id="method",
            scale=4,
            min_width=200,
        )
        steps = gr.Number(28, label="Steps", elem_id="image-steps", min_width=90)
        seed = gr.Number(0, label="Seed", elem_id="image-seed", min_width=90)
    note = gr.Markdown(elem_id="image-note")
    gr.on(
        [draw.click, prompt.submit],
        do.draw,
        [prompt, method, steps, seed],
        [drawn, note, draw],
        show_progress="hidden",
        trigger_mode="once",
    )


def _broken(what: str, error: Exception) -> str:
    """Log an error that is not the viewer's fault, and return a message for the viewer.

    The error's own text stays in the log: it may contain names of files of this machine.
    """
    _log.error("a %s broke off", what, exc_info=error)
    return f"**The {what} broke off ({type(error).__name__}); the log of the server says more.**"


def _about(policy: str) -> str:
    """Return a description of the frames that a policy holds, for a viewer who does not know its name."""
    row = find(policy.partition(":")[0], "video")
    return "One film alone." if row is None else row.sentence


def _choices(program: Program) -> list[Any]:
    """Return the choices of a policy, of one beside it, and of the effect of a new prompt."""
    first, beside = program.policies[0], program.beside or ALONE
    return [
        gr.Dropdown(list(names), value=value, label=label, info=about, elem_id=name, min_width=140)
        for name, label, names, value, about in (
            ("policy", "Cache", program.policies, first, _about(first)),
            ("other", "Beside it", [ALONE, *program.policies], beside, _about(beside)),
            (
                "switch",
                "Old frames then",
                program.switches,
                program.switches[0],
                "what a new prompt does to the cache",
            ),
        )
    ]
