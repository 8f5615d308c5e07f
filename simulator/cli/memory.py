"""The verb `headway memory`: what fits on a GPU."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from simulator.cli.options import Json, print_json


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Keys of a scenario's engine that the KV cache depends on."""

    tensor_parallel_size: Annotated[
        int, Parameter(alias=["--tp", "-tp"], help="GPUs that share each layer")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Parameter(alias=["--pp", "-pp"], help="pipeline stages")
    ] = 1
    gpu_memory_utilization: Annotated[
        float, Parameter(help="share of the GPU's memory, 0 to 1")
    ] = 0.92
    dtype: Annotated[str, Parameter(help="type of the weights; auto: the model's")] = "auto"
    quantization: Annotated[str | None, Parameter(help="type of weights: fp8, int8, int4")] = None
    kv_cache_dtype: Annotated[str, Parameter(help="type of the KV cache; auto: as dtype")] = "auto"
    block_size: Annotated[int, Parameter(help="tokens in a block of the KV cache")] = 16
    max_model_len: Annotated[
        int | None, Parameter(help="most tokens of a request [default: the model's]")
    ] = None
    max_num_seqs: Annotated[int, Parameter(help="most requests at once")] = 256
    max_num_batched_tokens: Annotated[int, Parameter(help="most tokens of a step")] = 2048


DEFAULT_ENGINE = EngineOptions()


def memory(
    *,
    model: Annotated[str, Parameter(help="shipped model, or the path of a config.json")],
    gpu: Annotated[str, Parameter(help="GPU, for example A100-80GB")],
    engine: EngineOptions = DEFAULT_ENGINE,
    json_: Json = False,
) -> int:
    """Print how many tokens and requests fit on a GPU."""
    from simulator.models.gpus import find_gpu
    from simulator.models.kv_budget import memory_figures, memory_table
    from simulator.models.load import load_model
    from simulator.scenario.kv_room import memory_budget
    from simulator.scenario.load import check_scenario
    from simulator.util.yaml_lines import SourceMap

    source_map = SourceMap("headway memory", {})  # what is wrong is told by its option
    source_map.override(("model",), f"--model {model}")
    source_map.override(("gpu",), f"--gpu {gpu}")
    for name, value in asdict(engine).items():
        source_map.override(("engine", name), f"--{name.replace('_', '-')} {value}")
    raw = {
        "model": model,
        "gpu": {"name": gpu, "count": engine.tensor_parallel_size * engine.pipeline_parallel_size},
        "engine": asdict(engine),
        "cost": {"kind": "roofline"},
    }
    checked = check_scenario(raw, source_map).engine
    budget = memory_budget(checked, load_model(model), find_gpu(gpu))
    if json_:
        print_json(memory_figures(budget, checked.max_model_len))
    else:
        print(memory_table(budget, max_model_len=checked.max_model_len))
    return 0
