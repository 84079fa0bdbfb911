"""The build: one .so behind torch's stable ABI, and a wheel that works elsewhere."""

import json
import os
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


def test_nothing_of_one_instruction_set_is_merged_with_another():
    """A weak symbol outside the namespaces of csrc/cpu/simd.h could bring AVX2 code to a processor without."""
    for built in sorted(ROOT.glob("build/**/kernels_avx2.o")):
        symbols = run("nm", "--demangle", built).splitlines()
        weak = [line for line in symbols if line.split()[-2:-1] != ["U"] and " W " in line and "avx2::" not in line]
        assert weak == []


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
