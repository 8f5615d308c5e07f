"""Two pieces of advice at once: which are tried together."""

from headway.planning.diagnose import Trial, _pairs
from simulator.diagnosis.finding import turn


def test_a_pair_may_take_fewer_replicas_than_the_advice_alone() -> None:
    more = turn("cluster.replicas", 1, 8).as_dict()
    trials = [
        Trial("", "", one, {})
        for one in (
            more,
            turn("cluster.replicas", 1, 4).as_dict(),
            turn("engine.max_num_seqs", 1, 4).as_dict(),
        )
    ]
    found = [advice for *_, advice in _pairs(trials)]
    assert [(one["to"], one["also"]) for one in found] == [
        (count, {"engine.max_num_seqs": 4}) for count in (8, 4, 2)
    ]
    assert not [*_pairs(trials[:2])]
    assert not [*_pairs([])]
