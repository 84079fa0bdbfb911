"""The CUDA emulator computes what a GPU computes, refuses what CUDA forbids, and, in its instrumented builds, sees
races, overflows and traffic: small kernels, right ones and ones with a bug (tests/cuda_emulator/selftest.cu)."""

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parent / "cuda_emulator"
SELFTEST = EMULATOR / "selftest.cu"
SCHEDULES = ("ascending", "descending", "random")

RIGHT = [
    "reduction",
    "shuffles",
    "votes",
    "poison",
    "atomics",
    "launch configurations",
    "devices",
    "publication",
    "held events",
    "publication order",
    "two streams",
    "host threads",
    "conversions",
]
AT = r"selftest\.cu:\d+"
ERRORS = {
    "divergent barrier": rf"__syncthreads\(\) at {AT} while others wait at {AT}",
    "barrier after exit": rf"exits while others wait in __syncthreads\(\) at {AT}"
    rf"|__syncthreads\(\) at {AT} after other threads of the block have exited",
    "lane not in mask": rf"a shuffle at {AT}: the mask 0000ffff lacks the calling lane",
    "source outside mask": rf"a shuffle at {AT} reads lane 20, which is not in the mask 0000ffff",
    "exited lane": rf"exits while others wait for it in __syncwarp\(\) at {AT}"
    rf"|__syncwarp\(\) at {AT}: lanes 00000008 of the mask have exited or do not exist",
    "different collectives": rf"a (vote|shuffle) at {AT} while other lanes wait in a (shuffle|vote) at {AT}",
    "deadlock": rf"deadlock: waits in __syncthreads\(\) at {AT} for 8 threads",
    "huge shared": r"49153 bytes of static shared memory, at most 49152",
    "late errors": rf"__syncthreads\(\) at {AT} while others wait at {AT}",
}
# What races, by a piece of the line that TSan must name.
RACES = {
    "reduction without sync": "sum += s.warps[w]",
    "reduction without sync at its end": "if (!s.last) return",
    "reduction without fence": "sum += r.partials[b]",
    "reduction with early fence": "sum += r.partials[b]",
    "reduction with block fence": "sum += r.partials[b]",
    "reduction without reader fence": "sum += r.partials[b]",
    "two streams without wait": "value[threadIdx.x] += n",
    "read without waiting": "CHECK(values[7] == 2)",
}


@functools.cache
def build():
    spec = importlib.util.spec_from_file_location("cuda_emulator_build", EMULATOR / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def selftest(variant):
    return build().driver("selftest", [SELFTEST], variant)


def run(case, variant="plain", **settings):
    environment = {f"LOSSGUARD_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}
    environment["TSAN_OPTIONS"] = "atexit_sleep_ms=0"
    return subprocess.run(
        [selftest(variant), case], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def text_of(result):
    return f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"


def test_every_case_is_run():
    listed = subprocess.run([selftest("plain")], capture_output=True, text=True).stdout.splitlines()
    elsewhere = ["log", "traffic", "late execution"]
    memory = ["shared in bounds", "shared overflow", "global overflow", "aligned", "misaligned"]
    assert sorted(listed) == sorted([*RIGHT, *ERRORS, *RACES, *memory, *elsewhere])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_right_kernels_compute_what_they_should(schedule):
    for case in [*RIGHT, "late execution"]:
        result = run(case, schedule=schedule)
        assert result.returncode == 0, f"{case}: {text_of(result)}"


def test_right_kernels_pass_under_many_random_schedules():
    for seed in range(2, 12):
        for case in ("reduction", "votes", "atomics"):
            result = run(case, schedule="random", seed=seed, resident_blocks=1 + seed % 5)
            assert result.returncode == 0, f"{case}, seed {seed}: {text_of(result)}"


@pytest.mark.parametrize("schedule", ["ascending", "random"])
@pytest.mark.parametrize("variant", ["tsan", "asan"])
def test_right_kernels_are_clean(variant, schedule):
    for case in RIGHT:
        result = run(case, variant, schedule=schedule)
        assert result.returncode == 0 and not result.stderr, f"{case}: {text_of(result)}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_cuda_forbids_is_an_error_that_says_where(schedule):
    for case, expected in ERRORS.items():
        result = run(case, schedule=schedule)
        assert result.returncode == 0, f"{case}: {text_of(result)}"
        assert re.fullmatch(rf"emulator: block \d+ thread \d+: ({expected})\n", result.stdout), text_of(result)


def test_an_error_names_the_thread():
    line_numbers = [n for n, line in enumerate(SELFTEST.read_text().splitlines(), 1) if "    __syncthreads();" == line]
    first, second = line_numbers[:2]
    assert run("divergent barrier").stdout == (
        f"emulator: block 0 thread 17: __syncthreads() at selftest.cu:{second}"
        f" while others wait at selftest.cu:{first}\n"
    )


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_leaves_the_sanitizers_content(case):
    for variant in ("tsan", "asan"):
        result = run(case, variant)
        assert result.returncode == 0 and not result.stderr, text_of(result)


@pytest.mark.parametrize("schedule", ["ascending", "random"])
@pytest.mark.parametrize("case", RACES)
def test_tsan_sees_races(case, schedule):
    result = run(case, "tsan", schedule=schedule)
    assert "WARNING: ThreadSanitizer: data race" in result.stderr, text_of(result)
    lines = SELFTEST.read_text().splitlines()
    racing = {lines[int(number) - 1] for number in re.findall(r"#0 .*selftest\.cu:(\d+)", result.stderr)}
    assert any(RACES[case] in line for line in racing), text_of(result)


@pytest.mark.parametrize("case", ["shared", "global"])
def test_asan_sees_what_is_out_of_bounds(case):
    result = run(f"{case} overflow", "asan")
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr and "selftest.cu" in result.stderr, text_of(result)


def test_asan_build_sees_what_is_misaligned():
    result = run("misaligned", "asan")
    assert "misaligned address" in result.stderr and "uint4" in result.stderr, text_of(result)


@pytest.mark.parametrize("case", ["shared in bounds", "aligned"])
def test_asan_accepts_what_is_right(case):
    result = run(case, "asan")
    assert result.returncode == 0 and not result.stderr and result.stdout == "no error\n", text_of(result)


def test_traffic_is_counted_to_the_byte():
    """Vectors once, a scattered gather by its sectors, an atomic as a load and a store, shared memory not at all."""
    scale = "(anonymous namespace)::scale"
    rounds = [
        # launch, kernel, buffer, bytes loaded and stored, sectors loaded and stored
        (0, f"{scale}<float>", "x", 16384, 0, 512, 0),
        (0, f"{scale}<float>", "y", 0, 16384, 0, 512),
        (1, f"{scale}<double>", "x", 1600, 0, 50, 0),
        (1, f"{scale}<double>", "y", 0, 1600, 0, 50),
        (2, "(anonymous namespace)::gather", "x", 1024, 0, 256, 0),
        (2, "(anonymous namespace)::gather", "y", 0, 1024, 0, 32),
        (2, "(anonymous namespace)::gather", "indices", 2048, 0, 64, 0),
        (2, "(anonymous namespace)::gather", "", 4, 4, 1, 1),
    ]
    without_names = [(0, f"{scale}<float>", "", 16384, 16384, 512, 512)]
    result = run("traffic", "traffic")
    assert result.returncode == 0, text_of(result)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    counted = [(int(launch), kernel, buffer, *map(int, numbers)) for launch, kernel, buffer, *numbers in lines]
    assert counted == rounds + rounds + without_names


def test_log_names_every_launch():
    result = run("log")
    assert result.returncode == 0, text_of(result)
    assert result.stdout == "(anonymous namespace)::fine\t3\t64\n(anonymous namespace)::scale<float>\t1\t32\n"


@pytest.mark.parametrize("setting", [{"schedule": "sideways"}, {"seed": "x"}, {"devices": ""}])
def test_a_setting_that_is_none_is_refused(setting):
    result = run("log", **setting)
    assert result.returncode != 0 and "is not a setting" in result.stderr, text_of(result)
