"""Packaging: the top folders become genrec.*, so that nothing here is importable as `hstu`, `model` or `data`."""

from pathlib import Path

from setuptools import setup

TOP_FOLDERS = ("configs", "data", "hstu", "model", "training")


def package_dirs() -> dict[str, str]:
    """Import name to folder, for every folder below TOP_FOLDERS that holds Python files."""
    root = Path(__file__).resolve().parent
    files = (path for top in TOP_FOLDERS for path in (root / top).rglob("*.py"))
    folders = sorted({path.parent.relative_to(root).as_posix() for path in files})
    return {f"genrec.{folder.replace('/', '.')}": folder for folder in folders}


setup(packages=list(package_dirs()), package_dir=package_dirs(), package_data={"genrec.configs": ["*.gin"]})
