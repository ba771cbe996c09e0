"""The rules of variables, without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.values import Mirrored, PerReplica
from pipedist.worker.variables.access import VariableCopy, plain, update_copies
from pipedist.worker.variables.rules import (
    Traits,
    VariableAggregation,
    VariableSynchronization,
    assign_copies,
    declare,
    first_value,
    operand_of,
    read_copies,
    require_aggregation,
    updated,
)


def traits(initial: Any = 0.0, replicas: int = 2, **options: Any) -> Traits:
    value = first_value(initial, options.pop("dtype", None), "v")
    given = {"trainable": None, "synchronization": "auto", "aggregation": None, "one_place": False, **options}
    return declare(value, name="v", replicas=replicas, **given)


class TestDeclaration:
    def test_defaults(self) -> None:
        made = traits([1.0, 2.0])
        assert (made.synchronization, made.aggregation) == (
            VariableSynchronization.ON_WRITE,
            VariableAggregation.NONE,
        )
        assert (made.trainable, made.copies, made.shape, made.dtype) == (True, False, (2,), np.float64)

    def test_an_on_read_variable_has_copies_and_is_not_trainable_unless_told(self) -> None:
        made = traits(synchronization="ON_READ", aggregation="Sum")
        assert (made.copies, made.trainable, made.aggregation) == (True, False, VariableAggregation.SUM)
        assert not traits(synchronization="on_read", one_place=True).copies
        assert traits(synchronization="on_read", trainable=True).trainable

    @pytest.mark.parametrize(
        ("initial", "options", "text"),
        [
            (0.0, {"synchronization": "none"}, "share it"),
            (0.0, {"synchronization": "sometimes"}, "one of auto, none, on_write, on_read"),
            (0.0, {"synchronization": None}, "one of auto, none, on_write, on_read, got None"),
            (0.0, {"aggregation": "max"}, "one of none, sum, mean, only_first_replica"),
            (0.0, {"aggregation": 1}, "one of none"),
            (0, {"aggregation": "mean"}, "mean of int64 values"),
            (True, {"aggregation": "mean"}, "mean of bool values"),
            (None, {}, "needs an initial value"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, initial: Any, options: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            traits(initial, **options)

    @pytest.mark.parametrize("initial", ["text", [b"x"], [None], PerReplica([1, 2])])
    def test_only_numbers_and_bools(self, initial: Any) -> None:
        with pytest.raises(TypeError, match="variable 'v'"):
            traits(initial)

    def test_the_first_value_is_the_variables_own(self) -> None:
        given = np.arange(3)
        value = first_value(lambda: given, np.float32, "v")
        given[:] = 9
        assert value.tolist() == [0, 1, 2]
        assert value.dtype == np.float32
        assert not value.flags.writeable

    def test_traits_travel(self) -> None:
        made = traits([1, 2], aggregation="sum", synchronization="on_read")
        assert Traits.from_wire(made.to_wire(), np.zeros(2, np.int64)) == made


class TestAssignment:
    @pytest.mark.parametrize(
        ("initial", "value"),
        [
            ([0.0, 0.0], 1.0),
            ([0.0], [[1.0]]),
            (np.zeros(2, np.float32), np.zeros(2)),
            (np.zeros(2, np.float32), np.float64(1)),
            (0, 1.5),
            (0, np.int32(1)),
            (0, True),
            (0.0, "1"),
            (0.0, None),
            (0.0, PerReplica([1.0, 2.0])),
        ],
    )
    def test_shape_and_dtype_must_fit(self, initial: Any, value: Any) -> None:
        with pytest.raises(ValueError, match="assign of"):
            operand_of(traits(initial), value, "assign")

    @pytest.mark.parametrize(("initial", "value"), [(0.0, 1), (np.float32(0), 0.1), (0j, 1.5), (True, False)])
    def test_python_numbers_adapt(self, initial: Any, value: Any) -> None:
        made = traits(initial)
        found = operand_of(made, value, "assign")
        assert (found.dtype, found.shape) == (made.dtype, made.shape)
        assert found == np.asarray(value, made.dtype)

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int8, np.int64])
    def test_python_integers_adapt_where_they_fit(self, dtype: Any) -> None:
        made, bounds = traits(0, dtype=dtype), np.iinfo(dtype)
        for value in (0, 1, int(bounds.min), int(bounds.max)):
            found = operand_of(made, value, "assign")
            assert (found.dtype, int(found)) == (bounds.dtype, value)
        for value in (int(bounds.min) - 1, int(bounds.max) + 1, 2**70):
            with pytest.raises(OverflowError, match=f"assign of {value} .* does not fit {bounds.dtype}"):
                operand_of(made, value, "assign")
        assert operand_of(traits([0, 0], dtype=dtype), [1, 2], "assign").tolist() == [1, 2]

    def test_what_is_assigned_is_the_variables_own(self) -> None:
        value = np.zeros(2)
        found = operand_of(traits([1.0, 1.0]), value, "assign")
        value[:] = 9
        assert found.tolist() == [0, 0]
        assert not found.flags.writeable

    @given(
        dtype=st.sampled_from([np.int8, np.uint8, np.int16, np.uint16]),
        how=st.sampled_from(["assign_add", "assign_sub"]),
        data=st.data(),
    )
    def test_integers_are_exact_or_refused(self, dtype: Any, how: Any, data: st.DataObject) -> None:
        bounds = np.iinfo(dtype)
        number = st.integers(int(bounds.min), int(bounds.max))
        a, b = data.draw(number), data.draw(number)
        made = traits(a, dtype=dtype)
        exact = a + b if how == "assign_add" else a - b
        old, delta = np.array(a, dtype), np.array(b, dtype)
        if bounds.min <= exact <= bounds.max:
            assert int(updated(made, old, how, delta)) == exact
        else:
            with pytest.raises(OverflowError, match="does not fit"):
                updated(made, old, how, delta)

    def test_bools_are_not_added(self) -> None:
        with pytest.raises(TypeError, match="only be assigned"):
            updated(traits(True), np.array(True), "assign_add", np.array(True))

    def test_several_replicas_need_an_aggregation(self) -> None:
        with pytest.raises(ValueError, match="aggregation='sum'"):
            require_aggregation(traits(), "assign")
        require_aggregation(traits(replicas=1), "assign")
        require_aggregation(traits(aggregation="sum"), "assign")


class TestCopies:
    def test_reading_aggregates(self) -> None:
        copies = [np.array(3.0), np.array(5.0)]
        for aggregation, value in (("sum", 8), ("mean", 4), ("only_first_replica", 3)):
            made = traits(synchronization="on_read", aggregation=aggregation)
            assert read_copies(made, copies) == value
        with pytest.raises(ValueError, match="without aggregation"):
            read_copies(traits(synchronization="on_read"), copies)

    @given(value=st.integers(-(2**63), 2**63 - 1), replicas=st.integers(1, 7))
    def test_an_assigned_integer_sum_reads_as_assigned(self, value: int, replicas: int) -> None:
        made = traits(0, replicas, synchronization="on_read", aggregation="sum")
        copies = assign_copies(made, [np.array(0)] * replicas, value, "assign")
        assert len(copies) == replicas
        assert sum(int(copy) for copy in copies) == value == int(read_copies(made, copies))
        assert len({int(copy) for copy in copies[1:]}) <= 1

    def test_floats_are_divided(self) -> None:
        made = traits(np.float32(0), 4, synchronization="on_read", aggregation="sum")
        copies = assign_copies(made, [np.float32(0)] * 4, 7.0, "assign")
        assert [float(copy) for copy in copies] == [1.75] * 4
        assert copies[0].dtype == np.float32

    def test_adding_to_a_sum_belongs_into_a_replica(self) -> None:
        made = traits(synchronization="on_read", aggregation="sum")
        with pytest.raises(ValueError, match="applies to a single copy"):
            assign_copies(made, [np.array(0.0)] * 2, 1.0, "assign_add")

    def test_without_a_sum_every_copy_is_changed(self) -> None:
        made = traits(synchronization="on_read", aggregation="mean")
        assert assign_copies(made, [np.array(1.0), np.array(2.0)], 3.0, "assign_add") == [4, 5]
        with pytest.raises(TypeError, match="give one value"):
            assign_copies(made, [np.array(1.0)] * 2, PerReplica([1.0, 2.0]), "assign")


class TestUpdate:
    def test_one_value_is_updated_once(self) -> None:
        seen = []

        def add(copy: VariableCopy, x: Any) -> Any:
            seen.append(copy)
            copy.assign_add(x)
            return {"new": copy, "x": x}

        copies, results = update_copies(traits(1.0, 3), [np.array(1.0)], add, (Mirrored([2.0] * 3),), {})
        assert [float(copy) for copy in copies] == [3]
        assert len(seen) == 1
        assert list(results["new"]) == [3, 3, 3]
        assert type(results["x"]) is Mirrored

    def test_one_value_would_become_several(self) -> None:
        with pytest.raises(ValueError, match="would become different ones"):
            update_copies(traits(1.0), [np.array(1.0)], VariableCopy.assign, (PerReplica([1.0, 2.0]),), {})

    @pytest.mark.parametrize(
        ("one", "other"),
        [(1, 1.0), (1.0, np.float32(1)), (0.0, -0.0), ([1.0], (1.0,)), (np.ones(2), np.ones(1)), ("a", "b")],
    )
    def test_only_the_same_bits_are_one_value(self, one: Any, other: Any) -> None:
        def update(*components: Any) -> None:
            update_copies(traits(1.0), [np.array(1.0)], lambda copy, _: None, (PerReplica(components),), {})

        update(one, one)
        with pytest.raises(ValueError, match="components differ"):
            update(one, other)

    @pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
    @pytest.mark.parametrize("given", [PerReplica([1.0] * 3), Mirrored([1.0] * 3)])
    def test_another_number_of_components_is_refused(self, synchronization: str, given: PerReplica) -> None:
        made = traits(1.0, synchronization=synchronization)
        with pytest.raises(ValueError, match="of 3 components, but there are 2 replicas"):
            update_copies(made, [np.array(1.0)] * 2, VariableCopy.assign, (given,), {})

    def test_arguments_that_are_no_tuple_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"expected a tuple: args=\(value,\)"):
            update_copies(traits(1.0), [np.array(1.0)], VariableCopy.assign, np.ones(1), {})  # type: ignore[arg-type]

    def test_copies_are_updated_each(self) -> None:
        made = traits(1.0, synchronization="on_read")
        before = [np.array(1.0), np.array(2.0)]
        copies, results = update_copies(made, before, VariableCopy.assign_sub, (PerReplica([1.0, 5.0]),), {})
        assert [float(copy) for copy in copies] == [float(result) for result in results] == [0, -3]


def test_numpy_takes_a_variable_for_its_value() -> None:
    held = VariableCopy(traits(np.ones((2, 2), np.float32)), np.ones((2, 2), np.float32))
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    for found in (x @ held, held @ x, np.dot(x, held), held * 2, 2 - held, -held, held[0], np.sum(held, 0)):
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
    assert (held == 1).all()
    assert len(held) == 2
    assert float(VariableCopy(traits(2.5), np.array(2.5))) == 2.5
    assert np.asarray(held) is held.value()
    assert np.asarray(held, np.float64).dtype == np.float64
    x += held
    assert x.tolist() == [[1, 2], [3, 4]]
    np.add.at(x, [0, 1], held)
    assert x.tolist() == [[2, 3], [4, 5]]
    with pytest.raises(TypeError, match="in place"):
        np.add(x, 1, out=held)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="in place"):
        np.add.at(held, [0], 1)  # type: ignore[arg-type]
    assert (held.value() == 1).all()
    assert [row.tolist() for row in held] == [[1, 1]] * 2
    with pytest.raises(TypeError, match="0-d"):
        list(VariableCopy(traits(2.5), np.array(2.5)))


def test_plain_replaces_what_holds_a_value() -> None:
    held = VariableCopy(traits(2.5), np.array(2.5))
    assert plain(held) is held.value()
    assert plain({"a": [held, 1]}) == {"a": [2.5, 1]}
    given = {"a": 1}
    assert plain(given) is given
    assert plain(None) is None
