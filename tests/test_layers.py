"""The convolution written as a matrix product is flax's."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from cleanba.core.layers import Conv

SAME, VALID = "SAME", "VALID"


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 1, SAME), (3, 2, SAME), (2, 2, VALID), (3, 2, VALID)])
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
