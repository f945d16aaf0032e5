"""Measuring kernels without a device: what is kept, left out and drawn, and when it no longer counts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffcache.eval.kernels import command, launch_options, measure, timing, watch
from diffcache.eval.kernels.cases import KernelCase, all_cases
from diffcache.eval.kernels.launch_options import Built
from diffcache.eval.workshop.kernels import page
from diffcache.kernels import configs, dense, dispatch

VERSIONS = {"driver": "580.1", "torch": "2.11", "triton": "3.6.0", "diffcache": "0.1"}
FIRST = {"device": "a GPU", "versions": VERSIONS, "limits": {"bytes": 1.0, "operations": 1.0}}


def broken(values: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of registers\nand more")


def case(operator: str, kernel=torch.clone, model: str = "a model") -> KernelCase:
    ways = {"kernel": kernel, "plain": torch.clone, "torch.compile": broken}
    made = lambda device, tiny: (torch.ones(9),)  # noqa: E731
    return KernelCase(operator, model, "[9]", made, ways, 36, target={"torch.compile": 1.0})


@pytest.fixture(name="clock")
def _clock(monkeypatch):
    """Say how long each operator's kernel takes, by name; plain PyTorch takes 6 µs."""
    seconds: dict[str, float] = {}
    running: list[str] = []

    def turn(device, run, calls, ahead=0.0):
        running.clear()
        run()
        return sum(seconds.get(name, 6e-6) for name in running or ["plain"] * timing.CALLS)

    def timed(name):
        return lambda values: (running.append(name), torch.clone(values))[1]

    monkeypatch.setattr(timing, "turn", turn)
    monkeypatch.setattr(measure, "ceilings", lambda device, tiny: FIRST["limits"])
    return seconds, timed


@pytest.fixture(name="cache")
def _cache(monkeypatch, tmp_path):
    """Keep files in a folder of the test's; there is one GPU, with versions of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DIFFCACHE_KERNELS_CHOICES", raising=False)
    monkeypatch.setattr(dispatch, "device_name", lambda index: "a GPU")
    monkeypatch.setattr(configs, "device_name", lambda index: "a GPU")
    known = dict(VERSIONS)
    monkeypatch.setattr(dispatch, "versions", lambda: known)

    def forget():
        for each in (dispatch.measured, dispatch.kept, configs._entries):
            each.cache_clear()

    forget()
    yield known, forget
    forget()


def results(wanted, tasks) -> list[dict]:
    found: list[dict] = []
    assert measure.work(torch.device("cpu"), tasks, found.append)
    return found


def test_a_broken_and_a_wrong_operator_are_left_out_alone(monkeypatch, clock, cache) -> None:
    seconds, timed = clock
    seconds |= {"good": 2e-6, "slow": 12e-6}
    kernels = {"good": timed("good"), "broken": broken, "wrong": lambda x: x + 0.5, "slow": timed("slow")}
    cases = [*(case(name, kernel) for name, kernel in kernels.items()), case("good", timed("slow"), "another")]
    monkeypatch.setattr(measure, "all_cases", lambda: cases)
    names = dict.fromkeys(case.operator for case in cases)
    found = watch.Found(dispatch.kept_file)
    for line in [FIRST, *results(cases, [("check", name) for name in names])[1:]]:
        found.take(line)
    kept = json.loads(dispatch.kept_file("a GPU").read_text())
    assert kept["choices"] == {"a GPU": {"good": 0.5, "broken": 0.0, "wrong": 0.0, "slow": 0.5}}
    why = {"broken": "RuntimeError: out of registers", "wrong": "off by 0.5, at most 0.02"}
    assert kept["failed"] == {name: f"a model: {said}" for name, said in why.items()}
    assert {row["model"] for row in kept["rows"] if row["operator"] == "good"} == {"a model", "another"}
    assert all("torch.compile" not in row["ways"] for row in kept["rows"])
    assert dispatch.ratio("good", torch.device("cuda", 0)) == 0.5


def test_options_that_are_faster_count_in_the_choice_and_in_launches(monkeypatch, clock, cache):
    seconds, timed = clock
    seconds |= {"TILE=1": 5e-6, "TILE=2": 2e-6, "TILE=3": 4e-6}

    def kernel(values):
        tile = configs.tuned("own", (values.numel(),), {"TILE": 1}, values.device)["TILE"]
        return timed(f"TILE={tile}")(values)

    tiles = [
        ({"TILE": tile} if tile > 1 else {}, {"TILE": tile}, "spills" if tile == 4 else "") for tile in (1, 2, 3, 4)
    ]
    done = [Built(options, "16", tried, (), why) for options, tried, why in tiles]
    monkeypatch.setattr(measure, "all_cases", lambda: [case("own", kernel)])
    monkeypatch.setattr(measure, "choices_of", lambda name: [one.tried for one in done[1:]])
    made = {(0, json.dumps(one.tried)): one for one in done}
    monkeypatch.setattr(measure, "_built", lambda one: one)
    found = watch.Found(dispatch.kept_file)
    asked = [(0, case("own", kernel))], torch.device("cpu"), FIRST["limits"], made
    first, second = measure.checked(*asked), measure.best_options(*asked)
    for line in (FIRST, {"task": ["check", "own"]} | first, {"task": ["options", "own"]} | second):
        found.take(line)
    assert second["configs"] == {"16": {"TILE": 2, "ratio": 2.5}}
    assert found.body["choices"] == {"a GPU": {"own": 3.0}}
    device = torch.device("cuda", 0)
    assert configs.tuned("own", (9,), {"TILE": 1}, device) == {"TILE": 2}
    assert configs.tuned("own", (99,), {"TILE": 1}, device) == {"TILE": 1}


@pytest.mark.parametrize("name", [None, "driver", "torch"])
def test_shipped_ratios_count_with_their_torch_and_triton_alone(monkeypatch, cache, tmp_path, name: str | None):
    known, forget = cache
    file, device = tmp_path / "choices.json", torch.device("cuda", 0)
    made_with = {key: VERSIONS[key] for key in dispatch.SHIPPED_FOR}
    file.write_text(json.dumps({"a GPU": {"choices": {"own": 2.0}, "versions": made_with}}))
    monkeypatch.setattr(dispatch, "CHOICES", file)
    known.update({} if name is None else {name: "another"})
    fits = name not in dispatch.SHIPPED_FOR
    assert dispatch.ratio("own", device) == (2.0 if fits else 0)
    assert any("another machine of this kind" in line for line in command._heads("a GPU")) is fits
    dispatch.kept_file("a GPU").parent.mkdir(parents=True)
    body = FIRST | {"versions": dict(known), "choices": {"a GPU": {"own": 0.5}}}
    dispatch.kept_file("a GPU").write_text(json.dumps(body))
    forget()
    assert dispatch.ratio("own", device) == 0.5  # what this machine measured goes first


@pytest.mark.parametrize("name", ["driver", "torch"])
def test_another_version_drops_what_was_measured(monkeypatch, cache, logged, name: str) -> None:
    known, forget = cache
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    body = FIRST | {"choices": {"a GPU": {"own": 2.0}}, "configs": {"a GPU": {"own": {"16": {"TILE": 2}}}}}
    dispatch.kept_file("a GPU").parent.mkdir(parents=True)
    dispatch.kept_file("a GPU").write_text(json.dumps(body))
    device = torch.device("cuda", 0)
    assert dispatch.ratio("own", device) == 2.0
    known[name] = "another"
    forget()
    assert dispatch.ratio("own", device) == dispatch.ratio("other", device) == 0
    assert configs.tuned("own", (9,), {"TILE": 1}, device) == {"TILE": 1}
    assert "".join(logged).count("`diffcache kernels measure`") == 1  # a hint, once
    found = watch.Found(dispatch.kept_file)
    for line in (FIRST | {"versions": dict(known)}, {"task": ["check", "own"], "failed": "no"}):
        found.take(line)
    assert found.body["choices"] == {"a GPU": {"own": 0.0}} and "own" not in found.body["configs"]["a GPU"]


# A process that measures: each task is done as its operator's name says.
PROCESS = """
import json, sys, time
lines, tasks = sys.argv[1:]
with open(lines, "a") as out:
    def tell(line):
        print(json.dumps(line), file=out, flush=True)
    tell({"device": "a GPU", "versions": VERSIONS, "limits": {}})
    for kind, name in json.loads(tasks):
        tell({"started": [kind, name]})
        if name == "hangs":
            time.sleep(60)
        if name == "crashes":
            sys.exit("illegal memory access")
        row = {"operator": name, "model": "m", "shapes": "s",
               "ways": {"kernel": {"us": [1, 1, 1]}, "plain": {"us": [2, 3, 4]}}}
        tell({"task": [kind, name], "rows": [row], "failed": ""})
        if name == "breaks":
            sys.exit(3)
"""


def run(names: str, file: Path, seconds: float = 30) -> watch.Found:
    found = watch.Found(lambda name: file)
    program = PROCESS.replace("VERSIONS", repr(VERSIONS))
    wanted = [("check", name) for name in names.split()]
    watch.measure([sys.executable, "-c", program], wanted, found, seconds, lambda *shown: None)
    return found


def test_a_task_that_crashes_or_hangs_ends_its_process_alone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(watch, "HANGS", 0.5)
    run("one crashes two hangs breaks three", tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    three = dict.fromkeys(("one", "two", "breaks", "three"), 3.0)
    assert kept["choices"] == {"a GPU": three | {"crashes": 0.0, "hangs": 0.0}}
    assert kept["failed"] == {"crashes": "crashed: illegal memory access", "hangs": "took longer than 0.5 seconds"}
    assert kept["finished"] is True


def test_time_that_is_up_keeps_what_there_is_and_the_next_run_adds_to_it(tmp_path) -> None:
    run("one hangs two", tmp_path / "kept.json", seconds=1.5)
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["choices"] == {"a GPU": {"one": 3.0}} and kept["finished"] is False
    found = run("two", tmp_path / "kept.json")
    assert found.body["choices"] == {"a GPU": {"one": 3.0, "two": 3.0}}


def test_a_process_that_cannot_begin_says_why(tmp_path) -> None:
    found = watch.Found(lambda name: tmp_path / "kept.json")
    words = [sys.executable, "-c", "import sys; sys.exit('no driver')"]
    with pytest.raises(RuntimeError, match="could not be measured: no driver"):
        watch.measure(words, [("check", "one")], found, 30, lambda *shown: None)


def test_a_kernel_has_to_be_faster_than_what_runs_in_its_place() -> None:
    """Attention of one query, for one, is torch's fused attention where the kernel does not run."""
    ways = {name: {"us": [0, us, 0]} for name, us in {"kernel": 4, "plain": 40, "fused": 2}.items()}
    row = {"operator": "own", "ways": ways}
    assert timing.choices([row]) == {"own": 10.0}
    assert timing.choices([row | {"instead": "fused"}]) == {"own": 0.5}
    assert all(case.instead in case.ways for case in all_cases())


def test_the_command_says_what_is_used_and_why(monkeypatch, cache) -> None:
    monkeypatch.delenv("DIFFCACHE_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    choices = {"rotate": 2.0, "l1_sums": 0.9, "int8_codes": 0.0}
    body = FIRST | {"choices": {"a GPU": choices}, "failed": {"int8_codes": "off by 0.5"}}
    dispatch.kept_file("a GPU").parent.mkdir(parents=True)
    dispatch.kept_file("a GPU").write_text(json.dumps(body))

    def said(operator):
        return command._choice(operator, torch.device("cuda", 0), "a GPU")

    assert said("rotate") == ("kernel", "2.00 times as fast as plain PyTorch")
    assert said("l1_sums") == ("plain PyTorch", "0.90 times as fast as plain PyTorch")
    assert said("int8_codes") == ("plain PyTorch", "off by 0.5")
    assert said("kv_gather") == ("plain PyTorch", "not measured")
    monkeypatch.setattr(torch.version, "hip", "7")
    chip = SimpleNamespace(gcnArchName="gfx1100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert said("attn_mass") == ("plain PyTorch", "spills registers")
    chip.gcnArchName = "gfx942:sramecc+:xnack-"
    assert said("attn_mass") == ("plain PyTorch", "not measured")
    assert "NVIDIA" in said("attn_decode_kivi")[1]
    monkeypatch.setenv("DIFFCACHE_KERNELS_OFF", "rotate")
    assert said("rotate") == ("plain PyTorch", "DIFFCACHE_KERNELS_OFF")
    assert "measured on this machine" in "".join(command._heads("a GPU"))
    assert "KERNELS_OFF names" not in "".join(command._heads("a GPU"))
    monkeypatch.setenv("DIFFCACHE_KERNELS_OFF", "rotate, rotat")
    assert "names no operator of ours: rotat" in command._heads("a GPU")[2]


def test_candidates_that_are_right_are_timed_beside_the_defaults() -> None:
    def kernel(values):
        return values + (configs.tuned("own", (), {"TILE": 1}, values.device)["TILE"] == 3)

    ways = {"kernel": kernel, "plain": torch.clone, "rival": torch.clone}
    case = KernelCase("own", "a model", "", lambda device, tiny: (torch.ones(9),), ways, 1)
    kept = [launch_options.Built({"TILE": n} if n > 1 else {}, "all", {"TILE": n}, (), "") for n in (1, 2, 3)]
    limits = {"bytes": 1.0, "operations": 1.0}
    ways = timing.row(launch_options.trial(case, kept), torch.device("cpu"), 2, limits)["ways"]
    (found,) = launch_options.ratios(case, kept, ways)
    ratio = ways["default"]["us"][1] / ways["TILE=2"]["us"][1]
    assert found == ("own", "all", {"TILE": 2}, ratio)
    assert ways["TILE=3"]["error"] > case.tolerance and not configs.TRIED


def test_the_best_of_the_worst_rows_is_an_entry_if_it_is_faster() -> None:
    one, two, three = {"BLOCK": 1}, {"BLOCK": 2}, {"BLOCK": 3}
    timed = [
        ("a", "x", one, 1.5),
        ("a", "x", two, 1.2),
        ("a", "x", one, 1.04),
        ("a", "x", two, 1.1),
        ("a", "x", three, 2.0),  # in one of the two rows of its bucket
        ("a", "y", one, 1.029),
        ("b", "x", two, 0.9),
        ("b", "z", three, 1.0301),
    ]
    expected = {"a": {"x": {"BLOCK": 2, "ratio": 1.1}}, "b": {"z": {"BLOCK": 3, "ratio": 1.03}}}
    assert launch_options.faster(timed) == expected
    assert launch_options.faster([]) == {}


def test_the_page_and_the_choices_are_up_to_date() -> None:
    assert page.main(["--check"]) == 0, "python -m diffcache.eval.workshop.kernels.page --write"


def test_every_operator_has_a_row_and_a_caller() -> None:
    listed = {case.operator for case in all_cases()}
    assert listed == {*dispatch.OPERATORS, dense.NAME}
