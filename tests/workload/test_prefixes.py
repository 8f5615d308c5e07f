"""What prompts share, counted by hand."""

from simulator.workload.prefixes import shared_prefix_tokens
from tests.support.workloads import of_prompts


def test_shared_prefixes_are_counted_from_the_front():
    """Only what follows an equal beginning counts; a run counts as far as it was seen before."""
    a, b, c = ("a", 100), ("b", 50), ("c", 30)
    assert shared_prefix_tokens(of_prompts([(a, b), (a, c), (c, b)])) == 100
    assert shared_prefix_tokens(of_prompts([(a, b), (a, b), (b, a)])) == 150
    assert shared_prefix_tokens(of_prompts([(a, b), (("a", 40), b)])) == 40
    assert shared_prefix_tokens(of_prompts([(("a", 40), b), (a, b), (a, b)])) == 40 + 150
    assert shared_prefix_tokens(of_prompts([(a, b), None, (a,)], [150, 7, 100])) == 100
    assert shared_prefix_tokens(of_prompts([None, None], [5, 5])) is None
