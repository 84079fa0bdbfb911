"""Where labels come from: tensors, arrays, sequences, datasets and loaders. Files are read in `_audit_files`."""

from __future__ import annotations

import collections
import importlib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ._audit_count import PIECE, Chunk

#: Where the label is in an item or batch: its key or position, or a function of it.
Label = Union[str, int, Callable[[Any], Any], None]

KEYS = ("labels", "label", "target", "targets", "y", "mask")
_NUMBERS = 1 << 16  # Python numbers made a tensor at once
_BATCH = 64  # items that a worker of ours reads at once


@dataclass
class Batches:
    """Of a loader."""

    count: int = 0
    first: int = 0  # samples in it
    last: int = 0

    def note(self, size: int) -> None:
        self.count += 1
        self.first = self.first if self.count > 1 else size
        self.last = size


@dataclass
class Source:
    name: str
    chunks: Iterator[Chunk]
    total: Optional[int] = None  #: samples, where that is known beforehand
    unit: str = "sample"  #: what the ids are: "sample", "row", "file", or "position" in reading order
    dataset: Any = None  #: map-style, whose items the samples are
    ids: Optional[list[Any]] = None  #: dataset indices in reading order; None if they are 0, 1, 2, ...
    batches: Optional[Batches] = None
    as_is: bool = True  #: whether the dtype is the one that a loss would be given


def optional(package: str, purpose: str, install: Optional[str] = None) -> Any:
    """An optional dependency. Raises ImportError that says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = install or package.partition(".")[0]
        raise ImportError(f"{purpose} needs {name}: pip install {name}") from error


def open_source(data: Any, label: Label = None, batched: Optional[bool] = None, num_workers: int = 0) -> Source:
    """Raises TypeError for what holds no labels; what is wrong within comes to light when it is read."""
    if isinstance(data, (str, os.PathLike)):
        from . import _audit_files

        return _audit_files.open_path(os.fspath(data), label)
    if isinstance(data, DataLoader):
        return _from_loader(data, label, batched is not False)
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # a data frame
        names = [str(name) for name in data.columns]
        column = data[data.columns[names.index(choose(names, label, "the data frame"))]]
        return _from_array(column.to_numpy(), _name_of(data), "row")
    if hasattr(data, "to_numpy"):  # a series
        return _from_array(data.to_numpy(), _name_of(data), "row")
    if isinstance(data, Tensor) or _is_array(data):
        return _from_array(data)
    if isinstance(data, Mapping):
        return open_source(find_label(data, label))
    if isinstance(data, tuple) and _are_columns(data):
        return open_source(find_label(data, label))
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        if not hasattr(data, "__iter__"):
            raise TypeError(
                f"no labels in {data!r}: wanted a dataset, a loader, a tensor, an array, a sequence or iterable of "
                "labels or samples, or the path of a file"
            )
        if num_workers:
            raise ValueError(f"num_workers is for map-style datasets, not {_name_of(data)}: pass a DataLoader")
        return _from_iterable(data, label, bool(batched))
    if batched:
        return _from_iterable(data, label, True)
    return _from_dataset(data, label, num_workers)


# ---- the label in an item or batch


def find_label(item: Any, label: Label, batched: bool = False) -> Any:
    """What `label` names; by default the last element of a tuple or list, or the first of KEYS in a mapping.

    Raises LookupError if it is not there.
    """
    if callable(label):
        return label(item)
    if isinstance(label, str) and label in getattr(item, "_fields", ()):
        return getattr(item, label)
    if isinstance(item, (tuple, list)) and not isinstance(label, int):
        if not item:
            raise LookupError(f"no label in an empty {type(item).__name__}")
        item = item[-1]
        if batched and isinstance(item, (tuple, list)) and item and isinstance(item[0], Mapping):
            return [find_label(each, label) for each in item]
    if isinstance(item, Mapping) and label is None:
        for key in KEYS:
            if key in item:
                return item[key]
        raise LookupError(f"no label among the keys {_listed(item)}: pass label=, the key that holds it")
    if label is None:
        return item
    try:
        found = item[label]
    except (LookupError, TypeError, ValueError):
        what = f"the keys are {_listed(item)}" if isinstance(item, Mapping) else f"it is a {type(item).__name__}"
        raise LookupError(f"no label {label!r}: {what}") from None
    return find_label(found, None, batched) if isinstance(found, Mapping) else found


def choose(names: Sequence[str], label: Label, what: str) -> str:
    """The column, or array of an archive, that holds the labels. Raises LookupError if that cannot be told."""
    if callable(label):
        raise TypeError(f"label must be the name or number of a column of {what}, not a function")
    if label is None:
        for key in (*KEYS, *(names if len(names) == 1 else ())):
            if key in names:
                return key
        raise LookupError(f"which column of {what} holds the labels? It has {_listed(names)}: pass label=")
    if str(label) in names:
        return str(label)
    if isinstance(label, int) and -len(names) <= label < len(names):
        return names[label]
    raise LookupError(f"no column {label!r} in {what}: it has {_listed(names)}")


def to_tensor(label: Any) -> Tensor:
    """A number, array, image, or sequence of numbers as a tensor. Raises TypeError for anything else."""
    if isinstance(label, Tensor):
        tensor = label.detach().as_subclass(Tensor)
        if tensor.is_complex() or tensor.is_quantized:
            raise TypeError(f"labels cannot be {tensor.dtype}")
        return tensor
    if isinstance(label, (list, tuple)):
        if all(isinstance(each, numbers.Real) for each in label):
            return _from_numbers(label)
        kinds = sorted({type(each).__name__ for each in label})
        raise TypeError(f"the label is a {type(label).__name__} of {', '.join(kinds)}: pass label=, which picks one")
    if isinstance(label, (bool, int, float)):
        return _from_numbers(label)
    if _is_array(label) or hasattr(label, "__array_interface__"):
        return _from_numpy(label)
    shown = repr(label)
    hint = ""
    if isinstance(label, (str, bytes)):
        hint = "; number the names, as in {name: i for i, name in enumerate(sorted(names))}"
    raise TypeError(
        f"the label is a {type(label).__name__}, {shown if len(shown) < 80 else shown[:77] + '...'}: "
        f"wanted a number, tensor or array{hint}"
    )


def _from_numbers(label: Any) -> Tensor:
    try:
        tensor = torch.tensor(label)
        # Python's floats are doubles, and default_collate makes them so.
        return torch.tensor(label, dtype=torch.float64) if tensor.is_floating_point() else tensor
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"the label {str(label)[:80]} does not fit int64, the dtype of class indices") from error


def _from_numpy(array: Any) -> Tensor:
    np = optional("numpy", "reading arrays")
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        text = "; number the names first: np.unique(names, return_inverse=True)" if array.dtype.kind in "USO" else ""
        raise TypeError(f"labels cannot be of the dtype {array.dtype}{text}")
    dtype = array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else np.float64
    # torch.from_numpy takes neither a foreign byte order nor negative strides, and warns of what cannot be written to.
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__") and hasattr(data, "dtype") and hasattr(data, "shape")


def _are_columns(data: tuple[Any, ...]) -> bool:
    """Whether these are tensors with as many rows each, like those of a TensorDataset."""
    return (
        len(data) > 1
        and all((isinstance(each, Tensor) or _is_array(each)) and len(each.shape) > 0 for each in data)
        and len({each.shape[0] for each in data}) == 1
    )


def _listed(names: Iterable[Any]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def _name_of(data: Any) -> str:
    return getattr(data, "__name__", None) or type(data).__name__


def located(error: Exception, where: str) -> Exception:
    """The same error, telling where; what a dataset raises itself becomes a RuntimeError."""
    if type(error) in (TypeError, LookupError, ValueError):
        return type(error)(f"{where}: {error}")
    return RuntimeError(f"{where} could not be read: {type(error).__name__}: {error}")


# ---- chunks


def gather(parts: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same labels in fewer chunks: neighbours of one dtype and shape are made one."""
    held: list[Chunk] = []
    size = 0
    for part in parts:
        labels = part.labels
        if held and (labels.shape[1:] != held[0].labels.shape[1:] or labels.dtype != held[0].labels.dtype):
            yield _join(held)
            held, size = [], 0
        held.append(part)
        size += labels.numel() + 16  # many samples without a label are to be yielded too
        if size >= PIECE // 4:
            yield _join(held)
            held, size = [], 0
    if held:
        yield _join(held)


def _join(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(torch.cat([c.labels.cpu() for c in chunks]), [sample for c in chunks for sample in c.ids])


def array_chunks(array: Any) -> Iterator[Chunk]:
    """Rows of a tensor, an array or a memory map: no more of it in memory at once than a few of PIECE elements."""
    if not len(array.shape):
        yield Chunk(to_tensor(array).reshape(1), range(1))
        return
    if not isinstance(array, Tensor) and array.dtype.kind == "O":
        yield from gather(item_chunks(enumerate(array), None, "row"))
        return
    step = max(1, PIECE // max(math.prod(array.shape[1:]), 1))
    for row in range(0, array.shape[0], step):
        labels = to_tensor(array[row : row + step])
        yield Chunk(labels, range(row, row + len(labels)))


def item_chunks(items: Iterable[tuple[Any, Any]], label: Label, noun: str) -> Iterator[Chunk]:
    """Pairs of an id and an item."""
    for index, item in items:
        try:
            labels = to_tensor(find_label(item, label))
        except Exception as error:
            raise located(error, f"{noun} {index}") from error
        yield Chunk(labels.unsqueeze(0), (index,))


# ---- sources


def _from_array(array: Any, name: str = "", unit: str = "sample") -> Source:
    total = array.shape[0] if len(array.shape) else 1
    if not name:
        shape = "x".join(map(str, array.shape)) or "one number"
        name = f"a {type(array).__name__} of {shape}"
    return Source(name, array_chunks(array), total, unit)


def _from_dataset(data: Any, label: Label, num_workers: int) -> Source:
    name = f"{_name_of(data)} of {len(data)}"
    at_once = _labels_at_once(data, label)
    if at_once is not None:
        chunks = array_chunks(at_once)
    elif num_workers:
        return _in_workers(data, label, num_workers, name)
    else:
        chunks = gather(_sequence_chunks(data, label))
    return Source(name, chunks, len(data), dataset=data)


def _labels_at_once(data: Any, label: Label) -> Optional[Tensor]:
    """The labels of all items, where they are at hand."""
    if callable(label) or isinstance(label, str):
        return None
    if type(data) is TensorDataset and -len(data.tensors) <= (position := -1 if label is None else label) < len(
        data.tensors
    ):
        return data.tensors[position]
    if type(data) is Subset:
        inner = _labels_at_once(data.dataset, label)
        return None if inner is None else inner[torch.as_tensor(data.indices, dtype=torch.int64)]
    return None


def _sequence_chunks(data: Any, label: Label) -> Iterator[Chunk]:
    if isinstance(data, (list, tuple, range)) and label is None:
        for begin in range(0, len(data), _NUMBERS):
            part = data[begin : begin + _NUMBERS]
            ids = range(begin, begin + len(part))
            if all(type(each) is int for each in part):
                yield Chunk(_from_numbers(list(part)), ids)
            else:
                yield from item_chunks(zip(ids, part), None, "item")
        return
    yield from item_chunks(_items(data), label, "item")


def _items(data: Any) -> Iterator[tuple[int, Any]]:
    for index in range(len(data)):
        try:
            item = data[index]
        except Exception as error:
            raise located(error, f"item {index}") from error
        yield index, item


class _LabelsOnly:
    """The collate_fn of our own workers: images stay where they are."""

    def __init__(self, label: Label) -> None:
        self.label = label

    def __call__(self, items: list[Any]) -> list[Tensor]:
        return [to_tensor(find_label(item, self.label)).cpu() for item in items]


def _in_workers(data: Any, label: Label, num_workers: int, name: str) -> Source:
    loader = DataLoader(data, _BATCH, num_workers=num_workers, collate_fn=_LabelsOnly(label))
    tensors = (tensor for batch in loader for tensor in batch)
    return Source(name, gather(Chunk(t.unsqueeze(0), (i,)) for i, t in enumerate(tensors)), len(data), dataset=data)


def _from_iterable(data: Iterable[Any], label: Label, batched: bool) -> Source:
    total = None if batched else _length(data)
    if batched:
        batches = Batches()
        chunks = gather(_batch_chunks(data, label, batches, None))
        return Source(_name_of(data), chunks, total, "position", batches=batches)
    return Source(_name_of(data), gather(item_chunks(enumerate(data), label, "item")), total, "position")


def _from_loader(loader: DataLoader[Any], label: Label, batched: bool) -> Source:
    name = f"{_name_of(loader)} over {_name_of(loader.dataset)}"
    if not batched:
        return _from_iterable(loader, label, False)
    batches = Batches()
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
        or not hasattr(loader.dataset, "__len__")
    ):
        chunks = gather(_batch_chunks(loader, label, batches, None))
        return Source(name, chunks, unit="position", batches=batches)
    sampled: collections.deque[list[Any]] = collections.deque()
    picked = not callable(label)  # workers send the labels alone; a function may not reach them
    ours: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=_Recording(loader.batch_sampler, sampled),
        num_workers=loader.num_workers,
        collate_fn=_Picking(loader.collate_fn, label) if picked else loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    source = Source(name, iter(()), _length(loader.sampler), dataset=loader.dataset, ids=[], batches=batches)
    chunks = _batch_chunks(ours, (lambda found: found) if picked else label, batches, sampled, source)
    source.chunks = _restoring(loader.generator, gather(chunks))
    return source


def _length(samples: Any) -> Optional[int]:
    try:
        return len(samples)
    except (TypeError, NotImplementedError):  # a sampler, or IterableDataset, that does not know
        return None


class _Recording:
    """A batch sampler that notes what it sampled."""

    def __init__(self, sampler: Iterable[list[Any]], sampled: collections.deque[list[Any]]) -> None:
        self.sampler, self.sampled = sampler, sampled

    def __iter__(self) -> Iterator[list[Any]]:
        for indices in self.sampler:
            self.sampled.append(list(indices))
            yield indices


class _Picking:
    def __init__(self, collate: Callable[[Any], Any], label: Label) -> None:
        self.collate, self.label = collate, label

    def __call__(self, items: Any) -> Any:
        return find_label(self.collate(items), self.label, batched=True)


def _batch_chunks(
    loader: Iterable[Any],
    label: Label,
    batches: Batches,
    sampled: Optional[collections.deque[list[Any]]],
    source: Optional[Source] = None,
) -> Iterator[Chunk]:
    position = 0
    for number, batch in enumerate(loader):
        try:
            parts = _samples(find_label(batch, label, batched=True))
        except Exception as error:
            raise located(error, f"batch {number}") from error
        size = sum(len(part) for part in parts)
        ids: Sequence[Any] = range(position, position + size)
        indices = sampled.popleft() if sampled is not None else None
        if _are_of_tasks(parts, len(indices) if indices is not None else _length_of_first(batch)):
            raise LookupError(f"batch {number}: the label is a list of {len(parts)} tensors: pass label=, picking one")
        if indices is not None and source is not None and source.ids is not None:
            if len(indices) == size:
                ids = indices
            else:  # the collate_fn left out samples, or added some: they cannot be traced back
                source.dataset, source.unit = None, "position"
            source.ids += ids
        batches.note(size)
        position += size
        begin = 0
        for part in parts:
            yield Chunk(part, ids[begin : begin + len(part)])
            begin += len(part)


def _samples(label: Any) -> list[Tensor]:
    """Of a batch: one tensor (samples, ...), or one (1, ...) for each sample of a list."""
    if isinstance(label, (tuple, list)) and not all(isinstance(each, numbers.Real) for each in label):
        return [to_tensor(each).unsqueeze(0) for each in label]
    labels = to_tensor(label)
    return [labels if labels.dim() else labels.unsqueeze(0)]


def _are_of_tasks(parts: list[Tensor], batch_size: Optional[int]) -> bool:
    """Whether a list of labels has one tensor for each of several tasks, and not one for each sample."""
    return 1 < len(parts) != batch_size and all(p.dim() > 1 and p.shape[1] == batch_size for p in parts)


def _length_of_first(batch: Any) -> Optional[int]:
    return len(batch[0]) if isinstance(batch, (tuple, list)) and hasattr(batch[0], "__len__") else None


def _restoring(generator: Optional[torch.Generator], chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Leaves a loader's own generator as it was: the audit must not change how training shuffles."""
    state = None if generator is None else generator.get_state()
    try:
        yield from chunks
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)
