"""Builds lossguard on the emulator instead of CUDA: every .cu file by the host compiler, no toolkit needed.

    python tests/cuda_emulator/build.py [VARIANT]      # prints the folder to put on PYTHONPATH

The extension is setup.py's and compiled as there, but that its CPU dispatch key goes to the CUDA launchers.
Drivers are executables of their own, without Python or torch. What has not changed is not built again.
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

EMULATOR = Path(__file__).absolute().parent
ROOT = EMULATOR.parent.parent
BUILD = ROOT / "build"
DEFINES = ("-DLOSSGUARD_WITH_CUDA", "-DLOSSGUARD_EMULATED")


@dataclasses.dataclass(frozen=True)
class Variant:
    kernels: str  # flags for csrc/cuda and what drives it; the emulator itself is never instrumented
    link: str = ""
    sources: tuple[str, ...] = ()  # of the emulator, in this variant alone


# Forced inlining and checks in line would take minutes to compile. Of the undefined behaviour, what kernels are
# prone to.
SANITIZED = "-O1 -g1 -D__forceinline__=inline"
ASAN = "-fsanitize=address,alignment,bool,bounds,enum,integer-divide-by-zero,shift,signed-integer-overflow"
ASAN_CALLS = "--param asan-instrumentation-with-call-threshold=0 -fno-sanitize-recover=undefined"
VARIANTS = {
    "plain": Variant("-O1"),
    # Instrumented for ThreadSanitizer but not linked with it: traffic.cpp has its own __tsan_* functions, which count.
    "traffic": Variant("-O1 -fsanitize=thread", sources=("traffic.cpp",)),
    "tsan": Variant(f"{SANITIZED} -fsanitize=thread", "-fsanitize=thread"),
    "asan": Variant(f"{SANITIZED} {ASAN} {ASAN_CALLS}", ASAN),
}


def _setup_py():
    spec = importlib.util.spec_from_file_location("lossguard_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


project = _setup_py()


def extension(variant="plain"):
    """Builds the package; its folder goes on PYTHONPATH."""
    folder = BUILD / ("emulated" if variant == "plain" else f"emulated-{variant}")
    package = folder / "lossguard"
    with _locked(folder):
        package.mkdir(exist_ok=True)
        _mirror(ROOT / "python/lossguard", package)
        ninja = project.NinjaFile()
        # -O1: the CPU half is hardly run.
        ninja.compiling_rule("cxx", project.cxx_command(*DEFINES, "-O1"))
        ninja.rule("link", project.link_command(VARIANTS[variant].link), "link $out")
        _emulated_rules(ninja, VARIANTS[variant])
        engine = _engine(ninja, VARIANTS[variant])
        output = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        project.extension(ninja, output, project.KERNELS, more_objects=engine)
        ninja.run(folder / "objects", stdout=sys.__stderr__)
    return folder


def driver(name, sources, variant="plain"):
    """Builds an executable of `sources` and the emulator."""
    return drivers({name: sources}, variant)[name]


def drivers(wanted, variant="plain"):
    """Builds executables, in one go: `wanted` has the sources of each.

    A source is compiled once for all drivers of a variant, or, as a pair with a copy of csrc, against that.
    """
    folder = BUILD / "drivers" / variant
    with _locked(folder):
        ninja = project.NinjaFile()
        ninja.rule("link", f"{project.CXX} $in -o $out {VARIANTS[variant].link} -pthread", "link $out")
        _emulated_rules(ninja, VARIANTS[variant])
        engine, built = _engine(ninja, VARIANTS[variant]), set()
        for name, sources in wanted.items():
            objects = []
            for source in sources:
                source, csrc = source if isinstance(source, tuple) else (source, ROOT / "csrc")
                of_copy = "" if csrc == ROOT / "csrc" else f"{csrc.parent.name}/"
                objects.append(project.object_name(of_copy + str(source.relative_to(ROOT))))
                if objects[-1] not in built:
                    ninja.build(objects[-1], "kernel", [source], [f"-I{csrc}"])
                    built.add(objects[-1])
            ninja.build(folder / name, "link", objects + engine)
        ninja.run(folder / "objects", stdout=sys.__stderr__)
    return {name: folder / name for name in wanted}


def _emulated_rules(ninja, variant):
    """`kernel` compiles what uses CUDA, `engine` the emulator."""
    include = EMULATOR / "include"
    for name, flags in (("kernel", variant.kernels), ("engine", "-O2")):
        # nvcc's #pragma unroll is unknown to the host compiler.
        flags = [*project.CXXFLAGS, "-Wno-unknown-pragmas", flags, *DEFINES, f"-I{include}"]
        ninja.compiling_rule(name, f"{project.CXX} -MMD -MF $out.d {' '.join(flags)} $extra -x c++ -c $in -o $out")


def _engine(ninja, variant):
    of_variants = {source for other in VARIANTS.values() for source in other.sources}
    names = {path.name for path in EMULATOR.glob("*.cpp")} - of_variants | {*variant.sources}
    objects = {f"emulator_{project.object_name(name)}": EMULATOR / name for name in sorted(names)}
    for object_, source in objects.items():
        ninja.build(object_, "engine", [source])
    return list(objects)


def _mirror(package, folder):
    """Symbolic links to the Python half, and none to what is no longer there."""
    wanted = {path.name for path in package.iterdir() if path.suffix != ".so" and path.name != "__pycache__"}
    for link in folder.iterdir():
        if link.is_symlink() and link.name not in wanted:
            link.unlink()
    for name in wanted - {link.name for link in folder.iterdir()}:
        (folder / name).symlink_to(os.path.relpath(package / name, folder))


@contextlib.contextmanager
def _locked(folder):
    """Workers of one test run build one after another."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(extension(*sys.argv[1:]))
