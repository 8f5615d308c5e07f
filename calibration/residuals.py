"""What a fit leaves unexplained, as profiles carry it: see simulator/costs/noise.py."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def residuals(logs: Floats, prompts: npt.NDArray[np.bool_], sizes: Floats) -> dict[str, float]:
    """Give the standard deviation of log(measured / predicted) of held-out steps, by regime.

    `logs` has the logarithms, `prompts` says which steps compute prompts, `sizes` (n x 2) has each
    step's tokens and what its attention reads. Only what is systematic counts: the root mean square
    of the medians of regions, an octave of tokens by an octave of what is read. Jitter of single
    steps evens out in a run; a region's error does not.
    """
    octaves = np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    found = {}
    for name, chosen in (("decode", ~prompts), ("prompts", prompts)):
        if not chosen.any():
            continue
        regions, where = np.unique(octaves[chosen], axis=0, return_inverse=True)
        mine = logs[chosen]
        medians = [float(np.median(mine[where == k])) for k in range(len(regions))]
        found[name] = min(1.0, float(np.sqrt(np.mean(np.square(medians)))))
    return found
