"""The page of `diffcache serve`: films that are shown while they are made, cached and not.

It needs no network: nothing is fetched and nobody is told. Leaving the page ends its films.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcache.errors import DiffcacheError, MissingError
from diffcache.pipelines.demo.program import Program, checked_prompt, one_of
from diffcache.pipelines.demo.recording import LATEST, has_mp4
from diffcache.pipelines.demo.showing import ALONE, Viewers, show
from diffcache.registry import find

for _name, _value in {
    "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)  # gradio reads them when it is imported

try:
    import gradio as gr
    import pandas as pd
except ImportError as _error:
    raise MissingError("the page needs gradio: pip install 'diffcache[demo]'") from _error

_HTML = '<div class="films"></div><div class="status" role="status">press Start</div>'
_CSS = """
.films { display: flex; gap: 12px; flex-wrap: wrap; }
.films figure { margin: 0; flex: 1 1 240px; max-width: 480px; }
.films canvas { width: 100%; image-rendering: pixelated; background: #222; }
.status { font-variant-numeric: tabular-nums; padding-top: 4px; }
"""
_SCRIPT = (Path(__file__).parent / "player.js").read_text(encoding="utf-8")
NARROW = "#readings th, #readings td { padding: 4px 6px; }"  # three columns on a phone
_ABOUT = {"window:sinks=0": "Hold the latest frames alone.", ALONE: ""}
_SAVE = "Save as MP4"
_PAUSE, _RESUME = "Pause", "Go on"
_NOT_RUNNING = "**nothing is running:** press Start first"
_log = logging.getLogger("diffcache.serve")


class Handlers:
    """Actions of the page's buttons; every message is for the viewer.

    Args:
        program: Films that can be shown.
        viewers: Everybody's films.
    """

    def __init__(self, program: Program, viewers: Viewers) -> None:
        self.program, self.viewers = program, viewers

    def start(
        self, prompt: Any, policy: Any, other: Any, seed: Any, steps: Any, height: Any,
        width: Any, request: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """Film, and yield what the page shows: player, read-outs, two plots, note."""
        none = gr.skip()
        kept: Any = ""  # the note of the film before goes
        try:
            asked = self.program.asked(prompt, policy, seed, steps, height, width)
            who = str(request.session_hash)
            for value in show(self.program, self.viewers, who, asked, other):
                plot = pd.DataFrame(value["points"]) if "points" in value else none
                yield value["player"], value.get("table", none), plot, plot, value["note"] or kept
                kept = none
        except (ValueError, DiffcacheError) as error:
            yield none, none, none, none, f"**{error}**"
        except Exception as error:  # this viewer is told; the others go on
            _log.exception("a film broke off")
            yield none, none, none, none, f"**The film broke off: {error}**"

    def apply(self, prompt: Any, switch: Any, request: gr.Request) -> str:
        """Change the prompt from the next chunk on."""
        try:
            orders = {"prompt": checked_prompt(prompt),
                      "switch": one_of("switch", switch, self.program.switches)}  # fmt: skip
        except ValueError as error:
            return f"**{error}**"
        return self._order(request, **orders)

    def policy(self, policy: Any, request: gr.Request) -> str:
        """Change the policy from the next chunk on, should a film be running."""
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
        """Stop filming for a while, or go on; return what the button says next."""
        showing = self.viewers.find(request.session_hash)
        if showing is None or showing.over:
            return _PAUSE
        for stream in showing.streams:
            if label == _PAUSE:
                stream.pause()
            else:
                stream.resume()
        return _RESUME if label == _PAUSE else _PAUSE

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
    """Return the page.

    Args:
        program: Films that can be shown.
        viewers: Everybody's films.
    """
    do = Handlers(program, viewers)
    with gr.Blocks(title=program.title, analytics_enabled=False) as page:
        gr.Markdown(f"## {program.title}")
        with gr.Row():
            with gr.Column(scale=1, min_width=320):
                asked = _settings(program)
                prompt, policy = asked[:2]
                with gr.Row():
                    start, pause, stop = (
                        gr.Button(label, variant=kind, elem_id=name, min_width=60)
                        for label, kind, name in (("Start", "primary", "start"),
                                                  (_PAUSE, "secondary", "pause"),
                                                  ("Stop", "secondary", "stop"))
                    )  # fmt: skip
                switch = gr.Dropdown(list(program.switches), value=program.switches[0],
                                     label="Old frames at a new prompt",
                                     elem_id="switch")  # fmt: skip
                use = gr.Button("Use the prompt from the next chunk on", elem_id="apply")
                note = gr.Markdown(elem_id="note")
                save = gr.Button(_SAVE if has_mp4() else f"{_SAVE}: pip install 'diffcache[eval]'",
                                 interactive=has_mp4(), elem_id="save")  # fmt: skip
                link = gr.HTML(f"the latest {LATEST / program.fps:.0f} seconds", elem_id="link")
            with gr.Column(scale=2, min_width=320):
                player = gr.HTML(value={"job": ""}, html_template=_HTML, css_template=_CSS,
                                 js_on_load=_SCRIPT, elem_id="player")  # fmt: skip
                with gr.Row():
                    with gr.Column(min_width=300):
                        readings = gr.Markdown(elem_id="readings")
                    with gr.Column(min_width=240):
                        plots = [
                            gr.LinePlot(x="second", y=unit, color="film", height=220, title=title)
                            for unit, title in (("ms", "A chunk takes (ms)"), ("MB", "Held (MB)"))
                        ]
        start.click(do.start, asked, [player, readings, *plots, note], show_progress="hidden",
                    concurrency_limit=None, trigger_mode="multiple")  # fmt: skip
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
        start.click(lambda: _PAUSE, None, pause, **quick)
        gr.on([use.click, prompt.submit], do.apply, [prompt, switch], note, **quick)
        policy.input(do.policy, policy, note, **quick)
        for chosen in asked[1:3]:
            chosen.change(lambda name: gr.Dropdown(info=_about(name)), chosen, chosen, **quick)
        pause.click(do.pause, pause, pause, **quick)
        stop.click(do.stop, None, None, **quick)
        save.click(do.save, None, link, **quick)
        page.unload(do.leave)
    return page


def _about(policy: str) -> str:
    """Return what a policy holds, for a viewer to whom its name says nothing."""
    row = find(policy.partition(":")[0], "video")
    return _ABOUT.get(policy, "" if row is None else row.sentence)


def _settings(program: Program) -> list[Any]:
    """Return the inputs of `Handlers.start`, in order."""
    prompt = gr.Textbox(program.prompts[0], label="Prompt", elem_id="prompt")
    gr.Examples([[text] for text in program.prompts], prompt)
    first, beside = program.policies[0], program.beside or ALONE
    policy = gr.Dropdown(list(program.policies), value=first, label="Cache", info=_about(first),
                         elem_id="policy")  # fmt: skip
    other = gr.Dropdown([ALONE, *program.policies], value=beside, label="Beside it, to compare",
                        info=_about(beside), elem_id="other")  # fmt: skip
    with gr.Accordion("More", open=False), gr.Row():
        numbers = [
            gr.Number(value, label=label, elem_id=label.lower(), min_width=80)
            for label, value in (("Seed", 0), ("Steps", program.steps),
                                 ("Height", program.size[0]), ("Width", program.size[1]))
        ]  # fmt: skip
    return [prompt, policy, other, *numbers]
