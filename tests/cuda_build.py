"""What a build has for GPUs: the machine code in the extension, and what ptxas said of each kernel.

    python tests/cuda_build.py      # prints the table of tests/ptxas.txt for the lossguard that is imported
"""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent


# ---- the extension's fat binaries


@dataclasses.dataclass(frozen=True)
class Code:
    kind: str  # "machine code" or "PTX"
    arch: str  # "9.0"
    content: bytes  # compressed unless the build was told otherwise


def fat_binaries(extension):
    """For each .cu file that is linked into the extension, what it was compiled to.

    nvcc puts a container of its own a file into the section .nv_fatbin: 16 bytes of header and then the entries, of
    which each begins with its kind, the size of its header, the size of its content, and the architecture.
    """
    sections = subprocess.run(["readelf", "-SW", extension], stdout=subprocess.PIPE, text=True, check=True).stdout
    offset, size = re.search(r"\.nv_fatbin +PROGBITS +\w+ (\w+) (\w+)", sections).groups()
    section = Path(extension).read_bytes()[int(offset, 16) :][: int(size, 16)]
    start, found = 0, []
    while start < len(section):
        magic, _, header, size = struct.unpack_from("<IHHQ", section, start)
        if magic != 0xBA55ED50:
            assert magic == 0, f"no fat binary, nor padding, at {start} of .nv_fatbin"
            start += 8
            continue
        entry, end, codes = start + header, start + header + size, []
        while entry < end:
            kind, _, header, size, arch = struct.unpack_from("<HHIQ12xI", section, entry)
            content = section[entry + header : entry + header + size]
            codes.append(Code({1: "PTX", 2: "machine code"}[kind], f"{arch // 10}.{arch % 10}", content))
            entry += header + size
        found.append(codes)
        start = end
    return found


def launch_bounds(extension):
    """Of each kernel that the extension has legible PTX of: threads a block, and blocks a multiprocessor at least."""
    bounds = {}
    for codes in fat_binaries(extension):
        for ptx in (code.content.decode(errors="replace") for code in codes if code.kind == "PTX"):
            for name, directives in re.findall(r"\.entry (\w+)\(.*?\)\s*(.*?)\{", ptx, re.DOTALL):
                threads = re.search(r"\.maxntid (\d+)", directives)
                blocks = re.search(r"\.minnctapersm (\d+)", directives)
                bounds[name] = int(threads[1]) if threads else 0, int(blocks[1]) if blocks else 1
    return bounds


# ---- what ptxas said


@dataclasses.dataclass(frozen=True)
class Usage:
    registers: int  # a thread
    shared: int  # bytes a block
    stack: int  # bytes a thread
    spilled: int  # bytes a thread, stored and loaded


def ptxas_usage(objects):
    """{source: {kernel: {arch: Usage}}} of the objects in a build directory."""
    found = {}
    for file in sorted(objects.glob("cuda_*.ptxas.txt")):
        kernels = found.setdefault(file.name.removeprefix("cuda_").removesuffix(".o.ptxas.txt") + ".cu", {})
        # To each kernel also belongs what is said of the functions that it calls, which follow it.
        for said in file.read_text().split("Compiling entry function '")[1:]:
            name, arch = re.match(r"(\w+)' for 'sm_(\d+)", said).groups()
            numbers = {what: sum(map(int, re.findall(rf"(\d+) bytes {what}", said))) for what in _BYTES}
            registers = int(re.search(r"Used (\d+) registers", said)[1])
            usage = Usage(registers, *(numbers[what] for what in ("smem", "stack frame", "spill")))
            kernels.setdefault(name, {})[f"{arch[:-1]}.{arch[-1]}"] = usage
    return found


_BYTES = ("smem", "stack frame", "spill")


def objects_of(extension):
    """Where setup.py left the objects of an extension that it built in place or into build/*/lib.*."""
    package_in = Path(extension).parent.parent
    build = package_in.parent if package_in.name.startswith("lib.") else ROOT / "build"
    found = sorted(build.glob("temp.*"))
    assert len(found) <= 1, f"objects of which Python: {found}?"
    return found[0] if found else build / "nothing"


# ---- the table


def readable(mangled):
    """{mangled: "forward<float, true>"}: without lossguard's namespaces and the parameters."""
    said = subprocess.run(["c++filt"], input="\n".join(mangled), stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: _short(demangled) for name, demangled in zip(mangled, said.splitlines())}


def _short(demangled):
    name = re.sub(r"\(anonymous namespace\)::|lossguard::|\bcuda::", "", demangled.removeprefix("void "))
    depth = 0
    for i in reversed(range(len(name) if name.endswith(")") else 0)):
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if depth == 0:
            return name[:i]
    return name


HEADING = """\
What ptxas of CUDA {} says of each kernel; `make ptxas-table` writes it anew. Launch bounds: threads a block x blocks a
multiprocessor at least. Bytes of shared memory a block, of stack and of spills a thread: the most on any architecture.
Then the registers of a thread on each.
"""


def table(extension, nvcc):
    """As text, of a build whose PTX is not compressed: that has the launch bounds."""
    built, bounds = ptxas_usage(objects_of(extension)), launch_bounds(extension)
    archs = sorted({arch for kernels in built.values() for usage in kernels.values() for arch in usage}, key=_version)
    rows = [["source", "kernel", "launch bounds", "shared", "stack", "spilled", *archs]]
    for source, kernels in built.items():
        names = readable(kernels)
        for name in sorted(kernels, key=names.get):
            usage = kernels[name]
            most = [max(getattr(on_one, what) for on_one in usage.values()) for what in ("shared", "stack", "spilled")]
            registers = [usage[arch].registers for arch in archs]
            rows.append([source, names[name], "{} x {}".format(*bounds[name]), *map(str, most + registers)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        lines.append("  ".join(left + [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]))
    return HEADING.format(nvcc) + "\n" + "\n".join(lines) + "\n"


def _version(arch):
    return tuple(map(int, arch.split(".")))


if __name__ == "__main__":
    import lossguard

    print(table(lossguard._C.__file__, lossguard._C.build_info()["nvcc"]), end="")
