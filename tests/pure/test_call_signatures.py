"""What the ranks compare of a call besides its arrays: the text in programs, names of operations, and differences."""

import itertools

import pytest

from multiring._frontend.requests.declining import endings_of
from multiring._frontend.requests.text import (
    GROUP,
    JAX,
    CallSignature,
    call_text,
    known_ending,
    name_of_call,
    numbered,
    parsed_name,
    wire_and_signature,
)
from multiring._frontend.variable_names import comparable_names
from multiring._runtime.named.signature_text import STRUCTURE, first_difference, structure_text


@pytest.mark.parametrize("wire", [None, "bf16"])
@pytest.mark.parametrize("paths", [(), ("['a b'], float32", "['|\udc80'], int8", "\n, uint8")])
@pytest.mark.parametrize("needs_equal_rows", [False, True])
def test_a_signature_comes_back_from_the_text(
    wire: str | None,
    paths: tuple[str, ...],
    needs_equal_rows: bool,  # noqa: FBT001
) -> None:
    made = CallSignature(paths, needs_equal_rows=needs_equal_rows)
    words = call_text(0, 1, 0, "a name", wire=wire, signature=made).split(" ", 7)
    assert words[7] == "a name"
    assert wire_and_signature(words[6]) == (wire, made)


def test_a_wire_type_alone_has_no_signature() -> None:
    assert wire_and_signature("bf16") == ("bf16", CallSignature())
    assert wire_and_signature("") == (None, CallSignature())
    assert wire_and_signature("a reason | with | bars") == ("a reason | with | bars", CallSignature())


def test_first_operations_have_one_name() -> None:
    for name in ("", "a", "a_1of2", "jax b ", "a\nb"):
        sent = name_of_call(JAX, name) or JAX
        assert parsed_name(sent) == (JAX, name, "")
        assert parsed_name(f"{sent}_1of2_3of4") == (JAX, name, "_1of2_3of4")
    assert parsed_name(f"{name_of_call(GROUP, 'x')}_2of2") == (GROUP, "x", "_2of2")
    assert parsed_name("jaxy") is parsed_name("x_1of2") is None
    assert known_ending("_1of2_1of3") == known_ending("") == ""
    assert known_ending("_1of2_2of3") == "_1of2_2of3"


def test_operations_of_one_call_have_different_names() -> None:
    types = ("float32", "int8", "bool")
    for count in range(1, 5):
        for chosen in itertools.product(types, repeat=count):
            paths = [f"[{place}], {dtype}" for place, dtype in enumerate(chosen)]
            for operation, wanted in (("allgather", count), ("allreduce", len(set(chosen)))):
                found = endings_of(operation, paths)
                assert found[0] == ""
                assert len(set(found)) == len(found) == wanted
                first = endings_of(operation, paths, is_in_turn=True)
                assert first == endings_of(operation, paths)[: len(first)]
                assert len(first) == (chosen.count(chosen[0]) if operation == "allgather" else 1)
                without_name = endings_of(operation, paths, is_in_turn=True, is_named=False)
                assert without_name == [known_ending(numbered(k, len(first))) for k in range(1, len(first) + 1)]
    assert endings_of("allgather", ()) == [""]
    assert numbered(1, 1) == ""


def test_numbers_of_layers_are_no_difference() -> None:
    first = ("sequential/dense/kernel", "sequential/dense_1/kernel", "adam/sequential_dense_1_kernel_momentum")
    later = (
        "sequential_3/dense_4/kernel",
        "sequential_3/dense_7/kernel",
        "adam_2/sequential_3_dense_7_kernel_momentum",
    )
    assert comparable_names(first) == comparable_names(later)
    for other in (("sequential/dense/kernel", "sequential/dense/kernel"), ("a/conv2d", "b/conv2d")):
        assert comparable_names(other) != comparable_names(first[:2])
    assert comparable_names(("conv_2d/w1", "conv_2d/w2"))[0] != comparable_names(("conv_2d/w1", "conv_2d/w2"))[1]


def test_the_first_difference_is_that_of_the_structure() -> None:
    def told(*paths: str, shape: str = "(2,)") -> tuple[tuple[str, str], ...]:
        return ("operation", "allreduce"), ("shape", shape), (STRUCTURE, structure_text(paths))

    term, said = first_difference({0: told("a", "b"), 1: told("a", "c", shape="(3,)"), 2: told("a")})
    assert (term, said) == (
        STRUCTURE,
        {0: "array 2 of 2 is b", 1: "array 2 of 2 is c", 2: "there is only 1 array"},
    )
    assert first_difference({0: told("a"), 1: told("a", shape="(3,)")}) == ("shape", {0: "(2,)", 1: "(3,)"})
    assert first_difference({0: told("a"), 1: told("a")[:2]}) == (
        STRUCTURE,
        {0: "array 1 of 1 is a", 1: "an array without keys"},
    )
