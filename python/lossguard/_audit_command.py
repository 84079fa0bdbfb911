"""The command ``lossguard audit``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from .audit import Audit, Label, audit

__all__ = ["add_parser"]

_DESCRIPTION = """\
Reads every label of a file, a folder of masks or a dataset, and says which ones a loss would refuse, where they are,
and what to do about them; then how often each class occurs.

PATH is one of
  labels.npy, labels.npz, labels.pt    an array or tensor: of class indices (samples, ...), or of floats in [0, 1]
  train.csv, train.tsv, train.parquet  a table: the column "label" or --label
  masks/                               a folder of masks, one number a pixel (.png, .tif, .bmp, .gif)
  package.module:attribute             a dataset or DataLoader, or a function without arguments that returns one
  train.py:attribute                   the same, in a file
"""

_EPILOG = """\
examples:
  lossguard audit labels.npy --num-classes 10
  lossguard audit train.csv --label category_id --num-classes 80
  lossguard audit masks/ --num-classes 19 --ignore-index 255 --plot classes.png
  lossguard audit train.py:make_train_set --num-classes 10 --workers 4 --json audit.json

exit status:
  0 if every label is valid, 1 if not, 2 for what cannot be read and for wrong usage.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``audit`` to the commands of a parser; it sets ``run``, which returns the exit status."""
    parser = commands.add_parser(
        "audit",
        help="look at every label of a file, a folder of masks or a dataset before training",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="what holds the labels, see above")
    parser.add_argument(
        "--num-classes",
        type=_at_least(1),
        metavar="N",
        help="outputs of the model; by default the largest label + 1, which lets every such label pass",
    )
    parser.add_argument(
        "--ignore-index",
        type=_index_or_none,
        default=-100,
        metavar="I",
        help="the class index of elements that the loss leaves out, or none (default: -100)",
    )
    parser.add_argument(
        "--label",
        type=_label,
        metavar="NAME",
        help="the column, array or key that holds the labels, by name or number; by default labels, label, target, "
        "targets, y or mask, and of a tuple the last element",
    )
    parser.add_argument(
        "--kind",
        choices=("classes", "probabilities", "binary"),
        help="what labels are: class indices, class probabilities, or targets in [0, 1]; by default as they look",
    )
    parser.add_argument("--max-samples", type=_at_least(1), metavar="N", help="end after N samples, rows or files")
    parser.add_argument(
        "--workers", type=_at_least(0), default=0, metavar="N", help="processes that read a dataset (default: 0)"
    )
    parser.add_argument("--weights", action="store_true", help="print class weights, as a line of Python, also if even")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a histogram of the classes (needs matplotlib)")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        found = audit(
            _open(arguments.path),
            arguments.num_classes,
            arguments.ignore_index,
            label=arguments.label,
            kind=arguments.kind,
            num_workers=arguments.workers,
            max_samples=arguments.max_samples,
            progress=False if arguments.no_progress else None,
        )
        _write(found, arguments)
    except (OSError, ImportError, TypeError, ValueError, LookupError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):  # nobody reads stdout: the main program's business
            raise
        print(f"lossguard audit: {error}", file=sys.stderr)
        return 2
    return 0 if found.ok else 1


def _write(found: Audit, arguments: argparse.Namespace) -> None:
    weights = found.weights_code() if arguments.weights else None
    if arguments.plot:
        found.plot(arguments.plot)
    if arguments.json:
        data = found.to_dict()
        if weights is not None:
            data["weights"] = found.weights().tolist()
        text = json.dumps(data, indent=2)
        if arguments.json == "-":
            print(text)
            return
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    print(found)
    if weights is not None:
        print(weights)


def _open(path: str) -> Any:
    """The path itself, or what it names in a module: a dataset, or what a function returns."""
    module, colon, attribute = path.rpartition(":")
    if not colon or not module or not attribute or os.path.exists(path):
        return path
    found = _load(module)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise LookupError(f"{module} has no {attribute}") from None
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        try:
            found = found()
        except Exception as error:
            raise RuntimeError(f"{path} raised {type(error).__name__}: {error}") from error
    return found


def _load(module: str) -> Any:
    try:
        if not module.endswith(".py"):
            if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` has it
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(module)
        file = Path(module)
        if not file.is_file():
            raise FileNotFoundError(f"no such file: {module}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        folder = str(file.resolve().parent)
        if folder not in sys.path:  # as for a script: what lies beside it can be imported
            sys.path.insert(0, folder)
        sys.modules[spec.name] = loaded  # workers find its classes there
        spec.loader.exec_module(loaded)
        return loaded
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ImportError(f"{module} could not be imported: {type(error).__name__}: {error}") from error


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            if (value := int(text)) >= least:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")

    return number


def _index_or_none(text: str) -> Optional[int]:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor none") from None


def _label(text: str) -> Label:
    return int(text) if text.lstrip("-").isdigit() else text
