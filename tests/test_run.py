"""`lossguard run`: a script unchanged, its losses validated, everything else as python does it."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import lossguard
import pytest
import torch
import torch.nn.functional as F
from lossguard.__main__ import main

TRAIN = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()

    def train(steps, bad):
        for step in range(steps):
            x, labels = torch.randn(32, 8), torch.randint(5, (32,))
            if step == bad:
                labels[3] = 7
            loss = criterion(net(x), labels)  # here
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if __name__ == "__main__":
        train(4, int(sys.argv[1]))
        print("trained", sys.argv[1:], __file__)
"""

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(lossguard._violations, "_warned", {})

    def write(text: str = TRAIN, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments)])


def test_a_violation_is_reported_with_its_line_and_its_batch(script: Script, capsys: pytest.CaptureFixture) -> None:
    assert run(script(), 2) == 65
    out, err = capsys.readouterr()
    assert "trained" not in out
    assert "Target 7 is out of bounds. CrossEntropyLoss: 1 of 32 targets is outside [0, 5)." in err
    assert "loss = criterion(net(x), labels)  # here" in err
    trace = err[: err.index("lossguard.TargetOutOfBoundsError")]
    assert trace.count('File "') == 2 and "site-packages" not in trace.splitlines()[-2]
    batch = err[err.index("the batch:") :]
    assert "input   (32, 5) float32 cpu" in batch and "target  (32,) int64 cpu: 0 .. 7" in batch
    assert "7        1" in batch and "outside" in batch
    assert batch[: batch.index("\n\n")].count("\n") == 3 + len({0, 1, 2, 3, 4, 7})
    causes = batch[batch.index("what it may be:") :]
    assert "evidence: " in causes and "fix: " in causes


def test_a_good_run_is_as_python_runs_it(script: Script, capsys: pytest.CaptureFixture) -> None:
    path = script()
    before = sys.argv[:], sys.path[:], sys.modules["__main__"], dict(os.environ)
    assert run(path, -1, "--strict", "--json", "x") == 0  # options behind the script are the script's
    out, err = capsys.readouterr()
    assert out == f"trained ['-1', '--strict', '--json', 'x'] {path}\n" and err == ""
    assert (sys.argv, sys.path, sys.modules["__main__"], dict(os.environ)) == before
    assert not lossguard._patch.is_patched() and not lossguard._violations._callbacks


@pytest.mark.parametrize("action", ("skip", "warn"))
def test_going_on(action: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log = tmp_path / "violations.jsonl"
    lossguard.reset_stats()
    saved = tmp_path / "first.pt"
    assert run("-o", action, "--json", log, "-s", saved, script(), 2) == 66
    out, err = capsys.readouterr()
    assert "trained" in out and torch.load(saved)["target"][3] == 7
    assert "lossguard: 1 call with violations:" in err and "CrossEntropyLoss: 1 in 1 of 4 calls" in err
    assert f"the batch is in {saved}" in err
    (line,) = log.read_text().splitlines()
    report = json.loads(line)
    assert (report["values"], report["indices"], report["loss"]) == ([7], [[3]], "CrossEntropyLoss")
    assert report["call_site"]["source"].endswith("# here") and report["pid"] == os.getpid()
    assert report["text"].startswith("Target 7 is out of bounds")


def test_reports_are_printed(script: Script, capsys: pytest.CaptureFixture) -> None:
    assert run("-o", "skip", "--json", "-", script(), 2) == 66
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert json.loads(line)["values"] == [7]


def test_the_batch_is_saved(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved = tmp_path / "bad.pt"
    assert run("--quiet", "--save-batch", saved, script(), 2) == 65
    assert f"torch.load('{saved}')" in capsys.readouterr().err
    batch = torch.load(saved)
    assert batch["target"][3] == 7 and batch["input"].shape == (32, 5) and batch["arguments"]["ignore_index"] == -100
    with pytest.raises(IndexError):
        F.cross_entropy(batch["input"], batch["target"])
    assert batch["report"]["count"] == 1
    with pytest.raises(SystemExit):
        run("-q", "-s", tmp_path / "nowhere" / "bad.pt", script(), 2)
    assert f"no such folder: {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert run("-q", "-s", tmp_path, script(), 2) == 65
    assert "the batch was not saved: IsADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, status, says",
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('bye')", 1, "bye\n"),
        ("import sys; sys.exit()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("nonsense(", 1, "SyntaxError"),
        ("import sys\nsys.excepthook = lambda *a: sys.stderr.write(f'hook {a[0].__name__}')\n1 / 0", 1, "hook Zero"),
        ("import torch\ntorch.nn.CrossEntropyLoss()(torch.zeros(3, 5), torch.zeros(2).long())", 1, "batch_size"),
    ],
)
def test_what_the_script_does_is_its_own(
    text: str, status: int, says: str, script: Script, capsys: pytest.CaptureFixture
) -> None:
    assert run(script(text)) == status
    err = capsys.readouterr().err
    assert says in err
    assert "_run.py" not in err and "runpy" not in err


def test_a_violation_that_is_caught_is_told_of_by_the_status(script: Script, capsys: pytest.CaptureFixture) -> None:
    text = """
        import torch
        try:
            torch.nn.functional.cross_entropy(torch.zeros(2, 5), torch.tensor([0, 9]))
        except IndexError as error:
            print(type(error).__name__)
    """
    assert run("--immediately", script(text)) == 66
    assert capsys.readouterr().out == "TargetOutOfBoundsError\n"


def test_what_only_lossguard_checks(script: Script, capsys: pytest.CaptureFixture) -> None:
    text = """
        import torch
        loss = torch.nn.BCEWithLogitsLoss()(torch.zeros(4), torch.full((4,), 2.0))
        print(round(loss.item(), 4))
    """
    with pytest.warns(lossguard.LossValidationWarning, match="4 of 4 elements of target are outside"):
        assert run(script(text)) == 66
    assert capsys.readouterr().out == "0.6931\n"  # as native computes it
    assert run("--strict", script(text)) == 65
    text = "import torch\ntorch.nn.CrossEntropyLoss()(torch.full((2, 5), float('nan')), torch.tensor([0, 1]))"
    assert run(script(text)) == 0
    assert run("--check-finite", script(text)) == 65


EMBEDDING = """
    import torch
    from torch import nn
    embedding = nn.Embedding(100, 4)
    tokens = torch.tensor([[1, 2], [100, 3]])
    print(embedding(tokens).shape)
"""


def test_indices(script: Script, capsys: pytest.CaptureFixture) -> None:
    assert run("--immediately", script(EMBEDDING)) == 65
    err = capsys.readouterr().err
    assert "lossguard.IndexOutOfBoundsError: index 100 is out of bounds. embedding: 1 of 4 indices" in err
    assert "index   (2, 2) int64 cpu: 1 .. 100" in err and "print(embedding(tokens).shape)" in err
    assert run("--no-indexing", script(EMBEDDING)) == 1
    assert "IndexError: index out of range in self" in capsys.readouterr().err


def test_modules_and_packages(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "some_package").mkdir()
    script(TRAIN, "some_package/__main__.py")
    script("", "some_package/__init__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_package", raising=False)
    assert run("-m", "some_package", 2) == 65
    assert run(tmp_path / "some_package", -1) == 0
    assert "trained ['-1']" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["-o", "explode", "x.py"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    assert "usage: lossguard run" in capsys.readouterr().err


def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for word in ("65 if a violation ended it", "66 if it ended well", "--save-batch", "-m MODULE"):
        assert word in text


@pytest.mark.parametrize(
    "text, status, out",
    [
        ("import sys; sys.stdout.close()", 0, ""),
        ("import sys\nsys.stdout = None\n" + textwrap.dedent(TRAIN), 65, ""),
        ("import os, tempfile; os.chdir(tempfile.gettempdir())\n" + textwrap.dedent(TRAIN), 65, ""),
    ],
    ids=["closed", "gone", "elsewhere"],
)
def test_what_a_script_does_to_its_process(text: str, status: int, out: str, script: Script, monkeypatch) -> None:
    path = script(text)
    monkeypatch.chdir(path.parent)
    done = in_process("--json", "v.jsonl", path.name, 2, cwd=path.parent)
    assert done.returncode == status and "_run.py" not in done.stderr
    if status == 65:
        assert "Target 7 is out of bounds" in done.stderr and (path.parent / "v.jsonl").exists()


AFTER_MAIN = """
    import atexit, pickle, sys, threading, time
    import torch

    class Mine:
        pass

    def bad(name):
        pickle.dumps(Mine())
        try:
            torch.nn.BCEWithLogitsLoss()(torch.zeros(2), torch.full((2,), 3.0))
        except RuntimeError as error:
            print(name, type(error).__name__, sys.argv[1:])

    threading.Thread(target=lambda: (time.sleep(0.2), bad("thread"))).start()
    atexit.register(bad, "exit")
"""


def test_what_runs_after_the_last_line(script: Script) -> None:
    done = in_process("--strict", "--immediately", script(AFTER_MAIN), "x")
    expected = [f"{name} ValueOutOfRangeError ['x']" for name in ("thread", "exit")]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.returncode == 66


EXECUTORS = """
    import time
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

    import torch

    def bad():
        time.sleep(0.2)
        torch.nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([3]))

    if __name__ == "__main__":
        kept = {0}Executor(1)
        kept.submit(bad)
        other = {1}Executor(1)
        other.submit(print, "done").result()
"""


@pytest.mark.parametrize("first, second", [("ThreadPool", "ProcessPool"), ("ProcessPool", "ThreadPool")])
def test_executors_that_are_left_open(script: Script, first: str, second: str) -> None:
    """Python tells their threads to end, and waits for what they were given."""
    executors = script(EXECUTORS.format(first, second))
    done = in_process("--on-violation", "warn", executors)
    assert done.stdout == "done\n", done.stderr
    assert "Target 3 is out of bounds" in done.stderr
    assert done.returncode == (66 if first == "ThreadPool" else 0)  # of this process


def test_other_kinds_of_scripts(script: Script, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").mkdir()
    script("import helper; print(helper.__name__)", "real/main.py")
    script("", "real/helper.py")
    (tmp_path / "link" / "main.py").symlink_to(tmp_path / "real" / "main.py")
    assert in_process(tmp_path / "link" / "main.py").stdout == "helper\n"
    assert in_process("-", "a", input="import sys; print(sys.argv)").stdout == "['-', 'a']\n"
    py_compile.compile(str(script("print(__name__)", "x.py")), str(tmp_path / "x.pyc"))
    with zipfile.ZipFile(tmp_path / "x.app", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.path[0][-5:])")
    assert in_process("x.pyc", cwd=tmp_path).stdout == "__main__\n"
    assert in_process("x.app", cwd=tmp_path).stdout == "x.app\n"


def test_a_batch_that_cannot_be_described(script: Script, capsys: pytest.CaptureFixture) -> None:
    text = """
        import torch
        torch.vmap(torch.nn.functional.cross_entropy)(torch.zeros(2, 3, 5), torch.full((2, 3), 9))
    """
    assert run("--immediately", script(text)) == 65
    assert "inside vmap" in capsys.readouterr().err


# ---- in processes of their own


def in_process(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lossguard", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(lossguard._C.__file__).parent.parent)},
        **options,
    )


def test_pdb_opens_where_the_loss_was_called(script: Script) -> None:
    done = in_process("--pdb", script(), 2, input="p labels[3].item() * 1000\nq\n")
    assert done.returncode == 65
    assert "-> loss = criterion(net(x), labels)  # here" in done.stdout and "7000" in done.stdout


CHILDREN = """
    import importlib.util, subprocess, sys
    importlib.util.find_spec("torch")  # as libraries that can do without it
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, Dataset

    def bad(rank=0, *rest):
        F.cross_entropy(torch.zeros(2, 5), torch.tensor([0, 9]))

    class Losses(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return bad()

    if __name__ == "__main__":
        how = sys.argv[1]
        if how == "spawn":
            torch.multiprocessing.spawn(bad, nprocs=1)
        elif how == "loader":
            next(iter(DataLoader(Losses(), num_workers=1, multiprocessing_context="spawn")))
        elif how == "child":
            bad()
        elif how == "subprocess":
            sys.exit(subprocess.call([sys.executable, __file__, "child"]))
        else:  # one that has no use for torch
            sys.exit(subprocess.call([sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"]))
"""


@pytest.mark.parametrize(
    "how, status", [("spawn", 1), ("loader", 65), ("subprocess", 1), ("no torch", 0)], ids=lambda v: str(v)
)
def test_processes_that_the_script_starts(how: str, status: int, script: Script, tmp_path: Path) -> None:
    log = tmp_path / "violations.jsonl"
    done = in_process("--immediately", "--json", log, script(CHILDREN), how)
    assert done.returncode == status, done.stderr
    if how == "no torch":
        return
    assert "Target 9 is out of bounds. CrossEntropyLoss: 1 of 2 targets is outside [0, 5)." in done.stderr
    reports = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["values"] for r in reports] == [[9]] and reports[0]["call_site"]["function"] == "bad"


def test_under_compile(script: Script) -> None:
    text = TRAIN.replace("criterion = nn.CrossEntropyLoss()", "criterion = torch.compile(nn.CrossEntropyLoss())")
    done = in_process(script(text), 2)
    assert done.returncode == 65 and "Target 7 is out of bounds" in done.stderr
    assert "called at" in done.stderr and "# here" in done.stderr
    assert "the batch is not at hand" in done.stderr


def test_a_sitecustomize_of_the_users_own_is_not_lost(script: Script, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own', __name__)\n")
    text = """
        import os, subprocess, sys
        os.environ["PYTHONPATH"] += os.pathsep + sys.argv[1]
        sys.exit(subprocess.call([sys.executable, "-c", "import sitecustomize"]))
    """
    done = in_process(script(text), tmp_path / "own")
    assert done.returncode == 0 and done.stdout == "own sitecustomize\n", done.stderr
