"""The report against a plain-Python reference, and the exception that carries it: type, text, pickling, call site."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import importlib.util
import itertools
import json
import linecache
import math
import multiprocessing
import pickle
import re
import sys
import textwrap
import threading
import warnings

import lossguard
import lossguard.functional as F
import pytest
import references as ref
import torch
import torch.nn.functional as native
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lossguard import _C, LossValidationError, NonFiniteError, TargetOutOfBoundsError, ValueOutOfRangeError

nan, inf = math.nan, math.inf
FUNCTIONS = {
    "BCELoss": F.binary_cross_entropy,
    "BCEWithLogitsLoss": F.binary_cross_entropy_with_logits,
    "NLLLoss": F.nll_loss,
    "CrossEntropyLoss": F.cross_entropy,
}


def error_of(function, *args, **kwargs) -> LossValidationError:
    with pytest.raises(LossValidationError) as caught:
        function(*args, **kwargs)
    return caught.value


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def sections_of(error: LossValidationError) -> list[dict]:
    return [dataclasses.asdict(section) for section in error.report.sections]


def same(got, want) -> bool:
    return repr(got) == repr(want)  # NaN included


# ---- against the reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BAD_LABELS = (-1, -100, 255, 256, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1)


@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate, Phase.shrink],
)
@given(
    loss=st.sampled_from((*FUNCTIONS, "CrossEntropyLoss, probabilities")),
    shape=st.sampled_from(
        [
            (5,),
            (1,),
            (0, 3),
            (6, 1),
            (9, 4),
            (70, 3),
            (3, 0),
            (2, 255),
            (2, 60),
            (2, 3, 7),
            (1, 2, 4, 5),
            (3, 2, 1, 3, 2),
        ]
    ),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(FLOATS),
    label_dtype=st.sampled_from((torch.int64, torch.uint8)),
    layout=st.sampled_from(ref.LAYOUTS),
    target_layout=st.sampled_from(ref.LAYOUTS),
    share=st.sampled_from((0.0, 0.02, 0.3, 1.0)),
    weighted=st.booleans(),
    strict=st.booleans(),
    check_finite=st.booleans(),
    ignore_index=st.sampled_from((-100, -1, 0, 255)),
)
def test_sections(
    loss, shape, seed, dtype, label_dtype, layout, target_layout, share, weighted, strict, check_finite, ignore_index
):
    g = torch.Generator().manual_seed(seed)
    name = loss.split(",")[0]
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    classes = shape[1] if len(shape) > 1 else shape[0]

    def sprinkle(t: torch.Tensor, values) -> torch.Tensor:
        chosen = torch.tensor(values, dtype=t.dtype)[torch.randint(len(values), t.shape, generator=g)]
        return torch.where(torch.rand(t.shape, generator=g) < share, chosen, t)

    beyond = ref.tolerance(dtype)
    wild = (nan, inf, -inf, -1.0, 2.0, 1 + beyond, 1 + 1.5 * beyond, -beyond, -1.5 * beyond, -0.0, 255.0)
    options = dict(strict=strict, check_finite=check_finite)
    input = sprinkle(
        torch.rand(shape, generator=g, dtype=torch.float64).to(dtype), wild if name == "BCELoss" else wild[:3]
    )
    if name in ("NLLLoss", "CrossEntropyLoss") and "probabilities" not in loss:
        target = torch.randint(max(classes, 1), rows, generator=g)
        values = [v % 256 if label_dtype == torch.uint8 else v for v in (*BAD_LABELS, classes, ignore_index)]
        target = sprinkle(target, values).to(label_dtype)
        options["ignore_index"] = ignore_index
        weight = torch.rand(classes, generator=g)
    else:
        target = sprinkle(torch.rand(shape, generator=g, dtype=torch.float64).to(dtype), wild)
        weight = torch.rand(shape if "BCE" in name else (classes,), generator=g)
    weight = (weight * (weight > 0.3)).to(dtype) if weighted else None
    input, target = ref.lay_out(input, layout), ref.lay_out(target, target_layout)

    want = ref.sections(name, input, target, weight, **options)
    if not want:
        FUNCTIONS[name](input, target, weight, **options)
        return
    for kernels in _C.cpu_kernels():
        before = _C.cpu_kernels_in_use()
        try:
            _C.choose_cpu_kernels(kernels)
            error = error_of(FUNCTIONS[name], input, target, weight, **options)
        finally:
            _C.choose_cpu_kernels(before)
        assert same(sections_of(error), want)
        report = error.report
        assert report.loss == name and report.device == "cpu" and report.rank is None
        assert report.shapes == {"input": tuple(input.shape), "target": tuple(target.shape)}
        assert report.dtypes == {
            n: str(t.dtype).removeprefix("torch.") for n, t in (("input", input), ("target", target))
        }
        assert report.num_classes == (classes if name in ("NLLLoss", "CrossEntropyLoss") else None)
        assert report.ignore_index == (None if target.is_floating_point() else ignore_index)
        first = report.sections[0]
        assert (report.kind, report.tensor, report.count) == (first.kind, first.tensor, first.count)
        assert report.indices is first.indices and report.values is first.values and report.counts is first.counts
        kinds = {"class_index": TargetOutOfBoundsError, "unit_interval": ValueOutOfRangeError, "finite": NonFiniteError}
        assert type(error) is kinds[first.kind]
        assert len(str(error)) < 4000


@pytest.mark.parametrize("label_dtype", (torch.int64, torch.uint8))
@pytest.mark.parametrize("layout", ref.LAYOUTS[:-1])
def test_indices_are_in_the_callers_shape(label_dtype, layout):
    target = torch.zeros(2, 4, 5, 6, dtype=label_dtype)
    target[0, 3, 4, 5] = target[1, 0, 0, 0] = 9
    report = error_of(F.cross_entropy, rand(2, 3, 4, 5, 6), ref.lay_out(target, layout)).report
    assert report.indices == [(0, 3, 4, 5), (1, 0, 0, 0)] and report.values == [9, 9]
    assert error_of(F.cross_entropy, rand(5), torch.tensor(7)).report.indices == [()]


def test_index_of_the_one_label_of_an_unbatched_input():
    report = error_of(F.cross_entropy, rand(5), torch.tensor([7])).report
    assert report.shapes["target"] == (1,) and report.indices == [(0,)]


def test_masked_logits_are_seen():
    """-inf is valid as a mask, and counts among the values seen."""
    section = error_of(
        F.cross_entropy, torch.tensor([[-inf, nan]]), torch.tensor([1]), check_finite=True
    ).report.sections[0]
    assert (section.seen, section.count, section.seen_min, section.seen_max) == (2, 1, -inf, -inf)


def test_a_row_of_nothing_but_masks_is_an_offence():
    logits = torch.tensor([[-inf, 0.0], [-inf, -inf]])
    report = error_of(F.cross_entropy, logits, torch.tensor([1, 1]), check_finite=True).report
    assert report.indices == [(1, 0), (1, 1)] and report.counts == {"-inf": 2}


def test_the_first_sixteen_in_index_order():
    target = torch.zeros(1000, dtype=torch.int64)
    bad = torch.arange(7, 1000, 9)
    target[bad] = 50 + torch.arange(len(bad))
    section = error_of(F.cross_entropy, rand(1000, 5), target).report.sections[0]
    assert section.count == len(bad) and section.seen == 1000
    assert section.indices == [(i,) for i in bad[:16].tolist()] and section.values == list(range(50, 66))
    assert (section.min, section.max, section.seen_min) == (50, 50 + len(bad) - 1, 0)


@pytest.mark.parametrize("count, more", [(16, None), (17, "... and 1 more"), (1000, "... and 984 more")])
def test_text_says_how_many_are_not_listed(count, more):
    text = str(
        error_of(F.cross_entropy, rand(1000, 5), torch.cat([torch.full((count,), 7), torch.zeros(1000 - count).long()]))
    )
    assert f"{count} of 1000 targets" in text and len(re.findall(r"^    \(\d+,\) +7$", text, re.M)) == min(count, 16)
    assert (more in text) if more else ("more" not in text)


def test_same_report_for_any_threads_layout_and_kernels():
    """Large enough for several blocks, with offenders in each."""
    g = torch.Generator().manual_seed(0)
    shape = (3, 5, 200, 211)
    logits = torch.randn(shape, generator=g)
    target = torch.randint(5, (3, 200, 211), generator=g)
    target[torch.rand(target.shape, generator=g) < 1e-3] = -7
    target[2, 199, 210], target[1, 0, 3] = 2**40, 255
    soft = torch.rand(shape, generator=g)
    soft[torch.rand(shape, generator=g) < 1e-4] = nan
    soft[2, 4, 199, 210] = 1e30
    probabilities = torch.where(torch.rand(shape, generator=g) < 1e-4, -0.5, torch.rand(shape, generator=g))
    want = [
        ref.sections("CrossEntropyLoss", logits, target),
        ref.sections("NLLLoss", logits, target),
        ref.sections("BCELoss", probabilities, soft),
        ref.sections("BCEWithLogitsLoss", logits, soft),
        ref.sections("CrossEntropyLoss", logits, soft),
    ]
    threads, kernels = torch.get_num_threads(), _C.cpu_kernels_in_use()
    texts = set()
    try:
        runs = itertools.product((1, 2, 3, 5), ("contiguous", "permuted", "channels_last", "strided"), _C.cpu_kernels())
        for n, layout, name in runs:
            torch.set_num_threads(n)
            _C.choose_cpu_kernels(name)
            x, t, y, p = (ref.lay_out(a, layout) for a in (logits, target, soft, probabilities))
            errors = [
                error_of(function, a, b)
                for function, a, b in (
                    (F.cross_entropy, x, t),
                    (F.nll_loss, x, t),
                    (F.binary_cross_entropy, p, y),
                    (F.binary_cross_entropy_with_logits, x, y),
                    (F.cross_entropy, x, y),
                )
            ]
            assert same([sections_of(error) for error in errors], want)
            texts.add("".join(map(str, errors)))
    finally:
        torch.set_num_threads(threads)
        _C.choose_cpu_kernels(kernels)
    assert len(texts) == 1


# ---- which checks run


def test_ignored_labels_are_never_reported():
    x, t = rand(4, 3), torch.tensor([0, 7, 2, 7])
    F.cross_entropy(x, t, ignore_index=7)
    F.nll_loss(x, t, ignore_index=7)
    x[1] = nan
    F.cross_entropy(x, t, ignore_index=7, check_finite=True)
    F.nll_loss(x, t, ignore_index=7, check_finite=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tolerance_of_the_checks_that_native_lacks(dtype):
    """4 ulp, and room for a bicubic resize (1 + 8e-7) and ten times 0.1; native's own checks stay exact."""
    one, zero = torch.tensor([1.0], dtype=dtype), torch.zeros(1, dtype=dtype)
    within = one + max(4 * torch.finfo(dtype).eps, 9e-7 if dtype in (torch.float32, torch.float64) else 0)
    beyond = one + max(5 * torch.finfo(dtype).eps, 1.1e-6 if dtype in (torch.float32, torch.float64) else 0)
    for value in (within, 1 - within):
        F.binary_cross_entropy_with_logits(zero, value)
        F.cross_entropy(torch.stack([zero, zero], 1), torch.stack([value, 1 - value], 1))
        assert error_of(F.binary_cross_entropy, zero, value).report.values == value.tolist()
    for value in (beyond, 1 - beyond):
        assert error_of(F.binary_cross_entropy_with_logits, zero, value).report.values == value.tolist()
        error = error_of(F.cross_entropy, torch.stack([zero, zero], 1), torch.stack([value, 0.5 * one], 1))
        assert error.report.values == value.tolist()
        F.binary_cross_entropy_with_logits(zero, value, strict=False)


def test_extra_checks_exempt_a_weight_of_zero():
    y = torch.tensor([-1.0, 1.0, -1.0])
    F.binary_cross_entropy_with_logits(torch.zeros(3), y, weight=torch.tensor([0.0, 1.0, 0.0]))
    F.cross_entropy(torch.zeros(1, 3), y[None], weight=torch.tensor([0.0, 1.0, 0.0]))
    error = error_of(F.binary_cross_entropy_with_logits, torch.zeros(3), y, weight=torch.tensor([0.0, 1.0, 2.0]))
    assert error.report.indices == [(2,)] and error.report.sections[0].seen == 2
    assert error_of(F.binary_cross_entropy, rand(3), y, weight=torch.tensor([0.0, 1.0, 0.0])).report.count == 2


# ---- several tensors, one exception


def test_input_and_target_both_wrong_are_one_exception():
    p, y = rand(20), rand(20, seed=1)
    p[3], p[5], y[4] = 1.25, nan, -2.0
    error = error_of(F.binary_cross_entropy, p, y)
    assert [s.tensor for s in error.report.sections] == ["target", "input"]
    assert [s.indices for s in error.report.sections] == [[(4,)], [(3,), (5,)]]
    text = str(error)
    assert text.startswith("all elements of target should be between 0 and 1. BCELoss: 1 of 20 elements of target is")
    assert "\n  also: 2 of 20 elements of input are outside [0, 1].\n" in text
    assert text.count("index") == 2 and text.index("(4,)") < text.index("also:") < text.index("(3,)") < text.index(
        "(5,)"
    )


@pytest.mark.parametrize(
    "call, kinds, type_",
    [
        (
            lambda: F.cross_entropy(torch.tensor([[0.0, nan], [0.0, 0.0]]), torch.tensor([0, 2]), check_finite=True),
            [("target", "class_index"), ("input", "finite")],
            TargetOutOfBoundsError,
        ),
        (
            lambda: F.cross_entropy(torch.tensor([[0.0, nan]]), torch.tensor([[2.0, 0.0]]), check_finite=True),
            [("target", "unit_interval"), ("input", "finite")],
            ValueOutOfRangeError,
        ),
        (
            lambda: F.nll_loss(torch.tensor([[inf, 0.0], [0.0, 0.0]]), torch.tensor([0, -1]), check_finite=True),
            [("target", "class_index"), ("input", "finite")],
            TargetOutOfBoundsError,
        ),
        (
            lambda: F.binary_cross_entropy_with_logits(torch.tensor([nan]), torch.tensor([3.0]), check_finite=True),
            [("target", "unit_interval"), ("input", "finite")],
            ValueOutOfRangeError,
        ),
        (
            lambda: F.binary_cross_entropy(torch.tensor([nan]), torch.tensor([1.0])),
            [("input", "unit_interval")],
            ValueOutOfRangeError,
        ),
        (
            lambda: F.binary_cross_entropy_with_logits(torch.tensor([nan]), torch.tensor([1.0]), check_finite=True),
            [("input", "finite")],
            NonFiniteError,
        ),
    ],
)
def test_precedence_target_then_input_then_finiteness(call, kinds, type_):
    error = error_of(call)
    assert [(s.tensor, s.kind) for s in error.report.sections] == kinds and type(error) is type_


# ---- type and first line


def test_exceptions_are_what_native_raises():
    assert issubclass(TargetOutOfBoundsError, IndexError) and issubclass(TargetOutOfBoundsError, LossValidationError)
    assert issubclass(ValueOutOfRangeError, RuntimeError) and issubclass(ValueOutOfRangeError, LossValidationError)
    assert issubclass(NonFiniteError, ValueOutOfRangeError)
    for type_ in (LossValidationError, TargetOutOfBoundsError, ValueOutOfRangeError, NonFiniteError):
        assert type_.__module__ == "lossguard" and getattr(lossguard, type_.__name__) is type_


@pytest.mark.parametrize(
    "name, args, kwargs",
    [
        ("cross_entropy", (rand(2, 5), torch.tensor([1, 97])), {}),
        ("cross_entropy", (rand(5), torch.tensor(-1)), {}),
        ("cross_entropy", (rand(2, 5, 3), torch.tensor([[0, 1, 5], [0, 0, 0]])), dict(reduction="none")),
        ("cross_entropy", (rand(1, 5, 1, 2), torch.tensor([[[0, -(2**63)]]])), dict(reduction="sum")),
        ("cross_entropy", (rand(2, 5), torch.tensor([1, 2**63 - 1])), dict(label_smoothing=0.1)),
        ("nll_loss", (rand(3, 5), torch.tensor([-100, -4, 1])), {}),
        ("nll_loss", (rand(3, 5), torch.tensor([0, 200, 1], dtype=torch.uint8)), {}),
        ("nll_loss", (rand(2, 0), torch.tensor([0, 0])), {}),
        ("binary_cross_entropy", (torch.tensor([0.5, 1.5]), torch.tensor([0.5, 0.5])), {}),
        ("binary_cross_entropy", (torch.tensor([0.5, nan]), torch.tensor([0.5, 0.5])), dict(reduction="none")),
        ("binary_cross_entropy", (torch.tensor([0.5, 0.5]), torch.tensor([-inf, 0.5])), dict(reduction="sum")),
    ],
)
def test_first_line_begins_with_natives_words(name, args, kwargs):
    with pytest.raises(Exception) as natively:
        getattr(native, name)(*args, **kwargs)
    error = error_of(getattr(F, name), *args, **kwargs)
    words = str(natively.value)
    assert len(words) > 20 and "\n" not in words and str(error).startswith(words)
    assert isinstance(error, natively.type)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda n: F.cross_entropy(rand(20, 5), torch.tensor([9] * n + [0] * (20 - n))),
            "{} of 20 targets {} outside [0, 5).",
        ),
        (
            lambda n: F.nll_loss(rand(20, 5), torch.tensor([9] * n + [0] * (20 - n))),
            "{} of 20 targets {} outside [0, 5).",
        ),
        (
            lambda n: F.binary_cross_entropy(torch.tensor([9.0] * n + [0.0] * (20 - n)), torch.zeros(20)),
            "{} of 20 elements of input {} outside [0, 1].",
        ),
        (
            lambda n: F.binary_cross_entropy_with_logits(
                torch.tensor([nan] * n + [0.0] * (20 - n)), torch.zeros(20), check_finite=True
            ),
            "{} of 20 elements of input {} not finite.",
        ),
    ],
)
def test_singular_and_plural(call, said):
    for n, verb in ((1, "is"), (2, "are"), (20, "are")):
        first = str(error_of(call, n)).splitlines()[0]
        assert first.endswith(said.format(n, verb)), first
    assert "smallest" not in str(error_of(call, 1))  # one value is its own extreme


def test_the_whole_text():
    target = torch.arange(4096) % 97
    target[13] = target[201] = 97
    target[4000] = -1
    error = error_of(lossguard.CrossEntropyLoss(), rand(4096, 97), target)
    lines = str(error).splitlines()
    assert lines[:6] == [
        "Target 97 is out of bounds. CrossEntropyLoss: 3 of 4096 targets are outside [0, 97).",
        "    index    value",
        "    (13,)    97",
        "    (201,)   97",
        "    (4000,)  -1",
        "  counts: == -1: 1, == num_classes: 2     valid: 0..96, ignore_index: -100",
    ]
    assert "  logits (4096, 97) float32 cpu, target (4096,) int64" in lines
    assert "  smallest -1, largest 97 of the invalid values" in lines


# ---- length


def assert_short(error: LossValidationError) -> None:
    text = str(error)
    assert len(text) < 4000 and len(str(error.report)) < 4000
    assert text.count("value\n") == len(error.report.sections)


def test_text_is_short_for_many_dimensions():
    shape = (1,) * 48 + (1000, 2)
    p, y = torch.full(shape, 1e-30) - 1, torch.full(shape, math.pi)
    error = error_of(F.binary_cross_entropy, p, y)
    assert_short(error)
    assert error.report.indices[15] == (0,) * 48 + (7, 1) and error.report.shapes["input"] == shape
    target = torch.full((1,) * 48 + (40,), -(2**63))
    assert_short(error_of(F.cross_entropy, rand(1, 2, *(1,) * 47, 40), target))


def test_text_is_short_for_extreme_labels():
    target = torch.tensor([-(2**63), 2**63 - 1] * 500)
    error = error_of(F.cross_entropy, rand(1000, 3), target)
    assert_short(error)
    assert f"smallest {-(2**63)}, largest {2**63 - 1}" in str(error)


@pytest.mark.parametrize("many_dimensions", (False, True))
def test_text_is_short_for_long_source_lines_and_paths(many_dimensions):
    """And the parts are shortened, not the report cut off."""
    filename = "/" + "d" * 3000 + "/train.py"
    function = "f" * 200
    source = f"def {function}(F, a, b):\n    return F.binary_cross_entropy(a, b), '{'x' * 10_000}'\n"
    scope: dict = {}
    exec(compile(source, filename, "exec"), scope)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    shape = (1,) * 50 + (40,) if many_dimensions else (40,)
    try:
        error = error_of(scope[function], F, torch.full(shape, -math.e), torch.full(shape, 255 / math.pi))
    finally:
        del linecache.cache[filename]
    assert_short(error)
    site = error.report.call_site
    assert (site.file, site.line, site.function) == (filename, 2, function) and site.source.endswith("x'")
    if not many_dimensions:
        called = next(line for line in str(error).splitlines() if line.startswith("  called at "))
        assert "ddd/train.py:2 in " in called and "return F.binary_cross_entropy(a, b)" in called
        assert "likely cause:" in str(error)


def test_text_is_short_for_a_long_function_name():
    name = "f" * 5000
    scope: dict = {}
    exec(compile(f"def {name}(F, a, b):\n    return F.cross_entropy(a, b)\n", "train.py", "exec"), scope)
    assert_short(error_of(scope[name], F, rand(3, 2), torch.tensor([0, 1, 2])))


# ---- values


@pytest.mark.parametrize(
    "dtype, value, shown",
    [
        (torch.float32, 1.0000001192092896, "1.0000001"),  # the least above 1
        (torch.float64, 1.0000000000000002, "1.0000000000000002"),
        (torch.float16, 1.0009765625, "1.001"),
        (torch.bfloat16, 1.0078125, "1.0078125"),
        (torch.float32, -1.401298464324817e-45, "-1e-45"),
        (torch.float32, 3.4028234663852886e38, "3.4028235e+38"),
        (torch.float64, -5e-324, "-5e-324"),
        (torch.float64, 1.7976931348623157e308, "1.7976931348623157e+308"),
        (torch.bfloat16, 3.3895313892515355e38, "3.3895313892515355e+38"),
        (torch.float32, nan, "nan"),
        (torch.float32, -inf, "-inf"),
    ],
)
def test_values_are_whole(dtype, value, shown):
    error = error_of(F.binary_cross_entropy, torch.tensor([0.5, value], dtype=dtype), torch.zeros(2, dtype=dtype))
    assert same(error.report.values, [value])
    assert f"\n    (1,)     {shown}\n" in str(error)


@pytest.mark.parametrize("dtype", FLOATS)
def test_shown_values_name_one_value_of_the_dtype(dtype):
    """Every float16 beyond [0, 1]; for the wider types, as many at random."""
    if dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    else:
        g = torch.Generator().manual_seed(0)
        values = torch.randint(-(2**63), 2**63 - 1, (2**13,), generator=g).view(dtype)
    values = values[(values.isfinite()) & ((values < 0) | (values > 1))]
    for some in values.split(16):
        text = str(error_of(F.binary_cross_entropy, some, torch.zeros_like(some)))
        shown = [line.split()[-1] for line in text.splitlines()[2 : 2 + len(some)]]
        assert torch.equal(torch.tensor([float(v) for v in shown], dtype=torch.float64).to(dtype), some)


# ---- pickling and JSON


def nasty_errors() -> list[LossValidationError]:
    p, y = torch.tensor([0.5, nan, inf, -inf, 1.0000001192092896]), torch.tensor([-1.0, 0.5, nan, 255, 0.5])
    return [
        error_of(F.binary_cross_entropy, p, y),
        error_of(F.cross_entropy, rand(3, 5), torch.tensor([-(2**63), 2**63 - 1, 255])),
        error_of(F.cross_entropy, torch.tensor([[nan, 0.0], [inf, -inf]]), torch.tensor([0, 1]), check_finite=True),
        error_of(F.cross_entropy, rand(5), torch.tensor(9)),
    ]


def assert_equal_errors(a: LossValidationError, b: LossValidationError) -> None:
    assert type(a) is type(b) and str(a) == str(b) and repr(a.report) == repr(b.report)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(protocol):
    for error in nasty_errors():
        assert_equal_errors(pickle.loads(pickle.dumps(error, protocol)), error)
        assert repr(pickle.loads(pickle.dumps(error.report, protocol))) == repr(error.report)
        assert_equal_errors(copy.deepcopy(error), error)
        assert_equal_errors(copy.copy(error), error)


def fail_elsewhere() -> None:
    F.cross_entropy(rand(3, 5), torch.tensor([0, 97, 1]))


def test_raised_in_another_process():
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        error = error_of(pool.submit(fail_elsewhere).result, 300)
    assert type(error) is TargetOutOfBoundsError and error.report.values == [97]
    assert_equal_errors(error, pickle.loads(pickle.dumps(error)))
    assert error.report.call_site.function == "fail_elsewhere"


def test_json():
    for error in nasty_errors():
        plain = error.report.to_dict()
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain["kind"] == error.report.kind and plain["count"] == error.report.count
        assert plain["loss"] == error.report.loss and plain["call_site"]["function"] == "error_of"
    section = nasty_errors()[0].report.to_dict()["sections"][1]
    assert section["values"] == ["nan", "inf", "-inf", 1.0000001192092896]
    assert section["indices"] == [[1], [2], [3], [4]] and (section["min"], section["max"]) == ("-inf", "inf")


# ---- likely causes

HINTS = {
    "no outputs": "the model has 0 outputs along the class dimension",
    "every -1": "every invalid target is -1, often used for unlabelled elements: ",
    "every -100": "every invalid target is -100, often used for padding elements: ",
    "every 255": "every invalid target is 255, often used for void elements: pass ignore_index=255",
    "1-based": "labels look 1-based (they run from",
    "1-based or too few outputs": "labels look 1-based or the model has one output too few",
    "one output too few": "the model has one output too few (give it",
    "one output": "the model has one output, and labels are 0 and 1",
    "map -1": "-1 to 255, the ignore_index of this call",
    "grey levels": "looks like an image mask of grey levels",
    "other vocabulary": "they look like ids of another task",
    "more labels": "outputs but labels reach",
    "some -1": " -1: pass ignore_index=-1 if that marks",
    "some -100": " -100: map -100 to -1, the ignore_index of this call, if that marks",
    "some 255": " 255: pass ignore_index=255 if that marks",
    "negative labels": "negative labels: uninitialised memory",
    "cast from NaN": "are what NaN or infinity becomes when it is cast to an integer",
    "logits": "the input looks like logits, not probabilities: use BCEWithLogitsLoss",
    "rounding": "probabilities just outside [0, 1], from rounding",
    "NaN in some of the input": "missing values or a division by zero in these samples, or the model diverged",
    "NaN throughout the input": "NaN in the input (every element): the model diverged upstream",
    "NaN target": "NaN in the target",
    "scale 255": "images of scale 255",
    "class ids": "the target holds class ids",
    "-1 and 1": "-1 in the target: labels in {-1, 1}",
    "negative targets": "negative targets: they look like",
    "log of 0": "log-probabilities of -inf",
    "float16": "float16 overflows",
    "diverged": "\n: the model diverged upstream of the loss (lower",
    "all masked": "every class of a row is masked with -inf",
}


def labels(*values: int, classes: int = 5, n: int = 40, dtype=torch.int64):
    """Valid labels and, at the end, these."""
    good = torch.arange(n) % classes if classes else torch.zeros(0)
    return lambda: F.cross_entropy(rand(n + len(values), classes), torch.cat([good, torch.tensor(values)]).to(dtype))


def mask(*values: int, classes: int = 5, dtype=torch.int64):
    target = torch.arange(64).reshape(1, 8, 8) % classes
    target[0, 3, : len(values)] = torch.tensor(values)
    return lambda: F.cross_entropy(rand(1, classes, 8, 8), target.to(dtype))


def probabilities(*values: float, dtype=torch.float32):
    p = torch.tensor([0.0, 0.25, 1.0, *values], dtype=dtype)
    return lambda: F.binary_cross_entropy(p, torch.zeros_like(p))


def targets(*values: float, function=F.binary_cross_entropy_with_logits):
    y = torch.tensor([[0.0, 1.0, *values]])
    return lambda: function(torch.zeros_like(y), y)


def logits(*values: float, dtype=torch.float32, function=F.cross_entropy, target=(0,)):
    x = torch.tensor([values], dtype=dtype)
    y = torch.tensor(target) if function is not F.binary_cross_entropy_with_logits else torch.zeros_like(x)
    return lambda: function(x, y, check_finite=True)


@pytest.mark.parametrize(
    "call, hints",
    [
        (lambda: F.cross_entropy(rand(3, 0), torch.tensor([0, 1, 2])), ["no outputs"]),
        (lambda: F.cross_entropy(rand(20, 5), 1 + torch.arange(20) % 5), ["1-based"]),
        (labels(5), ["one output too few"]),
        (lambda: F.cross_entropy(rand(2, 97), torch.tensor([97, 5])), ["1-based or too few outputs"]),
        (lambda: F.cross_entropy(rand(2, 97), torch.tensor([97, 97])), ["1-based or too few outputs"]),
        (lambda: F.cross_entropy(rand(3, 1), torch.tensor([0, 1, 1])), ["one output"]),
        (lambda: F.cross_entropy(rand(3, 5), torch.tensor([0, 255, -1]), ignore_index=255), ["every -1", "map -1"]),
        (labels(-1, -1), ["every -1"]),
        (labels(-1), ["every -1"]),
        (lambda: F.cross_entropy(rand(2, 5), torch.tensor([0, -100]), ignore_index=-1), ["every -100"]),
        (labels(255, 255, classes=19), ["every 255"]),
        (labels(255, classes=150), ["every 255"]),
        (labels(255, classes=19, dtype=torch.uint8), ["every 255"]),
        (mask(255, 255, classes=19), ["every 255"]),
        (mask(255, 255, classes=19, dtype=torch.uint8), ["every 255"]),
        (mask(192, 64, 128), ["grey levels"]),
        (mask(192, 64, 128, dtype=torch.uint8), ["grey levels"]),
        (mask(6, 7), ["more labels"]),
        (mask(21), ["more labels"]),
        (labels(30521, 12), ["other vocabulary"]),
        (labels(6, 7), ["more labels"]),
        (labels(12, classes=10), ["more labels"]),
        (labels(5, -1), ["one output too few", "some -1"]),
        (labels(7, -1), ["more labels", "some -1"]),
        (
            lambda: F.cross_entropy(rand(3, 5), torch.tensor([0, -100, 7]), ignore_index=-1),
            ["more labels", "some -100"],
        ),
        (labels(-1, 255, classes=19, n=400), ["some -1", "some 255"]),
        (labels(-7, -12345), ["negative labels"]),
        (labels(-(2**63)), ["cast from NaN"]),
        # probabilities
        (probabilities(-3.0, 4.0), ["logits"]),
        (probabilities(1.5), ["logits"]),
        (probabilities(1.0000001192092896), ["rounding"]),
        (probabilities(-1e-9, 1.001, dtype=torch.float16), ["rounding"]),
        (probabilities(nan), ["NaN in some of the input"]),
        (probabilities(nan, 7.0), ["logits", "NaN in some of the input"]),
        (lambda: F.binary_cross_entropy(torch.full((4,), nan), torch.zeros(4)), ["NaN throughout the input"]),
        # soft targets, of each loss that has them
        (targets(255.0, 128.0), ["scale 255"]),
        (targets(127.5), ["scale 255"]),
        (targets(255.0, 128.0, function=F.binary_cross_entropy), ["scale 255"]),
        (targets(255.0, function=F.cross_entropy), ["scale 255"]),
        (targets(2.0, 3.0), ["class ids"]),
        (targets(7.0, function=F.cross_entropy), ["class ids"]),
        (targets(-1.0), ["-1 and 1"]),
        (targets(-0.3, 0.5), ["negative targets"]),
        (targets(-2.0, 5.0), ["negative targets"]),
        (targets(nan), ["NaN target"]),
        (targets(nan, 2.0), ["NaN target", "class ids"]),
        (targets(inf), []),
        (targets(1.25), []),
        # finiteness
        (logits(0.0, nan), ["diverged"]),
        (logits(0.0, inf), ["diverged"]),
        (logits(0.0, inf, dtype=torch.float16), ["float16", "diverged"]),
        (logits(0.0, nan, dtype=torch.float16), ["diverged"]),
        (logits(-inf, -inf), ["all masked"]),
        (logits(-inf, 0.0, function=F.nll_loss), ["log of 0"]),
        (logits(nan, 0.0, function=F.nll_loss), ["diverged"]),
        (logits(0.0, nan, function=F.binary_cross_entropy_with_logits), ["diverged"]),
        (logits(0.0, -inf, function=F.binary_cross_entropy_with_logits), []),
    ],
)
def test_hints_appear_for_their_cause_and_no_other(call, hints):
    error = error_of(call)
    text = "".join(f"\n: {hint}" for hint in error.report.hints)  # a line each, as in the report
    found = [name for name, words in HINTS.items() if words in text]
    assert sorted(found) == sorted(hints), text
    assert len(error.report.hints) == len(hints) - ("map -1" in hints)  # which is a part of "every -1"
    for number, hint in enumerate(error.report.hints):
        assert f"\n  {'or' if number else 'likely cause'}: {hint}" in str(error)
        assert hint.endswith(".") and len(hint) < 250


def test_every_hint_has_a_case():
    cases = next(m for m in test_hints_appear_for_their_cause_and_no_other.pytestmark if m.name == "parametrize").args[
        1
    ]
    assert {name for _, names in cases for name in names} == set(HINTS)


def test_hints_speak_in_singular_and_plural():
    assert "1 target is -1: pass" in str(error_of(labels(7, -1)))
    assert "2 targets are -1: pass" in str(error_of(labels(7, -1, -1)))


# ---- call site


def here(offset: int = 0) -> tuple[int, str]:
    frame = sys._getframe(1)
    return frame.f_lineno + offset, frame.f_code.co_name


def assert_site(error: LossValidationError, line: int, function: str, source: str, file: str = __file__) -> None:
    site = error.report.call_site
    assert (site.file, site.line, site.function, site.source) == (file, line, function, source)
    assert f":{line} in {function}: {source}" in str(error)


X, T = rand(3, 5), torch.tensor([0, 1, 5])


def test_site_of_a_function_and_a_module():
    criterion = lossguard.CrossEntropyLoss()
    with pytest.raises(LossValidationError) as caught:
        F.cross_entropy(X, T)
    assert_site(caught.value, *here(-1), "F.cross_entropy(X, T)")
    with pytest.raises(LossValidationError) as caught:
        loss = criterion(X, T)  # noqa: F841
    assert_site(caught.value, *here(-1), "loss = criterion(X, T)  # noqa: F841")


def test_site_of_a_lambda():
    call, line = lambda: F.nll_loss(X, T), here()[0]  # noqa: E731
    assert_site(error_of(call), line, "<lambda>", "call, line = lambda: F.nll_loss(X, T), here()[0]  # noqa: E731")


def test_site_in_a_helper_module(tmp_path):
    path = tmp_path / "helper.py"
    path.write_text(
        "import lossguard\n\n\ndef compute(x, t):\n    criterion = lossguard.NLLLoss()\n    return criterion(x, t)\n"
    )
    spec = importlib.util.spec_from_file_location("helper", path)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    assert_site(error_of(helper.compute, X, T), 6, "compute", "return criterion(x, t)", str(path))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.Sequential()
        self.loss = lossguard.CrossEntropyLoss()

    def forward(self, x, t):
        return self.loss(self.criterion(x), t)  # the line


class Subclass(lossguard.CrossEntropyLoss):
    def forward(self, x, t):
        return 2 * super().forward(x, t)  # the subclass's line


def test_site_in_a_module_and_in_a_subclass():
    first = Model.forward.__code__.co_firstlineno
    assert_site(error_of(Model(), X, T), first + 1, "forward", "return self.loss(self.criterion(x), t)  # the line")
    first = Subclass.forward.__code__.co_firstlineno
    want = "return 2 * super().forward(x, t)  # the subclass's line"
    assert_site(error_of(Subclass(), X, T), first + 1, "forward", want)


def test_site_behind_torch_itself():
    """Frames of torch are passed over: the caller of vmap, not vmap."""
    mapped = torch.func.vmap(F.cross_entropy)
    with pytest.raises(LossValidationError) as caught:
        mapped(X, T)
    assert_site(caught.value, *here(-1), "mapped(X, T)")


def test_site_in_a_thread():
    caught = []

    def work() -> None:
        try:
            F.cross_entropy(X, T)
        except LossValidationError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_site(caught[0], work.__code__.co_firstlineno + 2, "work", "F.cross_entropy(X, T)")


def test_site_of_a_call_over_several_lines():
    with pytest.raises(LossValidationError) as caught:
        F.cross_entropy(
            X,
            T,
        )
    line, function = here(-4)
    assert_site(caught.value, line, function, "F.cross_entropy(")


def test_warning_points_to_the_caller_once_for_a_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            F.cross_entropy(X, T, on_violation="warn")
        F.cross_entropy(X, T, on_violation="warn")
    first, second = caught
    line, _ = here(-2)
    assert (first.filename, first.lineno, second.lineno) == (__file__, line - 1, line)
    for w in caught:
        assert w.category is lossguard.LossValidationWarning
        assert str(w.message).startswith(
            "Target 5 is out of bounds. CrossEntropyLoss: 1 of 3 targets is outside [0, 5)."
        )


def test_source_that_cannot_be_read_is_left_out():
    scope: dict = {}
    exec(
        compile(textwrap.dedent("def f(F, x, t):\n    return F.cross_entropy(x, t)\n"), "/gone/train.py", "exec"), scope
    )
    error = error_of(scope["f"], F, X, T)
    assert error.report.call_site == lossguard.CallSite("/gone/train.py", 2, "f", "")
    assert "\n  called at /gone/train.py:2 in f\n" in str(error)
