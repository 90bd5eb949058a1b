"""The fences that import-linter cannot see, and what importing genrec may not need."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("configs", "data", "hstu", "model", "training")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Imports all modules in one process in which the packages of other machines cannot be imported.
LEAN_IMPORT = """
import importlib, importlib.abc, os, runpy, sys

ABSENT = {"triton", "transformer_engine", "transformer_engine_torch", "hstu", "hstu_attn_2_cuda", "dynamicemb"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT or name.startswith("fbgemm_gpu.experimental"):
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)

sys.meta_path.insert(0, Absent())
import torch

def refuse_cuda():
    raise RuntimeError("an import initialises CUDA")

torch.cuda._lazy_init = refuse_cuda  # what every use of CUDA calls first, also on a machine without
modules, scripts = sys.argv[1].split(","), sys.argv[2].split(",")
for name in modules:
    importlib.import_module(name)
for script in filter(None, scripts):
    sys.path.insert(0, os.path.dirname(script))  # as for a script that is started
    runpy.run_path(script, run_name="not_main")
    del sys.path[0]
print(len(modules), len(scripts))
"""


def imported_names(path):
    """(line, name) of every import in the file, wherever it stands; a relative one with its dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("genrec", *parts)).removesuffix(".__init__")


def import_lean(names, scripts):
    command = [sys.executable, "-c", LEAN_IMPORT, ",".join(names), ",".join(map(str, scripts))]
    environment = {"PYTHONPATH": str(ROOT / ".pkgroot"), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_module_imports_without_gpu_packages_and_leaves_cuda_alone():
    scripts = [path for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    result = import_lean([module_name(path) for path in MODULES], scripts)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import torch; torch.cuda.current_device()", "an import initialises CUDA"),
        ("import torch; torch.cuda.manual_seed(0); torch.zeros(1).cuda()", "an import initialises CUDA"),
        ("import triton", "triton is not on this machine"),
    ],
)
def test_an_import_that_needs_a_gpu_would_be_found(tmp_path, code, error):
    script = tmp_path / "script.py"
    script.write_text(code)
    result = import_lean(["genrec.configs.schema"], [script])
    assert result.returncode != 0 and error in result.stderr


def test_the_contract_on_configs_names_every_module_but_schema():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(one for one in settings["tool"]["importlinter"]["contracts"] if one["id"] == "schema")
    modules = {module_name(path) for path in (ROOT / "configs").glob("*.py")}
    assert set(contract["forbidden_modules"]) == modules - {"genrec.configs", "genrec.configs.schema"}


def test_torchrec_distributed_is_imported_in_training_alone():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        if path.relative_to(ROOT).parts[0] != "training"
        for line, name in imported_names(path)
        if name.startswith("torchrec.distributed")
    ]
    assert not found


def test_imports_are_absolute_and_never_by_folder_name():
    """`import configs` or `from hstu import` would find another package, or none once installed."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, name in imported_names(path)
        if name.partition(".")[0] in ("", *PACKAGES)
    ]
    assert not found


def test_environment_variables_are_not_feature_switches():
    """Only what torchrun sets is read from the environment, and what cuBLAS reads is set in it."""
    allowed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG"}
    allowed |= {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                text = ast.get_source_segment(path.read_text(encoding="utf-8"), node)
                line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
                assert any(name in line for name in allowed), f"{path.relative_to(ROOT)}:{node.lineno}: {text}"


def gpu_marked(node):
    return any("mark.gpu" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_what_skips_without_cuda_is_marked_gpu(path):
    """The skip itself is in conftest.py: a test that asks for CUDA by itself must carry the marker all the same."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole_file = any("pytestmark" in ast.unparse(node) and "mark.gpu" in ast.unparse(node) for node in tree.body)
    if whole_file or path == Path(__file__).resolve():
        return
    for node in tree.body:
        asks = "cuda.is_available" in ast.unparse(node) or "cuda.device_count" in ast.unparse(node)
        assert not asks or gpu_marked(node), f"{path.name}:{node.lineno} looks for CUDA without the marker gpu"
