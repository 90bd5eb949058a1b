"""What a user can get wrong is answered with one sentence, exit code 2 and no traceback."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch

from genrec.configs.schema import UserError
from genrec.hstu.precision import capability
from genrec.training import preflight
from genrec.training.scoring import main as evaluate_main
from genrec.training.train import main


def bad_dataset(path):
    return f"DatasetArgs.dataset_path = {str(path)!r}"


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("TrainerArgs.train_batch_sise = 4", ["TrainerArgs", "train_batch_sise", "did you mean 'train_batch_size'"]),
        ("TrainerArg.seed = 4", ["TrainerArg", "did you mean 'TrainerArgs'"]),
        ("LEARNIG_RATE = 1e-3", ["LEARNIG_RATE"]),
        ("OptimizerArgs.learning_rate = %LEARNIG_RATE", ["LEARNIG_RATE"]),
        ("RetrievalArgs.temperature = 0.1", ["RetrievalArgs.temperature", "nothing reads"]),
        ("OptimizerArgs.learning_rate = '1e-3'", ["learning_rate", "'1e-3'"]),
        ("TrainerArgs.train_batch_size = 2.5", ["train_batch_size", "2.5"]),
        ("DatasetArgs.dataset_name = ml-20m", ["quotes"]),
        ("TrainerArgs.train_batch_size = 2 * 64", ["arithmetic"]),
        ("TrainerArgs.train_batch_size = 0", ["train_batch_size", "0"]),
        ("TrainerArgs.eval_batch_size = -1", ["eval_batch_size", "-1"]),
        ("NetworkArgs.kv_channels = 7", ["kv_channels", "7", "8"]),
        ("DatasetArgs.dataset_name = 'ml-20'", ["ml-20", "ml-100k", "ml-20m"]),
        ("DatasetArgs.contextual_features = ['gender']", ["gender", "age"]),
        ("DatasetArgs.split = 'user'", ["split", "user", "leave_last"]),
        ("TrainerArgs.pipeline_type = none", ["text needs quotes", "TrainerArgs.pipeline_type = 'none'"]),
        ("TrainerArgs.ckpt_load_dir = '/no/such/folder'", ["/no/such/folder"]),
        ("DatasetArgs.dataset_path = '/no/such/folder'", ["/no/such/folder", "prepare_data.py"]),
        ("RankingArgs.prediction_head_arch = [8, 3]", ["prediction_head_arch"]),
    ],
)
def test_bad_binding(refusal, binding, words):
    sentence = refusal(binding)
    assert not [word for word in words if word not in sentence], sentence


FP8 = "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'"
PER_HEAD = "MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-head'"
EMULATED = "MixedPrecisionArgs.backend = 'emulated'"


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        ([EMULATED, "NetworkArgs.hidden_size = 1000"], ["NetworkArgs.hidden_size = 1000", "16", "992 or 1008"]),
        ([EMULATED, "NetworkArgs.kv_channels = 8", "NetworkArgs.num_attention_heads = 3"], ["kv_channels = 8 times"]),
        ([EMULATED, "MixedPrecisionArgs.linear_recipe = 'rowwise'"], ["'rowwise'", "'delayed', 'tensorwise', 'block"]),
        ([EMULATED, "MixedPrecisionArgs.linear_scaling_precision = 'e5m2'"], ["'e5m2'", "'hybrid'", "'e4m3'"]),
        ([EMULATED, "MixedPrecisionArgs.amax_history_len = 16"], ["amax_history_len = 16", "1024", "'delayed'"]),
        ([EMULATED, PER_HEAD, "NetworkArgs.relative_bias = 'table'"], ["with a relative bias", "'none' are"]),
        ([PER_HEAD, "MixedPrecisionArgs.linear_recipe = None"], ["'per-head' with backend", "needs a GPU", EMULATED]),
        (["MixedPrecisionArgs.linear_recipe = 'delayed'"], ["'delayed'", "needs a GPU", EMULATED]),
    ],
)
def test_bad_fp8(refusal, bindings, words):
    sentence = refusal(FP8, *bindings)
    assert not [word for word in words if word not in sentence], sentence


@pytest.mark.parametrize(
    ("binding", "words"),
    [("NetworkArgs.hidden_size = 1000", "such as 992 or 1008"), ("TrainerArgs.device = 'cpu'", EMULATED)],
)
def test_bad_binding_of_the_fp8_preset(refusal, binding, words):
    assert words in refusal(binding, gin_file="movielens_ranking_fp8.gin")


@pytest.mark.parametrize(
    ("recipe", "capabilities", "words"),
    [
        ("mxfp8", {"delayed": "", "tensorwise": "", "blockwise": "", "mxfp8": "MXFP8 needs another GPU"},
         ["'mxfp8'", "MXFP8 needs another GPU", "'delayed', 'tensorwise', 'blockwise' are", EMULATED]),
        ("tensorwise", dict.fromkeys(("delayed", "tensorwise", "blockwise", "mxfp8"), capability.NOT_INSTALLED),
         ["'tensorwise'", "Transformer Engine is not installed", "requirements/cuda.txt", EMULATED]),
    ],
    ids=["mxfp8 on Hopper", "te without Transformer Engine"],
)  # fmt: skip
def test_fp8_that_the_gpu_or_its_software_lacks(refusal, monkeypatch, recipe, capabilities, words):
    monkeypatch.setattr(preflight, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(capability, "linear_capabilities", lambda: capabilities)
    for check in (False, True):
        bindings = (
            f"MixedPrecisionArgs.linear_recipe = {recipe!r}",
            "NetworkArgs.hidden_size = 32",
            "NetworkArgs.kv_channels = 16",
        )
        sentence = refusal(FP8, *bindings, check=check)
        assert not [word for word in words if word not in sentence], sentence


def test_missing_file(refusal):
    assert "absent.gin" in refusal(gin_file="absent.gin")


def test_check_refuses_too(refusal):
    assert "train_batch_size" in refusal("TrainerArgs.train_batch_size = 0", check=True)
    assert "/no/such/folder" in refusal("DatasetArgs.dataset_path = '/no/such/folder'", check=True)


@pytest.mark.parametrize(("shift", "bad_id"), [(5, "20"), (-1, "-1")])
def test_id_outside_its_table(refusal, tmp_path, write_tiny_dataset, shift, bad_id):
    data = write_tiny_dataset(tmp_path / "data", train_lengths=(30, 30, 30), item_shift=shift)
    sentence = refusal(bad_dataset(data), "TrainerArgs.train_batch_size = 16")
    assert "feature 'item' has id" in sentence
    assert "table 'item' has 20 rows (ids 0 to 19)" in sentence
    if shift < 0:
        assert f"id {bad_id} " in sentence


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_rows(refusal, tmp_path, write_tiny_dataset, num_workers):
    """Bytes flipped in the middle of the file: the footer is whole, so it is found while training."""
    data = write_tiny_dataset(tmp_path / "data")
    path = data / "train" / "00000.parquet"
    content = bytearray(path.read_bytes())
    content[200:240] = bytes(40)
    path.write_bytes(content)
    sentence = refusal(bad_dataset(data), f"DatasetArgs.num_workers = {num_workers}")
    assert str(path) in sentence
    assert "damaged" in sentence


def test_damaged_file(refusal, tmp_path, write_tiny_dataset):
    data = write_tiny_dataset(tmp_path / "data")
    path = data / "test" / "00000.parquet"
    path.write_bytes(path.read_bytes()[:100])
    assert str(path) in refusal(bad_dataset(data))


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_empty_dataset(refusal, tmp_path, write_tiny_dataset, lengths):
    data = write_tiny_dataset(tmp_path / "data", train_lengths=lengths)
    assert "empty" in refusal(bad_dataset(data))


def test_output_folder_cannot_be_written(refusal, tmp_path):
    (tmp_path / "file").write_text("")
    sentence = refusal(f"TrainerArgs.output_dir = {str(tmp_path / 'file' / 'run')!r}")
    assert "TrainerArgs.output_dir" in sentence
    assert "is not a folder" in sentence


def test_checkpoint_folder_cannot_be_written(refusal, tmp_path):
    (tmp_path / "file").write_text("")
    sentence = refusal(f"TrainerArgs.ckpt_save_dir = {str(tmp_path / 'file' / 'run')!r}")
    assert "TrainerArgs.ckpt_save_dir" in sentence
    assert "is not a folder" in sentence


def test_eval_interval_0_evaluates_at_the_end(train_command, capsys):
    assert main("ranking", train_command("TrainerArgs.eval_interval = 0")) == 0
    assert "results after step 6" in capsys.readouterr().out


def test_loss_gone_nan_has_its_own_exit_code(train_command, capsys, tmp_path):
    """A learning rate that blows the weights up."""
    bindings = ("OptimizerArgs.learning_rate = 1e30", "OptimizerArgs.optimizer_str = 'sgd'")
    assert main("ranking", train_command(*bindings, "TrainerArgs.ckpt_save_interval = 1")) == 3
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: the loss or a gradient is not finite at step")
    assert "Traceback" not in captured.err
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_debug_shows_the_traceback(train_command):
    with pytest.raises(UserError):
        main("ranking", [*train_command("TrainerArgs.train_batch_size = 0"), "--debug"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "/no/such/folder"], "no checkpoint folder /no/such/folder"),
        (["--checkpoint", "."], "no whole checkpoint"),
    ],
)
def test_evaluate_without_a_checkpoint(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert evaluate_main([*arguments, "--scores", str(tmp_path / "scores.parquet")]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_in_a_process_of_its_own(examples, train_command):
    arguments = train_command("TrainerArgs.train_batch_size = 0")
    command = [sys.executable, str(examples / "pretrain_gr_ranking.py"), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1
    assert finished.stderr.startswith("error: ")
    assert "train_batch_size" in finished.stderr


def test_an_interrupt_is_no_traceback(train_command, monkeypatch, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("genrec.training.train.train", interrupt)
    assert main("ranking", train_command()) == 130
    assert capsys.readouterr().err.strip().startswith("interrupted: ")
