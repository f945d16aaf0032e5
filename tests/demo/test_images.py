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
    assert drawer._checked("interval:every=2") == "interval:every=2"
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
