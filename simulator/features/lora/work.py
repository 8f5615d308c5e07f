"""What adapters (LoRA) have to do with a step."""

from collections.abc import Mapping
from dataclasses import dataclass

from simulator.core.request import Step

KEY = "enable_lora"


@dataclass(slots=True)
class AdapterWork:
    """What adapters (LoRA) have to do with a step."""

    active: int = 0  # adapters of those who compute
    tokens: int = 0  # computed under an adapter
    read: int = 0  # adapters read into host memory before it
    copied: int = 0  # adapters copied to the GPU before it
    refused: int = 0  # waiting requests passed over for `max_loras`

    def amounts(self, seconds: float, own: float) -> Mapping[str, float]:
        """Return what is loaded, in how many s, and the requests x s of those passed over."""
        if not (self.copied or self.refused):
            return {}
        return {
            "adapters_read": self.read,
            "adapters_copied": self.copied,
            "adapter_loading_time": own,
            "adapter_waiting_time": self.refused * seconds,
        }


def work_of(step: Step) -> AdapterWork | None:
    """Return what adapters have to do with a step; None: the engine serves none."""
    return None if step.work is None else step.work.get(KEY)  # type: ignore[return-value]
