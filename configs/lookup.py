"""Where gin files are found: as named, beside the script, among the presets shipped in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from genrec.configs.errors import ConfigError


def presets() -> dict[str, Path]:
    """The shipped gin files by name. The package is always installed as plain files, so they have paths."""
    files = (Path(str(entry)) for entry in resources.files("genrec.configs").iterdir())
    return {path.name: path for path in sorted(files) if path.suffix == ".gin"}


def find_config(name: str, search_dirs: Sequence[Path]) -> Path:
    """The file ``name``: as given (from the working directory), then in ``search_dirs``, then a preset."""
    return _find(name, [Path(), *search_dirs], f"--gin-config-file {name!r}")


def find_include(name: str, folder: Path, place: str) -> Path:
    """The included file ``name``: in ``folder``, that of the including file, then a preset."""
    return _find(name, [folder], f"{place}: include {name!r}")


def _find(name: str, folders: Sequence[Path], asked: str) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    if name in presets():
        return presets()[name]
    searched = " or ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))
    raise ConfigError(f"{asked} is not a file in {searched}, nor a preset, which are {', '.join(presets())}")
