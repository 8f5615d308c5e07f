"""What a log has and a run does not play is counted, by one general rule for each kind."""

import json
import re
import warnings

import pytest

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace, write_mooncake
from tests.workload.test_ledger import HEAD, told

SPAN = {"traceId": "t", "type": "GENERATION"}
USAGE = {"usageDetails": {"input": 100, "output": 40}}
NO_COUNTS = "requests left out, which have no token counts"


def langfuse(put, *spans):
    """Read observations with a number for each, with what is told."""
    named = ({"id": f"o{k}", "startTime": f"2026-03-02T09:00:0{k}Z"} for k in range(len(spans)))
    every = (name | SPAN | span for name, span in zip(named, spans, strict=True))
    return told(put("\n".join(map(json.dumps, every))))


@pytest.mark.parametrize(
    ("silent", "count"),
    [
        ({"usageDetails": {}}, 1),
        ({"usageDetails": {"input": 100}}, 1),
        ({"type": "SPAN"}, 0),
        ({"type": "EMBEDDING", "gen_ai.operation.name": "embeddings"}, 0),
        ({"type": "", "gen_ai.request.model": "m"}, 1),
        ({"type": "", "openinference.span.kind": "LLM"}, 1),
        ({"type": "", "gen_ai.operation.name": "chat"}, 1),
        ({"type": "", "gen_ai.operation.name": "execute_tool"}, 0),
    ],
)
def test_calls_without_token_counts(put, silent, count):
    """In spans that are calls to generate text, by their kind or their model; no other ones."""
    work, said = langfuse(put, USAGE, silent, USAGE)
    assert len(work) == 2
    assert said == [f"{NO_COUNTS}: {count}"] * count


def test_spans_that_enclose_others(put):
    """One without token counts around a call is no request, and not counted."""
    inner = USAGE | {"parentObservationId": "o0"}
    work, said = langfuse(put, USAGE, inner, USAGE)
    assert len(work) == 2
    assert said == ["enclosing spans left out, each taken as the sum of its children: 1"]
    assert not langfuse(put, {}, inner, inner)[1]


def test_spans_that_were_exported_twice(put):
    """By trace and span: a span's number may come again in another trace."""
    work, said = langfuse(put, USAGE, {"id": "o0"} | USAGE, {"id": "o0", "traceId": "u"} | USAGE)
    assert len(work) == 2
    assert said == ["spanId: spans that come again left out: 1"]


def test_requests_whose_id_came_before_are_played_and_counted(put):
    rows = "0,9,5,a\n1,9,5,b\n1,9,5,b\n2,9,5,\n3,9,5,\n"
    work, said = told(put(f"{HEAD},request_id\n{rows}"))
    assert len(work) == 5
    assert said == ["request_id: requests whose id came before, played all the same: 1"]


def test_answers_that_max_tokens_cuts(put):
    """Not those of 0, which is none, and as long as allowed."""
    work, said = told(put(f"{HEAD},max_tokens\n0,9,50,20\n1,9,5,20\n2,9,50,\n3,9,20,20\n"))
    assert work.max_tokens.tolist() == [20, 20, 0, 20]
    assert said == [
        "max_tokens: answers longer than it allows, cut there: 1",
        "max_tokens: output tokens that this cuts off: 30",
    ]


@pytest.mark.parametrize(
    ("columns", "cells", "cached", "later"),
    [
        ("n", ["2", "1", "1"], 240, 2),
        ("prefix_id,prefix_tokens", ["a,16", "a,16", ","], 224, 2),
        ("prefix_id,prefix_tokens", ["a,96", "b,96", "a,96"], 160, 2),
    ],
)
def test_requests_that_share_nothing_beside_some_that_do(put, columns, cells, cached, later):
    """Whether one asks for several answers, or some have a prefix: the others are told."""
    rows = "".join(f"{k},100,5,{cell},80,c\n" for k, cell in enumerate(cells))
    _, said = told(put(f"{HEAD},{columns},cached_tokens,conversation_id\n{rows}"))
    assert any(f"cache had when it was recorded: {cached};" in one for one in said)
    assert any(f"requests that continue a conversation: {later};" in one for one in said)


def test_messages_of_sharegpt_that_are_not_played(put):
    def talk(*lengths):
        return {"conversations": [{"value": "x" * 4 * n} for n in lengths]}

    path = put(json.dumps([talk(9, 9, 9, 9), talk(9, 9), talk(9), talk(1, 9)]))
    work, said = told(path, chars_per_token=4)
    assert len(work) == 2
    assert said == [
        "conversations: later messages left out: 2",
        "conversations left out, as vllm bench serve does: 2",
    ]


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("response_status_code", "200 500 429"),
        ("http_response_code", "200 0 503"),
        ("upstream_status", "200 502 error"),
        ("status_text", "OK Error timeout"),
        ("request_status", "success failed cancelled"),
        ("stop_reason", "end_turn cancelled error"),
        ("termination_reason", "stop aborted timeout"),
        ("error_code", "0 500 E17"),
        ("failure_reason", "- boom x"),
        ("closed_by_client", "0 1 true"),
        ("finish_reasons", "['stop'] ['error'] ['cancelled']"),
    ],
)
def test_names_like_those_of_an_outcome(put, column, cells):
    """The first request was answered, the others were not."""
    rows = "".join(f"{k},9,5,{cell}\n" for k, cell in enumerate(cells.split()))
    work, said = told(put(f"{HEAD},{column}\n{rows}"))
    assert work.arrival.tolist() == [0]
    assert said[0] == (
        "2 requests left out: failed or cancelled when recorded, or without output tokens"
    )
    given_up = len(re.findall("cancelled|aborted", cells)) or 2 * column.startswith("closed")
    assert said[1:] == [f"requests left out as cancelled when recorded: {given_up}"][:given_up]


@pytest.mark.parametrize("reason", ["error", "cancelled", "stop"])
@pytest.mark.parametrize("several", [True, False])
def test_a_reason_to_finish_of_a_span_may_be_a_list(put, reason, several):
    value = {"stringValue": reason}
    value = {"arrayValue": {"values": [value]}} if several else value
    usage = [("gen_ai.usage.input_tokens", {"intValue": "9"})]
    usage += [("gen_ai.usage.output_tokens", {"intValue": "5"})]
    spans = [
        {"traceId": "t", "spanId": f"s{k}", "startTimeUnixNano": str(10**18 + k)}
        | {"attributes": [{"key": key, "value": one} for key, one in [*usage, *more]]}
        for k, more in enumerate([[], [("gen_ai.response.finish_reasons", value)]])
    ]
    whole = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    assert len(told(put(json.dumps(whole)))[0]) == 1 + (reason == "stop")


@pytest.mark.parametrize(
    ("column", "chat", "other"),
    [
        ("request", "POST /v1/chat/completions HTTP/1.1", "POST /v1/embeddings HTTP/1.1"),
        ("request", "see /v1/images", "POST /v1/images/generations"),
        ("request_uri", "/v1/completions", "/v1/rerank"),
        ("request_url", "https://api/v1/chat/completions", "https://api/v1/embeddings"),
        ("openinference.span.kind", "LLM", "EMBEDDING"),
        ("traceloop.span.kind", "llm", "reranker"),
        ("model_type", "text-generation", "text-embeddings"),
        *(("type", "chat", one) for one in ("embedding", "moderation", "transcription", "tts")),
        ("type", "batch", "rerank"),
    ],
)
def test_what_generates_no_text(put, column, chat, other):
    work, said = told(put(f"{HEAD},{column}\n0,9,5,{chat}\n1,9,5,{other}\n"))
    assert len(work) == 1
    assert said == [f"{column}: requests left out: 1, no calls to generate text"]


def test_a_model_goes_before_its_provider(put):
    cells = ("0,9,5,qwen,x", "1,9,5,llama,x")
    _, said = told(put(f"{HEAD},model_permaslug,provider_name\n" + "\n".join(cells)))
    assert said[0].startswith("model_permaslug: requests that name one of several models")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        *((name, "gpt-4o", "name one of several models") for name in ("model_permaslug", "llm")),
        *((name, "b", "name one of several models") for name in ("ai_model", "deployment_name")),
        ("engine", "b", "name one of several models"),
        ("parent_id", "r1", "follow another's answer"),
        *((name, "7", "have a class of service") for name in ("priority_level", "urgency")),
        ("audio_duration", "1.5", "have audio"),
        ("video_duration_s", "2", "have video"),
        *((name, "x.png", "have media without sizes") for name in ("image_url", "image_size")),
        ("type", "image", "have media without sizes"),
        ("best_of", "4", "may have had more answers than they were given"),
        ("messages", "[{'type': 'image_url'}]", "have media in their messages"),
        ("gen_ai.input.messages", "[{'modality': 'image'}]", "have media in their messages"),
        ("modality", "Video", "have media without sizes"),
    ],
)
def test_names_like_those_of_what_changes_a_load(put, column, value, said):
    _, all_said = told(put(f"{HEAD},n,{column}\n0,9,5,1,\n1,9,5,1,{value}\n"))
    assert len(all_said) == 1
    assert all_said[0].startswith(f"{column}: requests that {said}")
    assert all_said[0].endswith(": 1")


def test_a_type_that_is_no_medium_says_nothing(put):
    assert not told(put(f"{HEAD},type,cache_status\n0,9,5,text,MISS\n1,9,5,search,MISS\n"))[1]


@pytest.mark.parametrize("column", ["lora_id", "lora_int_id", "peft_name", "adapter_model"])
def test_names_of_adapters(put, column):
    work, _ = told(put(f"{HEAD},{column},model\n0,9,5,7,base\n1,9,5,,base\n"))
    assert work.model == ["7", ""]


def test_tokens_of_images_as_gemini_counts_them(put):
    details = [{"modality": "TEXT", "tokenCount": 10}, {"modality": "IMAGE", "tokenCount": 258}]
    usage = {"promptTokenCount": 268, "candidatesTokenCount": 5, "promptTokensDetails": details}
    _, said = told(put(json.dumps({"createTime": "2026-03-02T09:00:00Z", "usageMetadata": usage})))
    assert said[0].startswith("image_tokens: requests that have tokens of images")
    assert len(said) == 1


def test_what_a_web_server_says_before_the_tokens(put):
    """Path, status and, as Envoy writes them, flags of what went wrong."""
    line = '[2026-03-02T09:00:0{}Z] "POST {} HTTP/1.1" {} 9 prompt_tokens=9 completion_tokens=5{}\n'
    chat, hit = "/v1/chat/completions", " upstream_cache_status=HIT"
    asked = [(chat, "200 -", ""), (chat, "0 DC", ""), (chat, "200 UF,URX", ""), (chat, 499, "")]
    asked += [("/v1/embeddings", 200, ""), (chat, 200, hit), (chat, 200, "")]
    work, said = told(put("".join(line.format(k, *one) for k, one in enumerate(asked))))
    assert work.arrival.tolist() == [0, 6]
    assert said == [
        "3 requests left out: failed or cancelled when recorded, or without output tokens",
        "requests left out as cancelled when recorded: 2",
        "upstream_cache_status: requests left out: 1, answered by a proxy's cache",
        "path: requests left out: 1, no calls to generate text",
    ]


AGAIN = "played at their recorded times; workload.max_concurrency limits them again"


def test_loads_that_waited_for_answers(put):
    """Of vllm bench serve under a limit, and of a run of Headway's."""
    result = {"input_lens": [9, 9], "output_lens": [5, 5], "start_times": [0.0, 1.0]}
    _, said = told(put(json.dumps(result | {"max_concurrency": 4})))
    assert said == [f"max_concurrency: requests recorded under 4, {AGAIN}: 2"]
    assert not told(put(json.dumps(result | {"max_concurrency": None})))[1]
    _, said = told(put(f"{HEAD},client_queue_time\n0,9,5,0\n0,9,5,1.5\n"))
    assert said == [f"client_queue_time: requests that waited at their client, {AGAIN}: 1"]


def test_prompts_with_fewer_tokens_than_their_images(tmp_path):
    """Where a trace counts the images' tokens in its prompts'."""
    rows = "".join(f"2026-03-02T09:00:0{k}Z,1,{n},5\n" for k, n in enumerate([700, 600, 500]))
    (tmp_path / "t.csv").write_text(f"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n{rows}")
    load = {"trace": {"path": str(tmp_path / "t.csv")}, "multimodal": {"image": {"tokens": 600}}}
    raw = {"model": "qwen2.5-vl-7b", "workload": load, "engine": {"multimodal_config": {}}}
    with pytest.warns(match="fewer tokens than their images: 2; raised by tokens: 102"):
        work = make_workload(load_scenario(raw))
    assert work.prompt_tokens.tolist() == [700, 601, 601]


@pytest.mark.parametrize("limit", [1, 2])
def test_more_images_than_a_prompt_may_have(limit, capsys, tmp_path):
    """Before the run, and as the reason why they were rejected: no key of the KV cache helps."""
    items = {"kind": "uniform", "low": 1, "high": 2}
    load = {"num_prompts": 40, "input_len": 9, "multimodal": {"image": {"items": items}}}
    engine = {"multimodal_config": {"limit_mm_per_prompt": {"image": limit}}}
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"model": "qwen2.5-vl-7b", "workload": load, "engine": engine}))
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    said = "requests with more than the 1 of image that limit_mm_per_prompt allows (up to 2): "
    assert (said in err) == (said in out) == (limit == 1)
    assert "KV blocks" not in out


def test_images_without_sizes_are_not_converted(put, tmp_path):
    work = read_trace(put(f"{HEAD},num_images\n0,9,5,1\n"))
    with pytest.raises(HeadwayError, match="images and clips cannot be written"):
        write_mooncake(work, tmp_path / "x.jsonl")


def test_the_served_model_is_no_adapter_under_any_of_its_names(tmp_path):
    names = ["llama-3-8b", "sql", "", "meta-llama/Meta-Llama-3-8B", "meta-llama/llama-2-7b-hf"]
    rows = "".join(f"{k},9,5,{name}\n" for k, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"{HEAD},model\n{rows}")
    load = {"trace": {"path": str(tmp_path / "t.csv")}}
    raw = {"model": "llama-3-8b", "engine": {"enable_lora": True}, "workload": load}
    assert make_workload(load_scenario(raw)).model == ["", "sql", "", "", names[4]]


def test_images_and_models_are_counted_where_a_first_scenario_is_written(tmp_path, capsys):
    path, out = tmp_path / "t.csv", tmp_path / "s.yaml"
    path.write_text(f"{HEAD},num_images,model\n0,9,5,1,a\n1,9,5,2,b\n")
    assert main(["init", str(out), "--yes", "--traffic", str(path)]) == 0
    err = capsys.readouterr().err
    assert "images: 3, whose sizes nothing tells" in err
    assert "requests ask for several models: a (1), b (1); one serves all" in err


def test_calls_for_embeddings_in_vllms_log(put):
    """Counted, and no reason to refuse the log."""
    line = (
        "INFO 03-02 09:00:0{} [logger.py:42] Received request r-{}: prompt: 'hi', params: {}, "
        "prompt_token_ids: [1, 2, 3], lora_request: None.\n"
    )
    kinds = ("SamplingParams(n=1, max_tokens=5)", "PoolingParams(dimensions=None)")
    text = "".join(line.format(k, k, kinds[k == 1]) for k in range(3))
    work, said = told(put(text.replace("'hi'", "'params: PoolingParams('")))
    assert len(work) == 2
    assert said[0] == "PoolingParams: requests left out, no calls to generate text: 1"


def test_a_dash_is_no_value(put):
    head = f"{HEAD},first_token_time,priority,cached_tokens"
    work, said = told(put(f"{head}\n0,9,5,0.5,1,-\n1,9,5,-,-,-\n"))
    assert work.priority.tolist() == [1, 0]
    assert not said


def test_five_problems_that_are_alike_are_one(put):
    rows = "".join(f"2026-03-02 09:00:0{k} CET,9,5\n" for k in range(6))
    with pytest.raises(HeadwayError) as error:
        read_trace(put(f"{HEAD}\n{rows}"))
    assert len(error.value.messages) == 1
    assert error.value.messages[0].endswith(", and so in 5 more places")


def test_every_column_that_is_not_understood_is_named(put):
    names = [f"mood_of_{one}" for one in "abcdefghijklmnop"]
    _, said = told(put(f"{HEAD},{','.join(names)}\n0,9,5{',1' * len(names)}\n"))
    assert said == [f"not understood, and without effect: {', '.join(names)}"]


def test_a_benchmark_without_lists_says_which_option_writes_them(put):
    """SGLang's, too, whose result has no request_throughput."""
    result = {"backend": "sglang", "completed": 2, "total_input_tokens": 9}
    with pytest.raises(HeadwayError, match="SGLang: --output-details"):
        read_trace(put(json.dumps(result | {"total_output_tokens": 5})))


def test_columns_within_columns_of_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    rows = [{"timestamp": float(k), "usage": usage} for k in range(2)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").prompt_tokens.tolist() == [9, 9]


@pytest.mark.parametrize("shared", ["", "8"])
def test_prompts_that_come_again_by_repeat(tmp_path, shared):
    (tmp_path / "t.csv").write_text(
        f"{HEAD},prefix_id,prefix_tokens\n0,9,5,{'a' * bool(shared)},{shared}\n"
    )
    load = {"trace": {"path": str(tmp_path / "t.csv"), "repeat": 3}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_workload(load_scenario({"model": "llama-3-8b", "workload": load}))
    said = ["repeat: prompts with contents come again, and a prefix cache finds them: 2 times"]
    assert [str(one.message) for one in caught] == said * bool(shared)


def test_cancelled_requests_whose_end_is_told_hang_up_again(put):
    """With `cancel_after`: of as many tokens as they allow, or one more than they got."""
    head = f"{HEAD},cancelled,cancel_after,max_tokens\n"
    rows = "0,9,50,0,,60\n1,9,20,1,0.5,400\n2,9,20,1,0.5,\n3,9,0,1,0.5,\n4,9,20,1,,\n"
    work, said = told(put(head + rows))
    assert work.output_tokens.tolist() == [50, 400, 21]
    assert work.cancel_after[1:].tolist() == [0.5, 0.5]
    assert said == [
        "2 requests left out: failed or cancelled when recorded, or without output tokens"
    ]


def test_requests_that_clients_of_a_run_gave_up_are_told(put):
    """They ask for all their tokens here: the file does not say how long their clients waited."""
    path = put(f"{HEAD},asked_output_tokens,finish_reason\n0,9,5,,stop\n1,9,0,80,timeout\n")
    work, said = told(path)
    assert work.output_tokens.tolist() == [5, 80]
    assert len(said) == 1
    assert said[0].startswith("finish_reason: requests that their clients gave up")
    assert said[0].endswith("a cluster.client with the timeout of that run gives them up again: 1")


@pytest.mark.parametrize("name", ["image_tokens", "audio_tokens", "video_tokens"])
def test_tokens_of_media_beyond_a_prompt_come_on_top(put, name):
    work, _ = told(put(f"{HEAD},{name}\n0,100,5,1152\n1,100,5,20\n"))
    assert work.prompt_tokens.tolist() == [1252, 100]


def test_embeddings_with_tokens_are_counted(put):
    other = {"type": "EMBEDDING", "usageDetails": {"input": 100}}
    work, said = langfuse(put, USAGE, other)
    assert len(work) == 1
    assert said == ["spans left out, no calls to generate text: 1"]
