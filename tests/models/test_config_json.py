"""What is read of a config.json: windows, rotary embeddings, families; and bad files."""

import json
from pathlib import Path

import pytest

from simulator.models.config_json import read_config, read_rope, spec_of
from simulator.models.engine_sizes import EngineSizes
from simulator.models.kv_budget import activation_bytes
from simulator.models.load import load_model
from simulator.models.spec import RopeScaling
from simulator.util.errors import HeadwayError, MappingError
from tests.support.model_configs import TINY, write_config


def test_a_bad_config_is_told_whole(tmp_path: Path) -> None:
    """Every missing, wrong and unsupported key in one go, with its line."""
    path = write_config(tmp_path, vocab_size=None, hidden_size="8", torch_dtype="int3")
    with pytest.raises(HeadwayError) as caught:
        load_model(path)
    assert [message.split(" ", 1)[0] for message in caught.value.messages] == [
        f"{path}:3:",
        f"{path}:",
        f"{path}:8:",
    ]
    keys = [message.split(": ")[1] for message in caught.value.messages]
    assert keys == ["hidden_size", "vocab_size", "torch_dtype"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3n", ": its layers work on several streams"),
        ("mllama_text_model", ": its layers attend to images"),
        ("falcon_h1", ": its layers have attention and Mamba"),
        ("deepseek_v4", ": its caches are of kinds"),
        ("mamba2", ": no layer has a KV cache"),
        ("unheard_of", "; there is llama, internlm3, .*, opt$"),
        ("qwen9", r"; did you mean qwen\d\?$"),
    ],
)
def test_another_architecture_is_told_in_one_line(tmp_path: Path, kind: str, why: str) -> None:
    """Whatever else the file lacks, which has other keys."""
    path = write_config(tmp_path, model_type=kind, vocab_size=None, num_attention_heads=None)
    with pytest.raises(HeadwayError, match=f"model_type: '{kind}' is not supported{why}") as caught:
        load_model(path)
    assert len(caught.value.messages) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"hidden_size": 8,\n"num_', ":2: not JSON: .*; the file is cut off$"),
        ("", ":1: not JSON: the file is empty$"),
        ("GGUF", ":1: not JSON: Expecting value$"),
    ],
)
def test_a_torn_file_is_said_to_be_one(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HeadwayError, match=told):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: must divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be positive, not 0"),
        ({"num_experts": 4}, "num_experts_per_tok: must be from 1 to num_experts"),
        ({"num_experts": 4, "decoder_sparse_step": 2}, "mlp_only_layers: every layer"),
    ],
)
def test_impossible_sizes(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """Sizes that contradict each other are refused, by file and key."""
    path = write_config(tmp_path, **changes)
    with pytest.raises(HeadwayError, match=words) as caught:
        load_model(path)
    assert str(caught.value).startswith(str(path))


def test_what_is_not_json(tmp_path: Path) -> None:
    """A broken file is told by its line; Python 3.13 names that of the comma."""
    path = tmp_path / "config.json"
    path.write_text('{\n"hidden_size": 8,\n}')
    with pytest.raises(HeadwayError, match=r"config.json:[23]: not JSON"):
        load_model(path)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 16}, (16, 2)),
        ({"sliding_window": 64}, (0, 0)),  # as long as the longest request
        ({"sliding_window": None}, (0, 0)),
        ({"sliding_window": 16, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (16, 1)),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, (16, 1)),
        ({"sliding_window": 16, "layer_types": ["full_attention", "full_attention"]}, (0, 0)),
        ({"sliding_window": 16, "model_type": "gemma2"}, (16, 1)),
        ({"sliding_window": 16, "model_type": "gemma3_text"}, (16, 2)),
        (
            {"sliding_window": 16, "model_type": "gemma3_text", "sliding_window_pattern": 2},
            (16, 1),
        ),
    ],
)
def test_which_layers_have_a_window(tmp_path: Path, keys: dict, window: tuple[int, int]) -> None:
    """By families' habits, or layer by layer."""
    model = load_model(write_config(tmp_path, **keys))
    assert (model.sliding_window, model.windowed * model.attention_layers) == window


def test_what_the_files_of_a_family_leave_out(tmp_path: Path) -> None:
    """Gemma ties its embeddings unsaid; GLM-4 has norms behind attention and MLP, its elder not."""
    plain, gemma, elder, glm, air = (
        load_model(write_config(tmp_path, model_type=kind, **more))
        for kind, more in (
            ("llama", {}),
            ("gemma2", {}),
            ("glm", {}),
            ("glm4", {}),
            ("glm4_moe", {"use_qk_norm": True}),
        )
    )
    assert gemma.parameters == plain.parameters - 100 * 8 + 2 * 2 * 8
    assert elder.parameters == plain.parameters
    assert glm.parameters == plain.parameters + 2 * 2 * 8
    assert air.parameters == plain.parameters + 2 * 2 * 2


def test_gemma_3_reads_its_window_in_five_of_six_layers() -> None:
    """27B: 10 layers see all, 52 the last 1,024 tokens; each token takes 62 * 2 * 16 * 128 * 2."""
    model = load_model("gemma-3-27b")
    assert (model.sliding_window, model.windowed * model.attention_layers) == (1024, 52)
    assert model.kv_bytes_per_token() == 507_904
    assert model.attention_flops_per_pair == 62 * 32 * 4 * 128


def test_llama_3_1_as_published() -> None:
    spec = load_model("llama-3.1-8b")
    assert spec.rope_theta == 500_000
    assert spec.rope_scaling == RopeScaling("llama3", 8, 1, 4, 8192)
    assert spec.rms_norm_eps == 1e-5
    scaling = load_model("llama-3.2-1b").rope_scaling
    assert scaling is not None
    assert scaling.factor == 32


def test_what_a_config_leaves_out_is_plain_rotation() -> None:
    assert read_rope({}) == (10_000, None)
    assert read_rope({"rope_theta": 1e6, "rope_scaling": None}) == (1e6, None)


def test_newer_files_hold_all_in_one_mapping() -> None:
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert read_rope({"max_position_embeddings": 8192, **new}) == (5e5, RopeScaling("linear", 2.0))
    assert read_rope({"rope_parameters": {"rope_theta": 7, "rope_type": "default"}}) == (7, None)


def test_angles_do_not_change_the_time_of_a_step(tmp_path: Path) -> None:
    """So models that differ in them alone share profiles."""
    one = read_config(write_config(tmp_path))
    two = read_config(write_config(tmp_path, rope_theta=3.0, rms_norm_eps=1e-5))
    assert one != two
    assert one.shape == two.shape


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": "big"}, "rope_theta: must be a positive number, not 'big'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a positive number, not 0"),
        ({"rope_scaling": 8}, "rope_scaling: must be a mapping, not 8"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "factor: must be a positive number, not -1",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_line(tmp_path: Path, changes, told) -> None:
    path = write_config(tmp_path, **changes)
    line = next(
        k for k, text in enumerate(path.read_text().splitlines(), 1) if told.split(":")[0] in text
    )
    with pytest.raises(HeadwayError) as caught:
        read_config(path)
    assert caught.value.messages == [f"{path}:{line}: {told}"]


def test_heads_share_the_hidden_size_evenly(tmp_path):
    """Unless head_dim says what each has."""
    path = write_config(tmp_path, hidden_size=9)
    with pytest.raises(HeadwayError, match=r"config.json:3: hidden_size: 9 is no multiple of 4"):
        read_config(path)
    assert read_config(write_config(tmp_path, hidden_size=9, head_dim=2)).head_dim == 2


def test_layers_without_end_are_refused(tmp_path: Path) -> None:
    """Each is read by itself, which took all memory."""
    path = write_config(tmp_path, num_hidden_layers=10**30)
    with pytest.raises(HeadwayError, match=r"num_hidden_layers: .* up to 10,000, not 1000"):
        load_model(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "LORA", "r": 16}, "peft_type: the file is an adapter's: give its base"),
        ({"dim": 4096, "n_layers": 32, "n_kv_heads": 8}, "n_kv_heads: the file is Mistral's own"),
        ({"do_resize": True}, "vocab_size, max_position_embeddings: give a model's config.json"),
    ],
)
def test_a_file_of_another_kind_under_this_name_is_one_line(tmp_path, keys, message):
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(HeadwayError) as raised:
        load_model(tmp_path)
    assert len(raised.value.messages) == 1
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["smollm3", "ernie4_5", "ernie4_5_moe", "gemma", "llama"])
def test_a_file_leaves_out_that_its_tables_are_one_where_its_class_says_so(tmp_path, kind):
    """SmolLM3 and ERNIE 4.5 had a second table; defaults of transformers 5."""
    model = load_model(write_config(tmp_path, model_type=kind))
    assert model.tie_word_embeddings == (kind != "llama")


@pytest.mark.parametrize(
    ("kind", "keys", "found"),
    [
        ("qwen3_vl", {"hidden_size": 2560, "num_hidden_layers": 36}, (32, 32, 128)),
        ("qwen3", {**TINY, "hidden_size": 2560, "num_attention_heads": 32}, (32, 2, 128)),
        ("qwen2_5_vl", {}, (64, 8, 128)),
        ("qwen3_5", {}, (16, 4, 256)),
        ("qwen3_5_moe", {}, (16, 2, 256)),
        ("glm4v_moe", {"head_dim": 128}, (96, 8, 128)),
        ("gemma4", {"intermediate_size": 9216}, (8, 4, 256)),
    ],
)
def test_a_block_that_transformers_saved_leaves_out_its_class_defaults(
    tmp_path: Path, kind: str, keys: dict[str, object], found: tuple[int, int, int]
) -> None:
    """A 4B of Qwen3-VL counted heads of 80 numbers, of which it has 128; others were refused."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "x", "text_config": {"model_type": kind, **keys}}))
    model = load_model(path)
    heads = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
    assert heads == found


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("LlamaForCausalLM", 1),
        ("LlamaForSequenceClassification", 0),
        ("Qwen2ForRewardModel", 0),
        ("InternLM2ForRewardModeling", 0),
        ("MistralModel", 0),
        ("InternVLChatModel", 1),
        ("QWenLMHeadModel", 1),
    ],
)
def test_a_model_that_pools_has_no_lm_head_and_no_sampler(tmp_path, architecture, head):
    """As _create_pooling_model_cls of vLLM, which deletes it."""
    model = load_model(write_config(tmp_path, model_type="llama", architectures=[architecture]))
    assert [one.name for one in model.outer].count("lm_head") == head
    sizes = EngineSizes(max_num_batched_tokens=1, max_num_seqs=999)
    layers = activation_bytes(model, sizes, samples=False)
    assert activation_bytes(model, sizes) == max(layers, head * 999 * 14 * model.vocab_size)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "kind", "older", "newest"),
    [
        ({"rope_scaling": YARN}, "qwen3", 128, 64),
        ({"rope_parameters": YARN}, "qwen3", 128, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "qwen3", 256, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "llama", 256, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "llama", 256, 256),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama", 64, 64),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2]}}, "qwen2", 64, 64),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "gemma3_text", 64, 64),
    ],
)
def test_longest_requests_follow_the_scaling_of_positions(tmp_path, rope, kind, older, newest):
    """As vLLM's _get_and_verify_max_len: yarn's factor counts before 0.30."""
    model = read_config(write_config(tmp_path, model_type=kind, **rope))
    assert (model.longest((0, 29, 0)), model.longest((0, 30, 0))) == (older, newest)


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),  # Command R
        ({"max_position_embeddings": 131_072, "model_max_length": 4096}, 4096),
        ({"max_position_embeddings": None, "model_max_length": 4096}, 4096),  # Baichuan2-13B
        ({"max_position_embeddings": 8192, "max_sequence_length": 2048}, 2048),
        ({"max_position_embeddings": None, "n_positions": 1024, "seq_len": 2048}, 1024),
    ],
)
def test_the_longest_request_is_the_least_of_all_keys_or_model_max_length(
    tmp_path: Path, keys: dict[str, int | None], most: int
) -> None:
    """As derive_max_model_len_and_key of vLLM 0.33."""
    assert load_model(write_config(tmp_path, **keys)).longest((0, 33, 0)) == most


def test_what_is_wrong_has_its_key() -> None:
    """Every fault of a config, and the first of a key that has two."""
    with pytest.raises(MappingError) as caught:
        spec_of("m", {"model_type": "llama", "hidden_size": "9", "torch_dtype": "int3"})
    keys = [fault.key for fault in caught.value.faults]
    assert keys[0] == ("hidden_size",)
    assert {("num_hidden_layers",), ("torch_dtype",)} <= {*keys}
    assert len({*keys}) == len(keys)
