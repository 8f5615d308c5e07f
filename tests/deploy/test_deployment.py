"""What deploys a scenario, held against Kubernetes' schemas and against files that were read."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from headway.cli.main import main
from headway.deploy.deployment import deployment
from simulator import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.scenarios import ONE_A_SECOND

GOLDEN = Path(__file__).parent / "deployments"
"""The values follow the chart llm-d-modelservice 0.4.0, whose schema is on no package index: these
files were read beside it.
"""
SCALED = """engine: {name: vllm, async_scheduling: true}
cluster:
  replicas: 2
  router: least_kv
  autoscaling: {metric: kv_usage, target: 0.7, max_replicas: 6, startup_delay: 900}
"""
APART = """engine: {name: textbook, tensor_parallel_size: 2}
gpu: {name: H100-80GB, count: 2}
cluster:
  router: session_affinity
  kv_transfer: {}
  groups:
    prefill: {kv_role: kv_producer, replicas: 2}
    decode: {kv_role: kv_consumer}
"""
TWO_KINDS = """engine: textbook
cluster:
  router: session_affinity
  groups:
    old one: {replicas: 3}
    new: {gpu: {name: H100-80GB}, engine: {max_num_seqs: 64}}
    none: {replicas: 0}
"""
CASES = {"single": "", "scaled": SCALED, "apart": APART, "two-kinds": TWO_KINDS}


@pytest.fixture(params=CASES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    path = tmp_path / f"{request.param}.yaml"
    own = CASES[request.param]
    base = ONE_A_SECOND
    for block in ("engine:", "gpu:"):
        if block in own:
            base = "".join(line for line in base.splitlines(True) if not line.startswith(block))
    path.write_text(base + own)
    files = deployment(load_scenario(path))
    return request.param, {name: text.decode() for name, text in files.items()}


def test_manifests_keep_kubernetes_own_schemas(written) -> None:
    """Strictly: no key that Kubernetes 1.37 does not know."""
    _, files = written
    manifests = [*yaml.safe_load_all(files["kubernetes.yaml"])]
    if "hpa.yaml" in files:
        manifests.append(yaml.safe_load(files["hpa.yaml"]))
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds[:2] == ["Deployment", "Service"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_a_service_finds_its_pods_and_an_autoscaler_its_deployment(written) -> None:
    _, files = written
    manifests = [*yaml.safe_load_all(files["kubernetes.yaml"])]
    for server, service in zip(manifests[::2], manifests[1::2], strict=True):
        labels = server["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == server["spec"]["selector"]["matchLabels"] == labels
    names = {server["metadata"]["name"] for server in manifests[::2]}
    assert len(names) == len(manifests) / 2
    if "hpa.yaml" in files:
        scaler = yaml.safe_load(files["hpa.yaml"])
        assert scaler["spec"]["scaleTargetRef"]["name"] in names
        assert "replicas" not in manifests[0]["spec"]


def test_files_are_those_that_were_read(written) -> None:
    case, files = written
    for name in files.keys() - {"vllm_serve.sh"}:
        assert files[name] == (GOLDEN / case / name).read_text(), f"{case}/{name}"
    assert {path.name for path in (GOLDEN / case).iterdir()} == files.keys() - {"vllm_serve.sh"}


def test_the_router_that_was_simulated_is_said(written) -> None:
    case, files = written
    said = "# simulated with the router "
    assert files["kubernetes.yaml"].count(said) == (case != "single")


def test_the_command_of_the_chart_is_written_out(written) -> None:
    """The chart's own reads the model as a template of Helm's. No option is there twice."""
    case, files = written
    for name in sorted(name for name in files if name.startswith("llm-d-values")):
        values = yaml.safe_load(files[name])
        assert values["decode"]["parallelism"]["tensor"] == (2 if case == "apart" else 1)
        for part in ("prefill", "decode") if case == "apart" else ("decode",):
            (container,) = values[part]["containers"]
            assert container["command"] == ["vllm", "serve"]
            options = [word for word in container["args"] if word.startswith("--")]
            assert {"--port", "--max-num-seqs"} < {*options}
            assert ("--tensor-parallel-size" in options) == (case == "apart")
            assert len({*options}) == len(options)


def test_the_autoscaler_scales_as_simulated(tmp_path: Path) -> None:
    """By the mean over pods and its target; growth at most to the double or by four."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND + "cluster: {autoscaling: {target: 2.5, cooldown: 4000}}\n")
    spec = yaml.safe_load(deployment(load_scenario(path))["hpa.yaml"])["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "vllm:num_requests_waiting"},
        "target": {"type": "AverageValue", "averageValue": "2500m"},
    }
    assert [policy["value"] for policy in spec["behavior"]["scaleUp"]["policies"]] == [100, 4]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 3600  # at most


def test_what_vllm_does_not_export_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    scaling = "{metric: slo_attainment, target: 0.9}"
    path.write_text(ONE_A_SECOND + f"goodput: {{ttft: 900}}\ncluster: {{autoscaling: {scaling}}}\n")
    files = deployment(load_scenario(path))
    assert files["hpa.yaml"] == b"# slo_attainment: vLLM exports no such metric; scale by another\n"


def test_every_gpu_of_nvidia_has_the_name_of_its_nodes() -> None:
    from simulator.models.gpus import GPUS

    assert {name for name, gpu in GPUS.items() if not gpu.product} == {"MI300X", "MI325X", "MI355X"}


def test_gpus_of_amd_are_asked_for_by_their_own_name(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    files = deployment(load_scenario(path, ["gpu.name=MI300X"]))
    pod = next(iter(yaml.safe_load_all(files["kubernetes.yaml"])))["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod
    (container,) = pod["containers"]
    assert container["image"].startswith("vllm/vllm-openai-rocm:")
    assert container["resources"]["limits"] == {"amd.com/gpu": "1"}


def test_the_image_is_of_the_version_that_was_simulated(tmp_path: Path) -> None:
    """A version without a patch release has that of its rules."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    for settings, tag in (([], "v0.33.0"), (["engine.version=0.11"], "v0.11.2")):
        files = deployment(load_scenario(path, settings))
        pod = next(iter(yaml.safe_load_all(files["kubernetes.yaml"])))["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == f"vllm/vllm-openai:{tag}"


@pytest.mark.medium
def test_run_and_plan_write_the_files(tmp_path: Path, capsys) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    where = tmp_path / "deploy"
    assert main(["run", str(path), "--out", str(tmp_path / "o"), "--deploy", str(where)]) == 0
    assert f"written to {where}: vllm_serve.sh, kubernetes.yaml" in capsys.readouterr().out
    one = (where / "kubernetes.yaml").read_text()
    plan = ["plan", str(path), "--cheapest", "--slo", "p99_ttft_ms<=100000"]
    plan += ["--out", str(tmp_path / "p"), "--deploy", str(where)]
    assert main([*plan, "--jobs", "1"]) == 0
    assert f"written to {where}: vllm_serve.sh, kubernetes.yaml" in capsys.readouterr().out
    assert (where / "kubernetes.yaml").read_text() == one


def test_a_file_in_the_way_is_told_before_the_run(tmp_path: Path, capsys) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    assert main(["run", str(path), "--out", str(tmp_path / "o"), "--deploy", str(path)]) == 2
    assert capsys.readouterr().err == (f"headway: error: --deploy {path}: {path} is not a folder\n")
    assert not (tmp_path / "o").exists()


def test_several_models_are_refused_and_adapters_are_options(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    base = "model: llama-3-8b\ncluster: {groups: {a: {replicas: 1}, b: {model: qwen3-32b}}}\n"
    path.write_text(base + "gpu: {name: H100-80GB}\nworkload: {models: {qwen3-32b: 1}}\n")
    with pytest.raises(HeadwayError, match=r"--deploy: needs one model"):
        deployment(load_scenario(path))
    path.write_text("model: llama-3-8b\nengine: {enable_lora: true, max_loras: 4}\n")
    command = deployment(load_scenario(path))["vllm_serve.sh"].decode()
    assert "--max-loras 4 " in command
    assert "--enable-lora" in command
    assert "max_cpu_loras" not in command
