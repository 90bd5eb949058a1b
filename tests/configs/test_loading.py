"""How gin behaves, trap by trap, and the sentence that each gets here."""

import dataclasses

import gin
import pytest

from genrec.configs import loading
from genrec.configs.loading import load_experiment
from genrec.configs.lookup import presets
from genrec.configs.schema import ConfigError

SYNTHETIC = """
events/FeatureArgs.feature_names = ['item']
events/FeatureArgs.max_sequence_length = 4
item/EmbeddingArgs.feature_names = ['item']
item/EmbeddingArgs.table_name = 'item'
item/EmbeddingArgs.item_vocab_size_or_capacity = 10
BenchmarkDatasetArgs.feature_args = [@events/FeatureArgs()]
BenchmarkDatasetArgs.embedding_args = [@item/EmbeddingArgs()]
BenchmarkDatasetArgs.item_feature_name = 'item'
BenchmarkDatasetArgs.contextual_feature_names = []
"""

# What is added to the minimal file (its line 12 and on), and the sentence, "..." for what is left out.
REFUSED_LINES = {
    "unknown class": ("TrainArgs.seed = 1", "run.gin:13: unknown class 'TrainArgs', known are TrainerArgs, Data..."
                      "(did you mean 'TrainerArgs'?)"),
    "class of another module": ("torch.TrainerArgs.seed = 1", "run.gin:13: unknown class 'torch.TrainerArgs'..."),
    "unknown field": ("TrainerArgs.sed = 1", "run.gin:13: TrainerArgs has no field 'sed', it has train_batch_size,"
                      "...(did you mean 'seed'?)"),
    "unknown class in a reference": ("TrainerArgs.seed = @Seed()", "run.gin:13: unknown class 'Seed'..."),
    "misspelt macro": ("SED = 1\nTrainerArgs.seed = %SEED", "run.gin:14: macro %SEED is not set"
                       " (did you mean 'SED'?)"),
    "macro nothing uses": ("SEED = 1", "run.gin:13: macro SEED is set but nothing uses %SEED"),
    "class nothing reads": ("RetrievalArgs.num_negatives = 4", "run.gin:13: nothing reads RetrievalArgs.num_negatives,"
                            " a ranking run with these files reads DatasetArgs, MixedPrecisionArgs, NetworkArgs, ..."),
    "scope nothing reads": ("tower/NetworkArgs.num_layers = 4", "run.gin:13: nothing reads tower/NetworkArgs.num..."),
    "text for a number": ("OptimizerArgs.learning_rate = '1e-3'", "run.gin:13: OptimizerArgs.learning_rate = '1e-3'"
                          " must be a number"),
    "float for an integer": ("TrainerArgs.seed = 1e3", "run.gin:13: TrainerArgs.seed = 1000.0 must be an integer"),
    "no call": ("TrainerArgs.seed = @NetworkArgs", "run.gin:13: TrainerArgs.seed = @NetworkArgs (not called: '()' is "
                "missing) must be an integer"),
    "out of range": ("TrainerArgs.train_batch_size = 0", "run.gin:13: TrainerArgs.train_batch_size = 0 must be at "
                     "least 1"),
    "clash of classes": ("NetworkArgs.is_causal = False", "run.gin:13: NetworkArgs.is_causal = False must be True when"
                         " DatasetArgs.max_num_candidates = 0, since it shows the future to the loss"),
    "bare word": ("DatasetArgs.dataset_name = ml-20m", "run.gin:13: 'DatasetArgs.dataset_name = ml-20m' is not valid "
                  "gin: text needs quotes, such as DatasetArgs.dataset_name = 'ml-20m'"),
    "bare path": ("TrainerArgs.output_dir = ./out", "...text needs quotes, such as TrainerArgs.output_dir = './out'"),
    "a call": ("OptimizerArgs.learning_rate = float('nan')", "...gin calls no functions, write the result"),
    "other language's true": ("TrainerArgs.profile = true", "...not valid gin: write TrainerArgs.profile = True"),
    "a name that looks like None": ("TrainerArgs.pipeline_type = none", "run.gin:13: ...text needs quotes, such as "
                                    "TrainerArgs.pipeline_type = 'none'"),
    "such a name before a comment": ("TrainerArgs.pipeline_type = none  # 'none', native", "...text needs quotes, such "
                                     "as TrainerArgs.pipeline_type = 'none'"),
    "such a name in a block": ("NetworkArgs:\n    relative_bias = none", "run.gin:14: ...text needs quotes, such as "
                               "relative_bias = 'none'"),
    "other language's None": ("MixedPrecisionArgs.linear_recipe = null", "...write MixedPrecisionArgs.linear_recipe = "
                              "None"),
    "other language's None in a macro": ("RECIPE = none", "...write RECIPE = None"),
    "product": ("TrainerArgs.train_batch_size = 2 * 64", "...gin has no arithmetic, write the result"),
    "product with a macro": ("N = 2\nTrainerArgs.train_batch_size = 2 * %N", "run.gin:14: ...gin has no arithmetic..."),
    "difference": ("TrainerArgs.train_batch_size = 128 - 64", "...gin has no arithmetic, write the result"),
    "open bracket": ("RankingArgs.prediction_head_arch = [16, 1", "run.gin:...is not valid gin: it must be ..."),
    "no value": ("TrainerArgs.seed =", "run.gin:13: 'TrainerArgs.seed =' is not valid gin: it must be 'Class.field = "
                 "value' or 'NAME = value', the value a Python literal, %MACRO or @reference"),
    "import": ("import os", "run.gin:13: import statements are not supported, all classes are known without them"),
    "circle of references": ("NetworkArgs.num_layers = @NetworkArgs()", "the @references or %macros that NetworkArgs "
                             "leads to go round in a circle"),
    "circle of macros": ("A = %A\nTrainerArgs.seed = %A", "...go round in a circle"),
    "gin's own constant": ("NetworkArgs.num_layers = %gin.REQUIRED", "run.gin:13: NetworkArgs.num_layers = ..."),
    "two datasets": (SYNTHETIC, "exactly one of DatasetArgs (prepared data) and BenchmarkDatasetArgs (synthetic data) "
                     "must be bound, both are"),
}  # fmt: skip


def matches(message, wanted):
    parts = wanted.split("...")
    position = 0
    for part in parts:
        found = message.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return message.startswith(parts[0]) and message.endswith(parts[-1])


@pytest.mark.parametrize(("added", "sentence"), REFUSED_LINES.values(), ids=REFUSED_LINES.keys())
def test_refused_in_a_file_with_its_line(refused, minimal_text, added, sentence):
    message = refused(minimal_text + added)
    assert matches(message, sentence), message


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        ("TrainerArgs.seed = 'x'", "TrainerArgs.seed = 'x'\": TrainerArgs.seed = 'x' must be an integer"),
        ("DatasetArgs.dataset_name=ml-20m", "text needs quotes, such as DatasetArgs.dataset_name = 'ml-20m'"),
        ("LEARNIG_RATE = 1e-3", "nothing uses %LEARNIG_RATE (did you mean 'LEARNING_RATE'?)"),
        ("include", "--gin-bindings 'include' is not a binding, must be like 'TrainerArgs.train_batch_size = 64'"),
    ],
)
def test_refused_on_the_command_line(refused, minimal_text, binding, sentence):
    text = minimal_text.replace("learning_rate = 1e-3", "learning_rate = %LEARNING_RATE\nLEARNING_RATE = 1e-3")
    message = refused(text, binding)
    assert message.startswith("--gin-bindings ")
    assert message.endswith(sentence)


def test_required_field_names_itself_and_its_scope(refused, minimal_text):
    without = "\n".join(line for line in minimal_text.splitlines() if "DatasetArgs" not in line)
    assert refused(without).endswith("must be bound, neither is")
    assert refused(without + SYNTHETIC.replace("item/EmbeddingArgs.table_name = 'item'\n", "")) == (
        "EmbeddingArgs.table_name is required and not bound in scope 'item'"
    )
    assert refused(minimal_text.replace("TrainerArgs.eval_batch_size = 4", "")) == (
        "TrainerArgs.eval_batch_size is required and not bound"
    )


def test_place_of_a_scoped_binding(refused, minimal_text):
    without = "\n".join(line for line in minimal_text.splitlines() if "DatasetArgs" not in line)
    text = without + SYNTHETIC.replace("capacity = 10", "capacity = 0")
    assert refused(text) == "run.gin:15: EmbeddingArgs.item_vocab_size_or_capacity = 0 must be at least 1"


def test_scopes_inherit_from_outer_bindings(load, minimal_text):
    without = "\n".join(line for line in minimal_text.splitlines() if "DatasetArgs" not in line)
    config = load(without + SYNTHETIC + "EmbeddingArgs.sharding_type = 'row_wise'")
    assert config.dataset.embedding_args[0].sharding_type == "row_wise"


def test_bindings_win_over_files_and_later_ones_over_earlier(load, tmp_path, minimal_text):
    config = load(minimal_text + "TrainerArgs.seed = 1", "TrainerArgs.seed = 2", "TrainerArgs.seed = 3")
    assert config.trainer.seed == 3
    second = tmp_path / "second.gin"
    second.write_text("TrainerArgs.seed = 5\nTrainerArgs.seed = 6")
    config = load_experiment("ranking", gin_files=[str(tmp_path / "run.gin"), str(second)], gin_bindings=[])
    assert config.trainer.seed == 6


def test_macro_may_be_set_after_its_use_and_overridden(load, minimal_text):
    text = minimal_text + "TrainerArgs.seed = %SEED\nSEED = 7"
    assert load(text).trainer.seed == 7
    assert load(text, "SEED = 8").trainer.seed == 8


def test_blocks_and_comments(load, minimal_text):
    config = load(minimal_text + "TrainerArgs:\n    seed = 3  # a comment\n    log_interval = 2\n")
    assert (config.trainer.seed, config.trainer.log_interval) == (3, 2)


def test_text_with_operators_needs_no_hint(load, minimal_text):
    assert load(minimal_text, "TrainerArgs.output_dir = 'a * b - c'").trainer.output_dir == "a * b - c"


def test_include_is_found_beside_the_including_file(load, tmp_path, minimal_text, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "parts" / "seed.gin").write_text("TrainerArgs.seed = 11")
    (tmp_path / "parts" / "all.gin").write_text("include 'seed.gin'")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(minimal_text + "include 'parts/all.gin'").trainer.seed == 11


def test_include_finds_presets_and_later_lines_win(load):
    config = load("include 'movielen_ranking.gin'\nTrainerArgs.train_batch_size = 2")
    assert config.trainer.train_batch_size == 2
    assert config.dataset.dataset_name == "ml-20m"


def test_missing_include_names_the_line_and_the_presets(refused, minimal_text):
    message = refused(minimal_text + "include 'bse.gin'")
    assert message.startswith("run.gin:13: include 'bse.gin' is not a file in ")
    assert "debug_synthetic.gin" in message


def test_include_circle_is_refused(refused, minimal_text):
    assert refused("include 'run.gin'") == "run.gin:1: include 'run.gin' leads back to a file that includes it"


def test_error_in_an_included_file_has_that_file(refused, tmp_path, minimal_text):
    (tmp_path / "part.gin").write_text("\nTrainerArgs.seed = -1")
    assert refused(minimal_text + "include 'part.gin'") == "part.gin:2: TrainerArgs.seed = -1 must be at least 0"


def test_lookup_as_given_then_beside_the_script_then_presets(tmp_path, minimal_text, monkeypatch):
    here, script = tmp_path / "here", tmp_path / "script"
    here.mkdir()
    script.mkdir()
    monkeypatch.chdir(here)
    (script / "debug_synthetic.gin").write_text(minimal_text + "TrainerArgs.seed = 1")

    def seed(search_dirs):
        config = load_experiment("ranking", gin_files=["debug_synthetic.gin"], gin_bindings=[], search_dirs=search_dirs)
        return config.trainer.seed

    assert seed([script]) == 1
    assert seed([]) == 1234
    (here / "debug_synthetic.gin").write_text(minimal_text + "TrainerArgs.seed = 2")
    assert seed([script]) == 2


def test_missing_file_lists_where_and_which_presets(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_experiment("ranking", gin_files=["mvielens.gin"], gin_bindings=[], search_dirs=[tmp_path])
    message = str(caught.value)
    assert message.startswith("--gin-config-file 'mvielens.gin' is not a file in ")
    assert str(tmp_path) in message
    assert message.endswith(f"nor a preset, which are {', '.join(presets())}")
    assert {"debug_synthetic.gin", "movielen_ranking.gin", "movielens_100k_ranking.gin"} <= set(presets())


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.gin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_experiment("ranking", gin_files=[str(path)], gin_bindings=[])


def test_nothing_leaks_into_the_next_configuration(load, refused, minimal_text):
    load(minimal_text, "TrainerArgs.seed = 5", "NetworkArgs.hidden_dropout = 0.5")
    config = load(minimal_text)
    assert (config.trainer.seed, config.network.hidden_dropout) == (1234, 0.2)
    refused(minimal_text, "TrainerArgs.seed = 'x'")
    assert load(minimal_text) == config


def test_nothing_can_be_bound_after_loading(load):
    config = load()
    with pytest.raises(RuntimeError, match="locked"):
        gin.bind_parameter("TrainerArgs.seed", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.seed = 1


def test_texts_load_to_the_same_configuration(load, minimal_text):
    without = "\n".join(line for line in minimal_text.splitlines() if "DatasetArgs" not in line)
    text = without + SYNTHETIC + "lengths/RandomDistribution.dist_type = 'zipf'\nHALF = 0.5\n"
    text += "events/FeatureArgs.seqlen_dist = @lengths/RandomDistribution()\nNetworkArgs.hidden_dropout = %HALF\n"
    config = load(text)
    operative = loading.operative_text()
    assert "TrainerArgs.seed = 1234" in operative
    assert "TrainerArgs.seed" not in config.text
    assert load(config.text) == config
    assert load(operative).digest == config.digest


def test_description_shows_values_and_defaults(load, minimal_text):
    lines = loading.describe(load(minimal_text, "TrainerArgs.seed = 9")).splitlines()
    assert "TrainerArgs.seed = 9" in lines
    assert "TrainerArgs.log_interval = 100  # default" in lines
    assert lines[-1].startswith("digest = ")


def test_retrieval_has_its_own_head(load, refused, minimal_text):
    text = minimal_text.replace("RankingArgs.prediction_head_arch = [16, 1]", "RetrievalArgs.num_negatives = 4")
    assert load(text, task="retrieval").retrieval.num_negatives == 4
    assert refused(text) == "RankingArgs.prediction_head_arch is required and not bound"
