"""The prefix tree: its invariants by name."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.prefix_tree import PrefixTree

PAGE = 4
A, B, C = list(range(100, 112)), list(range(50, 62)), list(range(200, 212))


def make_tree(pages: int = 100, *, checkpoints: bool = False, disk_pages: int = 0) -> PrefixTree:
    """A page takes 4 bytes, a checkpoint 2."""
    return PrefixTree(
        page_tokens=PAGE,
        token_bytes=1,
        budget_bytes=pages * PAGE,
        checkpoints=checkpoints,
        checkpoint_bytes=2,
        disk_budget_bytes=disk_pages * PAGE,
    )


def insert(tree: PrefixTree, tokens: list[int], *, checkpoints: tuple[int, ...] = (), namespace: str = "") -> list[int]:
    """Store whole pages and the tail; ids of the new ones."""
    ends = sorted({*range(PAGE, len(tokens) + 1, PAGE), len(tokens)})
    return [page for _, page in tree.insert(tokens, ends, checkpoints, namespace)]


def found(tree: PrefixTree, tokens: list[int], limit: int, row: int = 1, namespace: str = "") -> tuple[list[int], int]:
    match = tree.match(row, tokens, limit, namespace)
    return list(match.pages), match.tokens


def write(tree: PrefixTree, *ids: int) -> None:
    for page_id in ids:
        page = tree.page(page_id)
        assert page is not None
        tree.written(page, PAGE, state=page.ram_state)


def test_match_is_token_exact() -> None:
    tree = make_tree()
    ids = insert(tree, A)
    cases = [
        ([*A, 1], 12, (ids, 12)),
        (A, 11, (ids, 11)),
        ([*A[:9], 7, 7, 7], 11, (ids, 9)),
        (A[:8], 7, (ids[:2], 7)),
        (A[:5], 4, (ids[:1], 4)),
        ([*A[:3], 9, *A[4:]], 11, (ids[:1], 3)),
        ([9, *A], 11, ([], 0)),
        ([5], 0, ([], 0)),
        ([], 0, ([], 0)),
    ]
    for row, (prompt, limit, expected) in enumerate(cases):
        assert found(tree, prompt, limit, row) == expected
    tree.check_integrity()


def test_match_takes_the_longest_slice_among_siblings() -> None:
    tree = make_tree()
    for tail in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [256, 0, 0, 0]):
        insert(tree, [1, 2, 3, 4, *tail])
    assert tree.match(1, [1, 2, 3, 4, 5, 6, 9, 1, 2], 8).tokens == 7
    # Equal first bytes but another token: 256 and 0 share three of their four bytes.
    assert tree.match(2, [1, 2, 3, 4, 0, 0, 0, 0], 7).tokens == 4


def test_a_tail_is_found_and_gives_way_to_what_continues_it() -> None:
    tree = make_tree()
    first, tail = insert(tree, A[:6])
    assert found(tree, A[:6], 6) == ([first, tail], 6)
    tree.unlease(1)
    (longer,) = insert(tree, A[:7])
    assert tree.page(tail) is None
    assert tree.dropped == [tail]
    assert insert(tree, A[:5]) == [], "it begins what is held"
    (page, *_) = insert(tree, A[:8])
    assert tree.page(longer) is None
    assert found(tree, [*A[:8], 1], 8) == ([first, page], 8)
    tree.check_integrity()


def test_a_match_with_checkpoints_ends_at_one() -> None:
    tree = make_tree(checkpoints=True)
    first, second, third = insert(tree, A, checkpoints=(8,))
    assert found(tree, [*A, 1], 12) == ([first, second], 8)
    assert tree.match(1, [*A, 1], 12).branch == 12, "pages are known further than a checkpoint"
    assert found(tree, A[:8], 7) == ([], 0), "a checkpoint cannot be cut"
    assert tree.insert(A, (12,), (12,)) == ((12, third),), "the page gets its checkpoint and keeps its id"
    assert found(tree, [*A, 1], 12) == ([first, second, third], 12)
    assert insert(tree, A, checkpoints=(8, 12)) == []
    tree.unlease(1)
    tree.check_integrity()


def test_a_checkpoint_inside_a_page_is_a_tail() -> None:
    tree = make_tree(checkpoints=True)
    first, tail = insert(tree, A[:6], checkpoints=(6,))
    insert(tree, A, checkpoints=(12,))
    assert found(tree, [*A[:6], 9, 9, 9], 8) == ([first, tail], 6)
    assert tree.match(2, A[:7], 6).tokens == 6
    assert tree.match(2, A[:6], 5).tokens == 0
    tree.check_integrity()


def test_leased_pages_stay() -> None:
    tree = make_tree(4)
    first, second = insert(tree, A[:8])
    tree.match(1, A, 7)
    assert (tree.leased_bytes, tree.evictable_bytes) == (8, 0)
    assert tree.evict(1000) == 0
    assert len(insert(tree, C)) == 2, "the rest finds no room"
    tree.unlease(1)
    tree.unlease(1)
    assert tree.evict(1000) == 16
    assert set(tree.dropped) > {first, second}
    tree.check_integrity()


def test_a_pin_keeps_pages_for_a_block() -> None:
    tree = make_tree()
    ids = insert(tree, A)
    page = tree.page(ids[2])
    assert page is not None
    with tree.pin(page.path()):
        assert tree.evict(1000) == 0
    assert tree.evict(1000) == 12
    tree.check_integrity()


def test_a_second_match_of_a_row_replaces_its_lease() -> None:
    tree = make_tree()
    insert(tree, A[:8])
    insert(tree, B[:8])
    tree.match(1, A, 7)
    tree.match(1, B[:4], 3)
    assert tree.leased_bytes == 4
    tree.check_integrity()


def test_eviction_takes_leaves_first() -> None:
    tree = make_tree()
    old = insert(tree, A)
    new = insert(tree, B[:8])
    tree.evict(1)
    assert tree.dropped == [old[2]]
    tree.match(1, A, 8)
    tree.unlease(1)
    tree.evict(8)
    assert tree.dropped[1:] == [new[1], new[0]], "the other prefix was used more recently"
    tree.check_integrity()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_budget_is_never_exceeded(checkpoints: bool) -> None:
    tree = make_tree(3, checkpoints=checkpoints)
    for start in range(0, 200, 7):
        insert(tree, list(range(start, start + 11)), checkpoints=(8,))
        tree.check_integrity()
        assert 0 < tree.ram_bytes <= 12


def test_nothing_is_stored_behind_a_gap() -> None:
    tree = make_tree()
    assert tree.insert(A, (8, 12)) == ()
    assert tree.page(1) is None
    tree.check_integrity()


def test_tiers_are_closed() -> None:
    tree = make_tree(disk_pages=10)
    first, second, third = insert(tree, A)
    write(tree, first, second)
    tree.evict(8)
    assert tree.dropped == [third, second]
    assert tree.page(third) is None, "it was nowhere else"
    match = tree.match(1, A, 11)
    assert (match.pages, match.tokens) == ((first, second), 8)
    assert [page.page_id for page in tree.cold(1)] == [second]
    assert tree.match(2, A, 11, ram_only=True).tokens == 4
    assert insert(tree, A) == [second, third + 1], "computed again, the page on disk gets a copy in RAM"
    tree.check_integrity()


def test_a_page_comes_back_only_behind_its_parent() -> None:
    tree = make_tree(disk_pages=10)
    first, second, _ = insert(tree, A)
    write(tree, first, second)
    tree.evict(1000)
    low, high = tree.page(first), tree.page(second)
    assert low is not None
    assert high is not None
    assert not tree.restored(high)
    assert tree.restored(low)
    assert tree.restored(high)
    assert tree.ram_ids() == {first, second}
    tree.check_integrity()


def test_the_disk_gives_up_leaves_first_and_never_what_is_leased() -> None:
    tree = make_tree(disk_pages=2)
    first, second, third = insert(tree, A)
    write(tree, first, second)
    tree.evict(1000)
    low, high = tree.page(first), tree.page(second)
    assert low is not None
    assert high is not None
    tree.match(1, A, 11)
    assert not tree.make_disk_room(4)
    tree.unlease(1)
    assert tree.make_disk_room(4)
    assert tree.deleted == [high.chain]
    assert (tree.page(second), tree.page(third)) == (None, None)
    assert tree.make_disk_room(8)
    assert tree.deleted == [high.chain, low.chain]
    tree.check_integrity()


def test_records_of_an_earlier_life_come_back_parents_first() -> None:
    tree = make_tree(disk_pages=10)
    ids = insert(tree, A, namespace="x")
    write(tree, *ids)
    records = [page.record(PAGE) for page in tree.all_pages()]
    records.sort(key=lambda record: record.used, reverse=True)
    again = make_tree(disk_pages=10)
    assert not again.adopt(records[1]), "its parent is missing"
    assert all(again.adopt(record) for record in records)
    assert not again.adopt(records[0]), "it is there"
    match = again.match(1, A, 11, "x")
    assert (match.tokens, len(again.cold(1))) == (11, 3)
    assert again.match(2, A, 11).tokens == 0
    again.check_integrity()


def test_namespaces_share_nothing() -> None:
    tree = make_tree()
    ids = insert(tree, A, namespace="one")
    assert found(tree, A, 11, namespace="two") == ([], 0)
    others = insert(tree, A, namespace="two")
    assert not set(ids) & set(others)
    one, two = tree.page(ids[0]), tree.page(others[0])
    assert one is not None
    assert two is not None
    assert one.chain != two.chain
    tree.check_integrity()


def test_forgetting_a_page_ends_leases_and_takes_what_is_behind_it() -> None:
    tree = make_tree(disk_pages=10)
    ids = insert(tree, A)
    write(tree, *ids)
    tree.match(1, A, 11)
    assert tree.forget((ids[1],)) == 2
    assert set(tree.dropped) == set(ids[1:])
    assert len(tree.deleted) == 2
    assert tree.forget((ids[1],)) == 0
    tree.check_integrity()
    tree.unlease(1)
    tree.check_integrity()
