"""A wheel of genrec in an empty environment, beside another package called `hstu`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("configs", "data", "hstu", "model", "training", "setup.py", "pyproject.toml", "README.md", "LICENSE")

IMPORTS = """
import sys
assert not [path for path in sys.path if path == {root!r}], sys.path
import hstu
assert hstu.OWNER == "someone else", hstu
import genrec.configs.schema, genrec.data.batch, genrec.hstu.attention, genrec.model.ranking, genrec.training.train
from genrec.configs.loading import load_experiment
from genrec.configs.lookup import presets
for name in ("configs.schema", "hstu.attention", "training.train"):
    module = sys.modules["genrec." + name]
    assert module.__file__.startswith({site!r}), module
for name in presets():
    load_experiment("ranking", gin_files=[name], gin_bindings=[])
print(" ".join(presets()))
"""


def run(*command, cwd=None):
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the working tree stays clean."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "wheel", *flags, "-w", str(output), str(source))
    (built,) = output.glob("genrec-*.whl")
    return built


def test_wheel_installs_beside_another_hstu_and_both_import(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    flags = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", str(python), "install", *flags, str(wheel))
    (site / "hstu").mkdir()
    (site / "hstu" / "__init__.py").write_text('OWNER = "someone else"\n')
    # The dependencies are borrowed from the environment of this test; a path in a .pth file brings no .pth files along.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    found = run(str(python), "-I", "-c", IMPORTS.format(root=str(ROOT), site=str(site)), cwd=tmp_path)
    assert "movielens_100k_ranking.gin" in found.split()


def test_wheel_holds_nothing_importable_but_genrec(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path, "zip")
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["genrec", "genrec"]
    assert not (tmp_path / "genrec" / "hstu" / "__init__.py").exists()
    modules = {path.relative_to(tmp_path / "genrec") for path in (tmp_path / "genrec").rglob("*.py")}
    wanted = {path.relative_to(ROOT) for part in PARTS[:5] for path in (ROOT / part).rglob("*.py")}
    assert modules == wanted


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt", "cuda.txt"])
def test_locks_are_pinned_and_name_no_host_or_path(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    for pin in pins:
        package, _, version = pin.partition("==")
        assert package == package.strip().lower(), pin
        assert version and not set(version) & set(" ;@/<>*+"), pin
    names = [pin.partition("==")[0] for pin in pins]
    assert len(set(names)) == len(names)
    assert not any("http" in line or "file:" in line for line in lines)
