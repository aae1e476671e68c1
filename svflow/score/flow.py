"""The score-based variational flow: a state follows a posterior's mean of conditional scores.

Axes: `tokens`; `width`, d; `components`, the values of the latent z; `times` of a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from svflow import geometry
from svflow.dtypes import at_least_float32
from svflow.flow import Flow
from svflow.integers import is_integer
from svflow.score.mixtures import StateMixture, check_posterior, check_states, improper

MANIFOLDS = ("sphere", "euclidean")


class SoftmaxPosterior(nnx.Module):
    """q(z|x) = softmax_z(m_z . x + b_z): attention's kernel.

    On the sphere it is the exact posterior of the vMF mixture with eta_z = m_z whose prior is
    pi_z ~ exp(b_z) / C_d(kappa_z): of one with uniform weights, where the |m_z| are equal.

    Arguments:
        keys: (components, width) m_z; offsets: (components,) b_z; None for zeros.

    Raises:
        ValueError: wrong shapes or types.
    """

    def __init__(
        self,
        keys: Float[ArrayLike, "components width"],
        offsets: Float[ArrayLike, " components"] | None = None,
    ):
        keys = jnp.asarray(keys)
        if keys.ndim != 2 or not jnp.issubdtype(keys.dtype, jnp.floating):
            raise ValueError(
                f"keys must be floats of shape (components, width), got {keys.dtype} {keys.shape}"
            )
        offsets = jnp.zeros_like(keys[:, 0]) if offsets is None else jnp.asarray(offsets)
        if offsets.shape != keys.shape[:1] or offsets.dtype != keys.dtype:
            raise ValueError(
                f"offsets must be {keys.dtype} of shape {keys.shape[:1]}, got {offsets.dtype} "
                f"{offsets.shape}"
            )
        self.keys, self.offsets = nnx.Param(keys), nnx.Param(offsets)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        check_states(x, self.keys.shape[1])
        wide = at_least_float32(x.dtype)
        dots = jnp.matmul(
            x.astype(wide), self.keys[...].astype(wide).T, precision=jax.lax.Precision.HIGHEST
        )
        return jax.nn.softmax(dots + self.offsets[...].astype(wide), axis=-1)


class ScoreFlow(Flow):
    r"""dx/dt = E_q(z|x)[grad_x log p(x|z)] for every token on its own,

    on the sphere of radius sqrt(d) its tangent part P_x, with the retraction x -> sqrt(d) x / |x|;
    there a trajectory has to start on the sphere, see `check_start`.
    With q = p(z|x) it is grad log p(x); for any q it is the gradient of the ELBO, q held. So along
    the flow of the exact posterior F = -log p obeys dF/dt = -|dx/dt|^2.

    Its Euler steps descend too, x <- R_x(dt v), where dt |eta_z| <= 2 sqrt(d) for all z of a
    `VMFMixture` (kappa_z dt <= 2 d): -log E_q exp is no more than -E_q, so F falls by at least
    g . (x' - x) with g = sum_z q_z eta_z, at an angle theta from x; x' turns by
    atan(a sin theta), a = dt |g| / sqrt(d), towards g, which is at most 2 theta for a <= 2.
    Beyond it a step may climb, near a mean that it jumps over. (Derived here.)

    Source: Liao, "Transformer as an Euler Discretization of Score-based Variational Flow",
    arXiv 2604.23740.

    Arguments:
        mixture: p(z) and p(x|z).
        posterior: q as an nnx.Module (its weights are the flow's), from states (tokens, width) to
            probabilities (tokens, components): a `SoftmaxPosterior`, a router network; None for
            the exact one.
        depth: the span of time, in layers: where `simulate` ends. The field does not depend on
            time, so that depth is a matter of how far to go; 1 is as far as one layer.
        manifold: "sphere" or "euclidean"; None for the mixture's own. A vMF mixture in R^d is the
            function log sum_z pi_z C_d(kappa_z) exp(eta_z . x) there, not a density.

    Raises:
        ValueError: anything else than that, or a posterior of the wrong shape, or (where it is
            evaluated outside jit) whose rows do not sum to 1; under jit equinox raises for those.

    Examples:
        >>> import svflow as sv
        >>> means = jnp.eye(3, 8)
        >>> ascent = ScoreFlow(sv.score.GaussianMixture(means, 1.0), depth=5)
        >>> climb = sv.simulate(ascent, 3 * means, dt=1 / 2).xs
        >>> bool((jnp.diff(energy(ascent, climb), axis=0) <= 0).all())  # -log p only falls
        True
    """

    def __init__(
        self,
        mixture: StateMixture,
        *others: Any,
        posterior: Callable[[Float[Array, "tokens width"]], Float[Array, "tokens components"]]
        | None = None,
        depth: int = 1,
        manifold: str | None = None,
    ):
        if others:
            raise ValueError(
                "beside the mixture, ScoreFlow takes posterior, depth and manifold by name: got "
                f"{', '.join(type(other).__name__ for other in others)} without"
            )
        if not isinstance(mixture, StateMixture):
            raise ValueError(f"mixture must be a StateMixture, got {type(mixture).__name__}")
        if posterior is not None and not (
            isinstance(posterior, nnx.Module) and callable(posterior)
        ):
            raise ValueError(
                f"posterior must be a callable nnx.Module, got {type(posterior).__name__}"
            )
        if not is_integer(depth, 1):
            raise ValueError(f"depth must be a positive int, got {depth!r}")
        if manifold is not None and manifold not in MANIFOLDS:
            raise ValueError(f"manifold is one of {MANIFOLDS}, got {manifold!r}")
        self.depth, self.width = int(depth), mixture.width
        self.manifold = mixture.manifold if manifold is None else manifold
        self.mixture, self.posterior = mixture, posterior

    @property
    def jumps(self) -> tuple[float, ...]:
        return ()

    def probabilities(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens components"]:
        """q(z|x)."""
        if self.posterior is None:
            return self.mixture.posterior(x)
        q = check_posterior(self.posterior(x), (x.shape[0], self.mixture.components))
        if isinstance(q, jax.core.Tracer) and not isinstance(self.posterior, SoftmaxPosterior):
            message = f"{type(self.posterior).__name__} gives rows that do not sum to 1"
            q = eqx.error_if(q, improper(q), message)
        return q

    def velocity(self, t, x, context=None):
        v = self.mixture.ambient(x, self.probabilities(x))
        return geometry.tangent(x, v) if self.manifold == "sphere" else v

    def check_start(self, x, context=None):
        """The state x as the start of a trajectory.

        On the sphere every token has to be on it, to a thousandth of the radius (an adaptive
        solver's states are off it by its error), but for padding; and a posterior's rows have to
        be probabilities. A posterior is not looked at here where x is traced: `velocity` does.

        Raises:
            ValueError: states that are not, by token; where x is traced, equinox raises.
        """
        mask = None if context is None else context.mask
        if self.manifold == "sphere":
            x = _check_on_sphere(x, mask)
        if self.posterior is not None and not isinstance(x, jax.core.Tracer):
            self.probabilities(x)
        return x

    def retract(self, x):
        return geometry.sphere(x) if self.manifold == "sphere" else x


def energy(
    flow: ScoreFlow, xs: Float[Array, "*times tokens width"]
) -> Float[Array, "*times tokens"]:
    """F = -log p(x) along a trajectory.

    Raises:
        ValueError: what is not a ScoreFlow, or states of another width.
    """
    rows = _rows(flow, xs)
    return flow.mixture.free_energy(rows).reshape(xs.shape[:-1])


def elbo(flow: ScoreFlow, xs: Float[Array, "*times tokens width"]) -> Float[Array, "*times tokens"]:
    """E_q[log p(x, z) - log q(z|x)] along a trajectory, q the flow's own posterior.

    It is -`energy` less KL(q || p(z|x)). Raises as `energy` does.
    """
    rows = _rows(flow, xs)
    if flow.posterior is None:  # the gap is zero: not by subtraction
        return flow.mixture.log_density(rows).reshape(xs.shape[:-1])
    # A posterior may look at all tokens of one state at once.
    states = xs.reshape(-1, *xs.shape[-2:])
    return jax.vmap(lambda x: flow.mixture.elbo(x, flow.probabilities(x)))(states).reshape(
        xs.shape[:-1]
    )


def _check_on_sphere(x, mask):
    known = not any(isinstance(a, jax.core.Tracer) for a in (x, mask))
    wide = np.asarray(x, np.float64) if known else x.astype(at_least_float32(x.dtype))
    squares = (wide * wide).sum(axis=-1) / x.shape[1]
    off = ~(abs(squares**0.5 - 1) <= max(1e-3, float(jnp.finfo(x.dtype).eps) ** 0.5))
    if mask is not None:
        off = off & (np.asarray(mask) if known else mask)
    message = f"a ScoreFlow starts on the sphere of radius sqrt({x.shape[1]})"
    if not known:
        return eqx.error_if(x, off, f"{message}, and a token is not there")
    if off.any():
        token = int(off.argmax())
        raise ValueError(f"{message}: token {token} has norm {np.linalg.norm(wide[token]):.6g}")
    return x


def _rows(flow, xs):
    if not isinstance(flow, ScoreFlow):
        raise ValueError(f"the energy is that of a ScoreFlow, got {type(flow).__name__}")
    if not isinstance(xs, (jax.Array, np.ndarray)):
        raise ValueError(f"xs must be an array, got {type(xs).__name__}")
    if xs.ndim < 2 or xs.shape[-1] != flow.width:
        raise ValueError(f"xs must have shape (..., tokens, {flow.width}), got {xs.shape}")
    return xs.reshape(-1, flow.width)
