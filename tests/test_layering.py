"""Policies for stacks of blocks as values and as text, and how they divide a stack."""

import dataclasses
import pickle

import pytest

from remat_kit import POLICIES, Policy, Region, every, first, get_policy, parse_policies, save, segments, union
from remat_kit._errors import PolicyError
from remat_kit._layering import Layering, Method, balanced, runs, square_root
from remat_kit._lower import lower

# ---- values and text


@pytest.mark.parametrize(
    ("text", "policy", "name"),
    [
        ("segments(auto)", segments(), "segments(auto)"),
        ("segments(4)", segments(4), "segments(4)"),
        (" segments( 4 , none ) ", segments(4), "segments(4)"),
        ("segments(sqrt,full)", segments("sqrt", "full"), "segments(sqrt,full)"),
        ("segments(recursive)", segments("recursive"), "segments(recursive)"),
        ("segments(4,save(b,a))", segments(4, save("a", "b")), "segments(4,save(a,b))"),
        ("segments(4,dots_saveable|save(a,b))", segments(4, POLICIES["dots_saveable"] | save("a", "b")),
         "segments(4,dots_saveable|save(a,b))"),
        ("segments(2,segments(3,full))", segments(2, segments(3, "full")), "segments(2,segments(3,full))"),
        ("first(6)", first(6), "first(6)"),
        ("first(6,full)", first(6), "first(6)"),
        ("first(6,selective_attention)", first(6, "selective_attention"), "first(6,selective_attention)"),
        ("first(6,segments(2))", first(6, segments(2)), "first(6,segments(2))"),
        ("every(2)", every(2), "every(2)"),
        ("every(2,dots_saveable)", every(2, "dots_saveable"), "every(2,dots_saveable)"),
    ],
)  # fmt: skip
def test_a_policy_for_stacks_as_text_and_back(text, policy, name):
    assert get_policy(text) == policy
    assert str(policy) == policy.name == name
    assert get_policy(name) == policy
    assert hash(get_policy(text)) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.region is Region.STACK


def test_different_policies_differ():
    policies = [segments(), segments(1), segments("sqrt"), segments(1, "full"), every(1), first(1), first(1, save("a"))]
    assert len(set(policies)) == len({str(policy) for policy in policies}) == len(policies)
    assert len({policy.summary for policy in policies}) == len(policies)


def test_what_is_inside():
    assert segments(2, segments(3, save("a"))).of_block == save("a")
    assert segments(2, segments(3, save("a"))).tensor_names == ("a",)
    assert every(2).of_block is POLICIES["none"]
    assert first(2).of_block is POLICIES["full"]
    assert save("a").of_block == save("a")


def test_commas_inside_parentheses_belong_to_the_policy():
    text = "none,segments(4,save(a,b)),first(2,segments(2,save(c))),every(2,save(a)|offload(b)),full"
    assert parse_policies(text) == (
        POLICIES["none"],
        segments(4, save("a", "b")),
        first(2, segments(2, save("c"))),
        every(2, get_policy("save(a)|offload(b)")),
        POLICIES["full"],
    )
    assert parse_policies("segments(4),segments(4,none)") == (segments(4),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("segments(0)", r"segments\(\.\.\.\) takes first a number of segments of at least 1, or one of auto, sqrt, "
                        r"recursive, got 0\. Write e\.g\. segments\(4\)"),
        ("segments(-2)", "got -2"),
        ("segments(--2)", "got '--2'"),
        ("segments(2.5)", "got '2.5'"),
        ("segments(full)", "got 'full'"),
        ("segments(autp)", r"got 'autp'\. Did you mean 'auto'\?"),
        ("segments()", r"takes a count and at most one policy inside, got none\. Write e\.g\. segments\(4\)"),
        ("segments(4,full,none)", "at most one policy inside, got 3: 4, full, none"),
        ("segments(4,fool)", r"there is no policy 'fool'\. Did you mean 'full'\?"),
        ("first(auto)", r"first\(\.\.\.\) takes first a number of blocks of at least 1, got 'auto'"),
        ("first(0)", "got 0"),
        ("first(3,none)", r"first\(3,none\) checkpoints nothing\. Write 'none'"),
        ("every(sqrt)", r"every\(\.\.\.\) takes first a number of blocks"),
        ("segment(4)", r"no policy 'segment\(4\)'\. Did you mean 'segments'\?.*segments\(auto\), first\(COUNT\)"),
        ("segments(4", "there is no policy"),
        ("segments(4))", "there is no policy"),
        ("segments(4)(5)", "there is no policy"),
        ("segments", r"there is no policy 'segments'"),
    ],
)  # fmt: skip
def test_bad_text(text, message):
    with pytest.raises(PolicyError, match=message):
        get_policy(text)


@pytest.mark.parametrize("make", [segments, first, every])
@pytest.mark.parametrize("count", [0, -1, True, 2.0, None, "4", "", [2]])
def test_bad_counts(make, count):
    with pytest.raises(PolicyError, match=rf"{make.__name__}\(\.\.\.\) takes first a number of .*, got "):
        make(count)


def test_a_policy_for_stacks_has_no_union():
    with pytest.raises(PolicyError, match=r"'segments\(4\)' is for a stack of blocks.*inside, e\.g\. segments\(4,dots"):
        _ = segments(4) | save("a")
    with pytest.raises(PolicyError, match=r"'first\(2\)' is for a stack of blocks"):
        union(save("a"), first(2))


def test_it_is_made_by_its_function():
    with pytest.raises(
        PolicyError, match=r"has region stack, layering None .*Make one for stacks with segments, first"
    ):
        Policy("mine", "what I use", region=Region.STACK)
    with pytest.raises(PolicyError, match=r"has region block, layering segments\(2\)"):
        dataclasses.replace(segments(2), region=Region.BLOCK)


def test_it_is_not_lowered():
    with pytest.raises(AssertionError):
        lower(segments(2))


# ---- division

COUNTS = range(1, 40)


def sizes(method, count, blocks, cost=None):
    return Layering(method, count).sizes(blocks, cost)


def test_segments_are_as_many_as_asked_and_differ_by_one():
    for blocks in COUNTS:
        for count in range(1, blocks + 1):
            found = sizes(Method.SEGMENTS, count, blocks)
            assert len(found) == count
            assert sum(found) == blocks
            assert max(found) - min(found) <= 1
            assert found == tuple(sorted(found, reverse=True))
    assert balanced(12, 5) == (3, 3, 2, 2, 2)


def test_groups_are_full_but_for_the_last():
    assert sizes(Method.EVERY, 5, 12) == (5, 5, 2)
    assert sizes(Method.EVERY, 4, 12) == (4, 4, 4)
    assert sizes(Method.EVERY, 12, 12) == (12,)


def test_the_first_and_the_rest():
    assert sizes(Method.FIRST, 5, 12) == (5, 7)
    assert sizes(Method.FIRST, 12, 12) == (12,)


def test_about_the_square_root():
    # 12 = 4·3 and 8 = 4·2 divide evenly; the primes 5 and 7 do not.
    assert [square_root(blocks) for blocks in (1, 2, 4, 5, 7, 8, 12, 16, 32, 64, 128, 256)] == [
        1, 2, 2, 3, 3, 4, 4, 4, 8, 8, 16, 16,
    ]  # fmt: skip
    for blocks in COUNTS:
        assert blocks**0.5 <= square_root(blocks) <= max(2 * blocks, (blocks**0.5 + 1) ** 2) ** 0.5


def test_auto_takes_the_least_cost_and_the_fewest_segments():
    # A carry of 1 byte, and 4 that a block keeps inside: k + 4·16/k is least at k = 8.
    assert len(sizes(Method.SEGMENTS, "auto", 16, lambda division: len(division) + 4 * max(division))) == 8
    assert sizes(Method.SEGMENTS, "auto", 16, lambda division: 0) == (16,)
    assert sizes(Method.SEGMENTS, "auto", 12) == sizes(Method.SEGMENTS, "sqrt", 12) == (3, 3, 3, 3)


def test_recursive_comes_down_to_single_blocks():
    for blocks in COUNTS:
        depth, largest = 0, blocks
        while largest > 1:
            largest, depth = max(sizes(Method.SEGMENTS, "recursive", largest)), depth + 1
        assert depth <= blocks.bit_length()
    assert sizes(Method.SEGMENTS, "recursive", 1) == (1,)
    assert sizes(Method.SEGMENTS, "recursive", 9) == (3, 3, 3)


def test_neighbours_of_one_size():
    assert list(runs((3, 3, 2, 2, 2))) == [(2, 3), (3, 2)]
    assert list(runs((4,))) == [(1, 4)]
