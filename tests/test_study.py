"""A study over sequences: what it holds, and that a run that ends early is continued."""

import importlib
import json

import jax
import numpy as np
import pytest
from configs import tiny_model
from filelock import FileLock

import svflow as sv

module = importlib.import_module("svflow.spectra.study")  # the name is the function too
SEQUENCES = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "whole.npz"
    return path, sv.spectra.study(model, SEQUENCES, path)


def test_it_holds_the_measures_of_each_sequence(model, whole):
    _, study = whole
    layers = []
    for number, ids in enumerate(SEQUENCES):
        J = sv.layer_jacobians(model.flow, sv.simulate(model.flow, model.embed(ids)).xs)
        layers.append(np.asarray(J))
        found, product = sv.measures(J), sv.cumulative(J)
        for name, values in study.ginibre.items():
            np.testing.assert_array_equal(study.samples[name][number], getattr(found, name))
            np.testing.assert_array_equal(values[number], found.ginibre[name])
        np.testing.assert_array_equal(
            study.samples["cumulative_effective_rank"][number], product.effective_rank
        )
        normal = sv.cumulative(sv.schur_normal(J)).participation_ratio
        np.testing.assert_array_equal(
            study.samples["cumulative_participation_ratio_of_schur_normal"][number], normal
        )
    means = sv.cumulative(np.mean(layers, axis=0))
    for name in ("effective_rank", "participation_ratio"):
        np.testing.assert_allclose(
            study.product_of_means[f"cumulative_{name}"], getattr(means, name), rtol=1e-12
        )
    values = study.samples["condition_number"]
    np.testing.assert_allclose(study.mean["condition_number"], values.mean(0))
    np.testing.assert_allclose(study.quantiles["condition_number"][2], np.median(values, 0))
    assert values.shape == (3, model.flow.depth)
    assert study.settings["scope"] == "frozen"


def test_a_killed_run_is_continued_and_computes_nothing_twice(model, whole, tmp_path, monkeypatch):
    path = tmp_path / "some" / "study.npz"
    computed = []

    def measure(model, ids, settings, real=module.measured):
        if len(computed) == 2 and "killed" not in computed:
            computed.append("killed")
            raise KeyboardInterrupt
        computed.append(ids.tolist())
        return real(model, ids, settings)

    monkeypatch.setattr(module, "measured", measure)
    with pytest.raises(KeyboardInterrupt):
        sv.spectra.study(model, SEQUENCES, path)
    assert len(sv.spectra.load_study(path).samples["spectral_radius"]) == 2
    shown = []
    found = sv.spectra.study(
        model, SEQUENCES, path, progress=lambda items: shown.extend(items) or shown
    )
    assert computed == [*SEQUENCES[:2], "killed", SEQUENCES[2]]
    assert shown == [2]
    for name, values in whole[1].samples.items():
        np.testing.assert_array_equal(found.samples[name], values)
    for name, values in whole[1].product_of_means.items():
        np.testing.assert_array_equal(found.product_of_means[name], values)
    sv.spectra.study(model, SEQUENCES, path)  # all done: no more
    assert len(computed) == 4
    assert [file.name for file in path.parent.iterdir()] == ["study.npz"]


def test_another_model_setting_or_text_is_refused(model, whole):
    path, _ = whole
    with pytest.raises(ValueError, match="made with another model"):
        sv.spectra.study(tiny_model("gpt2", "float64", 1), SEQUENCES, path)
    with pytest.raises(ValueError, match="made with scope = 'frozen', not 'isolated'"):
        sv.spectra.study(model, SEQUENCES, path, scope="isolated")
    for other in (SEQUENCES[:2], [*SEQUENCES[:2], [1, 2]]):
        with pytest.raises(ValueError, match="made from other sequences, or more"):
            sv.spectra.study(model, other, path)


def test_bad_input_is_named_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measured", None)
    path = tmp_path / "study.npz"
    for sequences, message in (
        ([], "at least one sequence"),
        ([[1, 2], [1, 99]], "sequence 1: id 99 is outside the vocabulary"),
        ([[1, 2], [0.5]], "sequence 1 is not a sequence of token ids"),
        ([[1, 2], []], "sequence 1 is not a sequence of token ids"),
        ([[1, 2], list(range(20)) * 2], "sequence 1: 40 tokens, but gpt2 has 32"),
    ):
        with pytest.raises(ValueError, match=message):
            sv.spectra.study(model, sequences, path)
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens, and no token 1"):
        sv.spectra.study(model, [[1, 2], [1]], path, token=1)
    with pytest.raises(ValueError, match="scope must be one of"):
        sv.spectra.study(model, SEQUENCES, path, scope="full")
    for wrong, message in (
        (dict(top=99), r"top must be one of 1 \.\. 16"),
        (dict(token=1.5), "token must be an int, got 1.5"),
        (dict(tau=np.nan), "tau must be finite"),
        (dict(model=model.flow), "a study needs a Transformer"),
        (dict(out=tmp_path), "is a folder, not a file"),
    ):
        given = dict(model=model, sequences=SEQUENCES, out=path) | wrong
        with pytest.raises(ValueError, match=message):
            sv.spectra.study(**given)
    with FileLock(tmp_path / ".study.npz.lock"), pytest.raises(ValueError, match="another run"):
        sv.spectra.study(model, SEQUENCES, path)
    assert not path.exists()
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(ValueError, match="holds no study"):
        sv.spectra.load_study(tmp_path / "array.npy")
    head = json.dumps(dict(settings={}, sequences=["a", "b"], carried=[]))
    np.savez(tmp_path / "few.npz", study=np.asarray(head), rows=np.ones((1, 3)))
    with pytest.raises(ValueError, match="holds no study: its rows are not as many as its seq"):
        sv.spectra.load_study(tmp_path / "few.npz")
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="holds no study"):
        sv.spectra.study(model, SEQUENCES, path)
    assert path.read_bytes() == b"something else"
    with pytest.raises(FileNotFoundError):
        sv.spectra.load_study(tmp_path / "none.npz")


def test_what_is_not_finite_names_sequence_and_layer(model, tmp_path):
    broken = jax.tree.map(lambda leaf: leaf, model)
    weight = broken.flow.layers.feed_forward.down.kernel
    weight[...] = weight[...].at[1, 0, 0].set(np.nan)
    with pytest.raises(ValueError, match="sequence 0: the state before layer 2 is not finite"):
        sv.spectra.study(broken, SEQUENCES, tmp_path / "study.npz")
