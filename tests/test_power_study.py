"""The power-method study of a checkpoint, on tiny models and on a trained ALBERT."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import LinearFlow

import svflow as sv
from svflow import power
from svflow.power.flow import PowerFlow
from svflow.power.matrices import chance

ALBERT = Path(__file__).parent / "data" / "real" / "rxnmapper_albert"
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
EPS = float(jnp.finfo(jnp.float64).eps)


@pytest.fixture(scope="module")
def tiny():
    return power.study(tiny_model("gpt2"), IDS)


def test_a_study_is_its_parts(tiny):
    model, found = tiny_model("gpt2"), tiny
    assert (found.family, found.shared, found.width, found.tokens) == ("gpt2", False, 16, 8)
    F, reduced = power.layer_matrices(model), PowerFlow.from_model(model)
    x = model.embed(IDS)
    for one, other in zip(found.principal, power.principal(F)):
        for part, expected in zip(one, other):
            np.testing.assert_array_equal(part, expected)
    compared = 0
    starts = {"real": (model.flow, x), "reduced": (reduced, reduced.retract(x))}
    for system, (flow, start) in starts.items():
        with jax.default_matmul_precision("highest"):  # the study's own compiled program
            xs = sv.simulate(flow, start).xs
        dynamics = getattr(found, system)
        unit = np.asarray(xs / jnp.linalg.norm(xs, axis=-1, keepdims=True))
        consensus = np.linalg.norm(unit.mean(axis=1), axis=-1)
        np.testing.assert_allclose(dynamics.consensus, consensus, rtol=1e3 * EPS)
        for ordering in ("modulus", "residual"):
            measured = getattr(dynamics, ordering)
            expected = power.alignment(F, xs, ordering=ordering)
            for one, other in zip(measured.alignment, expected):
                np.testing.assert_allclose(one, other, rtol=1e4 * EPS)
            # A layer's states with the directions of the others of its kind.
            real = np.asarray(expected.real)
            for layer in range(3):
                kind = [k for k in range(3) if k != layer and real[k] == real[layer]]
                swapped = [power.alignment(F[jnp.full(3, k)], xs, ordering=ordering).gamma[layer]
                           for k in kind]  # fmt: skip
                mean = np.mean(swapped) if kind else np.nan
                np.testing.assert_allclose(measured.other[layer], mean, rtol=1e4 * EPS)
                compared += len(kind)
            check_span(np.asarray(F), unit, measured, float(ordering == "residual"))
    assert compared


def check_span(F, unit, measured, shift):
    for layer, matrix in enumerate(F):
        values, vectors = np.linalg.eig(matrix)
        order = np.argsort(-abs(shift + values), kind="stable")
        parts = [vectors[:, order[0]], vectors[:, order[1]]]
        if values[order[0]].imag == 0 and values[order[1]].imag:
            parts.append(vectors[:, order[2]])
        basis = np.linalg.qr(np.stack(parts, axis=1))[0]  # over C: the same projection
        size = np.linalg.norm(unit[layer + 1] @ basis.conj(), axis=-1).mean()
        np.testing.assert_allclose(measured.span[layer], size, rtol=1e6 * EPS)
        np.testing.assert_allclose(measured.span_chance[layer], chance(16, len(parts)))


def test_layers_of_one_matrix_are_not_others_to_each_other(monkeypatch):
    # Steered in its last layer: one block used twice, a copy of it, and the changed one.
    steered = power.steer(tiny_model("albert"), np.arange(16.0), 0.1, "basic")
    assert steered.config.blocks == (0, 0, 1, 2)
    # On any states.
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8, 16)))
    module = sys.modules[power.study.__module__]
    monkeypatch.setattr(module, "simulate", lambda *_: SimpleNamespace(xs=xs))
    found, F = power.study(steered, IDS), power.layer_matrices(steered)
    assert not found.shared
    compared = 0
    for ordering in ("modulus", "residual"):
        measured = getattr(found.real, ordering)
        real = np.asarray(measured.alignment.real)
        assert (real[:3] == real[0]).all()
        others = power.alignment(F[jnp.asarray([3, 3, 3, 0])], xs, ordering=ordering).gamma
        expected = others if real[3] == real[0] else np.full(4, np.nan)
        np.testing.assert_allclose(measured.other, expected, rtol=1e5 * EPS)
        compared += real[3] == real[0]
    assert compared


@pytest.fixture(scope="module")
def albert():
    ids = np.load(ALBERT / "reference.npz")["input_ids"][-1]
    return power.study(sv.load(ALBERT), ids)


def test_a_trained_albert_turns_to_the_first_direction_by_residual(albert):
    """Both first eigenvalues are complex; the reduced system follows |1 + lambda|, not |lambda|."""
    assert albert.shared
    assert not np.any(albert.principal.modulus.real)
    assert not np.any(albert.principal.residual.real)
    assert np.isnan(albert.real.modulus.other).all()
    by_residual, by_modulus = (getattr(albert.reduced, name).alignment.gamma[-1]
                               for name in ("residual", "modulus"))  # fmt: skip
    assert by_residual > 0.95
    assert by_modulus < 2 * chance(256, 2)
    assert albert.reduced.consensus[-1] > 0.99
    # With feed-forward layers and positions the tokens do neither.
    assert albert.real.residual.alignment.gamma[-1] < 0.2
    assert albert.real.consensus[-1] < 0.6


def test_table(albert, tiny):
    for study, layers in ((albert, 12), (tiny, 3)):
        lines = power.table(study).split("\n")
        assert max(map(len, lines)) <= 100
        assert study.family in lines[0]
        bars = [
            [place for place, letter in enumerate(line) if letter == "|"]
            for line in lines
            if "|" in line and "|lambda|" not in line and "|1 + lambda|" not in line
        ]
        assert len(bars) == 2 * (layers + 1)
        assert all(one == bars[0] for one in bars)
        rows = [line.replace("|", " ").split() for line in lines if line[:5].strip().isdigit()]
        assert [int(row[0]) for row in rows] == [*range(1, layers + 1)] * 2
        residual, gammas = study.principal.residual, study.real.residual.alignment
        last = rows[-1]
        np.testing.assert_allclose(float(last[2]), residual.gap_ratio[-1], rtol=1e-2)
        np.testing.assert_allclose(float(last[3]), gammas.chance[-1], atol=6e-4)
        np.testing.assert_allclose(float(last[4]), gammas.gamma[-1], atol=6e-4)


def test_refusals():
    with pytest.raises(ValueError, match="id 99"):
        power.study(tiny_model("gpt2"), [99])
    with pytest.raises(ValueError, match="LinearFlow"):
        power.study(LinearFlow(jnp.zeros((1, 2, 2))), IDS)
