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

COMMAND = "vllm serve Qwen/Qwen3-8B --api-key sk-1 sk-2 --served-model-name foo bar"


def test_a_command_brings_its_name_and_keys() -> None:
    taken = ServeOptions().with_command(COMMAND)
    assert (taken.served_model_name, taken.api_key) == ("foo", ["sk-1", "sk-2"])
    kept = ServeOptions(served_model_name="own", api_key=["k"]).with_command(COMMAND)
    assert (kept.served_model_name, kept.api_key) == ("own", ["k"])
    bare = ServeOptions().with_command("vllm serve Qwen/Qwen3-8B")
    assert (bare.served_model_name, bare.api_key or []) == (None, [])


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
