"""``patch()``: torch's own four losses, whoever calls them, go through lossguard.

All of them end in four functions of :mod:`torch.nn.functional`, which are written in Python. Their code is replaced,
and they stay the objects they are: names imported before, bound methods, tables keyed by function and the graphs of
torch.compile all mean the same function still.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import _indexing, _native, _violations, functional
from ._policy import OnViolation, When, _check, explicit_flags

__all__ = ["patch", "patched", "unpatch"]


class _Patched(NamedTuple):
    ours: Callable[..., Tensor]
    tensors: tuple[str, ...]
    has_extra: Callable[[dict[str, Any]], bool]  # whether native does not check at all what lossguard would


_LOSSES = {
    "binary_cross_entropy": _Patched(
        functional.binary_cross_entropy, ("input", "target", "weight"), lambda call: False
    ),
    "binary_cross_entropy_with_logits": _Patched(
        functional.binary_cross_entropy_with_logits, ("input", "target", "weight", "pos_weight"), lambda call: True
    ),
    "nll_loss": _Patched(functional.nll_loss, ("input", "target", "weight"), lambda call: False),
    "cross_entropy": _Patched(
        functional.cross_entropy,
        ("input", "target", "weight"),
        lambda call: isinstance(call["target"], Tensor) and call["target"].is_floating_point(),
    ),
}
_FUNCTIONS: dict[str, Any] = {name: getattr(F, name) for name in (*_LOSSES, *_indexing.EMBEDDINGS)}
_EMBEDDING = {name: _native.copy_of(_FUNCTIONS[name]) for name in _indexing.EMBEDDINGS}
_HOOK = "_lossguard_call"  # the name by which the new code, whose globals are torch's, finds `_call`


class _Options(NamedTuple):
    strict: bool
    policy: dict[str, Any]
    indexing: bool


_lock = threading.Lock()
_options: Optional[_Options] = None  # None: not patched
_original: dict[Any, CodeType] = {}
_attributes: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what it had of its own, or _INHERITED, what it has)
_INHERITED = object()
_uses_autograd_cache = True


def patch(
    *,
    strict: bool = False,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
    indexing: bool = False,
) -> None:
    """Have every use of torch's four losses validated, with no change to the code that uses them.

    ``torch.nn.CrossEntropyLoss`` and its like, their subclasses, ``torch.nn.functional.cross_entropy`` and names
    imported from there before, and so the losses of the libraries built on them. What is written in C++ or scripted by
    TorchScript stays native, and so does what calls ``torch.ops.aten`` itself. What torch.compile has compiled before
    is compiled anew.

    Args:
        strict: raise for what native torch does not check either (targets of BCE-with-logits, class probabilities).
            Otherwise that is computed as native computes it, and warned of once per line; not in compiled code.
        check_finite, on_violation, when: as in :func:`lossguard.configure`; None follows `guard` and `configure`.
        indexing: check, too, the indices of ``embedding``, ``embedding_bag``, ``gather``, ``scatter*``,
            ``index_select``, ``index_add``, ``index_copy``, ``index_fill``, ``take``, ``one_hot``, ``index_put`` and
            ``x[i]``, and raise :class:`lossguard.IndexOutOfBoundsError`. The nearest valid index
            takes the place of one that is not, so that on CUDA the device lives on; under "warn" and "skip" the
            program computes with it, and both warn. For looking for a fault: every
            index is read twice more, and each such call costs the host 40 to 80 us more.

    Patching again changes the options. :func:`unpatch` undoes it; ``with lossguard.patched(...):`` does both.
    """
    _check(strict, check_finite, on_violation, when)
    with _lock:
        policy = dict(check_finite=check_finite, on_violation=on_violation, when=when)
        _set(_Options(strict, policy, indexing))


def unpatch() -> None:
    """Give torch its losses back. Without effect where they are not patched."""
    with _lock:
        _set(None)


@contextlib.contextmanager
def patched(
    *,
    strict: bool = False,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
    indexing: bool = False,
) -> Iterator[None]:
    """:func:`patch` for the time of a ``with`` block, in every thread; then all is as it was before it."""
    before = options()
    patch(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when, indexing=indexing)
    try:
        yield
    finally:
        set_options(before)


def is_patched() -> bool:
    return _options is not None


def options() -> Optional[_Options]:
    return _options


def set_options(options: Optional[_Options]) -> None:
    with _lock:
        _set(options)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def _set(options: Optional[_Options]) -> None:
    global _options, _uses_autograd_cache
    if options == _options:
        return
    if options is not None and _options is None:
        setattr(F, _HOOK, _call)
        for function in _FUNCTIONS.values():
            _original[function] = function.__code__
            function.__code__ = _code_of_call(function)
        # Its keys are graphs that call torch's functions: what they mean is not the same now.
        _uses_autograd_cache = torch._functorch.config.enable_autograd_cache
        torch._functorch.config.enable_autograd_cache = False
    elif options is None:
        for function, code in _original.items():
            function.__code__ = code
        _original.clear()
        delattr(F, _HOOK)
        torch._functorch.config.enable_autograd_cache = _uses_autograd_cache
    indexing = options is not None and options.indexing
    if indexing and not _attributes:
        for owner, name, function in [*_indexing.replacements(_index_flags)]:
            _attributes.append((owner, name, vars(owner).get(name, _INHERITED), function))
            setattr(owner, name, function)
        _indexing.stay_no_sequences()
    elif not indexing and _attributes:
        _indexing.stay_no_sequences()
        while _attributes:
            owner, name, was, ours = _attributes.pop()
            if vars(owner).get(name) is not ours:  # somebody else has put another in its place
                continue
            if was is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, was)
    _options = options
    torch._dynamo.reset()


def _index_flags() -> Optional[int]:
    options = _options
    if options is None or not options.indexing:  # of a name that was imported while it was
        return None
    return explicit_flags(None, None, options.policy["on_violation"], options.policy["when"])


def _code_of_call(function: Any) -> CodeType:
    """Code with the function's parameters (the defaults are the function's) that calls `_call`.

    It says it is from where the function is: that is where inspect and TorchScript read the source.
    """
    names = list(inspect.signature(function).parameters)
    call = ", ".join([repr(function.__name__), *(f"{name}={name}" for name in names)])
    scope: dict[str, Any] = {}
    exec(f"def {function.__name__}({', '.join(names)}):\n    return {_HOOK}({call})", scope)
    code: CodeType = scope[function.__name__].__code__
    was = function.__code__
    return code.replace(co_filename=was.co_filename, co_firstlineno=was.co_firstlineno)


def _call(name: str, **arguments: Any) -> Tensor:
    if name in _indexing.EMBEDDINGS:
        return _embedding(name, arguments)
    ours, names, has_extra = _LOSSES[name]
    tensors = tuple(arguments[tensor] for tensor in names if arguments[tensor] is not None)
    if has_torch_function(tensors):
        first, second, *others = arguments
        positional = arguments[first], arguments[second]  # as torch hands them on
        overridden: Tensor = handle_torch_function(
            _FUNCTIONS[name], tensors, *positional, **{other: arguments[other] for other in others}
        )
        return overridden
    options = _options
    if options is None:  # another thread has undone it
        return functional.NATIVE[name](**arguments)
    if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        _indexing.observe(name, arguments)
        if not options.strict and has_extra(arguments):
            return _warned(name, ours, arguments, options)
    return ours(**arguments, strict=options.strict, **options.policy)


def _embedding(name: str, arguments: dict[str, Any]) -> Tensor:
    indices, weight = (arguments[key] for key in ("input", "weight"))
    flags = _index_flags()
    if flags is not None and isinstance(weight, Tensor) and not has_torch_function((indices, weight)):
        if weight.dim() == 2:
            arguments["input"] = _indexing.checked(name, indices, weight, 0, flags)
    return _EMBEDDING[name](**arguments)


def _warned(name: str, ours: Callable[..., Tensor], arguments: dict[str, Any], options: _Options) -> Tensor:
    """What native does not check: warned of, and computed as native does, with what is outside."""
    if options.policy["on_violation"] != "skip":
        with torch.no_grad(), _violations.only_warning():
            ours(**arguments, strict=True, on_violation="warn", when="immediately")
    if options.policy["check_finite"]:
        return ours(**arguments, strict=False, **options.policy)
    return functional.NATIVE[name](**arguments)
