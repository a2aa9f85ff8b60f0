"""One lease, one request."""

from kvplane.worker.once import UsedLeases


def test_a_lease_is_taken_once_for_longer_than_it_can_live() -> None:
    used = UsedLeases(longest_read=100)
    assert used.take(("a", 1), 0)
    assert used.take(("b", 1), 50)
    assert not used.take(("a", 1), 699)
    # By then nobody can have it any more, and it is forgotten.
    assert used.take(("a", 1), 700)
    assert not used.take(("b", 1), 701)
