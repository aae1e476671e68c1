"""The leading part of a spectrum, matrix-free: eigenvalues of a layer, singular values of a span.

A Krylov method sees a matrix through products with vectors, so it can be wrong in ways that a
dense solver cannot: it may stop early, find one copy of a repeated value, or miss a value. What is
returned here is therefore checked after the fact (`_leading`, `_conditions`), and `converged` says
for each value whether the checks passed. Jacobians small enough to be written down are.

Axes: `k`, the values asked for; `n`, the coordinates of the map, tokens * width or width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import threadpoolctl
from jaxtyping import Array, Bool, Complex, Float
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigs, eigsh

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow
from svflow.integers import is_integer
from svflow.memory import check_memory
from svflow.simulate import simulate
from svflow.spectra.jacobians import check_state, jacobian, token_map, widened
from svflow.spectra.screen import Screen

BASIS = 2**31  # Bytes that the Krylov spaces of a screen may take.
DENSE = 256  # Coordinates up to which n products and LAPACK take no longer than a Krylov method.


class PartialSpectrum(NamedTuple):
    """The eigenvalues of largest modulus of a Jacobian A.

    Arguments:
        values: (k,) by decreasing modulus; the members of a conjugate pair are neighbours, the one
            with the positive imaginary part first. If k cuts a pair, that one is the last value,
            and its conjugate is an eigenvalue too. nan for a value that was not found.
        vectors: (k, n) right eigenvectors, one a row, of unit length, the largest entry positive.
            Of a causal flow's whole layer, those of the tokens' own blocks A_ii: zero but for the
            token whose block has the value.
        residuals: (k,) |A v - lambda v|, computed from the vectors and values returned; with
            A_ii in the place of A where the vector is that of a block, as in `condition`.
        condition: (k,) |y| |v| / |y^H v| with y the left eigenvector: how far lambda moves at most
            for a change of A of unit norm, to first order; of a multiple value, an upper bound.
            Infinite where it could not be computed.
        converged: (k,) whether to first order |lambda - exact| <= tol |A|, that is
            condition * max(residual, eps |A|) <= tol |A|, and no eigenvalue is missing above it.
    """

    values: Complex[Array, " k"]
    vectors: Complex[Array, "k n"]
    residuals: Float[Array, " k"]
    condition: Float[Array, " k"]
    converged: Bool[Array, " k"]


class LeadingSingular(NamedTuple):
    """The largest singular values of a Jacobian A.

    Arguments:
        values: (k,) by decreasing size; nan for a value that was not found.
        left, right: (k, n) singular vectors, one a row, A right_i = values_i left_i; the largest
            entry of right_i is positive.
        residuals: (k,) max(|A v - s u|, |A^T u - s v|), which bounds the distance to a singular
            value.
        converged: (k,) whether max(residual, eps |A|) <= tol |A| and no singular value is missing
            above it.
    """

    values: Float[Array, " k"]
    left: Float[Array, "k n"]
    right: Float[Array, "k n"]
    residuals: Float[Array, " k"]
    converged: Bool[Array, " k"]


def partial_spectrum(
    flow: Flow,
    layer: int,
    x: Float[Array, "tokens width"],
    k: int,
    *,
    scope: str = "full",
    token: int = -1,
    tol: float | None = None,
    context: Context | None = None,
    max_iterations: int = 100,
    seed: int = 0,
) -> PartialSpectrum:
    """The k eigenvalues of largest modulus of one layer's Jacobian, without forming all of it.

    By implicitly restarted Arnoldi (ARPACK) on `jax.jvp` of the step, for the left vectors on
    `jax.vjp`; up to 256 coordinates, or for a third of the spectrum or more, by LAPACK on the
    matrix itself.

    A causal layer's Jacobian A is block triangular, its spectrum the union of those of its tokens'
    frozen blocks A_ii. There, Krylov spaces of all blocks grow together, one product of the whole
    layer for a step of each, until they rule out with the same certainty that a block has any of
    the k values (`svflow.spectra.screen`); the blocks that may have some are written down, and
    solved as above.

    After the eigenvalues are found, a second run from a new random start, orthogonal to what was
    found, looks for larger ones that the first one missed, until there are none. That is certain up
    to the luck of a random start, about one in a million. The flags are about the values: an
    eigenvalue of a Jordan block is wrong by about eps^(1/m) however small its residual, which its
    condition tells, and its flag is False. Where several eigenvalues share the modulus of the
    k-th, any of them may be returned; where many do, as for an orthogonal matrix, none may be
    found.

    Arguments:
        flow: the flow; its weights are arguments of the compiled programs.
        layer: of the flow, 0 to depth - 1.
        x: (tokens, width) the state before the layer.
        k: how many eigenvalues, 1 to n.
        scope: "full", all tokens to all tokens; "frozen", one token in its real context;
            "isolated", one token alone.
        token: of the scopes "frozen" and "isolated".
        tol: the error of a value that counts as converged, relative to |A|; None for eps^(2/3) of
            the arithmetic: 4e-11 in float64, 2e-5 in float32 and for narrower types.
        context: positions and padding; "isolated" keeps the token's position.
        max_iterations: bounds the restarts of each run.
        seed: of the random starts.

    Returns:
        Values, vectors, and what is known of them. It works on the host and cannot be transformed.

    Raises:
        ValueError: a wrong flow, layer, shape or type of x, token, k, scope, tolerance or
            context; a state or a product with the layer's Jacobian that is not finite.
        MemoryError: a third of the spectrum or more of a Jacobian that does not fit.

    Source: R. B. Lehoucq, D. C. Sorensen and C. Yang, "ARPACK Users' Guide", 1998; the deflated
    second run, the condition from both invariant subspaces and the union of blocks, derived here.
    """
    layer, x, token = check_state(flow, layer, _known(x), token, scope, context)
    where = (flow, np.int32(layer), x, np.int32(token), context)
    name = f"the Jacobian of layer {layer}"
    A = _operator(
        functools.partial(_step_jvp, *where, scope=scope),
        functools.partial(_step_vjp, *where, scope=scope),
        x.shape if scope == "full" else x.shape[1:],
        x.dtype,
        name,
    )
    options = dict(tol=tol, max_iterations=max_iterations, seed=seed)
    with _one_thread():
        if scope == "full" and flow.causal:
            push = _frozen_tangents(flow, np.int32(layer), x, context)
            images = _finite(functools.partial(_push, push), x.shape, x.dtype, name)

            def block(token):
                J = jacobian(flow, layer, x, token=token, context=context)
                return _matrix(np.asarray(J, np.float64), A.eps)

            found = _union(A, x.shape, images, block, k, **options)
        else:
            found = _eigenpairs(A, k, **options)
    return PartialSpectrum(*_rounded(found, x.dtype))


def propagator_singular_values(
    flow: Flow,
    x: Float[Array, "tokens width"],
    k: int,
    *,
    t0: float = 0.0,
    t1: float | None = None,
    dt: float = 1.0,
    solver: diffrax.AbstractSolver | None = None,
    token: int | None = None,
    tol: float | None = None,
    context: Context | None = None,
    max_iterations: int = 100,
    seed: int = 0,
) -> LeadingSingular:
    """The k largest singular values of the propagator d x(t1) / d x(t0), without forming it.

    Their logarithms over t1 - t0 are the largest finite-time Lyapunov exponents. By the symmetric
    Lanczos process (ARPACK) on A^T A, with `jax.jvp` and `jax.vjp` of `simulate`, and the singular
    value decomposition of A on the subspace that it finds, which undoes the squaring; then the
    same check as in `partial_spectrum`, on A with the found singular vectors projected out on both
    sides. Small Jacobians are written down, as there.

    Arguments:
        flow, t0, t1, dt, solver, context: of `simulate`, which integrates with fixed steps.
        x: (tokens, width) the state at t0.
        k: how many singular values, 1 to n.
        token: None for all tokens to all tokens; otherwise the one whose state at t0 and at t1 are
            meant, all others at t0 held fixed.
        tol: the error of a value that counts as converged, relative to the largest; None for
            eps^(2/3) of the arithmetic.
        max_iterations: bounds the restarts of each run.
        seed: of the random starts.

    Returns:
        Values, vectors, and what is known of them. It works on the host and cannot be transformed.

    Raises:
        ValueError: as `partial_spectrum` and `simulate`.
    """
    inside = 0 <= t0 < getattr(flow, "depth", 0)  # simulate refuses other times
    layer = math.floor(t0) if inside else 0
    place = 0 if token is None else token
    _, x, place = check_state(flow, layer, _known(x), place, "full", context)
    options = dict(t0=float(t0), t1=float(flow.depth if t1 is None else t1), dt=float(dt))
    where = (flow, x, None if token is None else np.int32(place), context)
    A = _operator(
        functools.partial(_span_jvp, *where, solver=solver, **options),
        functools.partial(_span_vjp, *where, solver=solver, **options),
        x.shape if token is None else x.shape[1:],
        x.dtype,
        "the propagator from t = {t0:g} to {t1:g}".format(**options),
    )
    with _one_thread():
        found = _singular_triplets(A, k, tol=tol, max_iterations=max_iterations, seed=seed)
    return LeadingSingular(*_rounded(found, x.dtype))


# The maps. Weights, states and places are arguments of the compiled programs.


def _step_map(flow, layer, x, token, context, scope):
    """The layer as a map of one token or of all, and the point where it is taken."""
    flow, x = widened(flow, x)
    if scope == "full":
        return lambda y: flow.step(layer, y, context), x
    return token_map(flow, layer, x, token, scope, context), x[token]


def _span_map(flow, x, token, context, solver, t0, t1, dt):
    flow, x = widened(flow, x)

    def end(y):
        run = simulate(flow, y, solver=solver, dt=dt, ts=[t1], t0=t0, t1=t1, context=context)
        return run.xs[-1]

    if token is None:
        return end, x
    return lambda row: end(x.at[token].set(row))[token], x[token]


def _programs(make, static):
    """The jvp and the vjp of a map as compiled functions, in full precision."""

    def jvp(*arguments, **options):
        *where, v = arguments
        function, point = make(*where, **options)
        return jax.jvp(function, (point,), (v,))[1]

    def vjp(*arguments, **options):
        *where, u = arguments
        function, point = make(*where, **options)
        return jax.vjp(function, point)[1](u)[0]

    def compiled(program):
        # Accelerators multiply float32 matrices in fewer bits by default.
        precise = jax.default_matmul_precision("highest")(program)
        return jax.jit(precise, static_argnames=static)

    return compiled(jvp), compiled(vjp)


_step_jvp, _step_vjp = _programs(_step_map, ("scope",))
_span_jvp, _span_vjp = _programs(_span_map, ("solver", "t0", "t1", "dt"))


@jax.jit
def _frozen_tangents(flow, layer, x, context):
    """The frozen Jacobians of all tokens as one linear map, each token's of its own tangent."""
    flow, x = widened(flow, x)

    def all_tokens(rows):
        def one(token, row):
            return flow.frozen(layer, x, token, context)(row)

        return jax.vmap(one)(jnp.arange(len(x)), rows)

    with jax.default_matmul_precision("highest"):
        return jax.linearize(all_tokens, x)[1]


@jax.jit
def _push(linear, v):
    return linear(v)


class _Operator(NamedTuple):
    """A square real matrix through its products, on the host in float64.

    Arguments:
        apply, transpose: v -> A v and u -> A^T u.
        n: its size.
        eps: of the arithmetic inside the products.
    """

    apply: Callable[[np.ndarray], np.ndarray]
    transpose: Callable[[np.ndarray], np.ndarray]
    n: int
    eps: float


def _operator(jvp, vjp, shape, dtype, name) -> _Operator:
    """The Jacobian of a map from `shape` to `shape`.

    Vectors are float64 on the host, whatever the flow's type: the products are what costs.
    """
    eps = float(jnp.finfo(at_least_float32(dtype)).eps)
    jvp, vjp = (_finite(program, shape, dtype, name) for program in (jvp, vjp))
    return _Operator(lambda v: jvp(v).ravel(), lambda u: vjp(u).ravel(), math.prod(shape), eps)


def _finite(program, shape, dtype, name):
    """A compiled product on float64 arrays of the host, which has to be finite."""
    dtype = at_least_float32(dtype)

    def apply(v):
        out = np.asarray(program(v.astype(dtype).reshape(shape)), np.float64)
        if not np.isfinite(out).all():
            raise ValueError(f"{name} is not finite")
        return out

    return apply


def _matrix(J: np.ndarray, eps: float) -> _Operator:
    return _Operator(lambda v: J @ v, lambda u: J.T @ u, len(J), eps)


def _one_thread():
    """Vectors on the host gain nothing from threads, and wait for them where cores are busy."""
    return threadpoolctl.threadpool_limits(limits=1, user_api="blas")


def _rounded(found, dtype):
    """The results in the precision of the state, float32 at least."""
    real = at_least_float32(dtype)
    types = {"f": real, "c": np.result_type(real, np.complex64), "b": np.dtype(bool)}
    return tuple(jnp.asarray(a.astype(types[a.dtype.kind])) for a in map(np.asarray, found))


# What is refused


def _known(x) -> jax.Array:
    if isinstance(x, jax.core.Tracer):
        raise ValueError("a partial spectrum is computed on the host: not under a JAX transform")
    return jnp.asarray(x)


def _index(value, name, stop) -> int:
    if not is_integer(value):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 1 <= value < stop:
        raise ValueError(f"{name} must be from 1 to {stop - 1}, got {value}")
    return int(value)


def _settings(A, k, tol, max_iterations, seed):
    k = _index(k, "k", A.n + 1)
    max_iterations = _index(max_iterations, "max_iterations", 2**31)
    tol = A.eps ** (2 / 3) if tol is None else float(tol)
    if not 0 < tol < 1:
        raise ValueError(f"tol must be between 0 and 1, got {tol}")
    return k, tol, max_iterations, np.random.default_rng(seed)


# Linear algebra: on any operator


def _norm(A: _Operator, rng: np.random.Generator) -> float:
    """|A| from below, by power iteration on A^T A; safe from overflow and underflow."""
    v, size = _unit(rng.standard_normal(A.n))[0], 0.0
    for _ in range(8):
        u, stretch = _unit(A.apply(v))
        size = max(size, stretch)
        v, stretch = _unit(A.transpose(u))
        size = max(size, stretch)
        if stretch == 0:
            break
    return size


def _unit(v):
    """v / |v| and |v|; (0, 0) for v = 0."""
    peak = np.abs(v).max()
    if peak == 0:
        return v, 0.0
    v = v / peak
    length = np.linalg.norm(v)
    return v / length, float(peak) * float(length)


def _scaled(A: _Operator, size: float) -> tuple[_Operator, float]:
    """A / s with s about |A|, a power of two: ARPACK's tests know no scale but 1."""
    s = math.ldexp(1.0, math.frexp(size)[1])
    return A._replace(apply=lambda v: A.apply(v) / s, transpose=lambda u: A.transpose(u) / s), s


def _is_dense(n: int, k: int) -> bool:
    return n <= DENSE or 3 * k >= n


def _explicit(A: _Operator) -> np.ndarray:
    # And the eigenvectors from both sides.
    check_memory(f"the Jacobian of {A.n} x {A.n} and its dense solution", 64 * A.n**2, None)
    return np.stack([A.apply(e) for e in np.eye(A.n)], axis=1)


class _Eigen(NamedTuple):
    """What `_leading` asks of an eigenvalue problem. A Q is kept beside the basis Q."""

    A: _Operator
    symmetric: bool = False
    power: int = 1

    def deflated(self, Q, AQ):
        # Q spans an invariant subspace, so these are the other eigenvalues, and zeros.
        return lambda v: _without(Q, self.A.apply(_without(Q, v)))

    def moduli(self, Q, AQ):
        return np.sort(np.abs(np.linalg.eigvals(Q.T @ AQ)))[::-1]


class _Singular(NamedTuple):
    """The same for singular values: the eigenvalues of A^T A are their squares."""

    A: _Operator
    symmetric: bool = True
    power: int = 2

    def deflated(self, Q, AQ):
        # Without the left vectors too: otherwise rounding would hide values below sqrt(eps) |A|.
        U = _left_basis(AQ)

        def apply(v):
            u = _without(U, self.A.apply(_without(Q, v)))
            return _without(Q, self.A.transpose(_without(U, u)))

        return apply

    def moduli(self, Q, AQ):
        return np.linalg.svd(AQ, compute_uv=False)


def _left_basis(AQ):
    """An orthonormal basis of the columns of A Q that are not rounding errors."""
    U, s, _ = np.linalg.svd(AQ, full_matrices=False)
    return U[:, s > 1e-15 * s.max(initial=0)]


def _without(Q, v):
    return v - Q @ (Q.T @ v)


def _leading(problem, k, tol, max_iterations, rng):
    """A basis Q of an invariant subspace that holds the k values of largest modulus.

    After k values are found, the rest of the spectrum is asked for its largest value, from a new
    random start. If it exceeds the k-th, it was missed, for example as a further copy of a
    repeated value: it joins the basis, and the rest is asked again.

    Returns:
        Q (n, m) orthonormal, A Q, and the largest modulus outside, or a bound of it from above.
    """
    A, power = problem.A, problem.power
    Q = AQ = np.zeros((A.n, 0))
    kth, slack = -np.inf, tol / 2  # A is scaled: its norm is between 1/2 and 1.

    def rest():
        apply = problem.deflated(Q, AQ)
        short = max(k - Q.shape[1], 0)
        return apply, short, _without(Q, rng.standard_normal((A.n, max(short, 1))))

    for _ in range(2 * k + 8):
        apply, short, start = rest()
        if not short:
            # With a gap behind the k-th this settles it, however slowly the rest would converge.
            bound = _radius_bound(apply, start[:, 0]) ** (1 / power)
            if bound <= kth + slack:
                return Q, AQ, bound
        floor = (10 * np.finfo(float).eps) ** power
        accuracy = max(A.eps, 1e-3 * tol)
        values, vectors, complete = _arpack(
            apply, start, problem.symmetric, floor, accuracy, max_iterations
        )
        largest = np.abs(values).max(initial=0) ** (1 / power)
        if complete and not short and largest <= kth + slack:
            return Q, AQ, largest
        new = _new_directions(Q, vectors)
        if new.shape[1] == 0:
            break
        Q = np.hstack([Q, new])
        AQ = np.hstack([AQ, np.stack([A.apply(q) for q in new.T], axis=1)])
        if Q.shape[1] >= k:
            kth = problem.moduli(Q, AQ)[k - 1]
    apply, _, start = rest()
    return Q, AQ, _radius_bound(apply, start[:, 0]) ** (1 / power)


def _arpack(apply, start, symmetric, floor, tol, max_iterations):
    """The eigenvalues of largest modulus, as many as `start` has columns or more.

    Returns:
        All values that ARPACK gives, the vectors of those that truly are eigenvectors, and whether
        there are as many as asked for.
    """
    n, count = start.shape
    first = start[:, 0]
    if np.linalg.norm(apply(first)) <= floor * np.linalg.norm(first):  # which ARPACK refuses
        return np.zeros(count), start, True
    solve = eigsh if symmetric else eigs
    asked = count + 1  # The last may be half of a pair.
    complete = True
    try:
        values, vectors = solve(
            LinearOperator((n, n), matvec=lambda v: apply(v.ravel()), dtype=np.float64),
            asked,
            which="LM",
            v0=first,
            ncv=min(n, 2 * asked + 80),  # few more products than 20, and many fewer restarts
            maxiter=max_iterations,
            tol=tol,
        )
    except ArpackNoConvergence as failure:
        values, vectors, complete = failure.eigenvalues, failure.eigenvectors, False
    except ArpackError:
        return np.zeros(0), np.zeros((n, 0)), False
    if symmetric:
        return values, vectors, complete
    good = []
    for value, v in zip(values, vectors.T):
        if not _is_eigenpair(apply, value, v, tol) and value.imag != 0:
            # SciPy 1.17 returns half a pair with a vector that is real, from the pair's plane.
            v = apply(v.real) - value.conj() * v.real
        if _is_eigenpair(apply, value, v, tol):
            good.append(v)
    vectors = np.array(good).reshape(-1, n).T
    return values, vectors, complete and len(good) >= count


def _is_eigenpair(apply, value, v, tol):
    image = apply(v.real) + 1j * apply(v.imag)
    return np.linalg.norm(image - value * v) <= math.sqrt(tol) * np.linalg.norm(v)


def _new_directions(Q, vectors):
    """An orthonormal real basis of what `vectors` span besides Q."""
    parts = np.hstack([vectors.real, vectors.imag])
    parts = parts[:, np.linalg.norm(parts, axis=0) > 0]
    if parts.shape[1] == 0:
        return parts
    parts = _without(Q, parts / np.linalg.norm(parts, axis=0))
    U, s, _ = np.linalg.svd(parts, full_matrices=False)
    new = _without(Q, U[:, s > 1e-10])
    return np.linalg.qr(new)[0]


def _radius_bound(apply, g, powers=100, delta=1e-6):
    """The spectral radius of B from above: (|B^p g| / delta)^(1/p) for g standard normal.

    It fails with a probability below delta: |B^p g| >= |B^p| |w . g| for a unit vector w, and
    w . g is standard normal. Derived here.
    """
    g, length = _unit(g)
    total = math.log(length) - math.log(delta)
    for _ in range(powers):
        g, stretch = _unit(apply(g))
        if stretch == 0:
            return 0.0
        total += math.log(stretch)
    return math.exp(total / powers)


def _eigenpairs(A: _Operator, k, *, tol=None, max_iterations=100, seed=0):
    """The fields of a `PartialSpectrum` of any operator, in float64."""
    k, tol, max_iterations, rng = _settings(A, k, tol, max_iterations, seed)
    *found, accurate, limit, _ = _pairs(A, k, tol, max_iterations, rng)
    return _filled(k, *found, accurate & (np.abs(found[0]) >= limit))


def _pairs(A, k, tol, max_iterations, rng):
    """Up to k eigenpairs of any operator.

    Returns:
        Values, vectors, residuals and condition; whether each is accurate; the least modulus above
        which none is missing; and |A| from below.
    """
    size = _norm(A, rng)
    if size == 0:  # on a random vector, so with probability one A = 0
        vectors = np.eye(k, A.n, dtype=complex)
        return np.zeros(k, complex), vectors, np.zeros(k), np.ones(k), np.ones(k, bool), 0.0, 0.0
    B, s = _scaled(A, size)
    size /= s
    if _is_dense(A.n, k):
        matrix = _explicit(B)
        size = float(np.linalg.norm(matrix, 2))
        values, left, right = scipy.linalg.eig(matrix, left=True)
        order = _pairwise(values)[:k]
        values, vectors = values[order], right[:, order]
        with np.errstate(divide="ignore"):
            condition = 1 / np.abs(np.sum(left[:, order].conj() * vectors, axis=0))
        limit = 0.0
    else:
        Q, AQ, outside = _leading(_Eigen(B), k, tol, max_iterations, rng)
        T = Q.T @ AQ
        values, coordinates = np.linalg.eig(T)
        order = _pairwise(values)
        values, vectors = values[order], Q @ coordinates[:, order]
        condition = _conditions(B, Q, values, vectors, size, tol, max_iterations, rng)[:k]
        values, vectors = values[:k], vectors[:, :k]
        # Outside is the rest of the spectrum of a matrix that is this far from A.
        defect = np.linalg.norm(AQ - Q @ T, 2) if Q.size else 0.0
        limit = outside - tol * size if defect <= tol * size else np.inf
    vectors = _directed(vectors.T.astype(complex))
    images = np.array([B.apply(v.real) + 1j * B.apply(v.imag) for v in vectors])
    residuals = np.linalg.norm(images.reshape(vectors.shape) - values[:, None] * vectors, axis=1)
    errors = condition * np.maximum(residuals, A.eps * size)
    values = values.astype(complex) * s
    return values, vectors, residuals * s, condition, errors <= tol * size, limit * s, size * s


def _union(A, shape, images, block, k, *, tol=None, max_iterations=100, seed=0):
    """The fields of a `PartialSpectrum` of a causal layer, from the tokens' frozen blocks.

    All blocks are screened together, and those are solved that the screen does not exclude from
    having one of the k largest values. The blocks solved decide what is large enough.

    Arguments:
        A: the whole Jacobian; only asked for its size and precision.
        shape: (tokens, width).
        images: (tokens, width) -> (tokens, width), every block's product with its own row.
        block: the operator of one token's block.
    """
    k, tol, max_iterations, rng = _settings(A, k, tol, max_iterations, seed)
    check_memory(f"{k} eigenvectors of {A.n} coordinates", 32 * k * A.n, None)
    tokens, width = shape
    waiting, solved = set(range(tokens)), []
    kth, slack, limit = -np.inf, 0.0, 0.0

    def solve(token):
        nonlocal kth, slack, limit
        waiting.remove(token)
        *found, bound, size = _pairs(block(token), min(k, width), tol, max_iterations, rng)
        solved.append((*found, np.full(len(found[0]), token)))
        slack, limit = max(slack, tol * size / 2), max(limit, bound)
        moduli = np.sort(np.concatenate([np.abs(values) for values, *_ in solved]))[::-1]
        kth = moduli[k - 1] if len(moduli) >= k else -np.inf

    if not _is_dense(A.n, k):
        # Beyond some hundred steps solving is cheaper.
        screen = Screen(images, shape, rng, limit=max(2, min(512, BASIS // (8 * A.n))))
        while waiting:
            screen.grow(waiting)
            for token in sorted(waiting, key=screen.radius, reverse=True):
                if screen.excludes(token, kth + slack):
                    waiting.remove(token)
                elif screen.radius(token) >= kth + slack or screen.finished(token):
                    solve(token)
    for token in sorted(waiting):
        solve(token)
    values, vectors, residuals, condition, accurate, owners = map(np.concatenate, zip(*solved))
    # Stable: the members of a pair, of equal moduli, stay together.
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    whole = np.zeros((len(order), tokens, width), complex)
    whole[np.arange(len(order)), owners[order]] = vectors[order]
    converged = accurate & (np.abs(values) >= limit)
    fields = values[order], whole.reshape(-1, A.n), residuals[order], condition[order]
    return _filled(k, *fields, converged[order])


def _conditions(B, Q, values, vectors, size, tol, max_iterations, rng):
    """The condition numbers of all eigenvalues of the invariant subspace spanned by Q.

    The left vectors are the rows of (W^H V)^-1 W^H, with W the left eigenvectors of the same
    eigenvalues: that needs no pairing of right and left, and holds for repeated values.
    """
    condition = np.full(len(values), np.inf)
    if not len(values):
        return condition
    U, AU = Q, np.stack([B.transpose(q) for q in Q.T], axis=1)
    if np.linalg.norm(AU - Q @ (Q.T @ AU), 2) > tol * size:  # else A is normal there
        transposed = B._replace(apply=B.transpose, transpose=B.apply)
        # Two more, so that a tie at the cut can be resolved either way.
        count = min(len(values) + 2, B.n // 2)
        U, AU, _ = _leading(_Eigen(transposed), count, tol, max_iterations, rng)
    left_values, C = np.linalg.eig(U.T @ AU) if U.size else (np.zeros(0), U.T)
    distance = np.abs(values[:, None] - left_values.conj()[None])
    right, left = linear_sum_assignment(distance)
    matched = distance[right, left] <= math.sqrt(tol) * size
    right, C = right[matched], C[:, left[matched]]
    try:
        C = C @ np.linalg.inv((U @ C).conj().T @ vectors[:, right]).conj().T
    except np.linalg.LinAlgError:
        return condition
    lengths = np.linalg.norm(C, axis=0)
    defects = np.linalg.norm(AU @ C - U @ C * values[right].conj(), axis=0)
    condition[right] = np.where(defects <= tol * size * lengths, lengths, np.inf)
    return condition


def _pairwise(values):
    """The order of eigenvalues of a real matrix: by modulus, conjugates side by side."""
    upper = np.flatnonzero(values.imag >= 0)
    order = []
    for i in upper[np.argsort(-np.abs(values[upper]), kind="stable")]:
        order.append(i)
        if values[i].imag > 0:  # LAPACK's pairs are neighbours in its own order
            order.append(i + 1)
    return np.array(order, int)


def _directed(rows):
    """Rows of unit length whose largest entry is positive."""
    if not len(rows):
        return rows
    peaks = np.take_along_axis(rows, np.abs(rows).argmax(1, keepdims=True), 1)
    rows = rows * (np.abs(peaks) / peaks)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _filled(k, *arrays):
    """k of each, nan and False for those not found."""
    filled = []
    for array in arrays:
        blank = False if array.dtype == bool else np.nan
        missing = np.full((k - len(array), *array.shape[1:]), blank, array.dtype)
        filled.append(np.concatenate([array, missing]))
    return tuple(filled)


def _singular_triplets(A: _Operator, k, *, tol=None, max_iterations=100, seed=0):
    """The fields of a `LeadingSingular` of any operator, in float64."""
    k, tol, max_iterations, rng = _settings(A, k, tol, max_iterations, seed)
    size = _norm(A, rng)
    if size == 0:
        return np.zeros(k), np.eye(k, A.n), np.eye(k, A.n), np.zeros(k), np.ones(k, bool)
    B, s = _scaled(A, size)
    size /= s
    if _is_dense(A.n, k):
        U, values, right = np.linalg.svd(_explicit(B))
        left, values, right, limit = U.T[:k], values[:k], right[:k], 0.0
    else:
        Q, AQ, outside = _leading(_Singular(B), k, tol, max_iterations, rng)
        U, values, rotation = np.linalg.svd(AQ, full_matrices=False)
        left, values, right = U.T[:k], values[:k], (rotation @ Q.T)[:k]
        limit = outside - tol * size
    turned = _directed(right)
    left = left * np.sign(np.sum(turned * right, axis=1))[:, None]
    right = turned
    residuals = np.array(
        [
            max(np.linalg.norm(B.apply(v) - sigma * u), np.linalg.norm(B.transpose(u) - sigma * v))
            for sigma, u, v in zip(values, left, right)
        ]
    )
    size = max(size, values.max(initial=0))
    converged = np.maximum(residuals, A.eps * size) <= tol * size
    converged &= values >= limit
    return _filled(k, values * s, left, right, residuals * s, converged)
