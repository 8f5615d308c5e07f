"""`fields.csv` accounts for every field of the engines' configurations."""

import os
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator.core.engine_config import EngineConfig
from simulator.launch.fields import NOWHERE, fields
from tools.engine_fields import list_fields


def test_each_row_says_what_becomes_of_a_field():
    assert len(fields()) > 1000
    for row in fields():
        key = row.effect.removeprefix("engine.").partition(".")[0]
        named = (*NOWHERE, "model", "cluster.replicas")
        known = row.effect in named or key in EngineConfig.model_fields
        assert known, row
        assert row.note or row.effect not in NOWHERE, row
        assert row.kind or not row.options, row


def test_no_option_is_in_two_rows():
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        options = [o for row in fields() if row.engine == engine for o in row.options.split()]
        assert [o for o in {*options} if options.count(o) > 1] == []


def test_every_field_of_an_installed_engine_has_a_row():
    """Of the sources in HEADWAY_ENGINE, a folder with vLLM or SGLang in it."""
    places = [*Path(os.environ.get("HEADWAY_ENGINE", "/none")).glob("lib/python*/site-packages")]
    if not places:
        pytest.skip("HEADWAY_ENGINE names no environment with an engine")
    known = {(row.config, row.field) for row in fields()}
    options = " ".join(row.options for row in fields())
    names = {row.field for row in fields()} | {*options.replace("--", "").replace("-", "_").split()}
    missing = [
        f"{one.owner}.{one.name}"
        for one in list_fields(places[0])
        if (one.owner, one.name) not in known and not (_is_option(one.owner) and one.name in names)
    ]
    assert missing == []


def _is_option(owner: str) -> bool:
    """Say whether a class has command-line options, which may be fields of another, too."""
    return owner.endswith(("EngineArgs", "FrontendArgs"))


def test_a_field_that_is_new_is_named(tmp_path):
    """A class is read from its source, without importing it."""
    folder = tmp_path / "sglang/srt/arg_groups/fields"
    folder.mkdir(parents=True)
    text = "class Schedule:\n    _NS_PATH = 's'\n    brand_new: A[int, Arg(aliases=['--bn'])] = 3\n"
    (folder / "schedule.py").write_text(text)
    (field,) = list_fields(tmp_path)
    assert (field.owner, field.name, field.default) == ("Schedule", "brand_new", "3")
    assert field.options == ["--bn"]
    with pytest.raises(FileNotFoundError, match="neither"):
        [*list_fields(folder)]


def test_engines_prints_the_table(capsys):
    assert main(["engines", "--fields"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(fields())
    assert "vllm CacheConfig.block_size: simulated by engine.block_size" in lines
