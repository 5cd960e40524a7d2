"""The table of rules: one precedence, and a rule for every kind of edit."""

from captrain.capabilities.rules import ALL, CAUSES, FEATURES, RULES


def test_rules_stand_in_the_order_of_their_ranks_and_name_known_causes() -> None:
    ranks = [rule.rank for rule in RULES]
    assert ranks == sorted({*ranks})
    assert {rule.cause for rule in RULES} | {*FEATURES.values()} <= {*CAUSES}


def test_a_rule_asks_an_edit_or_the_whole_rollout_and_some_rule_names_each_edit() -> None:
    for rule in RULES:
        assert (rule.sign is None) == (rule.log_sign is not None) == (not rule.steps)
    assert {step for rule in RULES for step in rule.steps} == {*ALL}


def test_causes_without_a_rule_are_told_by_occasions_or_by_the_engine() -> None:
    without = {*CAUSES} - {rule.cause for rule in RULES}
    assert without == {"suspect_reference", "infrastructure", "missing_confirmation", "reply_wording"}
