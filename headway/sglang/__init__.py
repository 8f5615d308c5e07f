"""Headway's policies in the real SGLang: a plug-in that orders its waiting queue.

    HEADWAY_POLICY='{"policy": "sjf", "by": "hint", "ageing": 20}' \\
        python -m sglang.launch_server --model-path MODEL

SGLang finds `register` by the entry point `sglang.srt.plugins` of the distribution, in each of its
processes. Nothing of SGLang is imported before. It may import `simulator`, `conformance`
and `headway.vllm`, none of which knows it. Start with `plugin.py`.
"""

import os


def register() -> None:
    """Put the policy that HEADWAY_POLICY names into SGLang; without it do nothing.

    Where that cannot be the server ends, with one line: SGLang would go on without the policy.
    """
    if not os.environ.get("HEADWAY_POLICY", "").strip():
        return
    from headway.sglang.plugin import hook
    from simulator.util.errors import HeadwayError

    try:
        hook()
    except HeadwayError as error:
        raise SystemExit(f"error: {error}") from error
