"""Writes gallery.md: each script of gallery/ as it is, what native torch says, and what lossguard says.

    python docs/gallery.py [--check]

``--check`` writes nothing, and exits with 1 where gallery.md is not what would be written.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "one_based_labels",
    "void_pixels",
    "binary_mask",
    "resized_mask",
    "sparse_ids",
    "padding",
    "tokenizer_out_of_step",
    "wrong_index",
    "forgotten_sigmoid",
    "class_ids_as_floats",
    "diverged",
    "uninitialised",
)
INTRODUCTION = """\
# What goes wrong, and what it looks like

Each script below is broken on purpose. Native torch's words are those of its CPU build; on a GPU a bad label or index is
`CUDA error: device-side assert triggered`, which names neither. lossguard's are those of `lossguard run script.py`, with
no change to the script.

Written by `python docs/gallery.py`.
"""


def _output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=HERE / "gallery",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "default", "NO_COLOR": "1", "PYTHON_COLORS": "0"},
    )
    return (done.stdout + done.stderr).replace(str(HERE / "gallery") + os.sep, "").rstrip()


def _section(name: str) -> str:
    path = HERE / "gallery" / f"{name}.py"
    source = path.read_text()
    title = ast.get_docstring(ast.parse(source))
    code = source.split('"""', 2)[2].strip()
    native = _output(path.name).splitlines()[-1:]  # the traceback ends with what there is to know
    ours = _output("-m", "lossguard", "run", "--immediately", path.name)
    ours = ours[ours.rfind("\nlossguard.") + 1 :] if "\nlossguard." in ours else ours
    return "\n".join(
        [
            f"## {name.replace('_', ' ').capitalize()}\n",
            f"{title}\n",
            f"```python\n{code}\n```\n",
            "Native torch:\n",
            "```text\n" + "\n".join(native) + "\n```\n",
            "lossguard:\n",
            f"```text\n{ours}\n```\n",
        ]
    )


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        text = "\n".join([INTRODUCTION, *pool.map(_section, SCRIPTS)])
    page = HERE / "gallery.md"
    if "--check" in sys.argv[1:]:
        same = page.exists() and page.read_text() == text
        print("gallery.md is up to date" if same else "gallery.md differs: run python docs/gallery.py")
        return 0 if same else 1
    page.write_text(text)
    print(f"wrote {page}: {len(SCRIPTS)} scripts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
