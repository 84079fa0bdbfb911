"""``lossguard run train.py``: a script as it is, with every one of torch's four losses validated.

The script runs in this process, as ``__main__``. Processes that it starts are told by the environment: there
``site/sitecustomize.py``, which is first on their path, has torch patched once it has been imported.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import os
import pdb
import runpy
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _callsite, _indexing, _patch, _pending, _violations, postmortem
from ._stats import stats
from .errors import LossValidationError
from .report import Report

STOPPED, WENT_ON = 65, 66  # exit statuses: a violation ended the script; there were some, and it ended well
ENVIRONMENT = "LOSSGUARD_RUN"
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_KEPT = 4  # calls whose tensors are at hand when a violation comes to light

_DESCRIPTION = """\
Runs a Python script or module as python does, with every use of torch's BCELoss, BCEWithLogitsLoss, NLLLoss
and CrossEntropyLoss validated, also in libraries and under torch.compile, and the indices of embeddings,
gather, x[i] and their like. At a bad label it says which one, where and the likely cause, and describes the
batch. The script, its arguments and everything else it raises are untouched. Options go before the script,
the script's own behind it.
"""
_EPILOG = """\
examples:
  lossguard run train.py --epochs 3
  lossguard run --pdb -m my_package.train
  lossguard run --on-violation skip --json violations.jsonl train.py
  lossguard run -m torch.distributed.run --nproc-per-node 4 train.py

exit status:
  the script's own, but
  65 if a violation ended it,
  66 if it ended well, with violations that were skipped, warned of or caught.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script unchanged, with its losses validated",
        usage="lossguard run [OPTIONS] SCRIPT [ARGUMENT ...]\n       lossguard run [OPTIONS] -m MODULE [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is checked")
    what.add_argument(
        "--strict",
        action="store_true",
        help="raise for what native torch does not check either (targets of BCE-with-logits, class probabilities), "
        "instead of one warning a line",
    )
    what.add_argument(
        "--no-indexing",
        action="store_true",
        help="leave out the indices of embedding, gather, scatter, index_select, x[i] and their like",
    )
    what.add_argument("--check-finite", action="store_true", help="check that logits and log-probabilities are finite")
    then = parser.add_argument_group("what a violation does")
    then.add_argument(
        "-o",
        "--on-violation",
        choices=("raise", "warn", "skip"),
        default="raise",
        help="raise an exception (default); or treat bad elements as ignored, with a warning or without (of a bad "
        "index the nearest valid one takes the place, with a warning)",
    )
    then.add_argument(
        "-i",
        "--immediately",
        action="store_true",
        help="raise at the call on CUDA too, for which each call waits, not before the optimizer's step",
    )
    then.add_argument(
        "--pdb", action="store_true", help="if a violation ends the script, open pdb where the loss was called"
    )
    then.add_argument(
        "-j", "--json", metavar="FILE", help="append every report to FILE, a line of JSON each; - prints them"
    )
    then.add_argument(
        "-s", "--save-batch", metavar="FILE.pt", help="save the tensors of the first bad call, for torch.load"
    )
    then.add_argument("-q", "--quiet", action="store_true", help="leave out the description of the batch")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Runs what the command line says; returns the exit status."""
    argv = options.module if options.module is not None else options.script
    if not argv:
        options.parser.error("what is to be run? Give a script, or -m and a module")
    is_module = options.module is not None
    if not is_module and argv[0] != "-" and not os.path.exists(argv[0]):
        options.parser.error(f"no such script: {argv[0]}")
    for name in ("json", "save_batch"):
        given = getattr(options, name)
        if given and not (name == "json" and given == "-"):
            path = os.path.abspath(given)  # the script may go to another folder
            if not os.path.isdir(os.path.dirname(path)):
                options.parser.error(f"no such folder: {os.path.dirname(path)}")
            setattr(options, name, path)
    watch = Watch(options)
    as_before = _become_main(argv, is_module, options.own_process)
    watch.begin()
    try:
        return watch.execute(argv, is_module)
    finally:
        if not options.own_process:  # else it stays, for what runs as the process ends
            watch.end()
            as_before()


def options_for_patch(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "strict": options.strict,
        "check_finite": options.check_finite or None,
        "on_violation": options.on_violation,
        "when": "immediately" if options.immediately or options.pdb else None,
        "indexing": not options.no_indexing,
    }


class Kept(NamedTuple):
    loss: str
    tensors: dict[str, Tensor]
    others: dict[str, Any]


class Watch:
    """Torch's losses patched, reports written as they come, the tensors of the latest calls kept for a post-mortem."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.reports = 0
        self.saved: Optional[str] = None  # what came of --save-batch
        self.kept: deque[Kept] = deque(maxlen=_KEPT)
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        settings = options_for_patch(self.options)
        self._undo.callback(_patch.set_options, _patch.options())
        _patch.patch(**settings)
        _indexing.observers.append(self._keep)
        self._undo.callback(_indexing.observers.remove, self._keep)
        _violations.on_report(self._reported)
        self._undo.callback(_violations.off_report, self._reported)
        # Where a step went well, nothing can come to light any more of the calls before it.
        hook = register_optimizer_step_post_hook(lambda *_: self.kept.clear())
        self._undo.callback(hook.remove)
        for name, value in children_environment({**settings, "json": self.options.json}).items():
            self._undo.callback(_restore, name, os.environ.get(name))
            os.environ[name] = value

    def end(self) -> None:
        self._undo.close()

    def _keep(self, loss: str, arguments: dict[str, Any]) -> None:
        tensors = {name: t.detach() for name, t in arguments.items() if isinstance(t, Tensor)}
        others = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
        self.kept.append(Kept(loss, tensors, others))

    def _reported(self, report: Report) -> None:
        self.reports += 1
        if self.options.save_batch and self.saved is None:  # the first, whatever is done about it
            self.saved = self._save(report, self._batch_of(report))
        if self.options.json:
            append(self.options.json, report)

    def execute(self, argv: list[str], is_module: bool) -> int:
        status = 0
        before = {*threading.enumerate()}
        try:
            if is_module:
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            elif argv[0] == "-" or _is_source(argv[0]):
                _run_script(argv[0])
            else:  # a folder, an archive, bytecode
                runpy.run_path(os.path.abspath(argv[0]), run_name="__main__")
            _join_threads(before)
            _pending.check()  # what the last losses had to say
        except SystemExit as leave:
            status = _status_of(leave)
        except LossValidationError as error:
            self._post_mortem(error)
            return STOPPED
        except BaseException as error:  # the script's own, to be shown as ever
            _show(error)
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        if self.reports:
            self._sum_up()
        return WENT_ON if status == 0 and self.reports else status

    def _sum_up(self) -> None:
        """Of a run that went on."""
        bad = {name: s for name, s in stats().items() if s.bad_calls}
        lines = [f"lossguard: {self.reports} call{'s' if self.reports > 1 else ''} with violations:"]
        lines += [f"  {name}: {s.violations} in {s.bad_calls} of {s.calls} calls" for name, s in bad.items()]
        print("\n".join([*lines, *filter(None, [self.saved])]), file=sys.stderr)

    def _post_mortem(self, error: LossValidationError) -> None:
        with contextlib.suppress(Exception):  # closed, or gone
            sys.stdout.flush()
        error.__traceback__ = _down_to_the_callers(error.__traceback__)
        _show(error)
        kept = self._batch_of(error.report)
        if not self.options.quiet:
            print("\n" + self._description(error, kept), file=sys.stderr)
        if self.saved:
            print(self.saved, file=sys.stderr)
        sys.stderr.flush()
        if self.options.pdb:
            pdb.post_mortem(error.__traceback__)

    def _description(self, error: LossValidationError, kept: Optional[Kept]) -> str:
        try:
            return postmortem.describe(error.report, kept.tensors if kept else None)
        except Exception as failed:  # it must not take the place of what it is about
            return f"the batch cannot be described: {type(failed).__name__}: {failed}"

    def _batch_of(self, report: Optional[Report]) -> Optional[Kept]:
        """The latest call with tensors such as the report's."""
        for kept in reversed(self.kept):
            shapes = {name: tuple(tensor.shape) for name, tensor in kept.tensors.items()}
            if report is not None and report.shapes.items() <= shapes.items():
                return kept
        return None

    def _save(self, report: Report, kept: Optional[Kept]) -> str:
        if kept is None:
            return "the batch was not saved: its tensors are not at hand (in compiled code they are not)"
        content = {**{name: t.cpu() for name, t in kept.tensors.items()}, "arguments": kept.others}
        try:
            with open(self.options.save_batch, "wb") as file:
                torch.save({**content, "loss": kept.loss, "report": report.to_dict()}, file)
        except Exception as failed:
            return f"the batch was not saved: {type(failed).__name__}: {failed}"
        return f"the batch is in {self.options.save_batch}: torch.load({self.options.save_batch!r})"


def append(path: str, report: Report) -> None:
    """As one write, which those of other processes do not come between. To standard output, if path is -."""
    line = json.dumps({**report.to_dict(), "text": str(report), "pid": os.getpid()}) + "\n"
    if path == "-":
        print(line, end="", flush=True)
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def children_environment(settings: dict[str, Any]) -> dict[str, str]:
    path = [_HERE + "site", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {ENVIRONMENT: json.dumps(settings), "PYTHONPATH": os.pathsep.join(path)}


def in_child() -> None:
    """In a process that a script under ``lossguard run`` has started, once torch has been imported there."""
    settings = json.loads(os.environ[ENVIRONMENT])
    path = settings.pop("json")
    _patch.patch(**settings)
    if path:
        _violations.on_report(lambda report: append(path, report))


def _restore(name: str, value: Optional[str]) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _become_main(argv: list[str], is_module: bool, own_process: bool) -> Callable[[], None]:
    """`sys.argv`, `sys.path` and ``__main__`` as python has them for a script. Returns what undoes it."""
    before = sys.argv[:], sys.path[:], sys.modules["__main__"], sys.excepthook
    sys.argv[:] = argv
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(argv[0]))
    if argv[0] == "-":
        folder = ""
    elif not is_module and not _is_source(argv[0]):
        folder = os.path.abspath(argv[0])
    sys.path[0 : int(own_process)] = [folder]  # the first entry is where lossguard's own command is

    def undo() -> None:
        sys.argv[:], sys.path[:], sys.modules["__main__"], sys.excepthook = before

    return undo


def _run_script(path: str) -> None:
    # A module that stays while its threads and functions do, which runpy's is not.
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    if path == "-":
        source, name = sys.stdin.buffer.read(), "<stdin>"
    else:
        main.__dict__["__file__"] = name = os.path.abspath(path)
        with open(path, "rb") as file:
            source = file.read()
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _is_source(path: str) -> bool:
    """Not a folder, an archive or bytecode."""
    if os.path.isdir(path) or not os.path.exists(path):
        return False
    with open(path, "rb") as file:
        return b"\0" not in file.read(4096)


def _join_threads(before: set[threading.Thread]) -> None:
    """Of those since `before`, the ones that python waits for before it ends, in its way."""

    def started() -> list[threading.Thread]:
        current = threading.current_thread()
        return [t for t in threading.enumerate() if t is not current and not t.daemon and t not in before]

    if not started():
        return
    # The threads of an executor wait for more to do until they are told, as python does, that there is none.
    for tell in reversed(getattr(threading, "_threading_atexits", ())):
        tell()
    while threads := started():
        for thread in threads:
            thread.join()


def _status_of(leave: SystemExit) -> int:
    if leave.code is None or isinstance(leave.code, int):
        return leave.code or 0
    print(leave.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """As the script's `sys.excepthook` does, without the frames that ran the script."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_code.co_filename.startswith(_HERE) or _is_runpy(trace)):
        trace = trace.tb_next
    error.__traceback__ = trace  # None for a script that cannot be compiled
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:
        traceback.print_exception(error)


def _is_runpy(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>")


def _down_to_the_callers(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    """Cut off below the innermost frame that is neither torch's nor lossguard's: there pdb opens."""
    last, entry = None, trace
    while entry is not None:
        if not _callsite.is_internal(entry.tb_frame.f_code.co_filename):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    return trace
