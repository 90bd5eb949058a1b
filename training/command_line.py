"""What the command lines of the example scripts share: their flags, and how an error reaches the user."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from genrec.configs.schema import UserError
from genrec.training.process_group import is_main_process, speaks, tell
from genrec.training.step import NonFiniteError
from genrec.training.stopping import Stopped

EXIT_USER_ERROR, EXIT_NOT_FINITE, EXIT_INTERRUPTED = 2, 3, 130


def run_for_user(run: Callable[[], object], *, debug: bool) -> int:
    """Call ``run``; a UserError becomes one sentence on stderr and an exit code, unless ``debug`` wants the traceback.

    What all ranks meet is told by rank 0 alone. Unexpected exceptions keep their traceback.
    """
    try:
        run()
    except UserError as error:
        if debug:
            raise
        if not error.told and speaks(error):
            tell(error)
        elif not error.told:  # met before the ranks had joined: torchrun stops all of them when the first one ends
            time.sleep(1.0)
        return EXIT_NOT_FINITE if isinstance(error, NonFiniteError) else EXIT_USER_ERROR
    except Stopped as stopped:
        if is_main_process():
            at = "in the final evaluation" if stopped.step is None else f"after step {stopped.step}, which is saved"
            told = f"{at}: starting it again continues there"
            if not stopped.saved:
                told = f"after step {stopped.step}: TrainerArgs.ckpt_save_interval = 0, so nothing is saved"
            print(f"stopped by SIGTERM {told}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if debug:
            raise
        if is_main_process():
            print("interrupted: starting it again continues from the newest checkpoint", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return 0


def script_directory() -> Path:
    """The folder of the script that was started, where gin files may lie."""
    return Path(sys.argv[0]).resolve().parent


def add_gin_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every script has."""
    parser.add_argument(
        "--gin-bindings",
        action="append",
        default=[],
        metavar="BINDING",
        help="such as 'TrainerArgs.seed = 1'; wins over files",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
