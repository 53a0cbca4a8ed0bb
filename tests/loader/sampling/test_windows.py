from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import UsageError
from pitools.loader.sampling.windows import Windows, WindowSpan

spans = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(st.integers(-2, 4), st.integers(-2, 6))
    .map(lambda pair: WindowSpan(*pair))
    .filter(lambda s: s.length > 0),
    min_size=1,
)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    spans=spans,
    stride=st.integers(1, 4),
    pad=st.booleans(),
    data=st.data(),
)
def test_the_samples_are_those_of_a_plain_loop(lengths, spans, stride, pad, data):
    """Any episodes, spans and strides: the anchors that a loop over all steps would choose, in its order."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    episodes = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(0, len(lengths)))]
    windows = Windows(offsets, np.array(episodes, np.int64), spans, stride=stride, pad=pad)
    expected = []
    for episode in episodes:
        start, stop = int(offsets[episode]), int(offsets[episode + 1])
        first = 0 if pad else max(0, *(span.before for span in spans.values()), 0)
        for anchor in range(start + first, stop, stride):
            inside = all(start <= anchor - s.before and anchor + s.after <= stop for s in spans.values())
            if pad or inside:
                expected.append((episode, start, stop, anchor))
    assert len(windows) == len(expected)
    actual = windows.locate(np.arange(len(windows)))
    assert list(zip(*(field.tolist() for field in actual), strict=True)) == expected


def test_what_is_no_window():
    """No array, no steps, no stride, and a sample that is not there."""
    offsets = np.array([0, 5])
    with pytest.raises(UsageError, match="spans: empty"):
        Windows(offsets, np.array([0]), {})
    with pytest.raises(UsageError, match=r"span: .*\[-1, -1\)"):
        Windows(offsets, np.array([0]), {"a": WindowSpan(1, -1)})
    with pytest.raises(UsageError, match=r"stride: .* 0"):
        Windows(offsets, np.array([0]), {"a": WindowSpan(0, 1)}, stride=0)
    with pytest.raises(IndexError, match="of 5"):
        Windows(offsets, np.array([0]), {"a": WindowSpan(0, 1)}).locate(np.array([5]))


def test_what_decides_which_sample_is_which_is_its_identity():
    """Other episodes, spans, stride or padding are another identity; the order of the spans' names is not."""
    offsets = np.array([0, 5, 9, 20])
    spans = {"a": WindowSpan(0, 2), "b": WindowSpan(1, 1)}
    created = [
        Windows(offsets, np.array([0, 1]), spans),
        Windows(offsets, np.array([1, 0]), spans),
        Windows(offsets, np.array([0, 1]), spans, stride=2),
        Windows(offsets, np.array([0, 1]), spans, pad=True),
        Windows(offsets, np.array([0, 1]), {"a": WindowSpan(0, 3), "b": WindowSpan(1, 1)}),
    ]
    assert len({windows.identity for windows in created}) == len(created)
    assert Windows(offsets, np.array([0, 1]), dict(reversed(spans.items()))).identity == created[0].identity
