"""What the encoder of images and clips has to do with a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.core.request import Media, Request, Step

KEY = "multimodal_config"


@dataclass(slots=True)
class EncoderWork:
    """What the encoder of images and clips has to do with a step."""

    encoded: dict[Request, list[int]]  # items, by their numbers, that are encoded before it
    evicted: list[Media]  # outputs that have left the encoder's cache
    users: list[Request]  # who compute in it, and may refer to outputs
    cut: int  # requests that computed less, or waited, for the encoder's sake
    loaded: dict[Request, list[int]] = field(default_factory=dict)
    """Items whose outputs come from elsewhere."""

    def sizes(self) -> list[int]:
        """Return the tokens of each item that is encoded."""
        found = [one.items[number] for one, numbers in self.encoded.items() for number in numbers]
        return [item.end - item.start for item in found]

    def amounts(self, seconds: float, own: float) -> Mapping[str, float]:
        """Return what is encoded, in how many s, and the requests x s of those cut short."""
        sizes = self.sizes()
        if not (sizes or self.cut):
            return {}
        return {
            "encoded_items": len(sizes),
            "encoded_tokens": sum(sizes),
            "encoding_time": own,
            "encoder_waiting_time": self.cut * seconds,
        }


def work_of(step: Step) -> EncoderWork | None:
    """Return what the encoder has to do with a step; None: nothing."""
    return None if step.work is None else step.work.get(KEY)  # type: ignore[return-value]
