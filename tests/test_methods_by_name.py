"""Methods and their settings from one word."""

import pytest

from diffcache import FirstBlock, TaylorSeer
from diffcache.catalog import make_method
from diffcache.errors import UnknownMethodError
from diffcache.eval.methods import parse_method, parse_row


def test_methods_from_one_word():
    assert parse_method("taylorseer") == TaylorSeer()
    assert parse_method(" taylorseer : every=4, site=module") == TaylorSeer(every=4, site="module")
    assert parse_method("first-block:threshold=1e-1") == FirstBlock(threshold=0.1)
    assert parse_method("taylorseer:site='stack'") == TaylorSeer(site="stack")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taylorseer:evry=4", "'taylorseer:evry=4': TaylorSeer has no setting 'evry'"),
        ("taylorseer:every", "'every' must be a setting and its value"),
        ("taylorseer:every=", "'every=' must be a setting and its value"),
        ("taylorseer:every=4,", "'' must be a setting"),
        ("taylorseer:every=4,every=5", "every is given twice"),
        ("taylorseer:", "settings are missing behind the colon"),
        ("taylorseer:every=0", "'taylorseer:every=0': every=0"),
        ("taylorseer:every=four", "'taylorseer:every=four': "),
        ("taylorseer:site=(1,2", "open quote or bracket"),
        (":every=4", "a name is missing"),
    ],
)
def test_methods_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_method(text)


def test_an_unknown_method_is_named():
    with pytest.raises(UnknownMethodError, match="'taylorser:every=4': .*did you mean"):
        parse_method("taylorser:every=4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fbcache", "it is called 'first-block' here"),
        ("FBCache", "it is called 'first-block' here"),
        ("cache_dit", "it is called 'dbcache' here"),
        ("easycache", "this method is not here yet"),
        ("teacach", "did you mean 'teacache'"),
    ],
)
def test_names_of_other_libraries_are_told(name, words):
    with pytest.raises(UnknownMethodError, match=f"unknown method '{name}'; {words}"):
        make_method(name)


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
