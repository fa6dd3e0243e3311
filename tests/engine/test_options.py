"""The table of sampling options: what each asks for, and which path it takes."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from test_sampler import request

from octavo.engine.sampling.option_table import COLUMNS, FILTERS, OPTIONS, Path
from octavo.sampling_params import SamplingParams

# Nothing that a sampler looks at: how many completions, and when text and requests end.
NO_OPTIONS = {"n", "seed", "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"}
NO_OPTIONS |= {"skip_special_tokens", "detokenize", "temperature"}


def test_every_sampling_parameter_is_in_the_table() -> None:
    """Or is known to need nothing of the sampler: a new one must be put in one of the two."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert (
        fields
        == {option.name for option in OPTIONS} - {"temperatures", "seeds", "first_positions"} | NO_OPTIONS
    )


def test_columns_stand_in_the_kernels_order_and_hold_their_neutral_values() -> None:
    assert [option.path for option in COLUMNS] == [Path.DRAW] * 3 + [Path.FILTER] * len(FILTERS)
    for option in OPTIONS:
        assert (option.dtype is np.void) == (option not in COLUMNS)
        if option in COLUMNS:
            assert np.array(option.neutral, option.dtype) == option.neutral


def test_a_plain_request_asks_for_nothing() -> None:
    plain = request()
    assert not plain.adjustments
    assert not plain.asks_for_filters
    assert all(option.read(plain) == option.neutral for option in OPTIONS if option.path is not Path.DRAW)


@pytest.mark.parametrize("asked", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_leave_logits_alone(asked: dict[str, float]) -> None:
    assert request(**asked).asks_for_filters
    assert not request(**asked).adjustments
    assert not request(**asked, temperature=0).asks_for_filters, "greedy rows have nothing to filter"


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
    ],
)
def test_what_changes_logits_says_so(asked: dict[str, object]) -> None:
    assert request(**asked).adjustments == tuple(asked)


def test_an_empty_bias_changes_nothing() -> None:
    assert not request(logit_bias={}).adjustments


def test_the_table_needs_no_torch() -> None:
    code = "import octavo.engine.sampling.option_table, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
