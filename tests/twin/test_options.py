"""What clients see of a server: its name and keys; and the folder of its run."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.cli.main import main
from headway.twin.options import ServeOptions
from headway.twin.server import Server
from tests.support.twins import served_by, twin

MODEL = "llama-3-8b"
COMMAND = "vllm serve Qwen/Qwen3-8B --api-key sk-1 sk-2 --served-model-name foo bar"


def test_a_command_brings_its_name_and_keys() -> None:
    taken = ServeOptions().with_command(COMMAND)
    assert (taken.served_model_name, taken.api_key) == (["foo", "bar"], ["sk-1", "sk-2"])
    kept = ServeOptions(served_model_name=["own"], api_key=["k"]).with_command(COMMAND)
    assert (kept.served_model_name, kept.api_key) == (["own"], ["k"])
    bare = ServeOptions().with_command("vllm serve Qwen/Qwen3-8B")
    assert (bare.served_model_name, bare.api_key) == ([], [])


@pytest.mark.parametrize("option", ["--api-key", "--served-model-name"])
def test_an_option_whose_value_is_forgotten_opens_no_server(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one whose value is an empty variable of a shell, or that a command has, too."""
    for words in ([option], [option, ""], [option, "--command", COMMAND]):
        assert main(["serve", "demo", "--port", "0", *words]) == 2
        assert capsys.readouterr().err.startswith(f"headway: error: {option}: needs a value, ")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("sk-1", 401),
        ("Bearer sk", 401),
        ("Basic sk-1", 401),
        ("Bearer sk-1", 200),
        ("bearer sk-2", 200),
    ],
)
def test_a_server_with_keys_wants_one_of_them(given: str | None, status: int) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        head = {} if given is None else {"Authorization": given}
        response = await client.get("/v1/models", headers=head)
        assert response.status == status
        if status == 401:
            assert await response.json() == {"error": "Unauthorized"}
        assert (await client.get("/health")).status == 200

    served_by(play, api_key=["sk-1", "sk-2"])


def test_each_name_of_the_model_is_answered_to_and_the_first_is_told() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        listed = (await (await client.get("/v1/models")).json())["data"]
        assert [(one["id"], one["root"]) for one in listed] == [("a", MODEL), ("b", MODEL)]
        for name in ("a", "b", ""):
            body = {"prompt": "one", "model": name}
            answer = await (await client.post("/v1/completions", json=body)).json()
            assert answer["model"] == "a"
        assert (await client.get("/v1/models/b")).status == 200
        response = await client.post("/v1/completions", json={"prompt": "one", "model": MODEL})
        assert response.status == 404
        assert "Valid aliases: a, b." in (await response.json())["error"]["message"]

    served_by(play, served_model_name=["a", "b"])


def test_a_key_may_come_from_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for key, status in (("sk-e", 200), ("sk-o", 401)):
            head = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=head)).status == status

    monkeypatch.setenv("VLLM_API_KEY", "sk-e")
    served_by(play)
    monkeypatch.setenv("VLLM_API_KEY", "sk-o")
    served_by(play, api_key=["sk-e"])


def test_a_served_run_has_the_ids_that_clients_see(tmp_path: Path) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        for name in ("mine", None):
            head = {} if name is None else {"X-Request-Id": name}
            body = {"prompt": "one", "n": 2}
            answer = await client.post("/v1/completions", json=body, headers=head)
            ids.extend([(await answer.json())["id"]] * 2)
        server.write(tmp_path)

    ids: list[str] = []
    served_by(play)
    assert ids[0] == "cmpl-mine"
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines == ["id,answer", *(f"{number},{name}" for number, name in enumerate(ids))]


def test_what_serve_obeys_of_a_command_is_not_said_to_be_without_effect() -> None:
    with twin("demo", "--port", "0", "--command", COMMAND) as (_, process):
        process.send_signal(signal.SIGINT)
        _, warned = process.communicate(timeout=60)
    assert "without effect" not in warned


def test_a_folder_that_cannot_be_made_is_said_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "demo", "--port", "0", "--out", "/proc/nope"]) == 2
    assert "/proc/nope" in capsys.readouterr().err


@pytest.mark.medium
def test_an_earlier_run_is_replaced_by_one_with_requests_alone(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with twin("demo", "--port", "0", "--out", str(tmp_path)) as (_, process):
        process.send_signal(signal.SIGINT)
        told, warned = process.communicate(timeout=60)
    assert f"nothing written to {tmp_path}: no request has come" in told
    assert f"--out {tmp_path}: the run that it has will be replaced" in warned
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
