"""The tuner without a GPU: launches it compiles, drops and keeps."""

from diffcache.eval.kernels import linear
from diffcache.eval.workshop.kernels import tune
from diffcache.kernels.gpu import linear as launch


def test_candidates_that_spill_or_do_not_fit_are_dropped(monkeypatch, capsys):
    wide, deep = {"COLUMNS": 256, "num_warps": 4}, {"num_stages": 8}
    same = {"num_warps": 8}
    monkeypatch.setitem(launch.CANDIDATES, "linear_of_codes", [same, wide, deep])
    monkeypatch.setattr(tune, "asked_for", lambda names: list(linear.cases())[:1])
    assert tune.main(["--device", "cpu"]) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines()]
    usual, spilling, large = ([cell.strip() for cell in line] for line in lines if line)
    assert usual[0] == "default" and usual[2:] == ["96", "0", "kept"] and 0 < int(usual[1]) < 256
    assert spilling[0].startswith("COLUMNS=256") and spilling[4] == "dropped: spills"
    assert int(spilling[3]) > 0
    assert large[0] == "num_stages=8" and "shared memory" in large[4]


def test_operators_that_have_no_options_are_refused(capsys):
    assert tune.main(["--device", "cpu", "--operators", "rotate,kv_gather"])
    assert "--operators 'kv_gather': must be of attn_decode," in capsys.readouterr().err
