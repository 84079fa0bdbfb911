"""The build: one .so behind torch's stable ABI, and a wheel that works elsewhere."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import lossguard

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


def test_a_wheel_builds_and_works_elsewhere(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    shutil.copytree(ROOT / "python", source / "python", ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = dict(os.environ, CXXFLAGS="-O1")  # seconds instead of a minute; the code is the same
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, env=environment)
    (wheel,) = tmp_path.glob("lossguard-*.whl")
    nothing_of_one_instruction_set_is_merged_with_another(source)

    elsewhere = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--target", elsewhere, wheel)
    assert (elsewhere / "lossguard" / "py.typed").exists() and (elsewhere / "lossguard" / "_C.pyi").exists()

    code = (
        "import json, torch, lossguard\n"
        "try: lossguard.functional.nll_loss(torch.zeros(2, 3), torch.tensor([0, 3]))\n"
        "except IndexError as e: print(json.dumps([lossguard.__file__, e.report.to_dict()]))"
    )
    installed = dict(os.environ, PYTHONPATH=str(elsewhere))
    file, report = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, env=installed))
    assert file == str(elsewhere / "lossguard" / "__init__.py")
    assert report["sections"][0]["indices"] == [[1]] and report["sections"][0]["values"] == [3]
