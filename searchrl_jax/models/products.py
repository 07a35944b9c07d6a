"""Products and sums of activations and weights.

Axis letters: B sequences, T tokens, I and O axes of inputs and of outputs.
"""

import functools
import math

import jax
import jax.numpy as jnp


def dense(x, w, contract: int = 1):
  """x [B, T, *I] times w [*I, *O] -> [B, T, *O]; I has `contract` axes.

  In the precision of x. The gradient of a float32 w is summed up in float32,
  over devices too, whatever x is (design 5.8).
  """
  product = _product if w.dtype == x.dtype else _half_product
  return product(x, w, contract)


def scaled(x, w):
  """x [..., *W] times w [*W], with precision and gradient as in `dense`."""
  return x * w if w.dtype == x.dtype else _half_scaled(x, w)


def shifted(x, w):
  """x [..., *W] plus w [*W], with precision and gradient as in `dense`."""
  return x + w if w.dtype == x.dtype else _half_shifted(x, w)


def rounded(w, dtype):
  """w in float32, of the values that it has in `dtype`, as in an engine.

  The gradient is that of w itself.
  """
  w = w.astype(jnp.float32)
  info = jnp.finfo(dtype)
  if info.dtype == jnp.float32:
    return w
  # XLA may leave out a cast to `dtype` and back.
  near = jax.lax.reduce_precision(w, info.nexp, info.nmant)
  return w + jax.lax.stop_gradient(near - w)


def _product(x, w, contract):
  # As one product of two matrices: XLA's CPU backend takes 1.7 times as long
  # over [B, T, I] as over [B T, I].
  I = math.prod(w.shape[:contract])
  y = jnp.einsum('RI,IO->RO', x.reshape(-1, I), w.reshape(I, -1))
  return y.reshape(*x.shape[:2], *w.shape[contract:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _half_product(x, w, contract):
  return _product(x, w.astype(x.dtype), contract)


def _half_product_bwd(contract, saved, g):
  x, half = saved
  I = math.prod(half.shape[:contract])
  flat, g = x.reshape(-1, I), g.reshape(-1, half.size // I)
  dx = jnp.einsum('RO,IO->RI', g, half.reshape(I, -1))
  dw = jnp.einsum('RI,RO->IO', flat, g, preferred_element_type=jnp.float32)
  return dx.reshape(x.shape), dw.reshape(half.shape)


def _half_product_fwd(x, w, contract):
  half = w.astype(x.dtype)  # one value, so that it is gathered once
  return _product(x, half, contract), (x, half)


_half_product.defvjp(_half_product_fwd, _half_product_bwd)


def _gradient(g, w):
  """Of w [*W], from g [..., *W], whose leading axes are summed in float32."""
  axes = tuple(range(g.ndim - w.ndim))
  return jnp.sum(g.astype(jnp.float32), axes).astype(w.dtype)


@jax.custom_vjp
def _half_scaled(x, w):
  return x * w.astype(x.dtype)


def _half_scaled_bwd(saved, g):
  x, w = saved
  each = g.astype(jnp.float32) * x.astype(jnp.float32)
  return g * w.astype(x.dtype), _gradient(each, w)


_half_scaled.defvjp(lambda x, w: (_half_scaled(x, w), (x, w)), _half_scaled_bwd)


@jax.custom_vjp
def _half_shifted(x, w):
  return x + w.astype(x.dtype)


_half_shifted.defvjp(
  lambda x, w: (_half_shifted(x, w), w), lambda w, g: (g, _gradient(g, w))
)
