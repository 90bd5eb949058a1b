"""The terminal, or the log where there is none: log lines and the tables among them. All on stderr."""

from __future__ import annotations

import io
import logging

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

LOG = logging.getLogger(__name__)
CONSOLE = Console(stderr=True)
LOG_WIDTH = 160  # of a table among log lines


def setup_logging(*, is_main: bool) -> None:
    """Log lines to stderr: everything on rank 0, warnings on the others."""
    root = logging.getLogger("genrec")
    root.setLevel(logging.INFO if is_main else logging.WARNING)
    if CONSOLE.is_terminal:  # above the progress bar, not through it
        handler: logging.Handler = RichHandler(console=CONSOLE, show_path=False, show_level=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root.handlers = [handler]
    root.propagate = False  # libraries put a handler of their own on the root logger
    # TorchRec calls a function of which torch.fx warns.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def show_table(title: str, table: Table) -> None:
    """Show ``table`` beside the log: on a terminal as it is, else as one log entry."""
    if CONSOLE.is_terminal:
        CONSOLE.print(title, table, sep="\n")
        return
    text = io.StringIO()
    Console(file=text, width=LOG_WIDTH).print(table)
    LOG.info("%s\n%s", title, text.getvalue().rstrip())
