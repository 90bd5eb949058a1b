"""Training throughput of whole steps (forward, backward, optimizer) on this machine, beside RecBole's SASRec.

    python benchmarks/end_to_end.py [--gin-config-file benchmark_cpu_ranking.gin] [--peer-path DIR] [--output FILE]

Ours: the ranking model of the gin file on synthetic batches, through the trainer's own step; full sequences, and as
"genrec_jagged" lengths uniform below that, new in every step. The peer: the SASRec module of RecBole 1.2.1 (dropout
.5 and inner size 256 as it ships) with the same width, layers, heads and tokens a batch, Adam, and a loss at every
position: against the whole item table ("ce", its default, and what the ratio is about), and against one random negative
("bpr", cheaper). Rounds alternate in one process, so all see the same machine, and drawing a batch is timed too. SASRec
has one token an event; HSTU with actions has two, so both tokens/s and events/s are given.

RecBole is not a dependency. To time it: `pip install --no-deps --target DIR recbole==1.2.1 colorlog==4.7.2
colorama==0.4.4 thop texttable tabulate`, and pass --peer-path DIR. Without it only ours is timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrec.configs.loading import load_experiment
from genrec.configs.schema import BenchmarkDatasetArgs, ExperimentConfig
from genrec.model.ranking import RankingModel
from genrec.training.datasets import RunData
from genrec.training.loop import grouped
from genrec.training.optim import LearningRateSchedule, build_optimizers
from genrec.training.ranks import Ranks
from genrec.training.step import TrainStep
from reporting import RESULTS, cpu, header, spread, write

OURS = "genrec"
RESULT = RESULTS / "cpu_throughput.json"


@dataclass(frozen=True)
class Step:
    """A training step that is ready to run, and how much it trains on."""

    run: Callable[[], object]
    num_tokens: int
    num_events: int


def our_steps(config: ExperimentConfig) -> Iterator[Step]:
    """Endless training steps of our model."""
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    model = RankingModel(config).train()
    optimizers = build_optimizers(model, config.optimizer)
    rates = LearningRateSchedule(optimizers, config.trainer, total_steps=1_000_000)
    step = TrainStep(model, optimizers, trainer=config.trainer, ranks=ranks, set_learning_rates=rates)
    data = RunData(config, splits=(), rank=0, world_size=1)
    for number, batches in enumerate(grouped(data.train_loader(), 1), start=1):
        num_tokens = sum(batch.num_tokens for batch in batches)
        num_events = sum(batch.timestamps.shape[0] for batch in batches)
        yield Step(partial(step, batches, step=number), num_tokens, num_events)


def jagged(config: ExperimentConfig, dataset: BenchmarkDatasetArgs) -> ExperimentConfig:
    """``config`` with uniform lengths, and so many batches that no layout is met twice in a row of cached ones."""
    features = tuple(replace(group, is_jagged=True) for group in dataset.feature_args)
    return replace(config, dataset=replace(dataset, feature_args=features, num_generated_batches=64))


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


def peer_steps(config: ExperimentConfig, dataset: BenchmarkDatasetArgs, *, length: int, loss: str) -> Iterator[Step]:
    """Endless training steps of the peer, on users of ``length`` tokens."""
    num_items = max(table.item_vocab_size_or_capacity for table in dataset.embedding_args)
    model = EveryPosition(config, num_items=num_items, length=length, loss=loss).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.learning_rate)
    generator = torch.Generator().manual_seed(0)
    shape = (config.trainer.train_batch_size, length)

    def step(items: Tensor, targets: Tensor, negatives: Tensor) -> None:
        optimizer.zero_grad()
        model(items, targets, negatives).backward()
        optimizer.step()

    while True:
        ids = [torch.randint(1, num_items, shape, generator=generator) for _ in range(3)]
        yield Step(partial(step, *ids), num_tokens=ids[0].numel(), num_events=ids[0].numel())


@dataclass(frozen=True)
class Round:
    """What one contestant did in one round."""

    seconds: float
    num_steps: int
    num_tokens: int
    num_events: int

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, without padding."""
        return self.num_tokens / self.seconds


def time_rounds(
    contestants: dict[str, Iterator[Step]], *, rounds: int, steps: int, warmup: int
) -> dict[str, list[Round]]:
    """The rounds of each contestant; they take turns in every round."""
    for stream in contestants.values():
        for _ in range(warmup):
            next(stream).run()
    finished: dict[str, list[Round]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, stream in contestants.items():
            finished[name].append(_time_round(stream, steps))
    return finished


def _time_round(stream: Iterator[Step], steps: int) -> Round:
    num_tokens = num_events = 0
    start = time.perf_counter()
    for _ in range(steps):
        step = next(stream)
        step.run()
        num_tokens += step.num_tokens
        num_events += step.num_events
    return Round(time.perf_counter() - start, steps, num_tokens, num_events)


def main() -> int:
    """Time, print and write the result."""
    args = _parser().parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    config = load_experiment("ranking", gin_files=[args.gin_config_file], gin_bindings=args.gin_bindings)
    dataset = config.dataset
    if not isinstance(dataset, BenchmarkDatasetArgs):
        print("error: this benchmark needs BenchmarkDatasetArgs, as in benchmark_cpu_ranking.gin", file=sys.stderr)
        return 2
    length = max(group.max_sequence_length for group in dataset.feature_args) * (
        2 if dataset.action_feature_name else 1
    )
    contestants = {OURS: our_steps(config), f"{OURS}_jagged": our_steps(jagged(config, dataset))}
    if args.peer_path:
        sys.path.insert(0, args.peer_path)
        for loss in ("ce", "bpr"):
            contestants[f"recbole_sasrec_{loss}"] = peer_steps(config, dataset, length=length, loss=loss)
    rounds = time_rounds(contestants, rounds=args.rounds, steps=args.steps, warmup=args.warmup)
    report = _report(config, rounds, length=length)
    print(json.dumps(report["results"], indent=1))
    write(report, args.output)
    return 0


def _report(config: ExperimentConfig, rounds: dict[str, list[Round]], *, length: int) -> dict[str, Any]:
    network = config.network
    return {
        **header("training steps on a CPU", device=cpu()),
        "setting": {
            "users_per_batch": config.trainer.train_batch_size,
            "max_tokens_per_user": length,
            "hidden_size": network.hidden_size,
            "num_layers": network.num_layers,
            "num_attention_heads": network.num_attention_heads,
            "rounds": len(rounds[OURS]),
            "steps_per_round": rounds[OURS][0].num_steps,
        },
        "results": {name: _summary(own, rounds[OURS]) for name, own in rounds.items()},
    }


def _summary(own: list[Round], ours: list[Round]) -> dict[str, Any]:
    """Medians over rounds, with the extremes; the ratio is of rounds that ran one after the other."""
    speeds = [entry.tokens_per_s for entry in own]
    return {
        "tokens_per_s": spread(speeds),
        "events_per_s": statistics.median(entry.num_events / entry.seconds for entry in own),
        "step_ms": statistics.median(1e3 * entry.seconds / entry.num_steps for entry in own),
        "genrec_tokens_per_s_over_this": statistics.median(
            a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, own, strict=True)
        ),
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
