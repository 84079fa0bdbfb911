"""The command line: what `python -m lossguard` prints, and that the self-test of `env` can fail."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time

import lossguard
import pytest
import torch
from lossguard import _C, _environment
from lossguard.__main__ import main

LOSSES = ["BCELoss", "BCEWithLogitsLoss", "NLLLoss", "CrossEntropyLoss"]
NAMES = ("bce", "bce_with_logits", "nll", "cross_entropy")
OPS = {"check_index", *(f"{loss}_{way}" for loss in NAMES for way in ("forward", "backward"))}


@pytest.fixture(scope="module")
def env():
    return subprocess.run(
        [sys.executable, "-m", "lossguard", "env"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},  # nothing printed may need more
        capture_output=True,
        text=True,
        timeout=120,
    )


def line_of(text, start):
    (line,) = [line for line in text.splitlines() if re.match(rf"\s*{re.escape(start)}\s", line)]
    return line


def test_env_succeeds_within_100_columns(env):
    assert env.returncode == 0
    assert env.stderr == ""
    assert "\033" not in env.stdout
    assert max(map(len, env.stdout.splitlines())) <= 100


def test_env_prints_the_versions(env):
    assert env.stdout.startswith(f"lossguard {lossguard.__version__}\n")
    assert platform.python_version() in line_of(env.stdout, "Python")
    assert torch.__version__ in line_of(env.stdout, "torch ")
    compiler = line_of(env.stdout, "compiler")
    assert _C.build_info()["compiler"] in compiler and f"pybind11 {_C.build_info()['pybind11']}" in compiler
    assert f"(in use: {_C.cpu_kernels_in_use()})" in line_of(env.stdout, "CPU kernels")


def test_env_prints_what_was_built(env):
    assert line_of(env.stdout, "CPU half").split()[-1] == "yes"
    assert line_of(env.stdout, "CUDA half").split()[2].rstrip(",") == ("yes" if _C.build_info()["cuda"] else "no")
    if _C.build_info()["cuda"]:
        assert _C.build_info()["cuda_archs"] in line_of(env.stdout, "CUDA half") and line_of(env.stdout, "driver")


@pytest.mark.parametrize("op", sorted(OPS))
def test_env_prints_the_kernels_of_each_op(env, op):
    assert line_of(env.stdout, op).split() == [op, "yes", "yes" if _C.build_info()["cuda"] else "-", "yes"]


def test_env_runs_every_check(env):
    section = env.stdout.split("self-test\n")[1]
    passed = re.findall(r"^  ok +(.+?)  ", section, re.MULTILINE)
    assert passed == [
        "kernels are registered",
        *(f"{loss}, forward and backward as native" for loss in LOSSES),
        "a bad label is reported, where and what",
        "a bad probability likewise",
        "a good batch right afterwards",
    ]
    assert "target[37] = 97" in section and "input[3, 7] = 1.5" in section
    assert "FAILED" not in env.stdout
    assert env.stdout.endswith("all 8 checks passed\n")


def test_env_as_json(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "location", "cpu", "gpu", "built", "ops", "self_test", "ok"}
    assert found["ok"] is True
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["lossguard"] == lossguard.__version__
    assert set(found["versions"]) >= {"python", "pybind11", "compiler", "platform", "torch_abi_floor"}
    assert found["built"].items() >= {"cpu": True, "cuda": bool(_C.build_info()["cuda"])}.items()
    assert found["cpu"]["kernels"] == list(_C.cpu_kernels())
    assert found["cpu"]["kernels_in_use"] in found["cpu"]["kernels"]
    assert [set(check) for check in found["self_test"]] == [{"name", "ok", "detail"}] * 8
    assert all(check["ok"] is True for check in found["self_test"])


def test_env_finds_every_op_there_is():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("lossguard::")}
    assert {f"lossguard::{op}" for op in _environment.describe()["ops"]} == names == {f"lossguard::{op}" for op in OPS}


def test_env_is_quick():
    main(["env"])
    start = time.perf_counter()
    main(["env"])
    assert time.perf_counter() - start < 2


def test_env_leaves_random_numbers_and_policy_alone():
    state = torch.get_rng_state()
    with lossguard.guard(on_violation="skip", strict=False):
        assert main(["env"]) == 0  # whatever the policy around it
        expected = {"strict": False, "check_finite": False, "on_violation": "skip", "when": "auto"}
        assert lossguard.policy() == expected
    assert torch.equal(torch.get_rng_state(), state)


# ---- the self-test sees what is wrong


def failures(capsys):
    """The names of the failed checks, with the exit status checked in both formats."""
    assert main(["env", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    failed = {check["name"]: check["detail"] for check in found["self_test"] if not check["ok"]}
    assert main(["env"]) == 1
    text = capsys.readouterr().out
    assert text.endswith(f"\n{len(failed)} of 8 checks FAILED\n")
    assert max(map(len, text.splitlines())) <= 100
    for name in failed:
        assert line_of(text, f"FAILED  {name}")
    return failed


@pytest.mark.parametrize("loss", LOSSES)
def test_a_wrong_loss_fails(loss, monkeypatch, capsys):
    module = getattr(lossguard, loss)
    right = module.forward
    monkeypatch.setattr(module, "forward", lambda self, input, target: right(self, input, target) + 1e-3)
    expected = {f"{loss}, forward and backward as native"}
    if loss == "CrossEntropyLoss":
        expected.add("a good batch right afterwards")
    failed = failures(capsys)
    assert set(failed) == expected
    assert all("relative difference" in detail for detail in failed.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_wrong_gradient_fails(loss, monkeypatch, capsys):
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.001 * grad

    module = getattr(lossguard, loss)
    right = module.forward
    monkeypatch.setattr(module, "forward", lambda self, input, target: WrongGradient.apply(right(self, input, target)))
    assert f"{loss}, forward and backward as native" in failures(capsys)


def test_nan_is_no_agreement(monkeypatch, capsys):
    monkeypatch.setattr(lossguard.BCELoss, "forward", lambda self, input, target: (input * torch.nan).sum())
    failed = failures(capsys)
    assert set(failed) == {"BCELoss, forward and backward as native", "a bad probability likewise"}
    assert failed["a bad probability likewise"] == "ValueError: nothing was reported"


def test_a_silent_loss_fails(monkeypatch, capsys):
    monkeypatch.setattr(lossguard.CrossEntropyLoss, "on_violation", "skip")
    assert failures(capsys) == {"a bad label is reported, where and what": "ValueError: nothing was reported"}


def test_a_wrong_report_fails(monkeypatch, capsys):
    right = lossguard.CrossEntropyLoss.forward

    def shifted(self, input, target):
        return right(self, input.roll(1, 0), target.roll(1, 0))

    monkeypatch.setattr(lossguard.CrossEntropyLoss, "forward", shifted)
    failed = failures(capsys)
    assert failed["a bad label is reported, where and what"] == "ValueError: reported target [(38,)] [97]"


def test_a_missing_kernel_fails(monkeypatch, capsys):
    present = torch._C._dispatch_has_kernel_for_dispatch_key
    gone = ("lossguard::nll_forward", "Meta")
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *asked: asked != gone and present(*asked)
    )
    assert failures(capsys) == {"kernels are registered": "ValueError: missing: nll_forward for Meta"}


# ---- the command itself


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["usage: lossguard", "COMMAND", "env", "demo", "--version", "from lossguard import CrossEntropyLoss"]),
        (["env"], ["usage: lossguard env", "--json", "versions", "bug reports", "Exit status"]),
        (["demo"], ["usage: lossguard demo", "handwritten digits", "pip install scikit-learn", "Exit status"]),
    ],
)
def test_help(arguments, words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for word in words:
        assert word in " ".join(text.split())


@pytest.mark.parametrize("arguments", [[], ["train"], ["env", "--yaml"]])
def test_a_wrong_command_explains_itself(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: lossguard" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"lossguard {lossguard.__version__}\n"


def test_console_script():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lossguard")
    assert script.load() is main


def test_a_closed_pipe_is_no_traceback(monkeypatch):
    read, write = os.pipe()
    os.close(read)  # as `head` does when it has enough
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["env"]) == 1
