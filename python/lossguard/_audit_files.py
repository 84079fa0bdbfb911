"""Labels in files: arrays, tables, and folders of masks. No more of a file in memory at once than its format needs."""

from __future__ import annotations

import csv
import itertools
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ._audit_count import Chunk
from ._audit_read import (
    Label,
    Source,
    array_chunks,
    choose,
    gather,
    item_chunks,
    located,
    open_source,
    optional,
    to_tensor,
)

_ROWS = 1 << 16
_MISSING = {"", "na", "nan", "n/a", "null", "none"}
_IMAGES = {".png", ".bmp", ".gif", ".tif", ".tiff"}
_TABLES = {".csv": ",", ".tsv": "\t", ".txt": ","}


def open_path(name: str, label: Label) -> Source:
    """Raises FileNotFoundError, and ValueError for a file of a kind that is not read here."""
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {name}")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in _IMAGES:
        return _masks(path)
    if suffix in (".npy", ".npz"):
        source = _numpy(path, label)
    elif suffix in (".pt", ".pth"):
        source = _torch(path, label)
    elif suffix in _TABLES:
        source = _csv(path, label, _TABLES[suffix])
    elif suffix in (".parquet", ".pq"):
        source = _parquet(path, label)
    else:
        raise ValueError(
            f"{name}: a file of this kind is not read. Wanted .npy, .npz, .pt, .csv, .tsv, .txt or .parquet, "
            f"or a folder of masks ({', '.join(sorted(_IMAGES))})"
        )
    source.name = name
    source.chunks = _naming(source.chunks, name)
    return source


def _naming(chunks: Iterator[Chunk], name: str) -> Iterator[Chunk]:
    """Errors in a file's content name the file."""
    try:
        yield from chunks
    except (TypeError, ValueError, LookupError) as error:
        raise located(error, name) from error


# ---- arrays


def _numpy(path: Path, label: Label) -> Source:
    np = optional("numpy", "reading .npy and .npz files")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix.lower() == ".npz":
            with found:
                found = found[choose(found.files, label, str(path))]
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    if found.dtype.names:
        found = found[choose(found.dtype.names, label, str(path))]
    return Source("", array_chunks(found), found.shape[0] if found.ndim else 1)


def _torch(path: Path, label: Label) -> Source:
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)  # written in the format before torch 1.6
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} could not be read as tensors alone: {why} "
            "If you trust the file, load it yourself and give lossguard.audit what is in it."
        ) from error
    try:
        return open_source(found, label)
    except (TypeError, LookupError) as error:
        raise located(error, str(path)) from error


# ---- tables


def _csv(path: Path, label: Label, delimiter: str) -> Source:
    with open(path, newline="", encoding="utf-8-sig") as file:
        first = file.readline()
    if delimiter == "," and "," not in first:
        delimiter = next((d for d in (";", "\t") if d in first), delimiter)
    names = next(csv.reader([first], delimiter=delimiter), [])
    has_header = not all(_is_number(cell) for cell in names)
    names = [name.strip() for name in names] if has_header else [str(i) for i in range(len(names))]
    if not names:
        return Source("", iter(()), 0, "row", as_is=False)
    column = names.index(choose(names, label, str(path)))
    return Source("", gather(_csv_chunks(path, delimiter, column, has_header)), None, "row", as_is=False)


def _csv_chunks(path: Path, delimiter: str, column: int, has_header: bool) -> Iterator[Chunk]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = filter(None, csv.reader(file, delimiter=delimiter))
        if has_header:
            next(rows)
        for begin in itertools.count(0, _ROWS):
            cells: list[str] = []
            for row in itertools.islice(rows, _ROWS):
                if len(row) <= column:
                    raise ValueError(f"row {begin + len(cells)} ends before column {column}, where labels are")
                cells.append(row[column])
            if not cells:
                return
            try:
                tensor = torch.tensor([int(cell) for cell in cells], dtype=torch.int64)
            except (ValueError, OverflowError, RuntimeError):  # one by one: what is missing apart from what is not
                yield from item_chunks(enumerate(map(_cell, cells), begin), None, "row")
            else:
                yield _rows(tensor, begin)


def _cell(text: str) -> Any:
    """Text stays text, which is refused with its row."""
    try:
        return int(text)
    except ValueError:
        pass
    if text.strip().lower() in _MISSING:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return text


def _is_number(text: str) -> bool:
    return not isinstance(_cell(text), str)


def _rows(labels: torch.Tensor, begin: int) -> Chunk:
    return Chunk(labels, range(begin, begin + len(labels)))


def _parquet(path: Path, label: Label) -> Source:
    parquet = optional("pyarrow.parquet", "reading Parquet files")
    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except Exception as error:  # of pyarrow's own
        raise ValueError(f"{path} could not be read: {error}") from error
    names = file.schema_arrow.names
    column = choose(names, label, str(path))
    return Source("", gather(_parquet_chunks(file, column)), file.metadata.num_rows, "row", as_is=False)


def _parquet_chunks(file: Any, column: str) -> Iterator[Chunk]:
    begin = 0
    with file:
        for batch in file.iter_batches(_ROWS, columns=[column]):
            values = batch.column(0)
            if values.null_count or "list" in str(values.type):
                cells = (math.nan if cell is None else cell for cell in values.to_pylist())
                yield from item_chunks(enumerate(cells, begin), lambda cell: cell, "row")  # also of lists the whole
            else:
                yield _rows(to_tensor(values.to_numpy(zero_copy_only=False)), begin)
            begin += len(values)


# ---- masks


def _masks(path: Path) -> Source:
    """Of a folder, and of those within it, in the order of their names; or of one file."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _IMAGES and p.is_file())
        if not files:
            raise ValueError(f"no masks in {path}: wanted files of {', '.join(sorted(_IMAGES))}")
    else:
        files, path = [path], path.parent
    image = optional("PIL.Image", "reading masks", "pillow")
    optional("numpy", "reading masks")
    name = f"{path}{os.sep} ({len(files)} masks)" if len(files) > 1 else str(files[0])
    masks = ((str(file.relative_to(path)), _mask(image, file)) for file in files)
    return Source(name, gather(item_chunks(masks, None, "file")), len(files), "file", as_is=False)


def _mask(image: Any, file: Path) -> Any:
    try:
        with image.open(file) as mask:
            mask.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file} could not be read: {error}") from error
    if len(mask.getbands()) != 1:  # a palette has one band, whose numbers are the labels
        raise ValueError(
            f"{file} is a colour image ({mask.mode}); a mask has one number a pixel: map its colours to class ids"
        )
    return mask
