"""The tab of images: a picture without a cache, with it, their difference, decisions and report."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from diffcache import AttachError
from diffcache.anchor import owner_of
from diffcache.pipelines.demo.generate import Order, generate
from diffcache.pipelines.demo.images import AUTOMATIC, Drawer


def test_a_picture_is_drawn_with_and_without_a_cache_and_leaves_none_behind() -> None:
    drawer = Drawer("sticker-flux")
    assert drawer.methods()[:3] == [AUTOMATIC, "interval", "taylorseer"]
    assert "teacache" not in drawer.methods()  # takes tables
    drawn = drawer.draw(prompt := "a fox <b>on</b> grass", "interval:every=2", "6", 3)
    page = drawn.html()
    assert "<b>on" not in page and "a fox &lt;b&gt;on&lt;/b&gt; grass: with the cache" in page
    shown = [Image.open(io.BytesIO(base64.b64decode(file))) for file in re.findall(r'base64,([^"]+)"', page)]
    pipe, defaults = drawer._loaded
    plain = generate(pipe, Order(prompt, 6, 3), defaults)[0]
    assert np.array_equal(np.asarray(shown[0]), np.asarray(plain))  # and nothing is left on it
    assert owner_of(pipe.transformer) is None
    assert not np.array_equal(np.asarray(shown[1]), np.asarray(plain))
    cells = re.findall(r'<i title="step (\d): (\w+)[^"]*" style="--part:(\d)', page)
    assert [cell[1:] for cell in cells] == [("computed", "1"), ("skipped", "0")] * 3
    assert "3 of 6 steps computed" in page and "Interval(every=2" in page
    same = drawer.draw(prompt, "interval:every=1", 2, 3).html()
    assert "no difference" in same and "PSNR 100 dB or more" in same
    for bad, error, said in (
        ((" ", "interval", 6, 0), ValueError, "the prompt is empty"),
        (("a", "teacache", 6, 0), ValueError, "no method 'teacache'; there are interval"),
        (("a", "interval:tables='/etc/passwd'", 6, 0), ValueError, "must be a number here"),
        (("a", "interval:every=0", 6, 0), ValueError, "every=0"),
        (("a", "interval", 1e9, 0), ValueError, "steps=1000000000.0"),
        (("a", "fastercache", 6, 0), AttachError, "."),
    ):
        with pytest.raises(error, match=said):
            drawer.draw(*bad)
        assert owner_of(pipe.transformer) is None


def test_a_method_is_checked_to_its_last_letter() -> None:
    drawer = Drawer("sticker-flux")
    word = "interval:every=2"
    assert drawer._checked(word) == word
    with pytest.raises(ValueError, match="method='interval:every=2 .* has 227 letters; at most 200"):
        drawer.draw("a", f"{word}{' ' * 190},tables='/etc/passwd'", 6, 0)
    for key in ("tables", "model", "method", "hold"):
        with pytest.raises(ValueError, match=f"{key}='x': must be a number here"):
            drawer._checked(f"{word},{key}='x'")


def test_what_draws_no_pictures_from_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="--images sticker-kontext: FluxKontextPipeline draws no"):
        Drawer("sticker-kontext")
    with pytest.raises(FileNotFoundError):
        Drawer("/none")
