"""Every kernel of csrc/cuda computes what it should in every dtype and under every schedule, alone and with other
streams' kernels in flight; and neither ThreadSanitizer nor AddressSanitizer (with UBSan) has anything to say about it.

The drivers of tests/cuda_emulator go through the launchers, without Python or torch. That the sanitizers would have
something to say is what test_cuda_mutants.py shows."""

import concurrent.futures
import functools
import os
import re
import subprocess

import pytest
from test_cuda_emulator import EMULATOR, build, text_of

CSRC = EMULATOR.parent.parent / "csrc"
DTYPES = ("float32", "float64", "float16", "bfloat16")
# Few blocks, and yet every kernel in each of its dtypes: a fiber costs TSan a millisecond.
SMALL = (
    "short rows, odd",
    "8 lanes a row",
    "a block a row, twice over it",
    "3 blocks a row",
    "pixels, many classes",
    "five dimensions",
    "elements, head and tail",
    "elements, ragged",
)
# Of the plain build: AddressSanitizer also sees the ends of rows and tensors in all regimes but the largest.
REGIMES = {"tsan": SMALL, "asan": ("--without", "more than")}
IN_FLIGHT = ("in flight", "host threads", "watched", "replayed", "handed over")  # streams.cpp


@functools.cache
def drivers(variant):
    kernels = sorted((CSRC / "cuda").glob("*.cu"))
    return build().drivers(
        {name: [*kernels, EMULATOR / f"drivers/{name}.cpp"] for name in ("regimes", "streams")}, variant
    )


def run(executable, *arguments):
    environment = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0"}
    command = [executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def assert_clean(result):
    assert result.returncode == 0 and not result.stderr, text_of(result)


def run_in_all_dtypes(executable, *arguments):
    """A process for each dtype, on all cores. Returns the kernels that ran."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda dtype: run(executable, "--dtypes", dtype, *arguments), DTYPES))
    for result in results:
        assert_clean(result)
    return {line for result in results for line in result.stdout.splitlines()[1:]}


def kernels_in(executable):
    """All that a launcher could launch, with their template arguments: the binary's symbols that are kernels."""
    sources = "".join(path.read_text() for path in (CSRC / "cuda").glob("*.h"))
    names = re.findall(r"__global__ void\s+__launch_bounds__\(.*\)\s+(\w+)\(", sources)
    assert len(names) == sources.count("__global__")
    symbols = subprocess.run(["nm", "--demangle", executable], capture_output=True, text=True, check=True).stdout
    kernels = set(re.findall(rf"void lossguard::cuda::((?:{'|'.join(names)})<.*?>)\(", symbols))
    assert {kernel.split("<")[0] for kernel in kernels} == set(names)
    return {kernel.replace("lossguard::cuda::", "") for kernel in kernels}


def test_every_kernel_computes_what_it_should():
    regimes = drivers("plain")["regimes"]
    assert run_in_all_dtypes(regimes) == kernels_in(regimes)


@pytest.mark.parametrize("variant", ["tsan", "asan"])
def test_every_kernel_is_clean(variant):
    regimes = drivers(variant)["regimes"]
    assert run_in_all_dtypes(regimes, "--schedules", "random", *REGIMES[variant]) == kernels_in(regimes)


@pytest.mark.parametrize("variant, seeds", [("plain", 40), ("asan", 5), ("tsan", 3)])
def test_losses_in_flight_do_not_meet(variant, seeds):
    for case in IN_FLIGHT:
        result = run(drivers(variant)["streams"], case, seeds)
        assert_clean(result)
        assert result.stdout == f"{seeds} seeds, 0 wrong\n"


def test_tsan_sees_streams_that_do_not_wait_for_each_other():
    result = run(drivers("tsan")["streams"], "handed over without an event")
    assert "WARNING: ThreadSanitizer: data race" in result.stderr, text_of(result)
    assert "ce_backward_flat" in result.stderr and "conclude" in result.stderr, text_of(result)
