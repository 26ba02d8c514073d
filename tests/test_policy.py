"""Policies as values, as text, and as the `jax.checkpoint` policies that they are lowered to."""

import dataclasses
import itertools
import pickle
import re

import jax
import pytest

from remat_kit import (
    POLICIES,
    Policy,
    Region,
    RematKitError,
    Rule,
    get_policy,
    names,
    offload,
    save,
    save_kernels,
    union,
)
from remat_kit._errors import PolicyError
from remat_kit._lower import lower
from remat_kit._policy import parse_policies

BUILT_IN = jax.checkpoint_policies
WRAPPING = [policy for policy in POLICIES.values() if policy.region is not Region.NOTHING]

# ---- values


def test_policies_with_one_content_are_one_value():
    one, same = save("context", "out_proj"), save("out_proj", "context", "out_proj")
    assert one == same
    assert hash(one) == hash(same)
    assert repr(one) == repr(same)
    assert str(one) == str(same) == "save(context,out_proj)"
    assert one.saves == ("context", "out_proj")
    assert len({one, same}) == 1


def test_policies_with_different_content_differ():
    policies = [*POLICIES.values(), save("a"), offload("a"), save_kernels("a"), save("b"), save("a") | offload("b")]
    for one, other in itertools.combinations(policies, 2):
        assert one != other
        assert str(one) != str(other)
        assert repr(one) != repr(other)


def test_the_repr_shows_the_content():
    text = repr(save("context") | offload("out_proj") | POLICIES["dots_saveable"])
    for part in ("context", "out_proj", "save dots", "saves", "offloads"):
        assert part in text


def test_a_policy_is_frozen_and_can_be_sent_to_another_process():
    policy = save("a") | offload("b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.saves = ()  # pyright: ignore[reportAttributeAccessIssue]
    sent = pickle.loads(pickle.dumps(policy))
    assert sent == policy
    assert lower(sent) is lower(policy)


def test_the_table():
    assert all(name == policy.name for name, policy in POLICIES.items())
    summaries = [policy.summary for policy in POLICIES.values()]
    assert len(set(summaries)) == len(summaries)
    assert all(0 < len(summary) <= 80 and "\n" not in summary for summary in summaries)
    assert {
        "none", "full", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable",
        "selective_attention", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj",
    } <= set(POLICIES)  # fmt: skip
    assert any(policy.offloads for policy in WRAPPING)


def test_the_table_uses_the_vocabulary_only():
    vocabulary = {entry.name for entry in names.VOCABULARY}
    for policy in POLICIES.values():
        assert set(policy.tensor_names) <= vocabulary, policy.name


def test_presets_hold_the_names_that_maxtext_lists():
    # As in MaxText's decoder: get_remat_policy and minimal_policy, without the quantization variants.
    qkv = ["query_proj", "value_proj", "key_proj", "kv_proj"]
    projections = [*qkv, "qkv_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"]
    saved = {
        "minimal": projections,
        "minimal_with_context": [*projections, "context"],
        "save_dot_with_context_except_mlp": [*qkv, "qkv_proj", "context", "out_proj"],
        "save_dot_except_mlpwi": [*qkv, "qkv_proj", "out_proj", "mlpwo"],
        "save_dot_except_mlp": [*qkv, "qkv_proj", "out_proj"],
        "save_qkv_proj": [*qkv, "qkv_proj"],
        "save_out_proj": ["out_proj"],
    }
    offloaded = {"qkv_proj_offloaded": qkv, "minimal_offloaded": projections}
    for name, expected in saved.items():
        assert POLICIES[name] == dataclasses.replace(POLICIES[name], saves=tuple(expected), offloads=())
        assert POLICIES[name].rule is Rule.RECOMPUTE
    for name, expected in offloaded.items():
        assert POLICIES[name] == dataclasses.replace(POLICIES[name], saves=(), offloads=tuple(expected))
        assert POLICIES[name].rule is Rule.RECOMPUTE


def test_selective_attention_saves_what_is_around_the_core_and_nothing_of_it():
    saves = set(POLICIES["selective_attention"].saves)
    assert {"query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "mlpwi"} <= saves
    assert not saves & {"attention_scores", "attention_probabilities", "context"}


@pytest.mark.parametrize("function", [save, offload, save_kernels])
@pytest.mark.parametrize("given", [(), ("",), ("a b",), ("a,b",), (3,), (None,), (["a"],), ("a|b",), ("a(",)])
def test_tensor_names_are_checked(function, given):
    with pytest.raises(PolicyError, match=rf"{function.__name__}\(\.\.\.\) takes one or more tensor names.*, got "):
        function(*given)


@pytest.mark.parametrize("field", ["saves", "offloads", "kernels"])
@pytest.mark.parametrize("given", ["context", (3,), ("a", None)])
def test_a_policy_of_ones_own_takes_tuples_of_names(field, given):
    # A plain string is a sequence of letters: none of them is in any model.
    with pytest.raises(PolicyError, match=field):
        Policy("mine", "what I use", **{field: given})


# ---- unions


def test_a_union_holds_what_each_holds():
    policy = save("a") | save("b", "a") | offload("c") | save_kernels("k") | POLICIES["dots_saveable"]
    assert policy.saves == ("a", "b")
    assert policy.offloads == ("c",)
    assert policy.kernels == ("k",)
    assert policy.tensor_names == ("a", "b", "c")
    assert policy.rule is Rule.DOTS


def test_the_order_of_a_union_does_not_matter():
    parts = [save("a"), offload("b"), POLICIES["dots_saveable"], save_kernels("k")]
    unions = [union(*order) for order in itertools.permutations(parts)]
    assert len(set(unions)) == 1
    assert len({lower(policy) for policy in unions}) == 1
    one, two, three, four = parts
    assert ((one | two) | three) | four == one | (two | (three | four))


def test_a_policy_united_with_itself_is_itself():
    for policy in WRAPPING:
        assert policy | policy == policy
        assert union(policy) == policy


def test_full_adds_nothing_to_what_a_union_keeps():
    united = POLICIES["full"] | save("a")
    assert (united.saves, united.rule) == (("a",), Rule.RECOMPUTE)


def test_saving_and_offloading_one_tensor_is_a_conflict():
    message = "both saves and offloads a, b. .*not both: drop it from one of the two"
    with pytest.raises(PolicyError, match=message):
        save("a", "b", "c") | offload("b", "a", "d")
    with pytest.raises(PolicyError, match="both saves and offloads a"):
        Policy("mine", "what I use", saves=("a",), offloads=("a",))


@pytest.mark.parametrize("unite", [lambda a, b: a | b, lambda a, b: b | a, lambda a, b: union(a, b)])
def test_none_has_no_union(unite):
    with pytest.raises(PolicyError, match="policy 'none' wraps nothing, so it has no union"):
        unite(POLICIES["none"], save("a"))


def test_two_rules_have_no_union():
    with pytest.raises(PolicyError, match="two rules for values without a name: 'save dots' and 'save everything'"):
        POLICIES["dots_saveable"] | POLICIES["everything_saveable"]


def test_a_union_of_nothing_is_refused():
    with pytest.raises(PolicyError, match="union"):
        union()


@pytest.mark.parametrize("other", ["full", None, 3])
def test_only_policies_have_a_union(other):
    with pytest.raises((PolicyError, TypeError), match=re.escape(repr(other)) + "|unsupported operand"):
        save("a") | other


# ---- text


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_of_the_table_gives_its_policy(name):
    assert get_policy(name) is POLICIES[name]
    assert get_policy(POLICIES[name]) is POLICIES[name]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("save(a)", save("a")),
        ("save( b , a )", save("a", "b")),
        ("offload(a,b)", offload("a", "b")),
        ("save_kernels(k)", save_kernels("k")),
        ("save(a)|offload(b)", save("a") | offload("b")),
        (" save(a) | dots_saveable ", save("a") | POLICIES["dots_saveable"]),
        ("dots_saveable|save(a)", save("a") | POLICIES["dots_saveable"]),
        ("full|full", POLICIES["full"]),
        (" full ", POLICIES["full"]),
        ("save(decoder.layer-1/x)", save("decoder.layer-1/x")),
    ],
)
def test_a_policy_as_text(text, policy):
    assert get_policy(text) == policy
    assert lower(get_policy(text)) is lower(policy)


@pytest.mark.parametrize("policy", [save("b", "a"), offload("a"), save("a") | offload("b"), *POLICIES.values()])
def test_the_name_of_a_policy_gives_it_back(policy):
    assert get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("ful", "full"), ("Full", "full"), ("selective_atention", "selective_attention"),
     ("dots_savable", "dots_saveable"),
     ("nome", "none"), ("save_out", "save_out_proj")],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(text, nearest):
    with pytest.raises(PolicyError, match=f"there is no policy '{text}'. Did you mean '{nearest}'\\? Policies: none,"):
        get_policy(text)


@pytest.mark.parametrize("text", ["", "full|", "|", "save(a", "save(a))", "save(a)x", "zzzzzz", "keep(a)", "full full"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(PolicyError, match=r"there is no policy .*or save\(NAME,\.\.\.\), offload\(NAME,\.\.\.\)"):
        get_policy(text)


def test_an_empty_call_is_refused():
    with pytest.raises(PolicyError, match=r"save\(\.\.\.\) takes one or more tensor names.*got none"):
        get_policy("save()")


def test_none_the_object_is_neither_none_nor_full():
    with pytest.raises(PolicyError, match=r"None is not a policy: .*Say which you mean: 'full' or 'none'"):
        get_policy(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [0, 1, True, 2.5, ["full"], b"full", Policy, jax.checkpoint_policies.dots_saveable])
def test_other_objects_are_no_policy(given):
    with pytest.raises(PolicyError, match=r"is not a policy\. Give a name \(none, full.*or a remat_kit\.Policy"):
        get_policy(given)


def test_errors_of_policies_are_errors_of_values():
    assert issubclass(PolicyError, RematKitError)
    assert issubclass(PolicyError, ValueError)


def test_a_list_of_policies():
    none, full = POLICIES["none"], POLICIES["full"]
    assert parse_policies("none,full") == (none, full)
    assert parse_policies("full , none,,") == (full, none)
    assert parse_policies(" full ") == (full,)
    assert parse_policies("none,save(a,b),full") == (none, save("a", "b"), full)
    assert parse_policies("save(a,b)|offload(c,d),full") == (save("a", "b") | offload("c", "d"), full)
    assert parse_policies("all") == parse_policies(" all ") == tuple(POLICIES.values())


def test_each_policy_of_a_list_comes_once():
    assert parse_policies("full,none,full") == (POLICIES["full"], POLICIES["none"])
    assert parse_policies("save(a,b),save(b,a)") == (save("a", "b"),)
    assert len(parse_policies("save(a)|dots_saveable,dots_saveable|save(a)")) == 1


@pytest.mark.parametrize("text", ["", "  ", ",", " , ,"])
def test_an_empty_list_is_refused(text):
    with pytest.raises(PolicyError, match=r"no policy in .*comma-separated list or 'all'. Policies: none,"):
        parse_policies(text)


def test_one_bad_policy_spoils_a_list():
    with pytest.raises(PolicyError, match=r"no policy 'fool'. Did you mean 'full'"):
        parse_policies("none,fool")
