"""The build: one .so behind torch's stable ABI, a wheel that works elsewhere, and CUDA found and compiled as asked."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import lossguard
import pytest

ROOT = Path(__file__).parent.parent
EXTENSION = Path(lossguard._C.__file__)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_extension_uses_torchs_stable_abi_alone():
    audit = Path(sys.executable).parent / "torch-abi-audit"
    said = run(audit, "--check", "torch", EXTENSION)
    assert "STABLE" in said and "unstable=0" in said
    assert "Min torch:   2.10.0" in said  # the floor in pyproject.toml


def nothing_of_one_instruction_set_is_merged_with_another(source):
    """Of a weak symbol the linker keeps the first: AVX2's must come last, and none may be in its object alone."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    (folder,) = {path.parent for path in source.glob("build/**/*.o")}
    (link,) = [line for line in (folder / "build.ninja").read_text().splitlines() if ": link " in line]
    objects = link.split(": link ")[1].split()
    assert objects[-1] == "kernels_avx2.o"

    def weak(name):
        symbols = run("nm", "--demangle", folder / name).splitlines()
        return {line.split(" W ")[1] for line in symbols if " W " in line}

    of_others = set().union(*(weak(name) for name in objects[:-1]))
    of_avx2 = weak("kernels_avx2.o")
    assert of_avx2, "the kernels are templates: some of their symbols are weak"
    assert {name for name in of_avx2 if "lossguard::avx2::" not in name} <= of_others


def test_a_wheel_builds_from_the_source_distribution_without_nvcc_and_works_elsewhere(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "csrc", checkout / "csrc")
    shutil.copytree(ROOT / "python", checkout / "python", ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CONTRIBUTING.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, checkout)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, checkout)
    (sdist,) = tmp_path.glob("lossguard-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()

    def files(folder):
        return {path.relative_to(folder) for path in (folder / "csrc").rglob("*")}

    assert files(source) == files(ROOT)

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # -O1: seconds instead of a minute; the code is the same.
    environment = dict(os.environ, LOSSGUARD_CUDA="0", CXXFLAGS="-O1")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, env=environment)
    (wheel,) = tmp_path.glob("lossguard-*.whl")
    nothing_of_one_instruction_set_is_merged_with_another(source)

    elsewhere = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--target", elsewhere, wheel)
    assert (elsewhere / "lossguard" / "py.typed").exists() and (elsewhere / "lossguard" / "_C.pyi").exists()

    code = (
        "import json, torch, lossguard\n"
        "try: lossguard.functional.nll_loss(torch.zeros(2, 3), torch.tensor([0, 3]))\n"
        "except IndexError as e: report = e.report.to_dict()\n"
        "print(json.dumps([lossguard.__file__, lossguard._C.build_info()['cuda'], report]))"
    )
    installed = dict(os.environ, PYTHONPATH=str(elsewhere))
    file, cuda, report = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, env=installed))
    assert file == str(elsewhere / "lossguard" / "__init__.py")
    assert not cuda
    assert report["sections"][0]["indices"] == [[1]] and report["sections"][0]["values"] == [3]


# ---- what setup.py finds and chooses, on a machine of these tests' own making


class Machine:
    """A PATH that holds what a test put there, and nothing in the usual places."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.bin = folder / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        for name in ("CUDA_HOME", "LOSSGUARD_CUDA", "TORCH_CUDA_ARCH_LIST"):
            monkeypatch.delenv(name, raising=False)

    def has(self, path, answers):
        """A program that answers by its first argument."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cases = "".join(f"  {argument}) echo '{answer}';;\n" for argument, answer in answers.items())
        path.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}  *) exit 1;;\nesac\n')
        path.chmod(0o755)

    def has_nvcc(self, home, version="12.8", archs=((7, 5), (8, 0), (9, 0), (12, 0))):
        listed = "\n".join(f"compute_{major}{minor}" for major, minor in archs)
        answers = {"--version": f"Cuda compilation tools, release {version}, V{version}.61", "--list-gpu-arch": listed}
        self.has(home / "bin/nvcc", answers | {"--dryrun": f"#$ TOP={home}/bin/.."})

    def has_gpus(self, *capabilities):
        self.has(self.bin / "nvidia-smi", {"--query-gpu=compute_cap": "\n".join(capabilities)})

    def setup_py(self, **environment):
        """A fresh setup.py: it remembers what it found."""
        for name, value in environment.items():
            self.monkeypatch.setenv(name, str(value))
        spec = importlib.util.spec_from_file_location("setup_py_under_test", ROOT / "setup.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.USUAL_CUDA = str(self.folder / "usual")
        return module


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_without_nvcc_the_cpu_half_builds_and_a_line_says_so(machine, capsys):
    assert machine.setup_py().cuda_home() is None
    assert "building the CPU half alone: no nvcc in CUDA_HOME, PATH or" in capsys.readouterr().err
    ninja = "\n".join(machine.setup_py().ninja_file("out.so").lines)
    assert "LOSSGUARD_WITH_CUDA" not in ninja and "cudart" not in ninja and ".cu" not in ninja


def test_nvcc_is_found_in_cuda_home_then_on_the_path_then_in_the_usual_place(machine):
    usual, on_path, named = (machine.folder / name for name in ("usual", "on path", "named"))
    machine.has_nvcc(usual)
    assert machine.setup_py().cuda_home() == usual
    machine.has_nvcc(on_path)
    machine.has(machine.bin / "nvcc", {"--dryrun": f"#$ TOP={on_path}/bin/.."})  # a script, as distributions have
    assert machine.setup_py().cuda_home() == on_path
    machine.has_nvcc(named)
    assert machine.setup_py(CUDA_HOME=named).cuda_home() == named


def test_lossguard_cuda_turns_cuda_off_or_insists_on_it(machine, capsys):
    with pytest.raises(SystemExit, match="LOSSGUARD_CUDA=1, but no nvcc"):
        machine.setup_py(LOSSGUARD_CUDA=1).cuda_home()
    machine.has_nvcc(machine.folder / "usual")
    assert machine.setup_py(LOSSGUARD_CUDA=1).cuda_home() is not None
    assert machine.setup_py(LOSSGUARD_CUDA=0).cuda_home() is None
    assert "as LOSSGUARD_CUDA=0 asks" in capsys.readouterr().err


def test_an_nvcc_that_is_too_old_is_as_good_as_none(machine, capsys):
    machine.has_nvcc(machine.folder / "usual", version="11.5")
    assert machine.setup_py().cuda_home() is None
    assert "is of CUDA 11.5, and 12.0 is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked, compiled_for",
    [
        ("7.5;9.0+PTX", ["7.5", "9.0+PTX"]),
        ("8.0 9.0a 12.0a+PTX", ["8.0", "9.0a", "12.0a+PTX"]),
        ("5.2 6.0;7.0 7.5 8.6+PTX 7.5", ["7.5", "8.6+PTX"]),
    ],
)
def test_architectures_are_those_asked_for(machine, asked, compiled_for):
    assert machine.setup_py(TORCH_CUDA_ARCH_LIST=asked).cuda_archs(None) == compiled_for


def test_an_architecture_that_is_no_number_is_refused(machine):
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST has Hopper: write 9.0, 9.0a or 9.0"):
        machine.setup_py(TORCH_CUDA_ARCH_LIST="8.0 Hopper").cuda_archs(None)


def test_architectures_are_else_those_of_the_gpus_here(machine):
    """A GPU newer than nvcc takes the newest PTX that it knows; one too old for the kernels is left to native torch."""
    home = machine.folder / "usual"
    machine.has_nvcc(home)
    machine.has_gpus("9.0", "8.0", "9.0", "12.1", "7.0")
    assert machine.setup_py().cuda_archs(home) == ["8.0", "9.0", "12.0+PTX"]


@pytest.mark.parametrize("answer", [None, "[N/A]", "No devices were found"])
def test_architectures_without_a_gpu_serve_every_gpu(machine, answer, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    home = machine.folder / "usual"
    machine.has_nvcc(home)
    if answer:
        machine.has_gpus(answer)
    assert machine.setup_py().cuda_archs(home) == ["7.5+PTX", "9.0+PTX"]


def test_each_architecture_has_machine_code_and_ptx_where_asked(machine):
    gencode = machine.setup_py().gencode
    assert gencode("9.0") == ["-gencode=arch=compute_90,code=sm_90"]
    assert gencode("8.9") == ["-gencode=arch=compute_80,code=sm_89"]
    assert gencode("10.0a+PTX") == [
        "-gencode=arch=compute_100a,code=sm_100a",
        "-gencode=arch=compute_100a,code=compute_100a",
    ]
