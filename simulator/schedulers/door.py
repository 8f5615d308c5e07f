"""The limits of the queue at a server's door: who comes beyond them gets 503 at once.

`AsyncLLM.check_admission` of vLLM 0.33; the limits came with 0.29. A request counts until it has
ended; its prompt counts whole until the first token has come.
"""

from simulator.core.request import Request

REQUESTS, TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"


class Door:
    """Who is in, running or waiting, and whether one more may come; limits in requests, tokens."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self.requests = requests
        self.tokens = tokens
        self.present: dict[Request, None] = {}
        self.refusals = {REQUESTS: 0, TOKENS: 0}

    def refuses(self, now: float, count: int = 1) -> str:
        """Return the limit that keeps a request out at a time, s, and count it; "": none does.

        One for several answers takes up as many places, and is kept out as a whole.
        """
        why = ""
        if self.requests is not None and len(self.present) + count > self.requests:
            why = REQUESTS
        elif self.tokens is not None and self.queued_tokens(now) >= self.tokens:
            why = TOKENS
        if why:
            self.refusals[why] += 1
        return why

    def queued_tokens(self, now: float) -> int:
        """Count the prompt tokens of requests without a token of their answer."""
        return sum(
            request.prompt_tokens
            for request in self.present
            if not 0.0 <= request.first_token <= now
        )

    def enter(self, request: Request) -> None:
        """Let a request in."""
        self.present[request] = None

    def leave(self, request: Request) -> None:
        """Let a request go, if it is in."""
        self.present.pop(request, None)
