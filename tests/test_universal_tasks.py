"""Generators: every label, mask and form, against checkers in plain Python."""

import jax
import numpy as np
import pytest

import universal as ut
from universal.tasks import ASK, CLOSE, OPEN, PAD


def balanced(text: str) -> bool:
    """By taking out pairs until none is left."""
    while "()" in text:
        text = text.replace("()", "")
    return text == ""


def find(letters, i, k):
    """find_k of the definition, with places from 1 on, by recursion."""
    if k == 0 or i == 0:
        return i
    i = find(letters, i, k - 1)
    return max([0, *(j for j in range(2, i + 1) if letters[j - 2] == letters[i - 1])]) if i else 0


@pytest.mark.parametrize("pairs", [4, 30])
def test_dyck1_is_what_a_checker_says(pairs):
    count = 3000
    ids, labels, mask = map(np.asarray, ut.dyck1(jax.random.key(3), count, pairs=pairs))
    assert ids.shape == labels.shape == mask.shape == (count, 2 * pairs + 3)
    assert (ids.dtype, labels.dtype, mask.dtype) == (np.int32, np.int32, bool)
    lengths, true = [], []
    for row, label, asked in zip(ids, labels, mask):
        (place,) = np.flatnonzero(row == ASK)
        assert np.array_equal(np.flatnonzero(asked), [place])
        assert (row[place + 1 :] == PAD).all()
        assert np.isin(row[:place], (OPEN, CLOSE)).all()
        assert 1 <= place <= 2 * pairs
        text = "".join("?()"[symbol] for symbol in row[:place])
        assert label[place] == balanced(text)
        assert not label[~asked].any()
        lengths.append(place)
        true.append(balanced(text))
    # Odd lengths are of the uniform third alone, and uniform.
    odd = np.asarray(lengths) % 2 == 1
    assert abs(odd.mean() - 1 / 6) < 5 * (5 / 36 / count) ** 0.5
    half = np.bincount(np.asarray(lengths)[odd], minlength=2 * pairs)[1::2] / odd.sum()
    assert np.abs(half - 1 / pairs).max() < 5 * (1 / pairs / odd.sum()) ** 0.5
    assert set(lengths) == set(range(1, 2 * pairs + 1))
    # A third stays balanced; some of the others are so by chance.
    assert 1 / 3 - 0.04 < np.mean(true) < 0.56
    assert len({row.tobytes() for row in ids}) > count / (2 if pairs == 30 else 30)


def test_dyck1_reaches_every_balanced_string_and_mutates():
    ids, labels, _ = map(np.asarray, ut.dyck1(jax.random.key(0), 3000, pairs=4))
    texts = ["".join(" ()"[s] for s in row if s in (OPEN, CLOSE)) for row in ids]
    true = labels.any(axis=1)
    seen = {text for text, one in zip(texts, true) if one}
    catalan = {1: 1, 2: 2, 3: 5, 4: 14}
    for pairs, number in catalan.items():
        assert len([text for text in seen if len(text) == 2 * pairs]) == number
    # Swaps keep as many "(" as ")", and are not balanced any more.
    swapped = [t for t, one in zip(texts, true) if not one and t.count("(") == t.count(")")]
    assert len(swapped) > 200
    # Every third mutated sequence is flipped only, by one flip in two of them.
    off = [t.count("(") - t.count(")") for t, one in zip(texts, true) if not one]
    assert {-2, 2} <= set(off)


@pytest.mark.parametrize("options", [{}, dict(length=17, alphabet=3, hops=(2, 5))])
def test_k_hop_is_what_a_checker_says(options):
    count = 1000
    length, alphabet = options.get("length", 100), options.get("alphabet", 4)
    least, most = options.get("hops", (0, 16))
    ids, labels, mask = map(np.asarray, ut.k_hop(jax.random.key(5), count, **options))
    assert ids.shape == labels.shape == mask.shape == (count, length + 1)
    assert (ids.dtype, labels.dtype, mask.dtype) == (np.int32, np.int32, bool)
    ks = ids[:, 0] - alphabet
    assert set(ks) == set(range(least, most + 1))
    letters = ids[:, 1:]
    assert set(np.unique(letters)) == set(range(alphabet))
    assert (letters[:, 1:] != letters[:, :-1]).all()
    shares = np.bincount(letters[:, 0], minlength=alphabet) / count
    assert np.abs(shares - 1 / alphabet).max() < 5 * (1 / alphabet / count) ** 0.5
    # What follows a letter is uniform over the others.
    steps = np.bincount(((letters[:, 1:] - letters[:, :-1]) % alphabet).ravel())[1:]
    assert np.abs(steps / steps.sum() - 1 / (alphabet - 1)).max() < 5 * steps.sum() ** -0.5
    assert (labels[:, 0] == alphabet).all()
    # All places of short strings, and 2000 of long ones.
    random, places = np.random.default_rng(0), range(1, length + 1)
    for row, k, label, asked in zip(letters, ks, labels, mask):
        for i in places if length < 20 else random.integers(1, length + 1, 2):
            at = find(row, i, k)
            assert label[i] == (row[at - 1] if at else alphabet)
            assert asked[i] == (at > 0)
    assert not mask[:, 0].any()
    assert mask[ks == 0, 1:].all()


def test_the_example_of_the_definition():
    text = "baebcabebdea"
    letters = ["abcde".index(c) for c in text]
    assert [text[find(letters, 12, k) - 1] for k in (1, 2)] == ["b", "c"]


def test_generators_are_pure_functions_of_the_key():
    for draw, count in ((ut.dyck1_task(4).draw, 3000), (ut.k_hop_task(17, 3, (2, 5)).draw, 1000)):
        first, again, other = (draw(jax.random.key(seed), count) for seed in (1, 1, 2))
        assert all(np.array_equal(a, b) for a, b in zip(first, again))
        assert not np.array_equal(first.ids, other.ids)
    assert ut.dyck1_task(4) is ut.dyck1_task(4)  # so that nothing compiles twice
    assert ut.k_hop_task(9, 2, (0, 3)) is ut.k_hop_task(9, 2, (0, 3))
    assert ut.k_hop_task(np.int64(9), 2, (0, np.int64(3))) is ut.k_hop_task(
        9, hops=(0, 3), alphabet=2
    )
    many = ut.k_hop_task(9, 30, (0, 3)).symbols  # more than there are letters
    assert len(set(many)) == 34
    assert all(name.isalnum() for name in many)


def test_summaries_count():
    task = ut.dyck1_task(4)
    ids, labels, mask = map(np.asarray, task.draw(jax.random.key(3), 3000))
    found = ut.summary(task, jax.random.key(3), 3000)
    yes = labels[mask].mean()
    np.testing.assert_allclose(found.classes, [1 - yes, yes])
    np.testing.assert_allclose(found.lengths @ np.arange(task.tokens + 1), (ids > 0).sum(1).mean())
    assert found.asked[1] == found.asked.sum() == 1
    hop = ut.summary(ut.k_hop_task(17, 3, (2, 5)), jax.random.key(5), 1000)
    assert hop.lengths[18] == 1
    assert hop.classes.shape == (3,)
    np.testing.assert_allclose([hop.classes.sum(), hop.asked.sum()], 1)
    assert 0 < hop.asked @ np.arange(19) < 17


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda key: ut.dyck1(key, 0), "batch must be a positive integer, got 0"),
        (lambda key: ut.dyck1(key, 2, pairs=0), "pairs must be a positive integer, got 0"),
        (lambda key: ut.k_hop(key, 2, alphabet=1), "alphabet must be at least 2"),
        (lambda key: ut.k_hop(key, 2, length=0), "length must be a positive integer"),
        (lambda key: ut.k_hop(key, 2, hops=(3, 1)), r"hops must be two numbers.*got \(3, 1\)"),
        (lambda key: ut.k_hop_task(hops=(-1, 1)), "hops must be two numbers"),
        (lambda key: ut.dyck1_task(-1), "pairs must be a positive integer, got -1"),
        # Named when the task is made, not when a run first draws from it.
        (lambda key: ut.k_hop_task(0), "length must be a positive integer, got 0"),
        (lambda key: ut.k_hop_task(5, 1), "alphabet must be at least 2"),
        (lambda key: ut.k_hop_task(5, 0.5), "alphabet must be a positive integer, got 0.5"),
        (lambda key: ut.k_hop_task(5, 3, [0, 1]), r"hops must be two numbers.*got \[0, 1\]"),
        (lambda key: ut.k_hop_task(5, 3, (0, True)), "hops must be two numbers"),
        (lambda key: ut.k_hop_task(hops=(0, 10**9)), "hops must be at most 1048576"),
        (lambda key: ut.k_hop(key, 2, alphabet=2**31), "alphabet must be at most 1048576"),
        (lambda key: ut.summary(ut.dyck1_task(2), key, 0), "batch must be a positive integer"),
    ],
)
def test_wrong_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(jax.random.key(0))
