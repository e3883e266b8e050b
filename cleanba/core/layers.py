"""Layers that are fast on the CPU too: drop-ins for `flax.linen.Conv` and `max_pool`, for square windows, NHWC.

On the CPU, XLA's convolution is ten times too slow inside a loop, and every update is a loop. A matrix product is fast
there, and what matters is how little is copied around it (figures: docs/performance.md).
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp


class Conv(nn.Module):
    """2-D convolution, parameters as `nn.Conv` has them, so that a model moves between devices."""

    features: int
    size: int
    stride: int = 1
    padding: str = "SAME"
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, H', W', features]."""
        k, s = self.size, self.stride
        kernel = self.param("kernel", self.kernel_init, (k, k, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if jax.default_backend() != "cpu":
            dims = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, kernel, (s, s), self.padding, dimension_numbers=dims) + bias
        return _convolve(x, kernel, s, self.padding) + bias


def _convolve(x: jax.Array, kernel: jax.Array, s: int, padding: str) -> jax.Array:
    """A convolution as one matrix product.

    With a stride, blocks of s x s pixels become channels first, so that the stride is 1 and the window is small. Then
    each pixel is multiplied by every place of the window, and shifted slices of the products are added up; without a
    stride, the window's rows are laid side by side before, which halves the sum for a copy of whole rows.
    """
    k, _, c, f = kernel.shape
    n = -(-k // s)  # the window in blocks
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (k, k), (s, s), padding)
    rows, columns = (((size + sum(pad) - k) // s + 1) for size, pad in zip(x.shape[1:3], pads, strict=True))
    height, width = (rows + n - 1) * s, (columns + n - 1) * s  # pixels that are looked at, rounded up to blocks
    ends = (height - x.shape[1] - pads[0][0], width - x.shape[2] - pads[1][0])
    x = jax.lax.pad(
        x, jnp.zeros((), x.dtype), ((0, 0, 0), (pads[0][0], ends[0], 0), (pads[1][0], ends[1], 0), (0, 0, 0))
    )
    kernel = jnp.pad(kernel, ((0, n * s - k), (0, n * s - k), (0, 0), (0, 0))).reshape(n, s, n, s, c, f)
    if s > 1:
        x = x.reshape(-1, height // s, s, width // s, s, c).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, height // s, width // s, s * s * c)
        y = _product(x, kernel.transpose(1, 3, 4, 0, 2, 5).reshape(s * s * c, n * n * f))
        parts = jnp.split(y, n * n, axis=-1)
        places = [parts[i * n + j][:, i : i + rows, j : j + columns] for i in range(n) for j in range(n)]
        return functools.reduce(jnp.add, places)
    x = jnp.concatenate([x[:, i : i + rows] for i in range(n)], axis=-1)
    y = _product(x, kernel.transpose(0, 4, 2, 1, 3, 5).reshape(n * c, n * f))
    return functools.reduce(jnp.add, [part[:, :, j : j + columns] for j, part in enumerate(jnp.split(y, n, axis=-1))])


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[..., C] times [C, F]."""
    return _matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """[R, M] @ [M, N] with many rows; what JAX derives for the gradient makes XLA transpose the rows before it."""
    return x @ w


def _matmul_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ w, (x, w)


def _matmul_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dy = jax.lax.optimization_barrier(dy)
    dx = jax.lax.dot_general(dy, w, (((1,), (1,)), ((), ())))
    over_rows = (((0,), (0,)), ((), ()))
    if x.shape[1] <= dy.shape[1]:  # the narrower one first: Eigen packs it on the side that it reads more often
        return dx, jax.lax.dot_general(x, dy, over_rows)
    return dx, jax.lax.optimization_barrier(jax.lax.dot_general(dy, x, over_rows)).T


_matmul.defvjp(_matmul_forward, _matmul_backward)


def max_pool(x: jax.Array, size: int, stride: int) -> jax.Array:
    """`nn.max_pool` with SAME padding; its gradient goes to the first of equal maxima too."""
    if jax.default_backend() != "cpu":
        return nn.max_pool(x, (size, size), (stride, stride), "SAME")
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), "SAME")
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis in (2, 1):  # columns before rows: of equal maxima the first by rows wins
        end = x.shape[axis] - size + 1
        first, *rest = (jax.lax.slice_in_dim(x, i, i + end, stride, axis) for i in range(size))
        for other in rest:
            first = jnp.where((first >= other) | jnp.isnan(first), first, other)
        x = first
    return x
