"""The convolution written as a matrix product is flax's, and so is the pooling written as slices."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.core.layers import Conv, max_pool

SAME, VALID = "SAME", "VALID"
SHAPES = [
    (3, 1, SAME),
    (4, 1, SAME),
    (3, 1, VALID),
    (3, 2, SAME),
    (2, 2, VALID),
    (3, 2, VALID),
    (8, 4, VALID),
    (1, 3, SAME),
]


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES)
def test_conv_equals_flax(size: int, stride: int, padding: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 13, 16, 3)).astype(np.float32)
    ours = Conv(5, size, stride, padding)
    theirs = nn.Conv(5, (size, size), (stride, stride), padding)
    params = theirs.init(jax.random.key(1), x)
    params["params"]["bias"] = rng.normal(size=5).astype(np.float32)
    mine = ours.init(jax.random.key(1), x)
    assert jax.tree.map(np.shape, mine) == jax.tree.map(np.shape, params)
    assert np.array_equal(mine["params"]["kernel"], params["params"]["kernel"])

    def of(module: nn.Module) -> tuple:
        def scalar(params: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y: Any = module.apply(params, x)
            return (y**2).sum(), y

        return jax.jit(jax.grad(scalar, (0, 1), has_aux=True))(params, x)

    (gradients, y), (expected_gradients, expected) = of(ours), of(theirs)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("size", "stride"), [(3, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("levels", [3, 10_000])  # with three levels most maxima are equal: a tie is won by the first
def test_max_pool_equals_flax(size: int, stride: int, levels: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(levels, size=(2, 13, 16, 3)).astype(np.float32) - levels / 2
    ours, back = jax.vjp(lambda x: max_pool(x, size, stride), x)
    theirs, their_back = jax.vjp(lambda x: nn.max_pool(x, (size, size), (stride, stride), SAME), x)
    np.testing.assert_array_equal(ours, theirs)
    gradient = rng.normal(size=ours.shape).astype(np.float32)
    np.testing.assert_allclose(back(gradient)[0], their_back(gradient)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 1), (2, 2)])
def test_max_pool_keeps_what_is_not_a_number(place: tuple[int, int]) -> None:
    x = jnp.zeros((1, 3, 3, 1)).at[0, *place].set(jnp.nan)
    assert jnp.isnan(max_pool(x, 3, 3)).all()
