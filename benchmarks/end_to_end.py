"""Training throughput of whole steps (forward, backward, optimizer) on this machine, beside RecBole's SASRec.

    python benchmarks/end_to_end.py [--gin-config-file benchmark_cpu_ranking.gin] [--peer-path DIR] [--output FILE]

Ours: the ranking model of the gin file, on synthetic full-length batches, through the trainer's own step. The peer: the
SASRec module of RecBole 1.2.1 (dropout .5 and inner size 256 as it ships) with the same width, layers, heads and tokens
a batch, Adam, and a loss at every position: once against the whole item table (its default, "ce"), once against one
random negative ("bpr"). Rounds alternate in one process, so both see the same machine. SASRec has one token an event;
HSTU with actions has two, so both tokens/s and events/s are given.

RecBole is not a dependency. To time it: `pip install --no-deps --target DIR recbole==1.2.1 colorlog==4.7.2
colorama==0.4.4 thop texttable tabulate`, and pass --peer-path DIR. Without it only ours is timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrec.configs.loading import load_experiment
from genrec.configs.schema import BenchmarkDatasetArgs, ExperimentConfig, UserError
from genrec.training.datasets import RunData
from genrec.training.loop import grouped
from genrec.training.optim import LearningRateSchedule, build_optimizers
from genrec.training.sharding import Ranks
from genrec.training.step import TrainStep

RESULT = Path(__file__).parent / "results" / "cpu_throughput.json"


def our_steps(config: ExperimentConfig) -> Iterator[Callable[[], None]]:
    """Endless training steps of our model."""
    from genrec.model.ranking import RankingModel

    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    model = RankingModel(config).train()
    optimizers = build_optimizers(model, config.optimizer)
    rates = LearningRateSchedule(optimizers, config.trainer, total_steps=1_000_000)
    step = TrainStep(model, optimizers, trainer=config.trainer, ranks=ranks, set_learning_rates=rates)
    data = RunData(config, splits=(), rank=0, world_size=1)
    for number, batches in enumerate(grouped(data.train_loader(), 1), start=1):
        yield lambda batches=batches, number=number: step(batches, step=number)


class EveryPosition(nn.Module):
    """RecBole's SASRec encoder with a loss at every position of full sequences (B, L)."""

    def __init__(self, config: ExperimentConfig, *, num_items: int, length: int, loss: str) -> None:
        super().__init__()
        module = importlib.import_module("recbole.model.sequential_recommender.sasrec")
        network = config.network
        self.loss = loss
        self.length = length
        self.peer = module.SASRec(_peer_config(network, length), _PeerDataset(num_items))

    def forward(self, items: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """items, targets, negatives: (B, L) -> mean loss."""
        peer: Any = self.peer
        positions = torch.arange(items.shape[1]).expand_as(items)
        embedded = peer.item_embedding(items) + peer.position_embedding(positions)
        embedded = peer.dropout(peer.LayerNorm(embedded))
        mask = peer.get_attention_mask(items)
        states = peer.trm_encoder(embedded, mask, output_all_encoded_layers=True)[-1]
        if self.loss == "ce":
            logits = states.flatten(0, 1) @ peer.item_embedding.weight.T
            return nn.functional.cross_entropy(logits, targets.flatten())
        positive = (states * peer.item_embedding(targets)).sum(-1)
        negative = (states * peer.item_embedding(negatives)).sum(-1)
        return -torch.log(1e-10 + torch.sigmoid(positive - negative)).mean()


class _PeerDataset:
    def __init__(self, num_items: int) -> None:
        self._num_items = num_items

    def num(self, _field: str) -> int:
        return self._num_items


def _peer_config(network: Any, length: int) -> dict[str, Any]:
    """What SASRec reads: its shipped values, with our width, layers, heads and length."""
    return {
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "LIST_SUFFIX": "_list",
        "ITEM_LIST_LENGTH_FIELD": "item_length",
        "NEG_PREFIX": "neg_",
        "MAX_ITEM_LIST_LENGTH": length,
        "device": torch.device("cpu"),
        "n_layers": network.num_layers,
        "n_heads": network.num_attention_heads,
        "hidden_size": network.hidden_size,
        "inner_size": 256,
        "hidden_dropout_prob": 0.5,
        "attn_dropout_prob": 0.5,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "loss_type": "CE",
    }


def peer_steps(config: ExperimentConfig, *, num_tokens: int, loss: str) -> Iterator[Callable[[], None]]:
    """Endless training steps of the peer, on as many tokens a user as ours."""
    assert isinstance(config.dataset, BenchmarkDatasetArgs)
    num_items = max(table.item_vocab_size_or_capacity for table in config.dataset.embedding_args)
    model = EveryPosition(config, num_items=num_items, length=num_tokens, loss=loss).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.learning_rate)
    generator = torch.Generator().manual_seed(0)
    shape = (config.trainer.train_batch_size, num_tokens)

    def step(items: Tensor, targets: Tensor, negatives: Tensor) -> None:
        optimizer.zero_grad()
        model(items, targets, negatives).backward()
        optimizer.step()

    while True:
        ids = [torch.randint(1, num_items, shape, generator=generator) for _ in range(3)]
        yield lambda ids=ids: step(*ids)


def time_rounds(
    contestants: dict[str, Iterator[Callable[[], None]]], *, rounds: int, steps: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds a step, one mean per round; the contestants take turns in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for stream in contestants.values():
        for _ in range(warmup):
            next(stream)()
    for _ in range(rounds):
        for name, stream in contestants.items():
            ready = [next(stream) for _ in range(steps)]
            start = time.perf_counter()
            for run in ready:
                run()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def main() -> int:
    """Time, print and write the result."""
    args = _parser().parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    config = load_experiment("ranking", gin_files=[args.gin_config_file], gin_bindings=args.gin_bindings)
    if not isinstance(config.dataset, BenchmarkDatasetArgs):
        raise UserError(
            "this benchmark needs synthetic data: bind BenchmarkDatasetArgs, as benchmark_cpu_ranking.gin does"
        )
    events = max(group.max_sequence_length for group in config.dataset.feature_args)
    tokens_per_event = 2 if config.dataset.action_feature_name else 1
    tokens = events * tokens_per_event
    contestants = {"genrec": our_steps(config)}
    if args.peer_path:
        sys.path.insert(0, args.peer_path)
        for loss in ("ce", "bpr"):
            contestants[f"recbole_sasrec_{loss}"] = peer_steps(config, num_tokens=tokens, loss=loss)
    seconds = time_rounds(contestants, rounds=args.rounds, steps=args.steps, warmup=args.warmup)
    per_event = {name: tokens_per_event if name == "genrec" else 1 for name in contestants}
    report = _report(config, seconds, num_tokens=config.trainer.train_batch_size * tokens, tokens_per_event=per_event)
    print(json.dumps(report["results"], indent=1))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _report(
    config: ExperimentConfig, seconds: dict[str, list[float]], *, num_tokens: int, tokens_per_event: dict[str, int]
) -> dict[str, Any]:
    results = {}
    for name, values in seconds.items():
        median = statistics.median(values)
        results[name] = {
            "tokens_per_s": round(num_tokens / median),
            "events_per_s": round(num_tokens / median / tokens_per_event[name]),
            "step_ms": {"median": 1e3 * median, "min": 1e3 * min(values), "max": 1e3 * max(values)},
            "tokens_per_s_ratio_of_genrec_to_it": statistics.median(
                other / own for other, own in zip(values, seconds["genrec"], strict=True)
            ),
        }
    network = config.network
    return {
        "benchmark": "training steps on a CPU",
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": {
            "users_per_batch": config.trainer.train_batch_size,
            "tokens_per_batch": num_tokens,
            "hidden_size": network.hidden_size,
            "num_layers": network.num_layers,
            "num_attention_heads": network.num_attention_heads,
            "rounds": len(next(iter(seconds.values()))),
        },
        "results": results,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time training steps on a CPU.")
    parser.add_argument("--gin-config-file", default="benchmark_cpu_ranking.gin")
    parser.add_argument("--gin-bindings", action="append", default=[])
    parser.add_argument("--peer-path", help="a folder that holds the package recbole")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps of a contestant in a round")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
