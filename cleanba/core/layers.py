"""A convolution that is fast on the CPU too: a drop-in for `flax.linen.Conv` with square windows."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Conv(nn.Module):
    """2-D convolution, NHWC; parameters as `nn.Conv` has them, so that a model moves between devices.

    Inside a loop XLA runs its native convolution ten times slower on the CPU than outside, and every update is a loop.
    There the window's pixels are gathered side by side and one matrix product does the rest.
    """

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
        pads = jax.lax.padtype_to_pads(x.shape[1:3], (k, k), (s, s), self.padding)
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        rows, columns = (x.shape[1] - k) // s + 1, (x.shape[2] - k) // s + 1
        ends = (rows - 1) * s + 1, (columns - 1) * s + 1
        windows = [x[:, i : i + ends[0] : s, j : j + ends[1] : s] for i in range(k) for j in range(k)]
        return jnp.concatenate(windows, -1) @ kernel.reshape(-1, self.features) + bias
