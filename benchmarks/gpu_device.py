"""Where a session's checks and timings run: a GPU, or in a dry run the emulator of tests/cuda_emulator on the CPU.

    python -m benchmarks.gpu_device [--dry-run]      # says what machine this is
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = 2 << 30  # many times any L2, and long enough to write that the host gets ahead of the GPU


class Gpu:
    """The current CUDA device."""

    name = "cuda"
    compiler = "inductor"  # of torch.compile
    clock = "CUDA events"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU here; --dry-run goes through every step without one")
        self._flush: torch.Tensor | None = None

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": _nvidia_smi("driver_version"),
            "clocks_max_mhz": _nvidia_smi("clocks.max.sm,clocks.max.mem"),
        }

    def has_kernels(self, build_info: dict[str, Any]) -> bool:
        return build_info["cuda"] is True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def alive(self) -> bool:
        """Whether the CUDA context still takes work."""
        with contextlib.suppress(RuntimeError):
            return torch.arange(1000, device=self.name).sum().item() == 499500
        return False

    def memory(self) -> dict[str, int]:
        """In bytes. `used` is the whole device's: also what did not come from torch's allocator."""
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return {"allocated": allocated, "reserved": reserved, "used": total - free, "host": _resident()}

    def forget(self) -> None:
        """Gives back what torch's allocator keeps."""
        torch.cuda.empty_cache()

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Any, Callable[[], None]]:
        """What `function` returned while it was recorded into a graph, and what replays that."""
        with self.side_stream():
            for _ in range(3):  # what libraries allocate at their first calls is not the graph's
                function()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = function()
        return kept, graph.replay

    def time_in_turn(self, runs: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
        """Milliseconds of each, on the GPU's clock; before each the L2 is emptied, unless it is called repeatedly."""
        if self._flush is None:
            size = min(FLUSH_BYTES, torch.cuda.get_device_properties(0).total_memory // 8)
            self._flush = torch.empty(size, dtype=torch.int8, device=self.name)
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in runs}
        for name, run in runs.items():
            start, stop = events[name]
            if calls == 1:
                self._flush.zero_()
            else:
                torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                run()
            stop.record()
        torch.cuda.synchronize()
        return {name: start.elapsed_time(stop) / calls for name, (start, stop) in events.items()}


class Emulated:
    """The extension that tests/cuda_emulator/build.py builds: its CPU key goes to the CUDA kernels."""

    name = "cpu"
    compiler = "aot_eager"
    clock = "time.perf_counter, emulated"

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def describe(self) -> dict[str, Any]:
        return {"gpu": None, "driver": None}

    def has_kernels(self, build_info: dict[str, Any]) -> bool:
        return bool(build_info.get("emulated"))

    def synchronize(self) -> None:
        pass

    def alive(self) -> bool:
        return True

    def memory(self) -> dict[str, int]:
        return {"host": _resident()}

    def forget(self) -> None:
        pass

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Any, Callable[[], None]]:
        """Of lossguard's kernels alone: what torch computes it computes now."""
        import lossguard

        library = ctypes.CDLL(lossguard._C.__file__)
        stream = library.lossguard_emulator_create_stream
        end, replay = library.lossguard_emulator_end_capture, library.lossguard_emulator_replay
        stream.restype = end.restype = ctypes.c_size_t
        side = stream(0)
        library.lossguard_emulator_begin_capture(ctypes.c_size_t(side))
        lossguard._C.emulate_on(0, side)
        try:
            kept = function()
        finally:
            lossguard._C.emulate_on(0, 0)
            graph = end(ctypes.c_size_t(side))
        return kept, lambda: replay(ctypes.c_size_t(graph), None)

    def time_in_turn(self, runs: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
        found = {}
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found[name] = (time.perf_counter() - start) / calls * 1e3
        return found


Device = Gpu | Emulated


def the_device(dry_run: bool) -> Device:
    return Emulated() if dry_run else Gpu()


def import_lossguard(device: Device) -> Any:
    """The package, if its kernels are those of the device. A call that would go to native torch raises from now on."""
    import lossguard.functional

    if not device.has_kernels(lossguard._C.build_info()):
        raise SystemExit(f"{lossguard._C.__file__} has no kernels for this: {lossguard._C.build_info()}")
    warnings.simplefilter("error", lossguard.NotValidatedWarning)
    if isinstance(device, Emulated):
        lossguard.functional._FEW = -1  # on the CPU a few elements of NLL are left to native torch
    return lossguard


class EmulatorLog:
    """The names of the kernels that the emulator ran since it was last asked."""

    def __init__(self, lossguard: Any) -> None:
        self._library = ctypes.CDLL(lossguard._C.__file__)
        self._library.lossguard_emulator_log.restype = ctypes.c_char_p

    def take(self) -> set[str]:
        lines = self._library.lossguard_emulator_log().decode().splitlines()
        self._library.lossguard_emulator_clear_log()
        return {line.split("\t")[0].split("<")[0].rsplit("::", 1)[-1] for line in lines}


class Records:
    """What a step found, a line of JSON each, in a file that keeps them should the step not come to its end."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def add(self, said: str = "", **record: Any) -> None:
        """`said` is for who watches."""
        if said:
            print(said, flush=True)
        if self._file:
            with open(self._file, "a") as file:
                file.write(json.dumps(record) + "\n")


def step_arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every module that the session runs understands."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the emulator instead of a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--records", type=Path, metavar="FILE", help="append what is found, as lines of JSON")
    return parser


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=20).stdout.strip()
    return None


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()


def main() -> None:
    arguments = step_arguments(__doc__).parse_args()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    facts = {
        **the_device(arguments.dry_run).describe(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "triton": triton_version,
    }
    Records(arguments.records).add("\n".join(f"{name:19} {fact}" for name, fact in facts.items()), **facts)


if __name__ == "__main__":
    main()
