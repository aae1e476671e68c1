"""Mixtures whose posterior-weighted scores a state follows.

Axes: `tokens`; `width`, d; `components`, the values of the latent z.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from svflow import geometry
from svflow.dtypes import at_least_float32
from svflow.score import bessel
from svflow.score.sampling import von_mises_fisher


class StateMixture(nnx.Module):
    r"""p(x) = sum_z pi_z p(x|z) of one token's state.

    A subclass sets `width` and `manifold` ("sphere", that of radius sqrt(d), or "euclidean") and
    defines `log_reference`, `log_ratios`, `ambient` and `sample`. Logarithms are in float32 at
    least, and vectors in the type of x.
    """

    width: int
    manifold: str
    log_weights: nnx.Param

    @property
    def components(self) -> int:
        """How many values z takes."""
        return self.log_weights.shape[0]

    @property
    def log_prior(self) -> Float[Array, " components"]:
        """log pi_z, normalised: a step of an optimiser on `log_weights` leaves a density."""
        weights = self.log_weights[...]
        return jax.nn.log_softmax(weights.astype(at_least_float32(weights.dtype)))

    @property
    def log_reference(self) -> float:
        """A constant of all log p(x|z), apart because in many dimensions it dwarfs the rest."""
        raise NotImplementedError

    def log_ratios(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        """log p(x|z) less `log_reference`."""
        raise NotImplementedError

    def ambient(
        self, x: Float[Array, "tokens width"], posterior: Float[Array, "tokens components"]
    ) -> Float[Array, "tokens width"]:
        """sum_z q_z grad_x log p(x|z), the gradient that of R^d."""
        raise NotImplementedError

    def sample(self, key: jax.Array, count: int) -> Float[Array, "count width"]:
        """States drawn from p."""
        raise NotImplementedError

    def log_likelihoods(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        """log p(x|z)."""
        return self.log_ratios(x) + self.log_reference

    def _log_joint(self, x):
        """log pi_z + log p(x|z) less `log_reference`."""
        ratios = self.log_ratios(x)
        return ratios + self.log_prior.astype(ratios.dtype)

    def log_density(self, x: Float[Array, "tokens width"]) -> Float[Array, " tokens"]:
        """log p(x)."""
        return jax.nn.logsumexp(self._log_joint(x), axis=-1) + self.log_reference

    def log_posterior(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        """log p(z|x)."""
        return jax.nn.log_softmax(self._log_joint(x), axis=-1)

    def posterior(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        """p(z|x)."""
        return jax.nn.softmax(self._log_joint(x), axis=-1)

    def field(
        self, x: Float[Array, "tokens width"], posterior: Float[Array, "tokens components"]
    ) -> Float[Array, "tokens width"]:
        """E_q[grad_x log p(x|z)], tangent to the manifold: the gradient of the ELBO, q held."""
        check_states(x, self.width)
        v = self.ambient(x, posterior)
        return geometry.tangent(x, v) if self.manifold == "sphere" else v

    def score(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """grad_x log p(x): the field of the exact posterior (Fisher's identity)."""
        return self.field(x, self.posterior(x))

    def elbo(
        self, x: Float[Array, "tokens width"], posterior: Float[Array, "tokens components"]
    ) -> Float[Array, " tokens"]:
        """E_q[log p(x, z) - log q(z|x)] = log p(x) - KL(q || p(z|x)).

        Raises:
            ValueError: states of another width, a posterior of the wrong shape, or with rows that
                are no probabilities.
        """
        joint = self._log_joint(x)
        q = check_posterior(posterior, joint.shape).astype(joint.dtype)
        some = q > 0  # 0 log 0 = 0 for what the mixture excludes too
        return (
            jnp.sum(q * jnp.where(some, joint, 0), axis=-1)
            - negative_entropy(q)
            + self.log_reference
        )

    def free_energy(
        self,
        x: Float[Array, "tokens width"],
        posterior: Float[Array, "tokens components"] | None = None,
    ) -> Float[Array, " tokens"]:
        """-log p(x), or of a posterior -ELBO, which is no less. Raises as `elbo` does."""
        return -self.log_density(x) if posterior is None else -self.elbo(x, posterior)


class VMFMixture(StateMixture):
    r"""A mixture of von Mises-Fisher densities of states on the sphere of radius sqrt(d):

        p(x) = sum_z pi_z C_d(kappa_z) exp(eta_z . x),   eta_z = kappa_z mu_z / d,

    a density of the direction x / sqrt(d), by the area of the unit sphere. The means mu_z are
    states, |mu_z| = sqrt(d), so that eta_z . x = kappa_z cos(mu_z, x): kappa is the concentration
    of the literature, and kappa_z = sqrt(d) |eta_z|. Its Params are the natural parameters
    `natural` and `log_weights`, free of constraints.

    Arguments:
        means: (components, width) mu_z.
        concentrations: (components,) kappa_z >= 0, or one for all.
        weights: (components,) pi_z > 0 that sum to 1; None for uniform ones.

    Raises:
        ValueError: wrong shapes or types, a mean that is not on the sphere, a concentration that
            is negative or whose square overflows the type (float32 at least), or weights that are
            not positive or do not sum to 1.

    Examples:
        >>> import svflow as sv
        >>> poles = sv.geometry.sphere(jnp.asarray([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]))
        >>> print(VMFMixture(poles, 1.0).posterior(poles).round(2))  # 1 / (1 + exp(-2)) = .88
        [[0.88 0.12]
         [0.12 0.88]]
    """

    manifold = "sphere"

    def __init__(
        self,
        means: Float[ArrayLike, "components width"],
        concentrations: Float[ArrayLike, " components"] | float,
        weights: Float[ArrayLike, " components"] | None = None,
    ):
        means = jnp.asarray(means)
        _check_rows("means", means, minimum=2)
        bessel.check_concentrations(concentrations)
        kappa = _vector("concentrations", concentrations, means)
        _check_squares("concentrations", kappa)
        if not isinstance(means, jax.core.Tracer):
            _check_on_sphere(means)
        self.width = means.shape[1]
        self.natural = nnx.Param(kappa[:, None] * (means / self.width))
        self.log_weights = nnx.Param(_log_weights(weights, means))

    @classmethod
    def from_natural(
        cls,
        natural: Float[ArrayLike, "components width"],
        weights: Float[ArrayLike, " components"] | None = None,
    ) -> VMFMixture:
        """The mixture of given natural parameters eta_z, as attention's keys are.

        Raises:
            ValueError: wrong shapes or types, or wrong weights.
        """
        natural = jnp.asarray(natural)
        _check_rows("natural parameters", natural, minimum=2)
        _check_squares("natural parameters", natural, natural.shape[1])
        placeholder = jnp.zeros_like(natural).at[:, 0].set(natural.shape[1] ** 0.5)
        mixture = cls(placeholder, jnp.zeros_like(natural[:, 0]), weights)
        mixture.natural = nnx.Param(natural)
        return mixture

    @property
    def concentrations(self) -> Float[Array, " components"]:
        """kappa_z = sqrt(d) |eta_z|."""
        return self.width**0.5 * _norm(self.natural[...])

    @property
    def log_reference(self):
        return bessel.log_uniform(self.width)

    def log_ratios(self, x):
        check_states(x, self.width)
        wide = at_least_float32(x.dtype)
        cumulants = bessel.cumulant(self.width, self.concentrations).astype(wide)
        dots = jnp.matmul(
            x.astype(wide), self.natural[...].astype(wide).T, precision=jax.lax.Precision.HIGHEST
        )
        return dots - cumulants

    def ambient(self, x, posterior):
        return posterior.astype(x.dtype) @ self.natural[...].astype(x.dtype)

    def sample(self, key, count):
        which, draw = jax.random.split(key)
        natural = self.natural[...]
        natural = natural.astype(at_least_float32(natural.dtype))
        index = jax.random.categorical(which, self.log_prior, shape=(count,))
        norm = _norm(natural)[:, None]
        first = jnp.zeros_like(natural).at[:, 0].set(1)  # any direction where kappa is 0
        directions = jnp.where(norm > 0, natural / jnp.where(norm > 0, norm, 1), first)
        k = self.width**0.5 * norm[:, 0]
        return self.width**0.5 * von_mises_fisher(draw, directions[index], k[index])


class GaussianMixture(StateMixture):
    r"""A mixture of isotropic Gaussians in R^d, p(x|z) = N(mu_z, sigma_z^2 I).

    Its Params are `means`, `log_deviations` and `log_weights`, free of constraints.

    Arguments:
        means: (components, width) mu_z.
        deviations: (components,) sigma_z > 0, or one for all.
        weights: (components,) pi_z > 0 that sum to 1; None for uniform ones.

    Raises:
        ValueError: wrong shapes or types, a deviation that is not positive, or weights that are
            not positive or do not sum to 1.
    """

    manifold = "euclidean"

    def __init__(
        self,
        means: Float[ArrayLike, "components width"],
        deviations: Float[ArrayLike, " components"] | float,
        weights: Float[ArrayLike, " components"] | None = None,
    ):
        means = jnp.asarray(means)
        _check_rows("means", means, minimum=1)
        sigma = _vector("deviations", deviations, means)
        if not isinstance(sigma, jax.core.Tracer) and not np.all(np.asarray(sigma) > 0):
            raise ValueError(f"deviations must be positive, got {np.asarray(sigma).min()}")
        self.width = means.shape[1]
        self.means = nnx.Param(means)
        self.log_deviations = nnx.Param(jnp.log(sigma))
        self.log_weights = nnx.Param(_log_weights(weights, means))

    @property
    def log_reference(self):
        return -self.width / 2 * math.log(2 * math.pi)

    def log_ratios(self, x):
        check_states(x, self.width)
        wide = at_least_float32(x.dtype)
        log_deviations = self.log_deviations[...].astype(wide)
        # Differences first: the squares of large states would cancel.
        apart = x.astype(wide)[:, None] - self.means[...].astype(wide)
        squares = jnp.sum(jnp.square(apart * jnp.exp(-log_deviations)[:, None]), axis=-1)
        return -squares / 2 - self.width * log_deviations

    def ambient(self, x, posterior):
        precise = posterior * jnp.exp(-2 * self.log_deviations[...]).astype(posterior.dtype)
        precise = precise.astype(x.dtype)
        total = jnp.sum(precise, axis=-1, keepdims=True)
        return precise @ self.means[...].astype(x.dtype) - x * total

    def sample(self, key, count):
        which, draw = jax.random.split(key)
        means = self.means[...]
        index = jax.random.categorical(which, self.log_prior, shape=(count,))
        noise = jax.random.normal(draw, (count, self.width), means.dtype)
        return means[index] + jnp.exp(self.log_deviations[...])[index, None] * noise


def check_states(x: Any, width: int) -> None:
    """Raises ValueError for what is not an array of floats (tokens, width)."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(f"x must be an array, got {type(x).__name__}")
    if x.ndim != 2 or x.shape[1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floats of shape (tokens, {width}), got {x.dtype} {x.shape}")


def negative_entropy(q: Float[Array, "*tokens components"]) -> Float[Array, "*tokens"]:
    """sum_z q log q, with 0 log 0 = 0 and a derivative of 0 there."""
    some = q > 0
    return jnp.sum(jnp.where(some, q * jnp.log(jnp.where(some, q, 1)), 0), axis=-1)


def check_posterior(posterior: Any, shape: tuple[int, ...]) -> Array:
    """The posterior, once it is one: of the shape, not negative, and each row of sum 1.

    Values are checked where they are known; under jit they are not. The sum may be off by the
    square root of the type's epsilon.

    Raises:
        ValueError: what is not.
    """
    q = jnp.asarray(posterior)
    if q.shape != shape or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"a posterior must be floats of shape {shape}, got {q.dtype} {q.shape}")
    if not isinstance(q, jax.core.Tracer):
        wrong = np.asarray(improper(q))
        if wrong.any():
            row = int(np.argmax(wrong))
            values = np.asarray(q, np.float64)[row]
            raise ValueError(
                f"a posterior must be probabilities that sum to 1: that of token {row} sums to "
                f"{values.sum():.6g}, its least is {values.min():.3g}"
            )
    return q


def improper(q: Float[Array, "*tokens components"]) -> Any:
    """Which rows are no probabilities."""
    off = jnp.abs(jnp.sum(q, axis=-1) - 1)
    return ~(off <= float(jnp.finfo(q.dtype).eps) ** 0.5) | jnp.any(q < 0, axis=-1)


def _norm(vectors: Float[Array, "components width"]) -> Float[Array, " components"]:
    """|vectors|, its derivative at 0 taken as 0: that of every even function of it is."""
    wide = vectors.astype(at_least_float32(vectors.dtype))
    square = jnp.sum(wide * wide, axis=-1)
    zero = square == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))


def _check_rows(name, rows, minimum):
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < minimum:
        wanted = f"(components, width) with a width of at least {minimum}"
        raise ValueError(f"{name} must have shape {wanted}, got {rows.shape}")
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got {rows.dtype}")
    if not isinstance(rows, jax.core.Tracer) and not np.isfinite(np.asarray(rows)).all():
        raise ValueError(f"{name} are not finite")


def _vector(name: str, values: Any, rows: Array) -> Array:
    """One value per row, of the rows' type; a number is that of all."""
    scalar = isinstance(values, (int, float, np.number, jax.Array)) and np.ndim(values) == 0
    if scalar and not isinstance(values, bool):
        full = jnp.full if isinstance(values, jax.core.Tracer) else np.full
        values = full(rows.shape[:1], values, rows.dtype)
    values = jnp.asarray(values)
    if values.shape != rows.shape[:1] or values.dtype != rows.dtype:
        raise ValueError(
            f"{name} must be {rows.dtype} of shape {rows.shape[:1]} as the means ask, got "
            f"{values.dtype} {values.shape}"
        )
    if not isinstance(values, jax.core.Tracer) and not np.isfinite(np.asarray(values)).all():
        raise ValueError(f"{name} are not finite")
    return values


def _check_squares(name, values, factor=1):
    """Refuses concentrations, or a factor of them, with no square in the type of computation."""
    if isinstance(values, jax.core.Tracer):
        return
    dtype = at_least_float32(values.dtype)
    largest = np.abs(np.asarray(values, np.float64)).max()
    limit = float(jnp.finfo(dtype).max) ** 0.5 / factor
    if not largest <= limit:
        raise ValueError(
            f"{name} are too large for {dtype}, in which squares overflow beyond {limit:.3g}: got "
            f"{largest:.3g}"
        )


def _check_on_sphere(means):
    values = np.asarray(means, np.float64)
    off = np.abs(np.linalg.norm(values, axis=1) / values.shape[1] ** 0.5 - 1)
    if off.max() > float(jnp.finfo(means.dtype).eps) ** 0.5:
        row = int(off.argmax())
        raise ValueError(
            f"means must be on the sphere of radius sqrt({values.shape[1]}): that of component "
            f"{row} has norm {np.linalg.norm(values[row]):.6g}"
        )


def _log_weights(weights, rows):
    if weights is None:
        return jnp.full(rows.shape[:1], -np.log(rows.shape[0]).item(), rows.dtype)
    weights = _vector("weights", jnp.atleast_1d(weights), rows)
    if not isinstance(weights, jax.core.Tracer):
        values = np.asarray(weights, np.float64)
        if (
            not (values > 0).all()
            or abs(values.sum() - 1) > float(jnp.finfo(weights.dtype).eps) ** 0.5
        ):
            raise ValueError(
                f"weights must be positive and sum to 1: the least is {values.min():.3g}, the sum "
                f"{values.sum():.6g}"
            )
        # Not by the device, which may take the least ones for zero.
        return jnp.asarray(np.log(values), weights.dtype)
    return jnp.log(weights)
