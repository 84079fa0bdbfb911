"""In the processes that a script under ``lossguard run`` starts: has torch's losses patched once torch is imported.

Python imports this as it starts, before anything else; torch may never be imported here, and is not on its account.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and has its loader patch it when it has been executed."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                try:
                    from lossguard import _run
                except ImportError:  # another environment, which has none
                    return
                _run.in_child()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _next_sitecustomize() -> None:
    """The one that this stands in front of, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = importlib.util.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "LOSSGUARD_RUN" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_module = sys.modules.pop(__name__, None)
try:
    _next_sitecustomize()
finally:
    if _module is not None:
        sys.modules[__name__] = _module
