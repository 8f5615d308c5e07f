"""Formats of checkpoints, module by module, by hand: bytes of a matrix, and which module has it."""

import json
from pathlib import Path

import pytest

from simulator.models.engine_sizes import EngineSizes
from simulator.models.load import load_model
from simulator.models.quantization import Format, Quantization, read_quantization
from tests.support.model_configs import write_config

Q, DOWN = "layers.0.self_attn.q_proj", "layers.7.mlp.down_proj"
FP8_GROUP = {
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    }
}
TOWER = "vision_tower.encoder.layers.0.self_attn.k_proj"
EXPERT, GATE = "layers.3.mlp.experts.0.up_proj", "layers.3.mlp.gate"

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
SCHEME = {"num_bits": 8, "type": "float"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
    "export": {"kv_cache_group": ["*k_proj"]},
}


def read(**config: object) -> Quantization:
    found = read_quantization(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "fp8"}, 256 * 512 + 256 * 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 512 + 2 * 4 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 256 * 512 / 2 + 256 * 4 * 2.5),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 256 * 512 / 2 + 256 * 8 * 2.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 256 * 512 + 256 * 3),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 256 * 512 / 2 + 256 * 8 * 4),
        ({"quant_method": "bitsandbytes"}, 256 * 512 / 2 + 256 * 8 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 256 * 512 + 256 * 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 256 * 512 / 2 + 256 * 32),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, 256 * 512 / 2 + 256 * 32),
        ({"quant_method": "modelopt", "quant_algo": "MXFP4"}, 256 * 512 / 2 + 256 * 16),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, 256 * 512 / 2 + 256 * 16),
    ],
)
def test_bytes_of_a_matrix_of_256_rows_and_512_columns(config: dict, size: float) -> None:
    found = read(**config).of(DOWN)
    assert found is not None
    assert found.bytes_of(256, 512) == size


def test_names_are_compared_by_whole_parts() -> None:
    """`gate` is the router and `model.layers.0` no layer 10; wrappers' names do not matter."""
    names = ["gate", "lm_head", "model.layers.0", "model.language_model.layers.7.mlp.down_proj"]
    found = read(quant_method="modelopt", quant_algo="FP8", exclude_modules=names)
    assert found.of(GATE) is None
    assert found.of(Q) is None
    assert found.of(DOWN) is None
    assert found.of("layers.10.self_attn.q_proj") is not None
    assert found.of("layers.3.mlp.gate_proj") is not None
    fused = read(
        quant_method="awq",
        w_bit=4,
        q_group_size=64,
        modules_to_not_convert=["qkv_proj", "feed_forward"],
    )
    assert [fused.of(name) for name in (Q, DOWN)] == [None, None]


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_fp8_leaves_out_modules_by_their_whole_names(method: str) -> None:
    """vLLM (is_layer_skipped, 0.32) takes no name of what they are part of, but of experts."""
    names = ["model.layers.0", "model.layers.3.mlp.experts", "model.layers.1.mlp.down_proj"]
    found = read(quant_method=method, modules_to_not_convert=names)
    assert [found.of(name) is None for name in (Q, "layers.1.mlp.down_proj")] == [False, True]
    assert found.of("layers.3.mlp.experts.0.up_proj") is None
    assert found.of("layers.3.mlp.shared_experts.up_proj") is not None


def test_groups_of_compressed_tensors_have_formats_of_their_own() -> None:
    """The names and patterns before the class Linear, whatever their order in the file."""
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {
            "targets": ["re:.*experts.*"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
        },
    }
    cache = {"num_bits": 8, "type": "float"}
    found = read(
        quant_method="compressed-tensors",
        config_groups=groups,
        ignore=["re:.*self_attn.*"],
        kv_cache_scheme=cache,
    )
    assert found.of(EXPERT) == Format("int4", 4, 2, 32)
    assert found.of(DOWN) == Format("fp8", 8, 4)
    assert found.of(Q) is None
    assert found.cache == "fp8"


def test_gptq_says_of_some_modules_something_else() -> None:
    dynamic = {"-:.*layers.7.*": {}, "+:.*experts.*": {"bits": 8, "group_size": 64}}
    found = read(quant_method="gptq", bits=4, group_size=128, dynamic=dynamic)
    assert found.of(DOWN) is None
    assert found.of(EXPERT) == Format("int8", 8, 3, 64)
    assert found.of(Q) == Format("int4", 4, 2.5, 128)


@pytest.mark.parametrize(
    ("key", "names", "quantized"),
    [
        ("block_name_to_quantize", "model.layers", (Q, DOWN, EXPERT)),
        ("block_name_to_quantize", "model.language_model.layers,x", (Q, DOWN, EXPERT)),
        ("to_quant_block_names", ["model.layers.0", "model.layers.3"], (Q, EXPERT)),
        ("modules_in_block_to_quantize", [["self_attn.q_proj"], ["mlp.down_proj"]], (Q, DOWN)),
        ("modules_in_block_to_quantize", None, (Q, DOWN, EXPERT, TOWER)),
    ],
)
def test_blocks_outside_of_a_list_stay_in_16_bits(
    key: str, names: object, quantized: tuple[str, ...]
) -> None:
    """As vLLM 0.33's INCConfigParser and is_layer_gptq_quantized; an encoder was in 4 bits."""
    found = read(quant_method="auto-round", bits=4, group_size=128, **{key: names})
    assert tuple(one for one in (Q, DOWN, EXPERT, TOWER) if found.of(one)) == quantized
    assert found.word == "int4"


def test_mixed_precision_names_its_modules(tmp_path: Path) -> None:
    """Also in the file beside config.json; where neither does, bytes are asked for, not guessed."""
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    layers["model.layers.1.mlp.down_proj"] = {"quant_algo": "NVFP4"}
    layers["model.layers.1.mlp.up_proj"] = {"quant_algo": "NVFP4"}
    found = read(**mixed, quantized_layers=layers)
    assert (found.word, found.of("layers.1.mlp.up_proj")) == ("nvfp4", Format("nvfp4", 4, 1, 16))
    assert found.of(Q) == Format("fp8", 8, 4)
    assert found.of(DOWN) is None
    path = write_config(tmp_path, quantization_config=mixed)
    with pytest.raises(ValueError, match=r"quantized_layers is empty.*\.quantization says it"):
        load_model(path).weight_bytes()
    assert load_model(path).weight_bytes("fp8") > 0
    beside = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}'
    (tmp_path / "hf_quant_config.json").write_text(beside)
    model = load_model(path)
    assert (model.weight_dtype(), model.cache_dtype()) == ("fp8", "fp8")


@pytest.mark.parametrize(
    ("config", "release", "dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 13, 0), "bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 14, 0), "fp8"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME}, (0, 14, 0), "bfloat16"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME}, (0, 15, 0), "fp8"),
        (QUARK, (0, 33, 0), "bfloat16"),
    ],
)
def test_releases_take_the_precision_of_the_cache_from_a_checkpoint(
    tmp_path: Path, config: dict, release: tuple[int, int, int], dtype: str
) -> None:
    """By vLLM's wheels 0.13 to 0.15: `resolve_kv_cache_dtype_string`, `Attention`."""
    config = {"kv_cache_quant_algo": "FP8"} | config
    model = load_model(write_config(tmp_path, quantization_config=config))
    assert EngineSizes(release=release).cache(model) == dtype
    assert EngineSizes(release=release, kv_cache_dtype="fp8").cache(model) == "fp8"
    assert EngineSizes(release=release, fraction_of="static").cache(model) == "fp8"


def test_a_router_and_a_head_stay_in_16_bits(tmp_path: Path) -> None:
    """Where the file ignores nothing: kernels have no quantized router."""
    config = {"quant_method": "fp8"}
    path = write_config(tmp_path, num_experts=4, num_experts_per_tok=2, quantization_config=config)
    model = load_model(path)
    rows = 2 * (8 + 2 * 4 + 8 + 4 * (2 * 10 + 8))
    routers = 2 * 4 * 8
    linear = int(model.matrix_bytes(4, None)) - routers
    rest = model.parameters - linear
    assert model.weight_bytes() == linear + 4 * rows + 2 * rest


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "weight_block_size: must be two"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 2]}, "weight_block_size: must be two"),
        ({"quant_method": "fp8", "modules_to_not_convert": {}}, "must be a list of names"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size: must be a whole"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": 5}}, "dynamic: must be a mapping"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"-:(": {}}},
            "no regular expression",
        ),
        ({"quant_method": "awq", "bits": "4"}, "bits: must be a positive number, not '4'"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "weights of 3 bits"),
        ({"quant_method": "awq", "group_size": 128}, "weights of null bits"),
        ({"quant_method": "awq", "bits": 4}, "group_size is missing"),
        (COMPRESSED | {"input_activations": {"dynamic": "far"}}, "dynamic: must be a mapping"),
        ({"quant_method": "quark", "global_quant_config": {}}, "weights of Quark's 'null'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": 3}}, "must be a mapping of"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
            "one of load_in_4bit and load_in_8bit must be true",
        ),
        ({"quant_method": "modelopt", "quantized_layers": {}}, "quant_algo '' is not known"),
        (COMPRESSED | {"ignore": ["re:("]}, "no regular expression"),
        (COMPRESSED | {"format": "marlin-24"}, "2 of 4 are 0"),
        (COMPRESSED | {"sparsity_config": {"sparsity_structure": "2:4"}}, "2 of 4 are 0"),
        (COMPRESSED | {"config_groups": {"g": 1}}, "config_groups: must be a mapping of mappings"),
        (COMPRESSED | {"config_groups": [1]}, "config_groups: must be a mapping of mappings"),
    ],
)
def test_what_cannot_be_read_is_said(config: dict[str, object], why: str) -> None:
    """Most of these were tracebacks."""
    with pytest.raises(ValueError, match=why):
        read_quantization(config)


@pytest.mark.parametrize(
    ("key", "config", "weights", "cache"),
    [
        ("compression_config", COMPRESSED, "fp8", ""),
        ("quantization_config", COMPRESSED | {"quant_method": "compressed_tensors"}, "fp8", ""),
        ("quantization_config", {"quant_method": "AWQ", "bits": 4, "group_size": 8}, "int4", ""),
        (
            "quantization_config",
            {"producer": {}, "quantization": {"quant_algo": "nvfp4"}},
            "nvfp4",
            "",
        ),
        (
            "quantization_config",
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
            "nvfp4",
            "",
        ),
        (
            "quantization_config",
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            "",
            "fp8",
        ),
        (
            "quantization_config",
            COMPRESSED | {"config_groups": {}, "kv_cache_scheme": SCHEME},
            "",
            "fp8",
        ),
    ],
)
def test_older_forms_of_the_formats(
    tmp_path: Path, key: str, config: dict[str, object], weights: str, cache: str
) -> None:
    """As vLLM 0.33 (_normalize_quantization_config, ModelOptQuantConfigBase.from_config).

    Headway took the first for 16 bits, the two of the cache alone for fp8 and for a mistake.
    """
    model = load_model(write_config(tmp_path, **{key: config}))
    assert model.checkpoint is not None
    assert (model.quantization, model.checkpoint.cache) == (weights, cache)
    assert (model.weight_bytes() < 2 * model.parameters) == bool(weights)


def test_weights_of_mlx_are_not_taken_for_16_bits(tmp_path: Path) -> None:
    path = write_config(tmp_path, quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ValueError, match=r"quantization_config: quant_method '' is not known"):
        load_model(path)


def test_what_is_wrong_in_modelopts_own_file_names_it(tmp_path: Path) -> None:
    """It was config.json that was blamed."""
    path = write_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": [1]}')
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization: must be a mapping"):
        load_model(path)
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quant_algo '' is not known"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "whole", "format"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, Format("int4", 4, 2.5, 128)),
        ("quantize_config.json", {"bits": 8, "group_size": -1}, Format("int8", 8, 3.0, 0)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64}, Format("int4", 4, 2.5, 64)),
    ],
)
def test_older_files_have_the_formats_beside_a_config(
    tmp_path: Path, name: str, whole: dict[str, object], format: Format
) -> None:
    """AutoGPTQ's and AutoAWQ's (get_config_filenames of vLLM 0.33); they counted as 16 bits."""
    path = write_config(tmp_path)
    (tmp_path / name).write_text(json.dumps(whole))
    found = load_model(path).formats()
    assert found is not None
    assert found.of(Q) == format
    (tmp_path / name).write_text(json.dumps(whole | {"group_size": "x"}))
    with pytest.raises(ValueError, match=rf"{name}: group_size: must be a whole number"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "bits", "found"),
    [
        ("int", 4, Format("int4", 4, 2.5, 32)),
        ("mx_fp", 4, Format("mxfp4", 4, 1, 32)),
        ("mx_fp4e2m1", 4, Format("mxfp4", 4, 1, 32)),
        ("mx_fp", 8, Format("fp8", 8, 1, 32)),
    ],
)
def test_auto_round_has_floats_too(kind: str, bits: int, found: Format) -> None:
    """As INCConfig of vLLM 0.33; all counted as integers."""
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "data_type": kind}
    own = read_quantization(config)
    assert own is not None
    assert own.of(Q) == found
    with pytest.raises(ValueError, match="nv_fp of 4 bits is not supported"):
        read_quantization(config | {"bits": 4, "data_type": "nv_fp"})


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.0.block_sparse_moe.experts.0.w1", "layers.0.mlp.experts.0.gate_proj"),
        ("model.layers.0.block_sparse_moe.experts.0.w3", "layers.0.mlp.experts.0.up_proj"),
        ("re:.*experts.*w[123]$", "layers.0.mlp.experts.0.down_proj"),
        ("re:.*shared_mlp.*", "layers.0.mlp.shared_experts.up_proj"),
        ("model.layers.2.mamba.in_proj", "layers.2.mixer.in_proj"),
        (
            "model.language_model.layers.1.linear_attn.in_proj_qkv",
            "layers.1.linear_attn.in_proj_qkvz",
        ),
    ],
)
def test_families_have_names_of_their_own(name: str, module: str) -> None:
    """Of Mixtral's experts, Granite 4's layers, Qwen3.5's projections.

    A GPTQ checkpoint of Mixtral that lists w1, w2 and w3 counted as 16 bits: 85 GiB for 23.
    """
    config = COMPRESSED | {"ignore": [name]}
    assert read(**config).of(module) is None
    assert read(**config).of("layers.0.mlp.gate_proj") is not None
    listed = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    if not name.startswith("re:"):
        own = name.split(".", name.startswith("model.language") + 3)[-1]
        assert read(**listed, modules_in_block_to_quantize=[[own]]).of(module) is not None


def test_names_that_no_module_has_are_said(tmp_path: Path) -> None:
    """All counted as 16 bits without a word."""
    group = GROUP | {"targets": ["re:.*transformer.h.*"]}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    found = load_model(write_config(tmp_path, quantization_config=config))
    assert found.unread == "quantization_config, whose names no module has: all count in 16 bits"
    group["targets"] = ["re:.*down_proj$"]
    assert load_model(write_config(tmp_path, quantization_config=config)).unread == ""


def test_floats_of_8_bits_in_groups() -> None:
    """A scale of 8 bits for 32 weights (MXFP8) counted as one of 32 bits for a row."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": 32}}
    assert read(**COMPRESSED | {"config_groups": {"g": group}}).of(Q) == Format("fp8", 8, 1, 32)


def test_a_quantized_head_counts(tmp_path: Path) -> None:
    """GPTQ's `lm_head: true`; it stayed in 16 bits."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    plain, quantized = (
        load_model(write_config(tmp_path, quantization_config=config | {"lm_head": head}))
        for head in (False, True)
    )
    (head,) = [one for one in plain.outer if one.name == "lm_head"]
    saved = 2 * head.numbers - head.outputs * (head.inputs / 2 + 2.5 * head.inputs / 8)
    assert plain.weight_bytes() - quantized.weight_bytes() == saved


def test_activations_scaled_by_groups_count_as_those_scaled_by_tokens() -> None:
    """llm-compressor's NVFP4 says `dynamic: local`; it was refused."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    for dynamic in ("local", True):
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": {"dynamic": dynamic},
        }
        assert read(quant_method="compressed-tensors", config_groups={"g": group}).word == "nvfp4"
