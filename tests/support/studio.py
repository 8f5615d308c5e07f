"""A studio that runs, asked by HTTP or through a browser."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

ENTER = "\ue007"


@contextlib.contextmanager
def serving(*words: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run `headway studio` on a free port; give the port. It ends at Ctrl-C, with 0."""
    command = [sys.executable, "-m", "headway", "studio", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        yield int(found.group(1)), process
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        told = process.stderr.read()
        assert told == "", told
    finally:
        process.kill()
        process.communicate()


def ask(
    port: int, body: object, path: str = "/run", headers: dict[str, str] | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Send a request; give its status and the lines of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, headers or {})
    response = connection.getresponse()
    lines = [json.loads(line) for line in response.read().splitlines()]
    connection.close()
    return response.status, lines


def wait_for_runs(driver: Any, count: int) -> str:
    """Wait until so many whole runs were shown; give what the status says."""
    end = time.monotonic() + 60
    status = driver.find_element("id", "status")
    while time.monotonic() < end:
        if int(status.get_attribute("data-runs") or 0) >= count:
            return str(status.text)
        time.sleep(0.02)
    raise AssertionError(status.text + driver.find_element("id", "errors").text)


def wait_until_idle(driver: Any) -> None:
    """Wait until what was asked for last is there."""
    end = time.monotonic() + 60
    time.sleep(0.2)
    while driver.find_elements("css selector", "[aria-busy]"):
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_until_shown(driver: Any, name: str) -> None:
    """Wait until an element is to be seen."""
    end = time.monotonic() + 20
    while not driver.find_element("id", name).is_displayed():
        assert time.monotonic() < end, name
        time.sleep(0.02)


def copied(driver: Any, button: str, *, clipboard: bool = True) -> str:
    """Press a button that copies; give what it copied."""
    if not clipboard:
        driver.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error());")
    driver.execute_script("delete document.getElementById('copied').dataset.text")
    driver.find_element("id", button).send_keys(ENTER)
    note = driver.find_element("id", "copied")
    end = time.monotonic() + 10
    while not note.get_attribute("data-text") and time.monotonic() < end:
        time.sleep(0.05)
    return str(note.get_attribute("data-text"))
