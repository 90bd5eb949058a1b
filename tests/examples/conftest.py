from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genrec.training.train import main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def examples() -> Path:
    """The folder of example scripts."""
    return REPOSITORY / "examples"


@pytest.fixture
def train_command(tiny_gin: Path) -> Callable[..., list[str]]:
    """``train_command("TrainerArgs.seed = 1", ...)``: the arguments of a tiny run with bindings."""

    def build(*bindings: str, gin_file: Path | str = tiny_gin) -> list[str]:
        return ["--gin-config-file", str(gin_file), *(word for b in bindings for word in ("--gin-bindings", b))]

    return build


@pytest.fixture
def refusal(train_command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refusal(binding, ...)``: the one sentence with which training refuses, after checking that it is one."""

    def run(*bindings: str, gin_file: Path | str | None = None, check: bool = False) -> str:
        words = train_command(*bindings) if gin_file is None else train_command(*bindings, gin_file=gin_file)
        capsys.readouterr()
        code = main("ranking", [*words, *(["--check"] if check else [])])
        captured = capsys.readouterr()
        assert code == 2, captured.err
        assert "Traceback" not in captured.err
        lines = [line for line in captured.err.splitlines() if line.strip()]
        assert lines[-1].startswith("error: "), captured.err
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert "results after" not in captured.out
        return lines[-1]

    return run
