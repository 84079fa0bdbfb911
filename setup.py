"""One extension: the CPU half, for each instruction set, behind torch's stable ABI."""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Under pip's build isolation, build with the torch of the environment that pip installs into; it is
# not named in build-system.requires, which would download a second one.
sys.path.append(sysconfig.get_path("purelib"))

ROOT = Path(__file__).parent
# Every newer torch loads what is built against this target.
TORCH_FLOOR = "0x020a000000000000"
X86 = platform.machine() in ("x86_64", "AMD64")
# namespace, table, compiler flags
INSTRUCTION_SETS = [("baseline", "kBaseline", [])]
if X86:
    INSTRUCTION_SETS.append(("avx2", "kAvx2", ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]))

SOURCES = ["ops.cpp", "module.cpp", "policy.cpp", "cpu/launchers.cpp", "cpu/scan.cpp"]
CXXFLAGS = ["-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra"]


def torch_and_pybind_paths():
    import pybind11
    import torch

    root = Path(torch.__file__).parent
    return [root / "include", pybind11.get_include()], root / "lib"


def ninja_file(output, build_dir):
    """One compiler call per object: ninja redoes what changed, and uses every core."""
    includes, torch_lib = torch_and_pybind_paths()
    defines = [f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}"] + (["-DLOSSGUARD_WITH_AVX2"] if X86 else [])
    include_flags = [f"-isystem {path}" for path in [*includes, sysconfig.get_path("include")]]
    cxx = os.environ.get("CXX") or "g++"
    lines = [
        f"cflags = {' '.join(CXXFLAGS + defines + include_flags)} {os.environ.get('CXXFLAGS', '')}",
        "rule cxx",
        f"  command = {cxx} -MMD -MF $out.d $cflags $extra -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in $extra",
        "rule link",
        f"  command = {cxx} -shared $in -o $out -L{torch_lib} -ltorch_cpu -lc10 -Wl,--exclude-libs,ALL"
        f" {os.environ.get('LDFLAGS', '')}",
        "  description = link $out",
    ]
    objects = []

    def compile_(source, name, extra=""):
        objects.append(f"{name}.o")
        lines.append(f"build {name}.o: cxx {ROOT / 'csrc' / source}")
        if extra:
            lines.append(f"  extra = {extra}")

    for source in SOURCES:
        compile_(source, source.replace("/", "_").removesuffix(".cpp"))
    # Last, and the baseline first of them: of an inline function that several objects have, the linker keeps
    # the first, and no processor must be given another's instructions.
    for isa, table, flags in INSTRUCTION_SETS:
        names = f"-DLOSSGUARD_ISA={isa} -DLOSSGUARD_TABLE={table}"
        compile_("cpu/kernels.cpp", f"kernels_{isa}", " ".join([*flags, names]))
    lines.append(f"build {output}: link {' '.join(objects)}")
    path = Path(build_dir, "build.ninja")
    path.write_text("\n".join(lines) + "\n")


class Build(build_ext):
    def build_extension(self, ext):
        build_dir = Path(self.build_temp).absolute()
        build_dir.mkdir(parents=True, exist_ok=True)
        output = Path(self.get_ext_fullpath(ext.name)).absolute()
        output.parent.mkdir(parents=True, exist_ok=True)
        ninja_file(output, build_dir)
        command = [sys.executable, "-m", "ninja", "-C", str(build_dir)]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        subprocess.run(command, check=True)


try:
    import torch  # noqa: F401
except ImportError:
    # None there yet: ask pip for one to build with, then be called again.
    setup(setup_requires=["torch>=2.10"])
else:
    setup(ext_modules=[Extension("lossguard._C", [])], cmdclass={"build_ext": Build})
