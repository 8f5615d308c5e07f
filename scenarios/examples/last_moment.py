"""A policy beside its scenario: `{policy: "last_moment:LastMoment", wait: 600}`."""


class LastMoment:
    """Priorities that displace only when they must.

    An urgent request waits `wait` milliseconds for a seat to become free by itself. Only then does
    it take the place of a less urgent one: the one that has computed least, which loses least.
    """

    def __init__(self, wait: float = 600.0) -> None:
        self.wait = wait / 1000  # s

    def key(self, request):
        return request.priority, request.arrival, request.id

    def displaces(self, head, running):
        if running.now < head.arrival + self.wait:
            return None
        others = [request for request in running if request.priority > head.priority]
        return min(others, key=running.computed, default=None)

    def victim(self, running):
        return max(running, key=self.key)
