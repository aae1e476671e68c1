"""Small flows whose answers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from universal_cases import target

from svflow import Flow, geometry
from svflow.score import GaussianMixture, ScoreFlow, SoftmaxPosterior, VMFMixture


class LinearFlow(Flow):
    """dx/dt = A(t) x for every token, A given per layer: piecewise constant, or linear between."""

    def __init__(self, matrices, *, linear=False):
        self.depth, self.width = matrices.shape[:2]
        self.matrices, self.linear = nnx.Param(matrices), linear

    def matrix(self, t):
        matrices = self.matrices[...]
        t = jnp.asarray(t).astype(matrices.dtype)
        layer = jnp.clip(jnp.floor(t), 0, self.depth - 1)
        here = matrices[layer.astype(int)]
        if not self.linear:
            return here
        following = matrices[jnp.minimum(layer.astype(int) + 1, self.depth - 1)]
        return here + (t - layer) * (following - here)

    def velocity(self, t, x, context=None):
        return x @ self.matrix(t).T

    def solution(self, x0, t):
        """x(t) = exp(int_0^t A) x0 layer by layer; for linear A only where the A_l commute."""
        for layer in range(self.depth):
            share = min(max(t - layer, 0.0), 1.0)
            integral = share * self.matrix(layer + share / 2 if self.linear else layer)
            x0 = x0 @ jax.scipy.linalg.expm(integral).T
        return x0


class SplitLinearFlow(Flow):
    """dx/dt = (A + B) x in two substeps that do not commute."""

    def __init__(self, first, second, depth):
        self.depth, self.width = depth, first.shape[0]
        self.first, self.second = nnx.Param(first), nnx.Param(second)

    @property
    def splitting(self):
        return (("first",), ("second",))

    def field(self, substep, t, x, context=None):
        return x @ (self.first, self.second)[substep][...].T

    def solution(self, x0, t):
        return x0 @ jax.scipy.linalg.expm(t * (self.first[...] + self.second[...])).T


class SphereFlow(Flow):
    """Two tangent fields on the sphere of radius sqrt(width): a rotation-free drift and a well."""

    def __init__(self, drift, well, depth):
        self.depth, self.width = depth, drift.shape[0]
        self.drift, self.well = nnx.Param(drift), nnx.Param(well)

    @property
    def splitting(self):
        return (("drift",), ("well",))

    def field(self, substep, t, x, context=None):
        push = x @ self.drift[...].T if substep == 0 else jnp.tanh(x) * self.well[...]
        return geometry.tangent(x, push)

    def retract(self, x):
        return geometry.sphere(x)


class VelocityFlow(Flow):
    """A flow that is nothing but a velocity: nonlinear, coupled over tokens, smooth in time."""

    def __init__(self, matrix, depth):
        self.depth, self.width = depth, matrix.shape[0]
        self.matrix = nnx.Param(matrix)

    @property
    def jumps(self):
        return ()

    def velocity(self, t, x, context=None):
        phase = jnp.cos(jnp.asarray(t).astype(x.dtype))
        return jnp.tanh(x @ self.matrix[...].T + phase) - x.mean(axis=0)


class LayerRecorder(Flow):
    """dx/dt = e_layer: the state counts how long each layer was used."""

    def __init__(self, depth):
        self.depth = self.width = depth

    def velocity(self, t, x, context=None):
        layer = jnp.clip(jnp.floor(jnp.asarray(t)).astype(int), 0, self.depth - 1)
        return jnp.broadcast_to(jax.nn.one_hot(layer, self.width, dtype=x.dtype), x.shape)


def fast(function):
    """`jax.jit` for a program that runs once: compiling it fast matters more than running it."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed, *shape, scale=1.0, dtype=jnp.float64):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def small_flows(dtype=jnp.float64):
    """One of each, three or four layers deep and six wide."""
    constant, linear = (normal(i, 3, 6, 6, scale=0.3, dtype=dtype) for i in (0, 1))
    first, second, drift, mixing = (normal(i, 6, 6, scale=0.3, dtype=dtype) for i in range(2, 6))
    return {
        "constant": LinearFlow(constant),
        "linear": LinearFlow(linear, linear=True),
        "split": SplitLinearFlow(first, second, 3),
        "sphere": SphereFlow(drift, normal(6, 6, dtype=dtype), 3),
        "velocity": VelocityFlow(mixing, 4),
        "attention": target(8, (3, 2, 6, 3, 2), dtype=dtype),
        "score": ScoreFlow(VMFMixture.from_natural(normal(8, 4, 6, dtype=dtype)), depth=3),
        "kernel": ScoreFlow(
            GaussianMixture(normal(9, 4, 6, dtype=dtype), jnp.full(4, 1.2, dtype)),
            posterior=SoftmaxPosterior(normal(10, 4, 6, dtype=dtype)),
            depth=3,
        ),
    }
