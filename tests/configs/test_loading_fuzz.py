"""Whatever a file holds, it loads or is refused in one sentence."""

from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError
from genrec.configs.statements import FIELDS

NAMES = st.sampled_from([f"{cls}.{name}" for cls, names in FIELDS.items() for name in names])
LITERALS = st.sampled_from(
    ["1", "-1", "0.5", "1e400", "True", "None", "'x'", "''", "[]", "()", "{}", "[1, 'a']", "(1,)", "{'a': 1}", "%M",
     "%N", "@FeatureArgs()", "@a/FeatureArgs()", "@TrainerArgs", "[@RandomDistribution()]",
     "ml-1m", "2 * 3", "%gin.REQUIRED"]
)  # fmt: skip
BINDINGS = st.tuples(NAMES, LITERALS).map(" = ".join)
PIECES = st.sampled_from(
    ["TrainerArgs", ".", "seed", " = ", "1", "\n", "    ", ":", "%", "@", "/", "(", ")", "[", "'", '"', "#", "\\", ",",
     "include ", "\x00", "import ", "from ", "M = 2", "$", "é", "\t", "0x", "1_", "-", "gin.", "macro", "constant"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def load_or_refuse(texts):
    try:
        load_experiment("ranking", gin_files=["debug_synthetic.gin"], gin_bindings=texts)
    except ConfigError as error:
        assert "\n" not in str(error)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(BINDINGS, min_size=1, max_size=3))
def test_any_value_for_any_field(bindings):
    load_or_refuse(bindings)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(TEXTS)
def test_any_text(text):
    load_or_refuse([f"M = 1\n{text} = 1"])
    load_or_refuse([text + "="])
