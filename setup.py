"""One extension behind torch's stable ABI: the CPU half for each instruction set, the CUDA half wherever nvcc is.

LOSSGUARD_CUDA=0 leaves the CUDA half out, =1 makes its absence an error. TORCH_CUDA_ARCH_LIST names the GPU
architectures. CUDA_HOME, CXX, CXXFLAGS, LDFLAGS, NVCC_APPEND_FLAGS and MAX_JOBS mean what they mean elsewhere.
"""

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Under pip's build isolation, build with the torch of the environment that pip installs into; it is
# not named in build-system.requires, which would download a second one.
sys.path.append(sysconfig.get_path("purelib"))

ROOT = Path(__file__).absolute().parent
CXX = os.environ.get("CXX") or "g++"
# Every newer torch loads what is built against this target.
TORCH_FLOOR = "0x020a000000000000"
X86 = platform.machine() in ("x86_64", "AMD64")
# namespace, table, compiler flags
INSTRUCTION_SETS = [("baseline", "kBaseline", [])]
if X86:
    INSTRUCTION_SETS.append(("avx2", "kAvx2", ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]))

SOURCES = ["ops.cpp", "module.cpp", "policy.cpp", "pending.cpp", "callsite.cpp", "stats.cpp"]
SOURCES += ["cpu/launchers.cpp", "cpu/scan.cpp"]
KERNELS = sorted(f"cuda/{path.name}" for path in ROOT.glob("csrc/cuda/*.cu"))
CXXFLAGS = ["-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra"]
NVCCFLAGS = [
    *("-std=c++20", "-O3", "--resource-usage"),
    *("-Werror=all-warnings", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
    "-Xfatbin=-compress-all",  # machine code too: a quarter of the size
]

USUAL_CUDA = "/usr/local/cuda"
OLDEST_NVCC = (12, 0)  # the first with C++20
OLDEST_GPU = (7, 5)  # the oldest that CUDA 13 compiles for
# Without a GPU to build for: PTX of the oldest, for any, and of the oldest with newer features.
USUAL_ARCHS = ["7.5+PTX", "9.0+PTX"]


def say(line):
    print(f"lossguard: {line}", file=sys.stderr)


# ---- CUDA: where it is, and for which GPUs


@functools.cache
def cuda_home():
    """The directory of the CUDA toolkit, or None."""
    choice = os.environ.get("LOSSGUARD_CUDA", "")
    if choice == "0":
        say("building the CPU half alone, as LOSSGUARD_CUDA=0 asks")
        return None
    on_path = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), on_path and toolkit_of(on_path), USUAL_CUDA]
    home = next((Path(place) for place in places if place and Path(place, "bin/nvcc").exists()), None)
    if home is None:
        missing = f"no nvcc in CUDA_HOME, PATH or {USUAL_CUDA}"
    elif nvcc_version(home) < OLDEST_NVCC:
        missing = f"{home}/bin/nvcc is of CUDA {dotted(nvcc_version(home))}, and {dotted(OLDEST_NVCC)} is needed"
    else:
        return home
    if choice == "1":
        raise SystemExit(f"lossguard: LOSSGUARD_CUDA=1, but {missing}")
    say(f"building the CPU half alone: {missing}")
    return None


def toolkit_of(nvcc):
    """What is on PATH may be a link or a script; nvcc itself knows where its toolkit is."""
    said = output_of(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent


def output_of(*command):
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=60
    ).stdout


def dotted(version):
    return ".".join(map(str, version))


@functools.cache
def nvcc_version(home):
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", output_of(home / "bin/nvcc", "--version")).groups()))


def gpus_present():
    """The compute capabilities of the GPUs here, as (major, minor)."""
    try:
        said = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        return {tuple(map(int, line.split("."))) for line in said.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        pass  # not every container has nvidia-smi
    import torch

    if not torch.cuda.is_available():
        return set()
    return {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}


@functools.cache
def cuda_archs(home):
    """The architectures to compile for, spelled as in TORCH_CUDA_ARCH_LIST: ["7.5", "9.0+PTX"]."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if asked:
        known = [arch for arch in asked if re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch)]
        archs = [arch for arch in known if tuple(map(int, re.findall(r"\d+", arch))) >= OLDEST_GPU]
        if unknown := set(asked) - set(known):
            names = " ".join(sorted(unknown))
            raise SystemExit(f"lossguard: TORCH_CUDA_ARCH_LIST has {names}: write 9.0, 9.0a or 9.0+PTX")
        if len(archs) < len(known):
            say(f"leaving out architectures before {dotted(OLDEST_GPU)} of TORCH_CUDA_ARCH_LIST")
    else:
        listed = re.findall(r"compute_(\d+)$", output_of(home / "bin/nvcc", "--list-gpu-arch"), re.MULTILINE)
        known = sorted(divmod(int(number), 10) for number in listed)
        archs = []
        for gpu in sorted(gpus_present()):
            # A GPU newer than nvcc takes the PTX of the newest that nvcc knows.
            usable = [arch for arch in known if OLDEST_GPU <= arch <= gpu]
            archs += [dotted(usable[-1]) + ("" if usable[-1] == gpu else "+PTX")] if usable else []
    return list(dict.fromkeys(archs)) or USUAL_ARCHS


def gencode(arch):
    """nvcc compiles to PTX once for each `arch=`, half of its time, and from that to each `code=`."""
    number = arch.removesuffix("+PTX").replace(".", "")
    if arch.endswith("+PTX"):
        return [f"-gencode=arch=compute_{number},code={code}_{number}" for code in ("sm", "compute")]
    # 8.6 and 8.9 have nothing over 8.0 that the kernels use.
    virtual = "80" if number in ("86", "87", "89") else number
    return [f"-gencode=arch=compute_{virtual},code=sm_{number}"]


# ---- what ninja is told


class NinjaFile:
    """One compiler call per object: ninja redoes what changed, and uses every core."""

    def __init__(self):
        self.lines = []

    def rule(self, name, command, description, **variables):
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
        self.lines += [f"  {key} = {value}" for key, value in variables.items()]

    def compiling_rule(self, name, command):
        self.rule(name, command, "compile $in $extra", depfile="$out.d", deps="gcc")

    def build(self, output, rule, inputs, extra=()):
        self.lines.append(f"build {output}: {rule} {' '.join(map(str, inputs))}")
        if extra:
            self.lines.append(f"  extra = {' '.join(extra)}")

    def run(self, build_dir, **options):
        build_dir.mkdir(parents=True, exist_ok=True)
        (build_dir / "build.ninja").write_text("\n".join(self.lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        subprocess.run([sys.executable, "-m", "ninja", "-C", str(build_dir), *jobs], check=True, **options)


def object_name(source):
    return source.rsplit(".", 1)[0].replace("/", "_") + ".o"


def cxx_command(*flags):
    """Compiles one C++ source against torch."""
    import pybind11
    import torch

    includes = [Path(torch.__file__).parent / "include", pybind11.get_include(), sysconfig.get_path("include")]
    defines = [f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}"] + (["-DLOSSGUARD_WITH_AVX2"] if X86 else [])
    flags = [*CXXFLAGS, *defines, *flags, *(f"-isystem {path}" for path in includes), os.environ.get("CXXFLAGS", "")]
    return f"{CXX} -MMD -MF $out.d {' '.join(flags)} $extra -c $in -o $out"


def nvcc_command(home, archs):
    """Compiles one CUDA source; what ptxas says of its kernels goes to a file beside the object."""
    host = [f"-ccbin={CXX}"] if os.environ.get("CXX") else []
    flags = [*NVCCFLAGS, *host, *(flag for arch in archs for flag in gencode(arch))]
    call = f"{home}/bin/nvcc -MD -MF $out.d {' '.join(flags)} $extra -c $in -o $out"
    return f"{call} 2> $out.ptxas.txt || {{ cat $out.ptxas.txt; exit 1; }}"


def link_command(*libraries):
    import torch

    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", *libraries, "-ltorch_cpu", "-lc10"]
    flags = ["-Wl,--exclude-libs,ALL", os.environ.get("LDFLAGS", "")]
    return f"{CXX} -shared $in -o $out {' '.join([*libraries, *flags])}"


def static_cuda_runtime(home):
    folders = ("lib*", "lib/*", "targets/*/lib")
    found = [path.parent for folder in folders for path in home.glob(f"{folder}/libcudart_static.a")]
    if not found:
        raise SystemExit(f"lossguard: {home} has nvcc but no libcudart_static.a")
    # libtorch is asked for because it needs libtorch_cuda exactly where there is one; the extension itself
    # refers to that weakly, and loads without.
    libtorch = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    return [*libtorch, f"-L{found[0]}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]


def extension(ninja, output, kernels, more_objects=(), facts=()):
    """The edges of the extension; the rules are the caller's: cxx, link and, for what `kernels` lists, kernel."""
    cxx, of_instruction_sets = [], []
    for isa, table, flags in INSTRUCTION_SETS:
        of_instruction_sets.append(f"kernels_{isa}.o")
        extra = [*flags, f"-DLOSSGUARD_ISA={isa}", f"-DLOSSGUARD_TABLE={table}"]
        cxx.append((of_instruction_sets[-1], "cpu/kernels.cpp", extra))
    for source in SOURCES:
        cxx.append((object_name(source), source, facts if source == "module.cpp" else []))

    # ninja starts them in this order: the longest first, so that no core idles at the end.
    for source in kernels:
        ninja.build(object_name(source), "kernel", [ROOT / "csrc" / source])
    for name, source, extra in cxx:
        ninja.build(name, "cxx", [ROOT / "csrc" / source], extra)

    # The instruction sets last, and the baseline first of them: of an inline function that several objects
    # have, the linker keeps the first, and no processor must be given another's instructions.
    objects = [object_name(source) for source in [*SOURCES, *kernels]]
    ninja.build(output, "link", [*objects, *more_objects, *of_instruction_sets])


def ninja_file(output):
    """The extension as it is installed."""
    ninja, home = NinjaFile(), cuda_home()
    if home is None:
        ninja.compiling_rule("cxx", cxx_command())
        ninja.rule("link", link_command(), "link $out")
        extension(ninja, output, [])
        return ninja
    archs = cuda_archs(home)
    say(f"building the CUDA half with {home}/bin/nvcc for {' '.join(archs)}")
    ninja.compiling_rule("cxx", cxx_command("-DLOSSGUARD_WITH_CUDA"))
    ninja.compiling_rule("kernel", nvcc_command(home, archs))
    ninja.rule("link", link_command(*static_cuda_runtime(home)), "link $out")
    facts = {"LOSSGUARD_CUDA_ARCHS": " ".join(archs), "LOSSGUARD_NVCC_VERSION": dotted(nvcc_version(home))}
    extension(ninja, output, KERNELS, facts=[shlex.quote(f'-D{name}="{fact}"') for name, fact in facts.items()])
    return ninja


class Build(build_ext):
    def build_extension(self, ext):
        if self.editable_mode:
            # pip gives each editable install a new temporary directory; here the next one finds what this one built.
            self.build_temp = f"{ROOT}/build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        output = Path(self.get_ext_fullpath(ext.name)).absolute()
        output.parent.mkdir(parents=True, exist_ok=True)
        ninja_file(output).run(Path(self.build_temp).absolute())


if __name__ == "__main__":
    try:
        import torch  # noqa: F401
    except ImportError:
        # None there yet: ask pip for one to build with, then be called again.
        setup(setup_requires=["torch>=2.10"])
    else:
        setup(ext_modules=[Extension("lossguard._C", [])], cmdclass={"build_ext": Build})
