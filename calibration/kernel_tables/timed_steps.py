"""Steps whose attention was timed, and what else is known of them."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel


@dataclass(frozen=True)
class TimedSteps:
    """Steps of `chunks` prompts' parts, each of `size` tokens after `history`, and of decodes.

    One entry of each column per step; seconds are those of all layers, without the engine's
    overhead.
    """

    chunks: Floats
    size: Floats
    history: Floats
    decodes: Floats
    context: Floats  # cached tokens that all decodes read, S
    attention: Floats  # s
    rest: Floats  # s, matrix products, small kernels and head; 0 until they are added

    @classmethod
    def of_decodes(cls, count: Floats, context: Floats, attention: Floats) -> "TimedSteps":
        """Make steps of decodes alone."""
        nothing = np.zeros(len(count))
        return cls(nothing, nothing, nothing, count, context, attention, nothing)

    @classmethod
    def of_prompts(cls, count: Floats, size: Floats, attention: Floats) -> "TimedSteps":
        """Make steps of whole prompts alone."""
        nothing = np.zeros(len(count))
        return cls(count, size, nothing, nothing, nothing, attention, nothing)

    @classmethod
    def concatenated(cls, *parts: "TimedSteps") -> "TimedSteps":
        """Put steps into one set."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def seconds(self) -> Floats:
        """The whole step."""
        return self.rest + self.attention

    @property
    def tokens(self) -> Floats:
        """T, of chunks and decodes."""
        return self.chunks * self.size + self.decodes

    @property
    def sequences(self) -> Floats:
        """n, of chunks and decodes."""
        return self.chunks + self.decodes

    @property
    def pairs(self) -> Floats:
        """P, the (query, key) pairs of the chunks."""
        return self.chunks * (self.size * self.history + self.size * (self.size + 1) / 2)

    @property
    def longest(self) -> Floats:
        """K, the keys of the longest sequence; of decodes the mean is known."""
        mean = self.context / np.maximum(self.decodes, 1)
        return np.maximum((self.chunks > 0) * (self.size + self.history), mean)

    @property
    def mixed(self) -> npt.NDArray[np.bool_]:
        """Whether there are both prompts and decodes."""
        return np.asarray((self.chunks > 0) & (self.decodes > 0))

    def select(self, rows: npt.NDArray[np.bool_]) -> "TimedSteps":
        """Give some of the steps."""
        return TimedSteps(*(getattr(self, field.name)[rows] for field in fields(self)))

    def steps(self) -> list[Step]:
        """Give the steps as an executor receives them."""
        columns = (self.chunks, self.size, self.history, self.decodes, self.context)
        return [
            Step([_chunk(int(size), int(history))] * int(chunks), int(decodes), int(context))
            for chunks, size, history, decodes, context in zip(*columns, strict=True)
        ]

    def predict(self, cost: CostModel) -> Floats:
        """Give the seconds that a cost model predicts."""
        return np.array([cost.execute(step) for step in self.steps()])


def _chunk(size: int, history: int) -> Chunk:
    return Chunk(Request(0, 0.0, size + history, 1), history, size)
