"""What a server's /metrics say, summed over its engines."""

import re
from collections import defaultdict
from math import nan

from simulator.workload.scrapes import LABEL, SAMPLE


class Scrape:
    """The values of vLLM's metrics, by name, each with its labels; ValueError where one is none."""

    def __init__(self, text: str) -> None:
        self.values: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for name, labels, value, _ in re.findall(rf"(?m)^{SAMPLE.pattern}", text):
            self.values[name].append((dict(LABEL.findall(labels)), float(value)))

    def total(self, name: str) -> float:
        """Return the sum of a metric of vLLM's; NaN where there is none."""
        found = self.values.get(f"vllm:{name}")
        return sum(value for _, value in found) if found else nan
