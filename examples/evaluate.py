"""Evaluates a checkpoint and writes user_id, item_id, timestamp, label and score of every evaluation target.

python examples/evaluate.py --checkpoint outputs/movielens_100k_ranking --scores scores.parquet
    [--split test|valid] [--protocol sequential|frozen] [--gin-bindings "DatasetArgs.dataset_path = 'DIR'"]
"""

from __future__ import annotations

import sys

from genrec.training.scoring import main

if __name__ == "__main__":
    sys.exit(main())
