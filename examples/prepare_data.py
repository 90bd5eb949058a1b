"""Turns a public dataset into the parquet files that genrec trains on.

python examples/prepare_data.py --dataset ml-100k --output prepared/ml-100k [--source FOLDER_OR_ZIP]
    [--split leave_last|user|global_time] [--holdout 10]
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from genrec.configs.schema import DATASET_NAMES, SPLIT_RULES, UserError
from genrec.data.format import DatasetMetadata
from genrec.data.prepare import DEFAULT_HOLDOUT, DEFAULT_SPLIT_SEED, prepare


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dataset", required=True, help=f"one of {', '.join(DATASET_NAMES)}")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--source", type=Path, help="folder or zip with the published files; default: fetch them")
    parser.add_argument("--split", default="leave_last", help=f"one of {', '.join(SPLIT_RULES)}")
    parser.add_argument("--holdout", type=int, default=DEFAULT_HOLDOUT, help="events a user in valid and in test")
    parser.add_argument("--split-seed", type=int, default=DEFAULT_SPLIT_SEED, help='which users "user" holds out')
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def summary(metadata: DatasetMetadata, output: Path) -> str:
    """What was prepared, for people."""
    notes = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in metadata.notes.items() if count)
    targets = ", ".join(f"{split} {count:,}" for split, count in metadata.num_targets.items())
    return (
        f"{metadata.name} from {metadata.source} in {output}\n"
        f"  {metadata.num_users:,} users, {metadata.num_items:,} items, {metadata.num_events:,} events\n"
        f"  targets ({metadata.split['rule']}): {targets}\n"
        f"  content hash {metadata.source_hash}" + (f"\n  {notes}" if notes else "")
    )


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        metadata = prepare(
            arguments.dataset,
            output=arguments.output,
            source=arguments.source,
            split=arguments.split,
            holdout=arguments.holdout,
            seed=arguments.split_seed,
        )
    except UserError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(metadata, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
