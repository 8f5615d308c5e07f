"""What a run says of prefill and decode on different replicas, from the facts of the logs.

The engines' logs each tell of their own: a producer has a row for each prompt that it computed, a
consumer for each answer. What the client saw is put together here, and what other replicas
encoded of its images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simulator.core.log import ENCODING, REJECTED, TRANSFER, UNFINISHED, Log
from simulator.costs.cost_model import CostModel
from simulator.results.breakdown import PARTS, break_down
from simulator.results.engine_metrics import share
from simulator.results.request_table import (
    ENCODER_PARTS,
    TRANSFER_PARTS,
    Floats,
    Ints,
    Rows,
    find_rows,
    gather_requests,
)
from simulator.workload.workload import Workload


class Transfers(NamedTuple):
    """The KV caches that went from replica to replica, and what each engine wrote down."""

    rows: Rows  # of dtype TRANSFER, ascending by id: those of the last tries
    engines: list[Log]  # as the engines wrote them
    producers: dict[int, tuple[int, float, float]]
    """By number: transfers, bytes that they moved, seconds that they took of its link."""

    @classmethod
    def of(
        cls,
        rows: bytes,
        engines: list[Log],
        producers: dict[int, tuple[int, float, float]],
        sent_again: Mapping[int, float],
    ) -> "Transfers":
        """Take the facts of a run; `rows` are of dtype TRANSFER, those of earlier tries, too.

        `sent_again` has the time (s) of each last try, which need not have moved anything.
        """
        every = np.frombuffer(rows, TRANSFER)
        if sent_again:
            since = np.array([sent_again.get(id, -1.0) for id in every["id"].tolist()])
            every = every[every["scheduled"] > since]
        _, last = np.unique(every["id"][::-1], return_index=True)
        return cls(every[::-1][last], engines, producers)

    @property
    def prompts(self) -> list[Log]:
        """Each producer's log with the prompts that others went on with; others are empty."""
        logs = [Log(log.num_blocks, log.block_size) for log in self.engines]
        for number in self.producers:
            prompts = self.engines[number].requests
            counted, at = find_rows(self.rows["id"], prompts["id"])
            taken = self.rows[at]  # of several tries the last
            same = (taken["producer"] == number) & (taken["ready"] == prompts["finish"][counted])
            counted[counted] = same
            logs[number] = _with(self.engines[number], prompts[counted])
        return logs

    @property
    def answers(self) -> list[Log]:
        """Each consumer's log, and those of the producers with what ended there for good."""
        logs = [*self.engines]
        others = (log.requests["id"] for k, log in enumerate(logs) if k not in self.producers)
        there = np.concatenate([*others])  # where consumers come first both have those unfinished
        for number in self.producers:
            rows = logs[number].requests
            ended = np.isin(rows["reason"], (REJECTED, UNFINISHED))  # nobody went on with it
            ended &= ~np.isin(rows["id"], there)
            logs[number] = _with(logs[number], rows[ended], run_rows=bytearray())
        return logs

    def seen(self) -> list[Log]:
        """Return the logs as clients see it: a request begins where its prompt was computed."""
        begun = np.concatenate([log.requests for log in self.prompts])
        begun = begun[np.argsort(begun["id"])]
        logs = self.answers
        for number, log in enumerate(logs):
            rows = log.requests.copy()
            if number not in self.producers:
                known, at = find_rows(begun["id"], rows["id"])
                for name in ("first_scheduled", "cached"):
                    rows[name][known] = begun[name][at]
                rows["preemptions"][known] += begun["preemptions"][at]
                logs[number] = _with(log, rows)
        return logs

    def moves(self) -> dict[int, list[tuple[str, float, float]]]:
        """Return by id what a request did from the end of its prefill until it had a seat again."""
        names = ("ready", "asked", "end", "scheduled")
        columns = (self.rows[name].tolist() for name in ("id", *names))
        return {
            id: [
                ("waits to decode", ready, asked),
                ("KV transfer", asked, end),
                ("waits to decode", end, scheduled),
            ]
            for id, ready, asked, end, scheduled in zip(*columns, strict=True)
        }

    def producer_of(self, size: int) -> Ints:
        """Return the replica that computed the prompt of each of `size` requests; -1: none."""
        numbers = np.full(size, -1)
        numbers[self.rows["id"]] = self.rows["producer"]
        return numbers

    def time_parts(
        self, workload: Workload, sent: Floats, costs: Sequence[CostModel]
    ) -> dict[str, Floats]:
        """Return the parts of each completed request's e2el in seconds, by id, in order of time.

        The first step at the consumer, which computes the last prompt token again, is prefill.
        """
        rows, size = self.rows, len(workload)
        halves = []
        for logs in (self.prompts, self.answers):
            table = gather_requests(workload, sent, logs)
            halves.append(break_down(table, logs, costs))
        prompts, answers = halves
        parts = {name: answers[name] + np.nan_to_num(prompts[name]) for name in PARTS}
        waits = {
            "decode_queue_time": rows["asked"] - rows["ready"] + rows["scheduled"] - rows["end"],
            "transfer_time": rows["end"] - rows["asked"],
        }
        done = ~np.isnan(parts["prefill_time"])
        for name, seconds in waits.items():
            whole = np.zeros(size)  # of those that a consumer computed itself
            whole[rows["id"]] = seconds
            parts[name] = np.where(done, whole, np.nan)
        first, *others = PARTS
        return {name: parts[name] for name in (first, *TRANSFER_PARTS, *others)}


def _with(log: Log, requests: Rows, **others: bytearray) -> Log:
    """Return a log with other rows of requests."""
    return replace(log, request_rows=bytearray(requests.tobytes()), **others)  # type: ignore[arg-type]


def link_summary(transfers: Transfers, paid: float) -> dict[str, object]:
    """Return the figures of the links; `paid` are the seconds that all producers are paid for.

    A transfer's time counts from when the consumer had blocks for it, `mean_link_wait_ms` of it
    until the link turned to it. `blocks_found_rate` is the share of the blocks that need not move.
    """
    rows = transfers.rows
    moved, waited = (1e3 * (rows[name] - rows["asked"]) for name in ("end", "begin"))
    counts, sizes, busy = (sum(each) for each in zip(*transfers.producers.values(), strict=True))
    found, blocks = int(rows["found"].sum()), int(rows["blocks"].sum())
    some = len(rows) > 0
    return {
        "transfers": counts,
        "bytes": sizes,
        "mean_transfer_time_ms": float(moved.mean()) if some else 0.0,
        "p99_transfer_time_ms": float(np.percentile(moved, 99)) if some else 0.0,
        "mean_link_wait_ms": float(waited.mean()) if some else 0.0,
        "link_utilization": share(busy, paid),
        "blocks_found_rate": share(found, found + blocks),
    }


class Encodings(NamedTuple):
    """The requests whose images were encoded elsewhere, and what went over the encoders' links."""

    rows: Rows  # of dtype ENCODING, ascending by id: those of the last tries
    links: dict[int, tuple[int, int, float]]
    """By number: outputs that an encoder sent, their tokens, seconds that they took of its link."""

    @classmethod
    def of(cls, rows: bytes, links: dict[int, tuple[int, int, float]]) -> "Encodings":
        """Take the facts of a run; `rows` has those of earlier tries, too."""
        every = np.frombuffer(rows, ENCODING)
        _, last = np.unique(every["id"][::-1], return_index=True)
        return cls(every[::-1][last], links)

    def time_parts(self, prefill: Floats) -> dict[str, Floats]:
        """Return the parts of each request's e2el in s, by id; NaN where it has no `prefill`."""
        rows, parts = self.rows, {}
        spans = rows["encoded"] - rows["begin"], rows["end"] - rows["encoded"]
        for name, seconds in zip(ENCODER_PARTS, spans, strict=True):
            whole = np.zeros(len(prefill))  # of those without images
            whole[rows["id"]] = seconds
            parts[name] = np.where(np.isnan(prefill), np.nan, whole)
        return parts

    def summary(self, token_bytes: int, paid: float) -> dict[str, object]:
        """Return the figures of the encoders' links, which are `paid` for so many s.

        Times are of the requests that have images.
        """
        rows = self.rows
        counts, tokens, busy = (sum(each) for each in zip(*self.links.values(), strict=True))
        found: dict[str, object] = {
            "requests": len(rows),
            "transfers": counts,
            "bytes": tokens * token_bytes,
        }
        spans = rows["encoded"] - rows["begin"], rows["end"] - rows["encoded"]
        for name, seconds in zip(ENCODER_PARTS, spans, strict=True):
            some = 1e3 * seconds if len(rows) else np.zeros(1)
            found[f"mean_{name}_ms"] = float(some.mean())
            found[f"p99_{name}_ms"] = float(np.percentile(some, 99))
        return {**found, "link_utilization": share(busy, paid)}
