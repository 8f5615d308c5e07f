"""Images and clips in prompts that are generated, or beside a trace."""

from pathlib import Path

import numpy as np
import pytest

from simulator.core.request import Media
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import from_mapping
from simulator.workload.generate import Generator, generate_parts, random_streams
from simulator.workload.traces import read_trace
from simulator.workload.traces.write import write_mooncake
from tests.support.workloads import generate

IMAGES = {
    "items": {"kind": "uniform", "low": 0, "high": 4},
    "tokens": {"kind": "uniform", "low": 5, "high": 50},
}


def media(segments):
    return [(name, count) for name, count in segments if isinstance(name, Media)]


def test_tokens_come_on_top_of_the_text() -> None:
    """Two images and a clip before the text, each new."""
    given = {"image": {"items": 2, "tokens": 30}, "audio": {"tokens": 7}}
    work = generate({"num_prompts": 3, "input_len": 10, "multimodal": given})
    assert [*work.prompt_tokens] == [77, 77, 77]
    assert work.segments is not None
    assert work.segments[1] == (
        (Media("image", (1, 0)), 30),
        (Media("image", (1, 1)), 30),
        (Media("audio", (1, 0)), 7),
        (("in", 1), 10),
    )
    work.check()


def test_images_do_not_change_the_rest() -> None:
    """Arrivals, lengths and answers have streams of their own."""
    spec = {
        "num_prompts": 50,
        "request_rate": 3,
        "input_len": {"kind": "uniform", "low": 1, "high": 99},
    }
    plain, with_images = generate(spec), generate(spec | {"multimodal": {"image": IMAGES}})
    more = [sum(count for _, count in media(parts)) for parts in with_images.segments]
    assert (with_images.prompt_tokens - more == plain.prompt_tokens).all()
    assert (with_images.arrival == plain.arrival).all()


def test_a_few_images_come_again_and_again() -> None:
    """Of one size each, the first more often than the last."""
    given = {"image": IMAGES | {"distinct": 10}}
    work = generate({"num_prompts": 500, "multimodal": given})
    found = [one for parts in work.segments for one in media(parts)]
    sizes = dict(found)
    assert len(sizes) == len({*found}) == 10
    counts = [sum(name.name == k for name, _ in found) for k in range(10)]
    weights = 1 / np.arange(1, 11)
    expected = weights / weights.sum() * len(found)
    assert (abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_parts_are_as_the_whole() -> None:
    """However many requests are made at a time."""
    media = {"image": IMAGES, "video": IMAGES | {"distinct": 3}}
    spec = {"num_prompts": 40, "multimodal": media}
    whole = generate(spec, seed=5)
    parts = [*generate_parts(from_mapping(Generator, spec), 5, None, 7)]
    assert [one for part in parts for one in part.segments] == whole.segments
    assert [*np.concatenate([part.prompt_tokens for part in parts])] == [*whole.prompt_tokens]
    assert "multimodal" in random_streams(0)


def test_later_turns_hold_the_images_of_those_before() -> None:
    given = {"sessions": {"turns": 2}, "num_prompts": 2, "input_len": 4, "output_len": 3}
    work = generate(given | {"multimodal": {"image": {"tokens": 9}}})
    first, second = work.segments
    assert second == (*first, (("out", 0), 3), (Media("image", (1, 0)), 9), (("in", 1), 4))
    assert [*work.prompt_tokens] == [13, 29]


@pytest.mark.parametrize(("cell", "wrong"), [("-2", "negative"), ("x", "is not a whole number")])
def test_a_traces_column(tmp_path: Path, cell: str, wrong: str) -> None:
    """`images` in a table, or another column that is named; an empty cell is none."""
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,Pics\n0,5,5,2\n1,5,5,\n")
    columns = "arrival=arrival,prompt=prompt_tokens,output=output_tokens,images=Pics"
    assert [*read_trace(path, columns=columns).images] == [2, 0]
    path.write_text(f"arrival,prompt_tokens,output_tokens,images\n0,5,5,{cell}\n")
    with pytest.raises(HeadwayError, match=f"t.csv:2: images: .*{wrong}"):
        read_trace(path)


def test_images_cannot_be_written_as_hash_ids(tmp_path: Path) -> None:
    work = generate({"num_prompts": 1, "multimodal": {"image": {}}})
    with pytest.raises(HeadwayError, match="cannot be written as hash_ids"):
        write_mooncake(work, tmp_path / "t.jsonl")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"image": {"items": -1}}, "multimodal.image.items"),
        ({"image": {"tokens": 0.5}}, "multimodal.image.tokens"),
        ({"image": {"size": 3}}, "multimodal.image.size"),
        ({"picture": {}}, "multimodal: must be a mapping"),
        ({}, "multimodal: must be a mapping"),
        ([], "multimodal: must be a mapping"),
    ],
)
def test_what_is_refused(given: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generate({"multimodal": given})
