"""A case is written, read and labelled one way."""

import pytest
from cases import parse_case


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("w1:16", "w1 c=16"),
        ("w3:1@2", "w3 c=1"),
        ("w4:2.5", "w4 2.5/s"),
        ("w1:1+busy@1", "w1 c=1 busy"),
    ],
)
def test_a_case_is_labelled_by_its_load_and_its_condition(written: str, label: str) -> None:
    assert parse_case(written).label == label


def test_a_disturbed_case_names_the_same_load_undisturbed() -> None:
    case = parse_case("w1:16+busy")
    assert case.is_disturbed
    assert case.calm_label == parse_case("w1:16").label


def test_a_case_is_due_in_as_many_rounds_as_it_says() -> None:
    assert [parse_case("w4:3@2").is_due(number) for number in range(4)] == [True, True, False, False]
    assert parse_case("w1:1").is_due(99)


@pytest.mark.parametrize("written", ["w9:1", "w1:0", "w1:1.5", "w1", "w1:1+idle", "w1:1@0", "w1:1 ", "w4:0"])
def test_anything_else_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"^|"):
        parse_case(written)
