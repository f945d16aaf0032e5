"""Methods and their settings from one word."""

import pytest

from diffcache import FirstBlock, TaylorSeer
from diffcache.catalog import make_method
from diffcache.eval.methods import parse_method, parse_row


def test_methods_from_one_word():
    assert parse_method("taylorseer") == TaylorSeer()
    assert parse_method(" taylorseer : every=4, site=module") == TaylorSeer(every=4, site="module")
    assert parse_method("first-block:threshold=1e-1") == FirstBlock(threshold=0.1)
    assert parse_method("taylorseer:site='stack'") == TaylorSeer(site="stack")


def test_python_takes_the_words_of_the_command_line():
    assert make_method("taylorseer:every=4,site=module") == TaylorSeer(every=4, site="module")
    assert make_method("taylorseer:every=4", order=2) == TaylorSeer(every=4, order=2)
    with pytest.raises(ValueError, match="'taylorseer:every=4': every is given twice"):
        make_method("taylorseer:every=4", every=3)
    with pytest.raises(ValueError, match="'taylorseer every=4': settings follow a colon"):
        make_method("taylorseer every=4")


def test_even_steps_stand_beside_methods() -> None:
    found = parse_row("even:computed=13,steps=20,site=module")
    assert found.when.steps == tuple(i * 20 // 13 for i in range(13)) and found.when.total == 20
    assert len(set(found.when.steps)) == 13 and found.site.value == "module"
    with pytest.raises(ValueError, match="computed=21: must be 1 to steps=20"):
        parse_row("even:computed=21,steps=20")
    with pytest.raises(ValueError, match="'even:computed=four,steps=20': computed='four'"):
        parse_row("even:computed=four,steps=20")
    with pytest.raises(ValueError, match="'even:computed=4': .*missing.* 'steps'"):
        parse_row("even:computed=4")
