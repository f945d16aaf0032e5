"""`diffcache serve` as a new user meets it: a page in a real browser, which asks nobody outside.

With DIFFCACHE_SCREENS=docs the pictures of docs/serve.md are drawn anew.
"""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
SHOWN = "+document.querySelector('#player .films').dataset.shown"
CANVAS = """() => {
  const canvas = document.querySelector('#player canvas');
  return Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data);
}"""


@contextmanager
def server(folder: Path, *arguments: str, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `diffcache serve` on a free port; give the process and its address, and end it."""
    for name in ("cwd", "tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)  # of a server that was killed
        (folder / name).mkdir()
    command = [sys.executable, "-m", "diffcache", "serve", *arguments, "--port", port]
    command += ["--keep", str(folder / "films")]
    # diffusers imports torch's compiler, which makes its folder wherever temporary files are.
    own = {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiler")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder / "cwd",
        env=os.environ if "--ray" in arguments else os.environ | own,
        # A shell has what it runs in the background ignore Ctrl-C, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, line + process.stdout.read()
        yield process, address[0]
    finally:
        process.kill()
        process.communicate()


@contextmanager
def browser_page(problems: list[str]) -> Iterator[Any]:
    """Give a page whose errors and requests to anywhere else are noted."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", *(f"--use-fake-{x}-for-media-stream" for x in ("ui", "device"))],
        )
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 960})
            page.set_default_timeout(240_000)
            page.on("pageerror", lambda error: problems.append(f"error: {error} {error.stack}"))
            page.on(
                "request",
                lambda request: (
                    request.url.startswith(("http://127.0.0.1", "data:", "blob:"))
                    or problems.append(f"outside: {request.url}")
                ),
            )
            yield page
        finally:
            browser.close()


def replicas_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of Ray that films are made in."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child.pid for child in children if "ServeReplica" in " ".join(child.cmdline())]


def a_film_of_a_killed_server(page: Any, folder: Path) -> str:
    """Begin a film, and kill the server with `kill -9`; return its port."""
    with server(folder, "--images", "") as (_, address):
        page.goto(address, wait_until="domcontentloaded")
        page.locator("#prompt textarea").fill("a frog on grass")
        page.click("#start")
        page.wait_for_function(f"{SHOWN} >= 30")  # five chunks, of which the fourth is saved
        assert page.locator("#back").count() == 0
    page.goto("about:blank")
    return address.split(":")[-1].strip("/")


def it_goes_on(page: Any, address: str) -> None:
    """Go on with that film, in the same browser, and in no other one."""
    page.goto(address, wait_until="domcontentloaded")
    page.locator("#note", has_text="your film of 'a frog on grass' was saved").wait_for()
    if os.environ.get("DIFFCACHE_SCREENS"):
        draw_screen(page, Path(os.environ["DIFFCACHE_SCREENS"]) / "serve-restart.png")
    page.click("#back")
    page.locator("#note", has_text=re.compile("goes on from chunk .*, as saved")).wait_for()
    page.wait_for_function(f"{SHOWN} >= 6")
    other = page.context.browser.new_page()  # of a profile of its own
    other.goto(address, wait_until="domcontentloaded")
    other.locator("#start").wait_for()
    other.wait_for_timeout(2000)
    assert other.locator("#back").count() == 0
    other.close()
    page.click("#stop")
    page.locator("#player .status", has_text="stopped").wait_for()


def two_policies(page: Any, address: str) -> None:
    """Show two policies side by side, on a page that shows nothing yet."""
    page.goto(address, wait_until="domcontentloaded")
    page.click("#other input")
    page.get_by_role("option", name="window", exact=True).click()
    page.click("#start")
    page.wait_for_function(f"{SHOWN} >= 3")
    assert page.locator("#player figcaption").all_inner_texts()[1:] == ["window"]
    page.click("#stop")
    page.locator("#player .status", has_text="stopped").wait_for()
    page.click("#other input")
    page.get_by_role("option", name="nothing").click()


def films_from_pictures(page: Any, folder: Path) -> None:
    """Make a film from a camera, then begin one with a picture, and leave both out."""
    said = page.locator("#pictures .said")
    page.click("#pictures .camera")
    said.get_by_text("the camera is on: press Start").wait_for()
    page.check("#pictures input[value=anew]")
    before = page.evaluate(CANVAS)
    page.click("#start")
    page.wait_for_function(f"before => String(({CANVAS})()) !== String(before)", arg=before)  # of the film before
    page.wait_for_function(f"{SHOWN} >= 6")
    page.click("#pictures .off")  # the film ends with its pictures
    page.locator("#player .status", has_text="stopped").wait_for()
    picture = folder / "red.png"
    Image.new("RGB", (300, 200), "red").save(picture)
    page.set_input_files("#pictures input[type=file]", picture)
    said.get_by_text("red.png: press Start").wait_for()
    page.check("#pictures input[value=begin]")
    page.wait_for_timeout(1000)  # three pictures come in
    page.click("#start")
    # the picture, through the autoencoder
    is_red = f"() => {{ const [r, g, b] = ({CANVAS})(); return r > 150 && g < 90 && b < 90; }}"
    page.wait_for_function(is_red)
    page.wait_for_function(f"{SHOWN} >= 6")
    page.click("#pictures .off")
    page.click("#stop")
    page.locator("#player .status", has_text="stopped").wait_for()


def an_image(page: Any) -> None:
    """Draw a picture with and without a cache, at the widths of a screen and a phone."""
    page.get_by_role("tab", name="Image").click()
    method = page.locator("#method input")
    method.fill("interval:tables='/etc/passwd'")
    method.press("Tab")
    page.click("#draw")
    page.locator("#image-note", has_text="must be a number here").wait_for()
    method.fill("taylorseer:every=3")
    method.press("Tab")
    steps = 28 if os.environ.get("DIFFCACHE_SCREENS") else 8
    page.locator("#image-steps input").fill(str(steps))
    page.click("#draw")
    page.locator("#drawn pre", has_text="TaylorSeer(every=3").wait_for(state="attached")
    assert page.locator("#drawn .decisions i").count() == steps
    assert "difference" in page.inner_text("#drawn")
    for width, height in ((1280, 880), (390, 1400)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark") if os.environ.get("DIFFCACHE_SCREENS") else ():
            dress(page, scheme)
            draw_screen(page, Path(os.environ["DIFFCACHE_SCREENS"]) / f"image-{width}-{scheme}.png")
    page.get_by_role("tab", name="Film").click()


def dress(page: Any, scheme: str) -> None:
    """Show the page from its top, light or dark."""
    page.evaluate(f"document.body.classList.toggle('dark', {str(scheme == 'dark').lower()})")
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(500)


def draw_screen(page: Any, file: Path) -> None:
    """Draw the page as it is, with 256 colors."""
    with Image.open(io.BytesIO(page.screenshot())) as screen:
        screen.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT).save(file)


def draw_screens(page: Any, folder: Path) -> None:
    """Draw the page at two widths, light and dark, while a film runs."""
    page.click("#numbers summary")  # folded, as it is at first
    page.locator("#prompt textarea").fill("a burger on wood")
    page.click("#apply")
    page.wait_for_timeout(8000)
    for width, height in ((1280, 1220), (390, 1400)):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": height})
            dress(page, scheme)
            draw_screen(page, folder / f"serve-{width}-{scheme}.png")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the path")
@pytest.mark.parametrize("replicas", [0, 2])
def test_a_page_streams_takes_orders_stops_and_leaves_nothing(replicas: int, tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    if replicas:
        pytest.importorskip("ray.serve", reason="needs ray[serve]")
    problems: list[str] = []
    with browser_page(problems) as page:
        port = "0" if replicas else a_film_of_a_killed_server(page, tmp_path)
        problems.clear()  # of a page whose server is gone
        with server(tmp_path, *(["--ray", "2"] if replicas else []), port=port) as (process, address):
            if not replicas:
                it_goes_on(page, address)
                two_policies(page, address)
                films_from_pictures(page, tmp_path)
                an_image(page)
            page.goto(address, wait_until="domcontentloaded")
            prompt, note = page.locator("#prompt textarea"), page.locator("#note")
            prompt.fill("x" * 10_000)
            page.click("#start")
            note.get_by_text("the prompt has 10,000 letters; at most 2,000 are read").wait_for()

            prompt.fill("a frog on grass")
            page.click("#start")
            page.wait_for_function(f"{SHOWN} >= 3")
            before = page.evaluate(CANVAS)
            page.wait_for_function(f"{SHOWN} >= 12")
            assert page.evaluate(CANVAS) != before  # pictures change
            page.click("#numbers summary")
            page.locator("#numbers td", has_text="rotated copies and room").wait_for()

            prompt.fill("a crab")
            page.click("#apply")
            note.get_by_text(re.compile("from chunk .* on: prompt 'a crab'")).wait_for()
            page.click("#policy input")
            page.get_by_role("option", name="infinity-rope").click()
            page.get_by_text("number them from the newest back").wait_for()  # what it holds
            page.locator("#player figcaption", has_text="infinity-rope").wait_for()
            page.click("#pause")
            page.locator("#pause", has_text="Go on").wait_for()
            page.click("#pause")
            page.locator("#pause", has_text="Pause").wait_for()
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            tall = "Math.max(...[...document.querySelectorAll('#numbers tr')].map(x => x.offsetHeight))"
            assert page.evaluate(tall) < 50  # no table of one letter a line
            page.set_viewport_size({"width": 1280, "height": 960})
            if replicas:
                os.kill(replicas_of(process)[0], signal.SIGKILL)
                note.get_by_text(re.compile("goes on from chunk .*, as saved")).wait_for()
                page.locator("#player .timeline", has_text="restored").wait_for()
            if os.environ.get("DIFFCACHE_SCREENS"):
                draw_screens(page, Path(os.environ["DIFFCACHE_SCREENS"]))

            page.click("#stop")
            page.locator("#player .status", has_text="stopped").wait_for()
            last = page.evaluate(SHOWN)
            page.click("#more button")
            page.click("#save")
            page.locator("#link a[download]").wait_for()
            assert page.evaluate(SHOWN) == last
            page.click("#apply")
            note.get_by_text("nothing is running").wait_for()
            page.click("#start")
            page.wait_for_function(f"{SHOWN} >= 3 && {SHOWN} < {last}")
            page.close()
            process.send_signal(signal.SIGINT)  # while a film runs whose page was closed
            told, _ = process.communicate(timeout=120)
        # Ray tells of its end, and of the replica that was killed.
        own = [line for line in told.splitlines() if not re.search(r"\(raylet\)| serve \d+ -- ", line)]
        assert (process.returncode, "".join(own)) == (0, "ended"), told
    assert problems == []
    assert [list((tmp_path / name).iterdir()) for name in ("cwd", "tmp")] == [[], []]
