"""The command line: ``python -m lossguard``, installed as ``lossguard``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Optional

import lossguard


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command in `argv` (the process's own by default) and returns the exit status."""
    arguments = _parser().parse_args(argv)
    arguments.own_process = argv is None
    try:
        status: int = arguments.run(arguments)
        if sys.stdout is not None and not sys.stdout.closed:  # a script may have closed it
            sys.stdout.flush()
    except BrokenPipeError:  # the reader left: `lossguard demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lossguard",
        description="Losses for PyTorch that name the bad label instead of killing the process.",
        epilog='To use them, change one import: "from lossguard import CrossEntropyLoss". '
        "The README says what is checked.",
    )
    parser.add_argument("--version", action="version", version=f"lossguard {lossguard.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    env = commands.add_parser(
        "env",
        help="print versions, what was built and registered, and test this installation",
        description="Prints versions, what was built and what is registered with torch, then tests each loss "
        "against native torch. Put the output into bug reports.",
        epilog="Exit status: 0 if every check of the self-test passed, else 1.",
    )
    env.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    env.set_defaults(run=_env)

    demo = commands.add_parser(
        "demo",
        help="train on handwritten digits, through four accidents that bad data and bad code cause",
        description="Trains small networks on scikit-learn's handwritten digits, on the CPU in a few seconds. "
        "Four accidents happen: labels counted from 1, a 255 in a mask, NaN probabilities, a forgotten sigmoid. "
        "Each shows what native torch says and what lossguard says; the bad batch is skipped and training goes on.",
        epilog="Needs scikit-learn: pip install scikit-learn. Exit status: 0 if all went as told, else 1.",
    )
    demo.set_defaults(run=_demo)

    from . import _audit_command, _run

    _run.add_parser(commands)
    _audit_command.add_parser(commands)
    return parser


def _env(arguments: argparse.Namespace) -> int:
    from . import _environment

    environment = _environment.describe()
    print(json.dumps(environment, indent=2) if arguments.json else _environment.as_text(environment))
    return 0 if environment["ok"] else 1


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    return demo.main()


if __name__ == "__main__":
    sys.exit(main())
