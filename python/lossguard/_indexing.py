"""``patch(indexing=True)``: the other operations whose bad index ends in a device-side assert.

Each index is checked by the op `check_index`, in NLL's kernel, before torch's own kernel has it; that then gets one
that is valid, so that the device lives on, and the report comes as those of the losses do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from . import _C, functional
from ._ops import ops
from ._policy import WRAPS

_NUMBERS = {name: number for number, name in enumerate(_C.operations)}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Signature(NamedTuple):
    """Where a function of (input, ...) has its dimension and its index: position and keyword."""

    operation: str
    dim: Optional[tuple[int, str]]
    indices: tuple[int, str]
    wraps: bool = False  # whether a negative index counts from the end


_Flags = Callable[[], Optional[int]]
_ALONG = ((1, "dim"), (2, "index"))
# Not take_along_dim: torch takes its indices modulo the size.
_SIGNATURES = {
    "gather": _Signature("gather", *_ALONG),
    "scatter": _Signature("scatter", *_ALONG),
    "scatter_add": _Signature("scatter", *_ALONG),
    "scatter_reduce": _Signature("scatter", *_ALONG),
    "index_select": _Signature("index_select", *_ALONG),
    "index_add": _Signature("index_add", *_ALONG),
    "index_copy": _Signature("index_copy", *_ALONG),
    "index_fill": _Signature("index_fill", *_ALONG, True),
    "take": _Signature("take", None, (1, "index"), True),
}
#: What is told of every call that is not being traced: (name of the operation or of the loss, its arguments).
observers: list[Callable[[str, dict[str, Any]], None]] = []


def observe(name: str, arguments: dict[str, Any]) -> None:
    for observer in tuple(observers):
        observer(name, arguments)


def checked(
    operation: str, index: Any, source: Tensor, dim: Optional[int], flags: int, wraps: bool = False
) -> Any:
    """`index`, or a copy in which what is outside of `source` along `dim` (None: of its elements) has become valid.

    It raises, now or later, what `flags` says of what is outside.
    """
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS or not index.numel():
        return index
    if has_torch_function((index, source)) or torch._C._are_functorch_transforms_active():
        return index
    if index.device != source.device or index.device.type not in functional.DEVICES or not source.numel():
        return index
    if index.layout != torch.strided or source.layout != torch.strided or source.is_quantized:
        return index
    size = source.numel() if dim is None else source.size(dim) if source.dim() else 1
    dim = -1 if dim is None else dim % max(source.dim(), 1)
    given = index.detach().to(torch.int64)
    if wraps:
        flags |= WRAPS
        given = torch.where(given < 0, given + size, given)
    if not torch.compiler.is_compiling():
        observe(operation, {"input": source, "index": index})
    copy = ops.check_index(given, source.detach(), dim, _NUMBERS[operation], flags, functional.site())
    return copy.clamp(0, size - 1).to(index.dtype)


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    position, name = place
    return args[position] if len(args) > position else kwargs.get(name, default)


def _with_argument(
    place: tuple[int, str], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position, name = place
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _along_dim(original: Callable[..., Any], signature: _Signature, flags: _Flags) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("input")
        index = _argument(signature.indices, args, kwargs)
        if (todo := flags()) is None or has_torch_function((source, index)):
            return original(*args, **kwargs)
        dim = None if signature.dim is None else _argument(signature.dim, args, kwargs)
        if isinstance(source, Tensor) and isinstance(index, Tensor) and (signature.dim is None or isinstance(dim, int)):
            if dim is None or -source.dim() <= dim < max(source.dim(), 1):  # or torch says what is wrong
                index = checked(signature.operation, index, source, dim, todo, signature.wraps)
                args, kwargs = _with_argument(signature.indices, index, args, kwargs)
        return original(*args, **kwargs)

    return function


def _checked_key(source: Tensor, key: Any, flags: int) -> Any:
    """The key of ``source[key]`` with its integer tensors checked along the dimensions that they index.

    As it is where it has something else, like a list or an array, which may take any number of dimensions.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is None or k is Ellipsis or isinstance(k, (Tensor, slice, int)) for k in keys):
        return key
    if not any(isinstance(k, Tensor) and k.dtype in _INTEGERS[:-1] and k.dim() for k in keys):
        return key
    takes = [k.dim() if isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8) else 1 for k in keys]
    fixed = sum(n for n, k in zip(takes, keys) if k is not None and k is not Ellipsis and not isinstance(k, bool))
    found, dim = [], 0
    for n, k in zip(takes, keys):
        if k is Ellipsis:
            dim += source.dim() - fixed
        elif k is not None and not isinstance(k, bool):
            if isinstance(k, Tensor) and k.dtype in _INTEGERS[:-1] and dim < source.dim():
                k = checked("indexing", k, source, dim, flags, wraps=True)
            dim += n
        found.append(k)
    return tuple(found) if isinstance(key, tuple) else found[0]


def _by_key(original: Callable[..., Any], flags: _Flags) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(self: Tensor, key: Any, *value: Any) -> Any:
        keys = key if type(key) is tuple else (key,)
        if any(isinstance(k, Tensor) for k in keys) and not has_torch_function((self, *keys)):
            if (todo := flags()) is not None:
                key = _checked_key(self, key, todo)
        return original(self, key, *value)

    return function


def _index_put(original: Callable[..., Any], flags: _Flags) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("input")
        indices = _argument((1, "indices"), args, kwargs)
        if isinstance(source, Tensor) and isinstance(indices, (tuple, list)) and (todo := flags()) is not None:
            if not has_torch_function((source, *indices)):
                key = _checked_key(source, tuple(slice(None) if k is None else k for k in indices), todo)
                indices = tuple(None if isinstance(k, slice) else k for k in key)
                args, kwargs = _with_argument((1, "indices"), indices, args, kwargs)
        return original(*args, **kwargs)

    return function


def _one_hot(original: Callable[..., Any], flags: _Flags) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        index = args[0] if args else kwargs.get("input")
        num_classes = _argument((1, "num_classes"), args, kwargs, -1)
        if isinstance(index, Tensor) and isinstance(num_classes, int) and num_classes > 0:
            if (todo := flags()) is not None and not has_torch_function((index,)):
                classes = torch.empty(1, device=index.device).expand(num_classes)
                args, kwargs = _with_argument(
                    (0, "input"), checked("one_hot", index, classes, 0, todo), args, kwargs
                )
        return original(*args, **kwargs)

    return function


def stay_no_sequences() -> None:
    """To be called after `__getitem__` or `__setitem__` of tensors was set, and before it is deleted.

    Python takes a class with a `__getitem__` of its own for a sequence, too, which tensors are not: C code would ask a
    tensor without dimensions for its length. Deleting does not undo that.
    """
    kinds: list[Any] = [Tensor]
    while kinds:
        kind = kinds.pop()
        inherits = [getattr(kind, name) is getattr(Tensor, name) for name in ("__getitem__", "__setitem__")]
        _C.clear_sequence_items(kind, *inherits)
        kinds += kind.__subclasses__()


def replacements(flags: _Flags) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, what takes the place of its attribute); `flags()` says what is done, or None: nothing any more."""
    for name, signature in _SIGNATURES.items():
        for owner, attribute in ((torch, name), (Tensor, name), (Tensor, f"{name}_")):
            original = getattr(owner, attribute, None)
            if original is not None:
                yield owner, attribute, _along_dim(original, signature, flags)
    for name in ("__getitem__", "__setitem__"):
        yield Tensor, name, _by_key(getattr(Tensor, name), flags)
    for owner in (torch, Tensor):
        for name in ("index_put", "index_put_"):
            yield owner, name, _index_put(getattr(owner, name), flags)
    for owner in (F, torch._C._nn):
        yield owner, "one_hot", _one_hot(owner.one_hot, flags)


#: Python functions of torch.nn.functional, whose `input` holds indices into the rows of `weight`.
EMBEDDINGS = ("embedding", "embedding_bag")
