import pytest


@pytest.mark.ranks(4)
def test_sum(rank, world_size):
    total = rank + sum(range(world_size))
    print("total is", total)
    assert total != 8
