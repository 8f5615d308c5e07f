"""A fit of coefficients that are above 0."""

from collections.abc import Callable, Iterable

import numpy as np

from calibration.errors import Floats

LOSS_SCALE = 0.05  # relative error beyond which a sample counts less in a robust fit


def fit_positive(
    predict: Callable[[Floats], Floats],
    measured: Floats,
    start: Iterable[float],
    tolerance: float = 1e-8,
) -> Floats:
    """Fit positive coefficients to relative errors: log(predicted / measured), soft l1 loss.

    `tolerance` is that of the coefficients' logarithms (scipy's `xtol`).
    """
    from scipy.optimize import least_squares

    result = least_squares(
        lambda logs: np.log(predict(np.exp(logs)) / measured),
        np.log([*start]),
        loss="soft_l1",
        f_scale=LOSS_SCALE,
        xtol=tolerance,
    )
    return np.asarray(np.exp(result.x))
