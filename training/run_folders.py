"""The folders that a run writes into, by it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from genrec.configs.schema import TrainerArgs, UserError
from genrec.data.files import locked, write_atomically


@contextlib.contextmanager
def sole_writer(trainer: TrainerArgs, *, checkpoints: Path) -> Iterator[None]:
    """Within it no other run writes into the folders of this one, which are made: that of ``checkpoints`` too, rather
    than find after hours of training that it can't be. Raises UserError.
    """
    places = [("output_dir", Path(trainer.output_dir))]
    if trainer.ckpt_save_interval != 0:
        places.append(("ckpt_save_dir" if trainer.ckpt_save_dir else "output_dir", checkpoints))
    with contextlib.ExitStack() as stack:
        for field, folder in places:
            with _for_user(field, trainer):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder / ".lock"))
        yield


def write_config(texts: Mapping[str, str], trainer: TrainerArgs) -> None:
    """Put the gin files of ``texts`` into the output folder. Raises UserError where that cannot be written."""
    with _for_user("output_dir", trainer):
        for name in ("config.gin", "operative_config.gin"):
            write_atomically(Path(trainer.output_dir) / name, texts[name])


@contextlib.contextmanager
def _for_user(field: str, trainer: TrainerArgs) -> Iterator[None]:
    """What the system refuses within it becomes a UserError that names ``field``, a folder."""
    named = f"TrainerArgs.{field} = {getattr(trainer, field)!r}"
    try:
        yield
    except BlockingIOError as error:
        raise UserError(f"another run writes into {named}: wait for its end, or choose another folder") from error
    except OSError as error:
        raise UserError(f"{named} cannot be written: {error.strerror} ({error.filename})") from error
