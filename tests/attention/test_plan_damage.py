"""Plans that were made, copied or edited by force: each is refused by name, and no kernel follows it."""

import copy
import dataclasses
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from damage_cases import capacity, forest_case
from plan_damage import ARRAYS, edited, edits, mixed_up, with_arrays

from octavo.attention import (
    ForestPlan,
)
from octavo.errors import InvalidArgumentError


@pytest.mark.parametrize("change", [{}, {"max_kv_len": 0}, {"num_partials": 99}])
def test_a_plan_is_made_by_its_constructors_alone(change):
    plan = forest_case().forest()
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    with pytest.raises(InvalidArgumentError, match=r"expected a ForestPlan made by ForestPlan\.flat"):
        replace(plan, **change)
    with pytest.raises(InvalidArgumentError, match=r"got one made by hand"):
        ForestPlan(**{**fields, **change})
    del fields["packed"]
    with pytest.raises(InvalidArgumentError, match=r"got one made by hand"):
        ForestPlan(**fields)


def test_a_plan_cannot_be_written_to():
    plan = forest_case().forest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_kv_len = 0
    for name in (*ARRAYS, "packed"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 99
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            getattr(plan, name).setflags(write=True)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_of_a_plan_outlives_it(copied):
    """Addresses that a plan remembers would point into the first one's memory."""
    case = forest_case()
    plan = case.forest()
    expected = case.run("c", plan)[0]
    plan = copied(plan)
    assert torch.equal(case.run("c", plan)[0], expected)


def is_refused(case, plan):
    """True if the kernel says that the plan is damaged; False if it followed it."""
    try:
        case.run("c", plan)
    except InvalidArgumentError as error:
        return "the plan is damaged" in str(error)
    return False


def test_a_plan_edited_by_force_is_refused_by_the_kernel():
    """Each wrong entry of each array, in a plan without partial results and in one with them."""
    case = forest_case()
    flat = ForestPlan.flat(case.metadata.seq_lens.numpy(), case.metadata.cu_seqlens_q.numpy())
    for plan in (flat, case.forest()):
        wrong = edits(plan, capacity(case))
        assert len(wrong) > 30
        assert [edit for edit in wrong if not is_refused(case, edited(plan, *edit))] == []


def test_a_plan_that_leaves_out_or_repeats_is_refused_by_the_kernel():
    """What no pair writes would be whatever memory held; what two write depends on who comes last."""
    case = forest_case()
    plans = mixed_up(case.forest())
    assert [number for number, plan in enumerate(plans) if not is_refused(case, plan)] == []


def test_a_damaged_plan_is_said_by_array_index_and_value():
    case = forest_case()
    plan = edited(case.forest(), "item_table_row", 2, 77)
    with pytest.raises(InvalidArgumentError) as error:
        case.run("c", plan)
    assert str(error.value) == (
        "the plan is damaged: item_table_row[2] is 77, expected a row of the block table; make plans by "
        "ForestPlan.flat or ForestPlan.from_block_tables, and do not change them"
    )


@pytest.mark.parametrize("impl", ["torch", "c"])
def test_a_segment_past_the_sequence_meets_no_block(impl):
    """Within the table, but past the sequence's blocks, where a table holds -1 or anything."""
    case = forest_case()
    plan = case.forest()
    plan = with_arrays(plan, item_kv_end=np.full_like(plan.item_kv_end, capacity(case)))
    with pytest.raises(InvalidArgumentError, match="names a block outside"):
        case.run(impl, plan)
