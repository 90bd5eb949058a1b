"""Trains an HSTU ranking model from gin files.

python examples/pretrain_gr_ranking.py --gin-config-file movielens_100k_ranking.gin
    [--gin-bindings 'TrainerArgs.train_batch_size = 64'] [--check] [--debug]
torchrun --nproc_per_node 2 examples/pretrain_gr_ranking.py --gin-config-file movielens_100k_ranking.gin
"""

from __future__ import annotations

import sys

from genrec.training.train import main

if __name__ == "__main__":
    sys.exit(main("ranking"))
